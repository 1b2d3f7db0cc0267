"""The messages that a page is made of: each is one JSON object, applied in order.

section        {"run", "name", "data"}                    a section of a run
metrics        {"run", "steps", "wall_s", "columns"}      rows of numbers
texts          {"run", "items"}                           adds texts to the run's table; rows hold their numbers
questions      {"run", "rows"}                            adds held-out questions with the way of each method
transcripts    {"run", "columns"}                         adds training steps, a list per column

Texts are data: the page never makes markup of them.
"""

from __future__ import annotations

import base64
import gzip
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Any, TypeVar

from query_mutator.errors import HIDDEN, hide_credentials
from query_mutator.files import encode, finite
from query_mutator.types import wire_text

Message = dict[str, Any]
T = TypeVar("T")

CHUNK_ROWS = 2000  # of a message: a browser decodes one at a time
NO_TEXT = -1  # the number of no text
_LEVEL = 6  # of gzip
_DIGEST_BYTES = 16
_RECENT, _RECENT_CHARS = 4096, 500  # texts whose numbers are kept at hand, and the longest of them

_SECRET_NAME = re.compile(r"(key|token|secret|passw(or)?d|credential|auth(orization)?)$", re.IGNORECASE)
_MIN_CHARS = 8  # of a secret: shorter values of such variables are words
_PATTERNS = (
    re.compile(r"(?P<name>--[\w-]*(key|token|secret|password|passwd|credential)[= ]+)(?P<secret>('[^']*'|\S+))", re.I),
    re.compile(
        r"(?P<name>\b((proxy-)?authorization|cookie|[\w-]*(api-key|token|secret))\s*:\s*)"
        r"(?P<secret>((bearer|basic|token)\s+)?[^\s'\",;]+)",
        re.I,
    ),
    re.compile(r"(?P<name>)(?P<secret>\bsk-[\w/+-]{16,})"),
)
_PARTS = ("command_line", "flags", "versions", "hardware", "commit", "dataset_sha256", "started", "resumed")


def section(run: int, name: str, data: Mapping[str, Any]) -> Message:
    """Return the message of a section; `run` is -1 for one that all runs share."""
    return {"kind": "section", "run": run, "name": name, "data": plain(data)}


def plain(value: Any) -> Any:
    """Return data that is valid JSON in UTF-8: lone surrogates become U+FFFD, numbers that are not finite None."""
    if isinstance(value, str):
        return wire_text(value)
    if isinstance(value, Mapping):
        return {wire_text(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return finite(value)


def chunks(rows: Iterable[T], size: int = CHUNK_ROWS) -> Iterator[list[T]]:
    """Yield the rows in parts of at most `size`."""
    left = iter(rows)
    while part := list(islice(left, size)):
        yield part


class TextTable:
    """The texts of a run, each sent once; keeps their digests, so its memory does not grow with their length."""

    def __init__(self, run: int, redact: Callable[[str], str]) -> None:
        """Take the number of the run on the page, and what removes secrets from a text."""
        self._run, self._redact = run, redact
        self._recent = lru_cache(maxsize=_RECENT)(self._find)  # ids, questions and operators repeat
        self._numbers: dict[bytes, int] = {}
        self._new: list[str] = []

    def number(self, text: object) -> int:
        """Return the number of a text, NO_TEXT for None."""
        if text is None:
            return NO_TEXT
        words = str(text)
        return self._recent(words) if len(words) <= _RECENT_CHARS else self._find(words)

    def _find(self, text: str) -> int:
        clean = wire_text(self._redact(text))
        digest = blake2b(clean.encode(), digest_size=_DIGEST_BYTES).digest()
        found = self._numbers.get(digest)
        if found is None:
            found = self._numbers[digest] = len(self._numbers)
            self._new.append(clean)
        return found

    def numbers(self, texts: Sequence[object]) -> list[int]:
        """Return the numbers of several texts."""
        return [self.number(text) for text in texts]

    def take(self) -> Iterator[Message]:
        """Yield the messages with the texts that are new since the last call."""
        new, self._new = self._new, []
        for part in chunks(new):
            yield {"kind": "texts", "run": self._run, "items": part}


def as_block(message: Message) -> bytes:
    """Return a message as a script block of the page: its JSON compressed, as text."""
    packed = base64.b64encode(gzip.compress(encode(message), _LEVEL, mtime=0))
    kind = str(message["kind"]).encode()
    return b'<script type="application/json+gzip" class="qm-message" data-kind="%b">%b</script>\n' % (kind, packed)


class Redactor:
    """Replaces secrets in texts: those of the environment and of settings that are named as secrets, wherever they are.

    Credentials in addresses, in headers and after flags that are named as secrets are replaced by their form.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        found = {value for name, value in os.environ.items() if _SECRET_NAME.search(name)}
        found |= set(_secrets_in(config))
        self._secrets = sorted((value for value in found if len(value) >= _MIN_CHARS), key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return a text without the secrets that are known."""
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, HIDDEN)
        return text

    def setting(self, value: Any) -> Any:
        """Return a setting, nested ones included, without secrets and without what looks like one."""
        if isinstance(value, str):
            shown = hide_credentials(self.text(value))
            for pattern in _PATTERNS:
                shown = pattern.sub(lambda match: f"{match['name']}{HIDDEN}", shown)
            return shown
        if isinstance(value, Mapping):
            return {name: HIDDEN if _is_secret(name, item) else self.setting(item) for name, item in value.items()}
        return [self.setting(item) for item in value] if isinstance(value, (list, tuple)) else value


def origin_of(config: Mapping[str, Any], redactor: Redactor) -> dict[str, Any]:
    """Return what it takes to repeat a run."""
    return {name: redactor.setting(config.get(name)) for name in (*_PARTS, "backend", "encoder", "plugins")}


def _is_secret(name: object, value: object) -> bool:
    return isinstance(value, str) and bool(value) and _SECRET_NAME.search(str(name)) is not None


def _secrets_in(value: Any) -> Iterator[str]:
    """Yield the values of settings that are named as secrets."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if _is_secret(name, item):
                yield item
            else:
                yield from _secrets_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secrets_in(item)
