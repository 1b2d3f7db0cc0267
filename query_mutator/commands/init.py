"""`qm init`: write the settings and example questions of a new project."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from query_mutator.cli.flags import Positional
from query_mutator.cli.settings import PROJECT
from query_mutator.errors import UsageError
from query_mutator.files import write_text

#: What a new project gets, and what each file is for.
FILES = {PROJECT: "settings of the commands that start here", "questions.jsonl": "ten example questions"}


@dataclass(frozen=True, kw_only=True)
class InitFlags:
    """Write qm.toml (settings) and questions.jsonl (example questions) for a new project; nothing is overwritten."""

    folder: Positional[str] = "."
    """Folder of the project; made if it is missing."""


def init(flags: InitFlags) -> None:
    """Write the files and print what to do next."""
    folder = Path(flags.folder)
    there = [name for name in FILES if os.path.lexists(folder / name)]
    if there:
        raise UsageError(f"{folder / there[0]} exists and is not replaced; move it away, or name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; name a folder that can be written") from None
    templates = resources.files("query_mutator.data") / "project"
    for name, purpose in FILES.items():
        write_text(folder / name, (templates / name).read_text(encoding="utf-8"))
        print(f"wrote {folder / name}: {purpose}")
    change = "" if folder.resolve() == Path.cwd() else f"cd {flags.folder} && "
    print(f"next: {change}qm train, which needs no model server; or name your model in {PROJECT} and run qm doctor")
