"""`qm`: evaluate and use trained policies, compare the runs that made them, check and size servers and machines.

    qm init                                               write settings and example questions for a project
    qm train                                              learn which rewrite makes a question get a better answer
    qm eval --checkpoint runs/latest                      compare with the baselines on held-out questions
    qm rewrite --checkpoint runs/latest "my question"     rewrite a question and show the answer
    qm doctor --target-model llama3.2                     check a model server and what would make it faster
    qm compare runs/a runs/b                              compare runs, question by question
    qm analyze runs/a runs/b                              compare metrics of runs of any trainer
    qm sweep --grid lr=1e-3,1e-2 -- python train.py       run a command over settings, find the best

`qm help --all` lists all commands, `qm COMMAND --help` shows the flags of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from query_mutator.cli.console import run_cli
from query_mutator.cli.registry import HELP
from query_mutator.commands import COMMANDS, GROUPS, Command
from query_mutator.errors import UsageError
from query_mutator.registry import nearest
from query_mutator.version import __version__

PROG = "qm"


def run() -> None:
    """Run `qm` and end the process."""
    run_cli(main, prog=PROG)


def main(argv: Sequence[str]) -> int:
    """Run the command that `argv` names; return the exit code."""
    if not argv or argv[0] in HELP | {"help"}:
        return _help(argv)
    if argv[0] == "--version":
        print(__version__)
        return 0
    name, words = _command(argv)
    if name is None:
        within = {key: one for key, one in COMMANDS.items() if key.split()[: len(words)] == [*words]}
        print(_usage({"": within}))
        return 0
    command = COMMANDS[name]
    if command.takes_words:
        return command.run(words) or 0
    return _run(name, words)


def _run(name: str, words: Sequence[str]) -> int:
    from query_mutator.cli.flags import parse_flags  # cyclopts takes longer than `qm --help`
    from query_mutator.llm.client import check_addresses

    command = COMMANDS[name]
    flags = parse_flags(command.flags, words, prog=f"{PROG} {name}", base=_resumed, table=name)
    check_addresses(**{key: value for key, value in vars(flags).items() if key.endswith("_url")})
    return command.run(flags) or 0


def _command(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Return the command and its words; for help on a group of commands None and the words of the group."""
    for count in range(min(len(argv), 3), 0, -1):
        if " ".join(argv[:count]) in COMMANDS:
            return " ".join(argv[:count]), argv[count:]
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    group = words
    while group and not _within(group):
        group = group[:-1]
    if group and group == words:
        if HELP & set(argv):
            return None, group
        raise UsageError(f"{' '.join(group)} needs a command: {', '.join(_within(group))}")
    typed = " ".join(words[: len(group) + 1]) or argv[0]
    near = next((name for name in COMMANDS if name.startswith(typed)), None) or nearest(typed, COMMANDS)
    raise UsageError(f"unknown command {typed!r}; " + (f"did you mean {near}?" if near else "see qm help --all"))


def _within(group: Sequence[str]) -> list[str]:
    """Return the words that may follow a group of commands."""
    words, size = tuple(group), len(group)
    parts = (tuple(name.split()) for name in COMMANDS)
    return list(dict.fromkeys(part[size] for part in parts if part[:size] == words and len(part) > size))


def _resumed(resume: str) -> tuple[Mapping[str, Any], str]:
    """Return the flags of the run that --resume names, and the file they are from."""
    from query_mutator.cli.flags import read_base

    resumed = Path(resume)
    if not resumed.exists():
        raise UsageError(f"--resume {resumed}: no such file; give an output folder, or a checkpoint in it")
    path = (resumed if resumed.is_dir() else resumed.parent.parent) / "config.json"
    return read_base(path), str(path)


def _help(argv: Sequence[str]) -> int:
    """Print the first commands, with --all all of them, or the help of the command that follows `help`."""
    words = [word for word in argv[1:] if not word.startswith("-")]
    if argv and argv[0] == "help" and words:
        return main([*words, "--help"])
    if {"--all", "--help-all"} & set(argv):
        print(_usage(GROUPS))
        return 0
    first = next(iter(GROUPS.values()))
    print(_usage({"": first}, f"qm help --all lists all {len(COMMANDS)} commands"))
    return 0


def _usage(groups: Mapping[str, Mapping[str, Command]], more: str = "") -> str:
    """Return the commands of groups under their titles, each with what it does."""
    width = max(len(name) for group in groups.values() for name in group)
    lines = ["usage: qm COMMAND [flags]"]
    for title, group in groups.items():
        lines += ["", *([title] if title else [])]
        lines += [f"  {name.ljust(width)}  {command.summary}" for name, command in group.items()]
    lines += ["", *([more] if more else [])]
    return "\n".join([*lines, "qm COMMAND --help shows its flags"])
