"""Exit codes, one line for a mistake, tables, signals; flags from a dataclass and the help; the bar."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from cyclopts import Parameter

from query_mutator import __version__
from query_mutator.cli.console import Interrupted, exit_code, note, table
from query_mutator.cli.flags import Positional, parse_flags
from query_mutator.cli.outputs import JsonTo
from query_mutator.errors import (
    DiskError,
    ServerDownError,
    TooManyFailuresError,
    UsageError,
    hide_credentials,
)
from query_mutator.files import disk_errors

ROOT = Path(__file__).resolve().parents[3]


HOSTILE = "\x1b]0;title\x07\x1b[2J red\x9b31m \u202egnp.exe \x00 \r over \ud800"
SHOWN = r"\x1b]0;title\x07\x1b[2J red\u009b31m \u202egnp.exe \x00 \x0d over \ud800"


def raising(error: BaseException) -> Callable[[Sequence[str]], int]:
    def main(argv: Sequence[str]) -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("try this"), 2, "prog: try this"),
        (ServerDownError("start it\nwith this"), 2, "prog: start it with this"),
        (TooManyFailuresError("half of them"), 3, "prog: half of them"),
        (KeyboardInterrupt(), 130, "prog: interrupted"),
        (Interrupted(143), 143, "prog: terminated"),
        (OSError(errno.ENOSPC, "No space left", "/full/out.json"), 2, "prog: /full/out.json: the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "/shut"), 2, "prog: /shut: cannot be written"),
    ],
)
def test_error_is_one_line_and_a_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(raising(error), [], prog="prog") == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_a_bug_keeps_its_traceback_and_a_closed_pipe_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (ZeroDivisionError(), OSError(errno.EDOM, "odd")):
        with pytest.raises(type(error)):
            exit_code(raising(error), [], prog="prog")
    assert exit_code(raising(BrokenPipeError()), [], prog="prog") == 141
    assert capsys.readouterr().err == ""


def test_full_disk_names_the_file() -> None:
    full = Path("/dev/full")
    with pytest.raises(DiskError, match="/dev/full: the disk is full"), disk_errors(full):
        full.write_text("x")


CHILD = """
import os, signal, sys, threading
from query_mutator.cli.console import closing_on_interrupt, run_cli
let_go = threading.Event()
def main(argv):
    with closing_on_interrupt(threading.Event().wait if "stuck" in argv else let_go.set):
        try:
            print("ready", flush=True)
            threading.Event().wait()
        finally:
            print("closed" if let_go.wait(60) else "still open", flush=True)
            if argv:
                threading.Event().wait()
    return 0
