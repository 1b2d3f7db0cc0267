"""The lines of an input file: OpenAI's batch format, or a prompt.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ..., "messages": [...]}}
{"id": "a", "prompt": "How do I sort a list?"}            the prompt under any name that question sets have for it
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from query_mutator.data.loaders import QUESTION_COLUMNS
from query_mutator.errors import UsageError
from query_mutator.files import parse_json_object
from query_mutator.types import Message, Role

__all__ = ["CHAT_URL", "Ask", "InputFile", "parse_line", "read_again", "read_lines", "scan_input"]

CHAT_URL = "/v1/chat/completions"
_ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
#: Sampling settings that Ollama and OpenAI have under the same name.
_OPTIONS = ("top_p", "stop", "presence_penalty", "frequency_penalty")
_READ = {"model", "messages", "max_tokens", "max_completion_tokens", "temperature", "seed", *_OPTIONS}
#: Fields that do not change the answer, and the values of others that ask for nothing special.
_IGNORED = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"}
_DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "tools": ([],),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one line asks; None: as the flags say."""

    number: int  # of the line, from 1
    id: Any
    messages: tuple[Message, ...]
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_openai: bool = False

    @property
    def prompt(self) -> str | None:
        """Return the text of a single user message, None for a conversation."""
        return self.messages[0].content if [message.role for message in self.messages] == ["user"] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """An input file as it is: its checksums and size, and the number of blank lines."""

    path: Path
    sha256: str
    num_bytes: int
    crcs: array[int]  # of the lines
    num_blank: int

    @property
    def num_lines(self) -> int:
        """Return the number of lines."""
        return len(self.crcs)


def scan_input(path: str | Path) -> InputFile:
    """Read a file once; UsageError when it cannot be read or has no line."""
    digest, size, crcs, blank = hashlib.sha256(), 0, array("L"), 0
    for _, line in read_lines(path):
        digest.update(line)
        size += len(line)
        crcs.append(zlib.crc32(line))
        blank += not line.strip()
    if len(crcs) == blank:
        raise UsageError(f"{path} has no lines; give one JSON object per line")
    return InputFile(path=Path(path), sha256=digest.hexdigest(), num_bytes=size, crcs=crcs, num_blank=blank)


def read_again(known: InputFile) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file as it was scanned, without what was appended since; UsageError if it changed."""
    left = known.num_bytes
    for number, line in read_lines(known.path):
        if not left:
            return
        line = line[:left]
        if zlib.crc32(line) != known.crcs[number - 1]:
            break
        left -= len(line)
        yield number, line
    if left:
        raise UsageError(f"{known.path} changed while it was answered; restore it and repeat the command")


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield number, from 1, and bytes of each line; UsageError when the file cannot be read."""
    try:
        with Path(path).open("rb") as file:
            yield from enumerate(file, 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None


def parse_line(number: int, line: bytes) -> Ask:
    """Return what a line asks; ValueError, without the line's number, for one that asks nothing we can send."""
    row = parse_json_object((line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip())
    names = ("prompt",) if "body" in row else ("prompt", *QUESTION_COLUMNS)
    column = next((name for name in names if name in row), None)
    if column is not None:
        return _from_prompt(number, row, column)
    if "body" not in row:
        known = ", ".join(QUESTION_COLUMNS)
        raise ValueError(f'neither a question ({known}) nor "body"; write {{"query"}} or OpenAI\'s batch format')
    return _from_openai(number, row)


def _from_prompt(number: int, row: Mapping[str, Any], column: str) -> Ask:
    prompt = row[column]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f'"{column}" {"is empty" if isinstance(prompt, str) else "must be text"}')
    message = Message(role="user", content=prompt)
    return Ask(number=number, id=row.get("id", number), messages=(message,), model=_model(row))


def _from_openai(number: int, row: Mapping[str, Any]) -> Ask:
    if (method := row.get("method", "POST")) != "POST" or (url := row.get("url", CHAT_URL)) != CHAT_URL:
        asked = method if method != "POST" else url
        raise ValueError(f"{asked!r} is not supported; lines must be POST {CHAT_URL}")
    body = row["body"]
    if not isinstance(body, dict):
        raise ValueError('"body" must be an object')
    _check_fields(body)
    return Ask(
        number=number,
        id=row.get("custom_id", number),
        messages=_messages(body.get("messages")),
        model=_model(body),
        max_tokens=_whole(body, "max_completion_tokens", "max_tokens"),
        temperature=_number(body, "temperature"),
        seed=_whole(body, "seed"),
        options={name: _option(body[name]) for name in _OPTIONS if body.get(name) is not None},
        is_openai=True,
    )


def _check_fields(body: Mapping[str, Any]) -> None:
    """Raise a ValueError for a field that would change the answer and cannot be sent to every server."""
    for name, value in body.items():
        plain = value is None or name in _READ | _IGNORED or value in _DEFAULTS.get(name, ())
        if not plain:
            raise ValueError(f'"{name}" in the body is not supported; leave it out')


def _messages(messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a list of at least one message')
    return tuple(_message(one) for one in messages)


def _message(one: Any) -> Message:
    role, content = (one.get("role"), one.get("content")) if isinstance(one, dict) else (None, None)
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"a message with the role {role!r} is not supported; use system, user or assistant")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise ValueError("the content of a message must be text")
    return Message(role=_ROLES[role], content=content)


def _model(row: Mapping[str, Any]) -> str | None:
    model = row.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        raise ValueError('"model" must be a name')
    return model


def _option(value: Any) -> Any:
    """Return an option as every server takes it: a list of stops, also of one."""
    return [value] if isinstance(value, str) else value


def _whole(body: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = body.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f'"{name}" must be a whole number')
        if value is not None:
            return value
    return None


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool)):
        raise ValueError(f'"{name}" must be a number')
    return value
