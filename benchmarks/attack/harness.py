"""What the areas of attack share: the outcome of a case, commands in this process, inputs that must not change."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from query_mutator.cli.console import exit_code
from query_mutator.commands.main import main as qm_main

Verdict = Literal["ok", "traceback", "hang", "wrong", "input changed", "memory"]
VERDICTS: tuple[Verdict, ...] = ("ok", "traceback", "hang", "wrong", "input changed", "memory")
EXIT_CODES = {0, 1, 2, 3}  # done, a check failed, invalid input, too many failed calls
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one case did."""

    case: str  # what was done, enough to do it by hand
    verdict: Verdict = "ok"
    detail: str = ""  # the traceback, or what is wrong


Attack = Callable[[random.Random, Path], Outcome]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A command that has ended in this process."""

    argv: tuple[str, ...]
    code: int | None  # None: an exception came out
    out: str
    err: str

    @property
    def case(self) -> str:
        """The command line, shortened."""
        return " ".join(word if len(word) < 200 else f"{word[:80]}…({len(word)} characters)" for word in self.argv)

    def outcome(self) -> Outcome:
        """Return "traceback" where an exception came out or was printed, "wrong" for an exit code without meaning."""
        if self.code is None or TRACEBACK in self.out + self.err:
            return Outcome(case=self.case, verdict="traceback", detail=(self.err or self.out)[-4000:])
        if self.code not in EXIT_CODES:
            return Outcome(case=self.case, verdict="wrong", detail=f"exit code {self.code}: {self.err[-500:]}")
        if self.code == 2 and not self.err.strip():
            return Outcome(case=self.case, verdict="wrong", detail="exit code 2 without a line that says why")
        return Outcome(case=self.case)


def run_qm(argv: Sequence[str | Path], folder: Path) -> Finished:
    """Run `qm argv` in this process, in `folder`."""
    return run_cli(qm_main, argv, folder, prog="qm")


def run_cli(
    main: Callable[[Sequence[str]], int], argv: Sequence[str | Path], folder: Path, *, prog: str = "train"
) -> Finished:
    """Run a command line's `main(argv)` in this process, in `folder`, and keep what it printed."""
    words = tuple(str(word) for word in argv)
    out, err = io.StringIO(), io.StringIO()
    code: int | None
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                code = exit_code(main, words, prog=prog)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            code = None
            err.write(traceback.format_exc())
    return Finished(argv=(prog, *words), code=code, out=out.getvalue(), err=err.getvalue())


@dataclass
class Inputs:
    """Content of the files that a case must not change."""

    digests: dict[Path, str] = field(default_factory=dict)

    def changed(self) -> list[Path]:
        """Return the files whose content is another one now, or that are gone."""
        return [path for path, digest in self.digests.items() if _digest(path) != digest]


@contextlib.contextmanager
def unchanged(*paths: Path) -> Iterator[Inputs]:
    """Remember the content of files, and of all files in folders, on entry."""
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    yield Inputs({file: _digest(file) for file in files if file.is_file()})


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() and os.access(path, os.R_OK) else "none"
