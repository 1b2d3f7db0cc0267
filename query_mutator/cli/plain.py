"""Text from servers, answers and files as a terminal may see it: no control characters, no credentials.

Every command line prints through `plain_output`, so no caller escapes text itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from query_mutator.errors import hide_credentials

__all__ = ["PlainStream", "plain", "plain_output", "styled_output"]

#: Controls except tab and line feed, and the characters that change the direction of text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_CURSOR_UP = re.compile(r"(\x1b\[A)+")  # tqdm moves between several bars by it


def plain(text: str) -> str:
    r"""Return `text` with control characters and lone surrogates shown as \x1b or \u202e, without credentials in URLs.

    JSON stays valid: the controls that would become \x.. are escaped in it already.
    """
    shown = _CONTROLS.sub(_escape, text).encode("utf-8", "backslashreplace").decode("utf-8")
    return hide_credentials(shown)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"


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

    def writelines(self, lines: list[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def plain_output() -> Iterator[None]:
    """Within the block standard output and standard error show only plain text."""
    out, err = (stream if isinstance(stream, PlainStream) else PlainStream(stream) for stream in _streams())
    with redirect_stdout(cast(TextIO, out)), redirect_stderr(cast(TextIO, err)):
        yield


@contextmanager
def styled_output() -> Iterator[None]:
    """Within the block our own text, as that of --help, may have colors."""
    out, err = (stream.stream if isinstance(stream, PlainStream) else stream for stream in _streams())
    with redirect_stdout(out), redirect_stderr(err):
        yield


def _streams() -> tuple[TextIO, TextIO]:
    return sys.stdout, sys.stderr