run_cli(main, prog="child")
"""


def child(*argv: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *argv], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("name", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_signal_closes_connections_and_ends_with_its_code(name: str, code: int, word: str) -> None:
    process = child()
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (code, "closed\n", f"child: {word}\n")


@pytest.mark.parametrize("what", ["hang", "stuck"])
def test_what_hangs_is_ended_anyway_and_a_second_interrupt_leaves_at_once(what: str) -> None:
    process = child(what)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    process = child("hang")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "closed\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130


def test_whatever_is_printed_shows_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: Sequence[str]) -> int:
        print("answer", HOSTILE)
        note(HOSTILE)
        print(table("t", ("a", "b"), [(HOSTILE, "1")]))
        print(json.dumps({"answer": HOSTILE}, ensure_ascii=False))
        raise UsageError(f"the server says {HOSTILE}")

    assert exit_code(main, [], prog="prog") == 2
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == f"answer {SHOWN}"
    assert captured.err.splitlines()[0] == SHOWN
    assert all(character.isprintable() or character == "\n" for character in captured.out + captured.err)
    assert json.loads(captured.out.splitlines()[-1]) == {"answer": HOSTILE}


def test_warnings_and_progress_bars_show_no_control_characters() -> None:
    code = (
        "import logging, warnings\n"
        "from query_mutator.cli.console import progress, run_cli\n"
        "def main(argv):\n"
        "    with progress('\x1b[2J', 3) as bar: bar.delay = 0; bar.refresh(); bar.update()\n"
        "    logging.getLogger('x').warning('server \x1b[2J %s', 'http://me:secret@host')\n"
        "    warnings.warn('\x1b[2J')\n"
        "    return 0\n"
        "run_cli(main, prog='prog')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "\x1b" not in done.stderr
    assert "server \\x1b[2J http://***@host\n" in done.stderr
    assert "\r\\x1b[2J:   0%" in done.stderr.replace("\n", "\r")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://me:pass@host/a?x=1", "see https://***@host/a?x=1"),
        ("http://host/v1?api_key=abc&x=1 failed", "http://host/v1?api_key=***&x=1 failed"),
        ("'ws://host/?Token=abc'", "'ws://host/?Token=***'"),
        ("mail me@host, a//b, 5 // 2", "mail me@host, a//b, 5 // 2"),
    ],
)
def test_credentials_in_addresses_are_hidden(text: str, shown: str) -> None:
    assert hide_credentials(text) == shown


@dataclass(frozen=True, kw_only=True)
class ReplayFlags:
    """Inherited flags."""

    size: int = 10
    """Transitions kept."""


@dataclass(frozen=True, kw_only=True)
class Flags(ReplayFlags):
    """A command."""

    FIRST: ClassVar[tuple[str, ...]] = ("question", "names")

    question: Positional[str]
    """The question."""
    names: Annotated[tuple[str, ...], Parameter(name=("--name", "-n"))] = ()
    """Names."""
    fast: bool = False
    """Hurry."""
    json: JsonTo = None
    """FILE of the result."""
    resume: str | None = None
    """A run."""


@dataclass(frozen=True, kw_only=True)
class CommandFlags:
    """A command that runs another."""

    command: Positional[tuple[str, ...]] = ()
    """The other command."""
    grid: tuple[str, ...] = ()
    """Values."""


def parse(*argv: str, base: dict[str, Any] | None = None) -> Flags:
    resumed = ["--resume", "run"] if base else []
    return parse_flags(Flags, [*argv, *resumed], prog="prog", base=lambda _: (base or {}, "base.json"))


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("q", None),
        ("q --json", "-"),
        ("--json --fast q", "-"),
        ("--json - q", "-"),
        ("q --json out.json", "out.json"),
        ("--json out.json q", "out.json"),
        ("--json=out.json q --json last.json", "last.json"),
    ],
)
def test_json_takes_a_file_or_none_and_leaves_the_question(line: str, file: str | None) -> None:
    flags = parse(*line.split())
    assert (flags.json, flags.question) == (file, "q")


def test_values_of_a_tuple_add_up_and_everything_after_the_dashes_is_the_positional() -> None:
    for line in ("--name a b", "--name a --fast -n b --size 1", "-n=a -n=b"):
        assert parse("q", *line.split()).names == ("a", "b")
    flags = parse_flags(CommandFlags, ["--grid", "a=1", "--", "python", "--grid", "--", "--help"], prog="prog")
    assert flags == CommandFlags(command=("python", "--grid", "--", "--help"), grid=("a=1",))


def test_command_line_replaces_values_of_the_base() -> None:
    base = {"name": ["x", "y"], "fast": True, "size": 3, "json": None}
    assert parse("q", base=base) == Flags(question="q", names=("x", "y"), fast=True, size=3, resume="run")
    assert parse("q", "-n", "z", "--no-fast", base=base) == Flags(question="q", names=("z",), size=3, resume="run")


def test_an_error_in_the_base_names_it() -> None:
    for base, named in (({"sise": 1}, "'sise'; did you mean 'size'"), ({"fast": "x"}, r"\[fast\] from base.json")):
        with pytest.raises(UsageError, match=named):
            parse("q", base=base)


def test_help_shows_the_first_flags_and_help_all_the_others_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    printed = {}
    for option in ("--help", "--help-all", "--version"):
        with pytest.raises(SystemExit, match="0"):
            parse(option)
        printed[option] = capsys.readouterr().out
    assert printed["--version"].strip() == __version__
    for words, shown in (("--name", [True, True]), ("--size", [False, True]), ("Replay options", [False, True])):
        assert [words in printed[option] for option in ("--help", "--help-all")] == shown
