"""One rule for every flag that names an output file, checked before the command starts.

    an input of the same command                  never written to, under whatever name: link, relative path, part of it
    a file that this command does not write       never replaced
    an earlier output of this command             replaced with --force; or resumed, by commands that can
    a terminal, pipe or device, as /dev/stdout    written to as it is

A flag is an output when its annotation holds an `Output`; every other flag whose value is a path that exists is an
input.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from query_mutator.errors import UsageError
from query_mutator.files import LOCK, encode, write_json
from query_mutator.version import __version__

WRITTEN_BY = "written_by"
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class Output:
    """Metadata of a flag that names an output.

    `is_own` returns whether a file or folder is an earlier output of this kind; with `resumes` the command resumes it.
    """

    is_own: Callable[[Path], bool]
    is_folder: bool = False
    resumes: bool = False


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """Flags of commands that write files."""

    force: bool = False
    """Replace earlier outputs of this command; other files are never replaced."""


def holding(*marks: bytes) -> Callable[[Path], bool]:
    """Return whether a file has one of these texts in its first 64 KB: how our reports are recognized."""

    def is_own(path: Path) -> bool:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        return any(mark in head for mark in marks)

    return is_own


def readable(load: Callable[[Path], object]) -> Callable[[Path], bool]:
    """Return whether `load` reads a file or folder without a UsageError."""

    def is_own(path: Path) -> bool:
        try:
            load(path)
        except UsageError:
            return False
        return True

    return is_own


#: A JSON report of `write_report`.
REPORT = Output(holding(f'"{WRITTEN_BY}": "query-mutator '.encode()))
#: Annotation of a flag that takes a FILE or nothing.
TAKES_FILE = "takes a FILE or nothing"
#: Type of `json: JsonTo = None`: the FILE to write the result to, `-` for standard output.
JsonTo = Annotated[str | None, TAKES_FILE, REPORT]
#: A picture of matplotlib, which names itself in PNG and SVG files.
FIGURE = Output(holding(b"Matplotlib"))


@dataclass(frozen=True, kw_only=True)
class JsonFlags(OutputFlags):
    """Flags of commands that report a result."""

    json: JsonTo = None
    """Write the result as JSON to FILE; without FILE, or with -, print it in place of text."""


def show(flags: JsonFlags, data: Mapping[str, Any], text: str) -> None:
    """Print a result as `text`, or with `--json -` as one JSON object; `--json FILE` also writes the object."""
    print(encode(data).decode() if flags.json == "-" else text)
    if flags.json not in (None, "-"):
        write_report(flags.json, data)


def rows_of(pairs: Mapping[str, object]) -> str:
    """Return names and values as lines in two columns."""
    width = max(map(len, pairs))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs.items())


def write_report(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write a report as JSON that a later run of the command recognizes as its own."""
    write_json(path, marked(data))


def marked(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report with the mark by which it is recognized."""
    return {WRITTEN_BY: f"query-mutator {__version__}", **data}


def outputs_of(cls: type[Any]) -> Mapping[str, Output]:
    """Return by field how an earlier output of it is recognized."""
    found = {name: [item for item in items if isinstance(item, Output)] for name, items in _annotations(cls).items()}
    return {name: outputs[-1] for name, outputs in found.items() if outputs}


def with_dash(cls: type[Any], argv: Sequence[str]) -> list[str]:
    """Return the words with `-` as cyclopts takes it: `--json=-`, also for `--json` alone, and arguments after `--`."""
    before = list(takewhile(lambda word: word != "--", argv))
    words, after = [], [*argv[len(before) + 1 :]]
    for word in before:
        if word != "-":
            words.append(word)
        elif words and words[-1].startswith("-"):
            words[-1] += "=-"
        else:
            after.insert(0, word)
    takes_file = any(TAKES_FILE in items for items in _annotations(cls).values())
    is_alone = [takes_file and word == "--json" and later[:2] == "--" for word, later in pairwise([*words, "--"])]
    words = [f"{word}=-" if alone else word for word, alone in zip(words, is_alone, strict=True)]
    return [*words, "--", *after] if after else words


def _annotations(cls: type[Any]) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}


def check_outputs(flags: Any, outputs: Mapping[str, tuple[str, Output]]) -> None:
    """Raise a UsageError for an output that may not be written; `outputs` has the flag and its Output by field."""
    chosen = [
        (flag, Path(value), output)
        for field, (flag, output) in outputs.items()
        if (value := getattr(flags, field)) not in (None, "", "-")
    ]
    others = {name: value for name, value in vars(flags).items() if name not in outputs}
    inputs = [path for value in others.values() for path in _paths(value)]
    for place, (flag, path, output) in enumerate(chosen):
        try:
            if _is_device(path):
                continue
            _check_apart(flag, path, output, inputs)
            for other, other_path, _ in chosen[:place]:
                if _is_same(path, other_path):
                    raise UsageError(f"{flag} and {other} both name {path}; give two files")
            _check_existing(flag, path, output, force=getattr(flags, "force", False))
            _check_parent(flag, path)
        except (OSError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{flag} {path}: {getattr(error, 'strerror', error)}; choose another") from None


def _check_apart(flag: str, path: Path, output: Output, inputs: list[Path]) -> None:
    """Raise for an output that is an input, or is a folder that holds one or lies in one."""
    if output.resumes and output.is_folder:
        return
    parents = list(_real(path).parents)
    for given in inputs:
        inside = output.is_folder and given.is_dir() and any(_is_same(one, given) for one in parents)
        holds = output.is_folder and any(_is_same(one, path) for one in _real(given).parents)
        if _is_same(path, given) or inside or holds:
            how = "lies in" if inside else "holds" if holds else "is"
            raise UsageError(f"{flag} {path} {how} the input {given}; choose another output")


def _check_existing(flag: str, path: Path, output: Output, *, force: bool) -> None:
    if not path.exists() and not path.is_symlink():
        return
    if path.is_dir() != output.is_folder or not os.access(path, os.R_OK):
        kind = "folder" if path.is_dir() else "file"
        raise UsageError(f"{flag} {path} is a {kind} that this command did not write; choose another")
    if output.is_folder and all(one.name == LOCK for one in path.iterdir()):  # a process was killed as it started
        return
    if not output.is_own(path):
        raise UsageError(f"{flag} {path} exists and was not written by this command; choose another")
    if not (force or output.resumes):
        raise UsageError(f"{flag} {path} exists; choose another, or replace it with --force")


def _check_parent(flag: str, path: Path) -> None:
    """Raise for an output whose folder is not one, or can neither be written nor made."""
    parent = next(one for one in path.absolute().parents if one.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        why = f"{parent} is not a writable folder"
        raise UsageError(f"{flag} {path} cannot be written ({why}); choose another place to write to")


def _paths(value: Any) -> Iterator[Path]:
    """Yield the paths that exist among the values of a flag."""
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(item, (str, Path)) and str(item):
            with contextlib.suppress(OSError, ValueError):
                if os.path.lexists(item):
                    yield Path(item)


def _is_same(one: Path, other: Path) -> bool:
    """Return whether two paths name one file: by the file itself, which sees hard links, else by the resolved path."""
    with contextlib.suppress(OSError):
        return one.samefile(other)
    return _real(one) == _real(other)


def _real(path: Path) -> Path:
    """Return where a path leads; of links that form a loop, the place where it begins."""
    return Path(os.path.realpath(path))  # Path.resolve raises for a loop


def _is_device(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        mode = path.stat().st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    return False
