"""How our command lines meet a terminal: one line for a mistake, exit codes, Ctrl-C, progress bars, tables.

results go to stdout; remarks, bars and errors to stderr
first Ctrl-C (130) or SIGTERM (143)   connections are closed, the program winds up, at most WIND_UP_S
second Ctrl-C                         the process ends at once
"""

from __future__ import annotations

import _thread
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from query_mutator.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_USAGE, QueryMutatorError
from query_mutator.files import disk_advice

if TYPE_CHECKING:
    from tqdm import tqdm

WIND_UP_S = 1.8  # from the first signal to the end, whatever still hangs
EXIT_BROKEN_PIPE = 141  # what a shell reports for a process ended by SIGPIPE

_on_interrupt: list[Callable[[], None]] = []


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by Ctrl-C or SIGTERM; carries the exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


def run_cli(main: Callable[[Sequence[str]], int], *, prog: str) -> NoReturn:
    """Run a command line's `main(argv)` and end the process with its exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    _install_handlers()
    code = exit_code(main, sys.argv[1:], prog=prog)
    if code in (EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_BROKEN_PIPE):
        _leave(code)  # the interpreter's own end would wait for threads that wait for replies
    sys.exit(code)


def exit_code(main: Callable[[Sequence[str]], int], argv: Sequence[str], *, prog: str) -> int:
    """Return the exit code of `main(argv)`; a mistake of the user's or the machine's becomes one line on stderr."""
    try:
        code = main(argv)
        sys.stdout.flush()
        return code
    except QueryMutatorError as error:
        return _say(prog, str(error), error.exit_code)
    except KeyboardInterrupt as error:
        code = error.exit_code if isinstance(error, Interrupted) else EXIT_INTERRUPTED
        return _say(prog, "interrupted" if code == EXIT_INTERRUPTED else "terminated", code)
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except OSError as error:
        advice = disk_advice(error)
        if advice is None:
            raise
        return _say(prog, advice, EXIT_USAGE)


@contextmanager
def closing_on_interrupt(close: Callable[[], None]) -> Iterator[None]:
    """While inside, the first signal also calls `close` in another thread, so that nothing waits for a reply."""
    _on_interrupt.append(close)
    try:
        yield
    finally:
        _on_interrupt.remove(close)


def note(*lines: str) -> None:
    """Tell the user something beside the results."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def progress(name: str, total: int, *, unit: str = "it", terminal_only: bool = False) -> tqdm[Any]:
    """Return a progress bar on stderr; where that is no terminal it comes late and is redrawn rarely, or not at all."""
    from tqdm import tqdm

    in_terminal = sys.stderr.isatty()
    return tqdm(
        total=total,
        desc=name,
        unit=unit,
        mininterval=0.2 if in_terminal else 15.0,
        delay=0.0 if in_terminal else 5.0,
        leave=False,
        dynamic_ncols=True,
        disable=None if terminal_only else False,
    )


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain-text table: the first column to the left, the others to the right."""
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


def _say(prog: str, message: str, code: int) -> int:
    print(f"{prog}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def _install_handlers() -> None:
    for number, code in ((signal.SIGINT, EXIT_INTERRUPTED), (signal.SIGTERM, EXIT_TERMINATED)):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup asked for it
            signal.signal(number, _handler(code))


def _handler(code: int) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, lambda *_: os._exit(code))
        # threading.Thread takes locks that the interrupted code may hold; this does not.
        _thread.start_new_thread(_wind_up, (code,))
        raise Interrupted(code)

    return handle


def _wind_up(code: int) -> None:
    ends = time.monotonic() + WIND_UP_S
    for close in tuple(_on_interrupt):
        close()
    time.sleep(max(0.0, ends - time.monotonic()))
    os._exit(code)


def _leave(code: int) -> NoReturn:
    if code == EXIT_BROKEN_PIPE:  # nobody reads what is left in the buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
