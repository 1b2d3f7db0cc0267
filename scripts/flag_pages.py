"""The pages of all flags on the docs site, from `--help-all`; `docs_hook.py` adds them to the build."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # from a checkout it works without being installed

Main = Callable[[Sequence[str]], object]

FOLDER = "reference/flags"  # on the site
WIDTH = 110  # columns of the help texts

#: Page -> its title, and the groups of `qm` commands on it ("" for those in no group).
QM_PAGES = {
    "qm.md": ("qm", ("", "train", "gym")),
    "qm-data.md": ("qm data", ("data",)),
    "qm-size.md": ("qm size", ("size",)),
}
#: Page -> its title, and the programs on it with the modules of their `main`.
OTHER_PAGES = {
    "train.md": ("qm train", {"qm train, python train_query_mutator.py": "train_query_mutator"}),
    "benchmark.md": ("benchmark_batching.py", {"python benchmark_batching.py": "benchmark_batching"}),
    "modules.md": ("python -m ppo", {"python -m ppo": "ppo.__main__"}),
}


def pages() -> dict[str, str]:
    """Return the text of each page by its path on the site."""
    from query_mutator.commands import COMMANDS
    from query_mutator.commands.main import main as qm_main

    found = {}
    for page, (title, groups) in QM_PAGES.items():
        names = [name for name in COMMANDS if _group(name, COMMANDS) in groups and not COMMANDS[name].takes_words]
        found[page] = _page(title, {f"qm {name}": _help(qm_main, name.split()) for name in names})
    for page, (title, programs) in OTHER_PAGES.items():
        helps = {program: _help(import_module(module).main, []) for program, module in programs.items()}
        found[page] = _page(title, helps)
    return {f"{FOLDER}/{page}": text for page, text in found.items()}


def _group(name: str, names: Sequence[str]) -> str:
    """Return the first word of a command that has others next to it, else ""."""
    first = name.split()[0]
    return first if sum(other.split()[0] == first for other in names) > 1 or first == "train" else ""


def _page(title: str, helps: dict[str, str]) -> str:
    about = "All flags with their defaults, as `--help-all` prints them."
    blocks = [f"## {program}\n\n```text\n{text}\n```" for program, text in helps.items()]
    return "\n\n".join([f"# Flags: {title}", about, *blocks]) + "\n"


def _help(main: Main, words: Sequence[str]) -> str:
    """Return what the command prints for `--help-all`, or `--help` where it has no more, without boxes."""
    before, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), str(WIDTH)
    try:
        text = _printed(main, [*words, "--help-all"]) or _printed(main, [*words, "--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return "\n".join(_without_boxes(text)).strip("\n")


def _printed(main: Main, argv: Sequence[str]) -> str:
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            main(argv)
    except SystemExit as ended:
        return out.getvalue() if not ended.code else ""
    except Exception:  # a command without --help-all reports it in its own way
        return ""
    return out.getvalue()


def _without_boxes(text: str) -> Iterator[str]:
    """Yield the lines of a help text; the border above a group becomes its title."""
    for line in text.splitlines():
        if line.startswith("╭"):
            yield f"{line.strip('╭─╮ ')}:"
        elif line.startswith("╰"):
            yield ""
        elif not re.fullmatch(r" -{20,} *", line):
            yield line.strip("│").rstrip()
