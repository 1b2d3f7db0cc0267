"""Command lines on a terminal: one-line errors, exit codes, Ctrl-C, progress bars, tables.

Results go to stdout; notes, bars and errors to stderr, without control characters and credentials of servers, answers
and files: every command line prints through `plain_output`, so no caller escapes text itself.

first Ctrl-C (130) or SIGTERM (143)   close connections and shut down, within SHUTDOWN_S
second Ctrl-C                         end the process at once
"""

from __future__ import annotations

import _thread
import codecs
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import TextIOWrapper
from traceback import walk_tb
from types import FrameType
from typing import Any, NoReturn, TextIO, cast
from weakref import WeakSet

from tqdm import tqdm

from query_mutator.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_USAGE, QueryMutatorError, hide_credentials
from query_mutator.files import disk_advice
from query_mutator.registry import fault_of

#: Controls except tab and line feed, and the characters that change the direction of text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_CURSOR_UP = re.compile(r"(\x1b\[A)+")  # tqdm moves between several bars by it

SHUTDOWN_S = 1.8  # from the first signal to the end of the process, even if something hangs
MESSAGE_CHARACTERS = 1000  # of the line that an error prints
EXIT_BROKEN_PIPE = 141  # what a shell reports for a process that SIGPIPE ended

BAR_FORMAT = "{desc}{percentage:3.0f}%|{bar}| {remaining} left{postfix}"


class FiguresBar(tqdm):  # type: ignore[type-arg]
    """tqdm with `figures`, the most important first; a postfix, as a server that is waited for, takes their place."""

    figures: Callable[[], Sequence[str]] | None = None

    def __str__(self) -> str:
        """Return the line, which tqdm draws."""
        if self.figures is None or not self.total:
            return super().__str__()
        shown = self.postfix or ", ".join(self.figures())
        return self.format_meter(**{**self.format_dict, "bar_format": BAR_FORMAT, "postfix": shown})


_on_interrupt: list[Callable[[], None]] = []
_bars: WeakSet[FiguresBar] = WeakSet()  # every bar of `progress`


def plain(text: str) -> str:
    r"""Return `text` with control characters and lone surrogates shown as \x1b or \u202e, without credentials in URLs.

    JSON stays valid: the controls that would become \x.. are escaped in it already.
    """
    shown = _CONTROLS.sub(lambda found: (r"\x%02x" if found[0] < " " else r"\u%04x") % ord(found[0]), text)
    return hide_credentials(shown.encode("utf-8", "backslashreplace").decode("utf-8"))


class PlainStream:
    """A text stream that writes only plain text, and what a progress bar needs to move within its line."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write `text`; carriage returns around it, and moves up alone, are those of a bar."""
        if not _CURSOR_UP.fullmatch(text):
            core = text.strip("\r")
            start = len(text) - len(text.lstrip("\r"))
            text = text[:start] + plain(core) + text[start + len(core) :]
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def plain_output() -> Iterator[None]:
    """Within the block standard output and standard error show only plain text."""
    streams = (sys.stdout, sys.stderr)
    out, err = (stream if isinstance(stream, PlainStream) else PlainStream(stream) for stream in streams)
    with redirect_stdout(cast(TextIO, out)), redirect_stderr(cast(TextIO, err)):
        yield


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by Ctrl-C or SIGTERM; carries the exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


#: Packages that a plain install does without -> the extra that has them.
_EXTRAS = {
    **dict.fromkeys(("torch", "gymnasium", "transformers", "sentence_transformers", "tensorboard"), "train"),
    **dict.fromkeys(("pydantic", "websockets"), "batching"),
    **dict.fromkeys(("matplotlib", "yaml", "scipy", "sklearn"), "lab"),
}


def run_cli(main: Callable[[Sequence[str]], int], *, prog: str) -> NoReturn:
    """Run a command line's `main(argv)` and end the process with its exit code."""
    codecs.register_error("as_json", _as_json)
    for stream in (sys.stdout, sys.stderr):
        cast(TextIOWrapper, stream).reconfigure(errors="as_json")  # a terminal or pipe that is not in UTF-8
    handler = logging.StreamHandler(cast(TextIO, PlainStream(sys.stderr)))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    for number, code in ((signal.SIGINT, EXIT_INTERRUPTED), (signal.SIGTERM, EXIT_TERMINATED)):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, _handler(code))
    code = exit_code(main, sys.argv[1:], prog=prog)
    if code not in (EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_BROKEN_PIPE):
        sys.exit(code)
    if code == EXIT_BROKEN_PIPE:  # the reader has left; drop what is still buffered
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit would wait for threads that wait for replies


def _as_json(error: UnicodeError) -> tuple[str, int]:
    r"""Return letters that an encoding lacks as \u escapes, which JSON stays valid with."""
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


@plain_output()
def exit_code(main: Callable[[Sequence[str]], int], argv: Sequence[str], *, prog: str) -> int:
    """Return the exit code of `main(argv)`; print one line on stderr for invalid input or a failing server or disk."""
    try:
        code = main(argv)
        sys.stdout.flush()
        return code
    except QueryMutatorError as error:
        return _print_error(prog, str(error), error.exit_code)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        if any(".lab." in frame.f_globals["__name__"] for frame, _ in walk_tb(error.__traceback__)):
            extra = "lab"  # has what it shares with the batching toolkit too
        return _print_error(prog, f'this needs {error.name}: pip install "query-mutator[{extra}]"', EXIT_USAGE)
    except KeyboardInterrupt as error:
        code = error.exit_code if isinstance(error, Interrupted) else EXIT_INTERRUPTED
        return _print_error(prog, "interrupted" if code == EXIT_INTERRUPTED else "terminated", code)
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except MemoryError as error:
        return _print_error(prog, f"not enough memory ({error}); choose smaller sizes", EXIT_USAGE)
    except Exception as error:
        advice = (disk_advice(error) if isinstance(error, OSError) else None) or fault_of(error)
        if not advice:
            raise
        return _print_error(prog, advice, EXIT_USAGE)


@contextmanager
def closing_on_interrupt(close: Callable[[], None]) -> Iterator[None]:
    """Inside the block the first signal also calls `close` in another thread, so that nothing waits for a reply."""
    _on_interrupt.append(close)
    try:
        yield
    finally:
        _on_interrupt.remove(close)


def note(*lines: str) -> None:
    """Print lines on stderr, next to the results on stdout."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def progress(name: str, total: int | None, *, unit: str = "it", initial: int = 0) -> FiguresBar:
    """Return a progress bar on stderr; without a terminal it appears late and is redrawn rarely, or not at all."""
    in_terminal = sys.stderr.isatty()
    bar = FiguresBar(
        total=total,
        initial=initial,
        desc=name,
        unit=unit,
        mininterval=0.2 if in_terminal else 15.0,
        delay=0.0 if in_terminal else 5.0,
        leave=False,
        dynamic_ncols=True,
    )
    _bars.add(bar)
    return bar


def show_status(line: str) -> None:
    """Show at the end of the open progress bars what the command waits for, "" when that is over; else print it."""
    bars = [bar for bar in _bars if not bar.disable]
    for bar in bars:
        bar.set_postfix_str(line)
    if line and not bars:
        note(line)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain-text table: the first column is left-aligned, the others right-aligned."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
    rule = "-" * max(map(len, lines))
    return "\n".join([title, rule, lines[0], rule, *lines[1:], rule])


def _print_error(prog: str, message: str, code: int) -> int:
    line = " ".join(message.split())
    if len(line) > MESSAGE_CHARACTERS:  # it quotes a value: its beginning and the advice at its end say enough
        line = f"{line[: MESSAGE_CHARACTERS // 2]} ... {line[-MESSAGE_CHARACTERS // 4 :]}"
    print(f"{prog}: {line}", file=sys.stderr, flush=True)
    return code


def _handler(code: int) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, _frame: FrameType | None) -> None:
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, lambda *_: os._exit(code))
        # threading.Thread takes locks that the interrupted code may hold; this does not. A close may need a lock that
        # the exception leaves locked, between its acquisition and the block of its `with`.
        _thread.start_new_thread(_exit_late, (code,))
        _thread.start_new_thread(_close_all, ())
        raise Interrupted(code)

    return handle


def _exit_late(code: int) -> None:
    time.sleep(SHUTDOWN_S)
    os._exit(code)


def _close_all() -> None:
    for close in tuple(_on_interrupt):
        close()
