"""Answer the lines of a file with `batch_size` calls in flight: every line is a flow, every answer is stored.

A line of the input is one of these; the output has one row per line in the same order, in the format of its line:

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ..., "messages": [...]}}
{"id": "a", "prompt": "How do I sort a list?"}            the prompt under any name that question sets have for it

The store OUT.replies.sqlite has the replies until all lines are done and the output is written. A resumed command asks
every line again, and finds in the store what was answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.data import QUESTION_COLUMNS
from query_mutator.encoder import CachedEncoder
from query_mutator.env.scheduling import Call, Flow
from query_mutator.errors import UsageError
from query_mutator.files import atomic_write, decode_object, encode, parse_json
from query_mutator.llm.cache import is_repeatable
from query_mutator.session.play import Caller, FailureWindow, in_pool
from query_mutator.settings import Sampling
from query_mutator.types import ChatRequest, Completion, ErrorInfo, Message, Role

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

AHEAD = 4  # lines in progress for each call in flight: some of them wait before a retry

#: The completion of a line, and what a policy did with its prompt.
Answer = tuple[Completion, dict[str, object] | None]


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
        """Return the user's message, alone or after a system prompt; None for a conversation."""
        roles = [message.role for message in self.messages]
        return self.messages[-1].content if roles in (["user"], ["system", "user"]) else None


def read_input(path: str | Path) -> tuple[bytes, ...]:
    """Return the lines of a file; UsageError when it cannot be read or has no line."""
    try:
        with Path(path).open("rb") as file:
            lines = tuple(file)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    if not any(map(bytes.strip, lines)):
        raise UsageError(f"{path} has no lines; give one JSON object per line")
    return lines


def parse_line(number: int, line: bytes) -> Ask:
    """Return what a line asks; ValueError, without the line's number, for one that asks nothing we can send."""
    row = decode_object((line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip(), parse_json)
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
    return Ask(number=number, id=row.get("id", number), messages=(message,), model=_value(row, str, "a name", "model"))


def _from_openai(number: int, row: Mapping[str, Any]) -> Ask:
    if (method := row.get("method", "POST")) != "POST" or (url := row.get("url", CHAT_URL)) != CHAT_URL:
        asked = method if method != "POST" else url
        raise ValueError(f"{asked!r} is not supported; lines must be POST {CHAT_URL}")
    body = row["body"]
    if not isinstance(body, dict):
        raise ValueError('"body" must be an object')
    _check_fields(body)
    options = {name: body[name] for name in _OPTIONS if body.get(name) is not None}
    if isinstance(options.get("stop"), str):  # which every server takes as a list
        options["stop"] = [options["stop"]]
    return Ask(
        number=number,
        id=row.get("custom_id", number),
        messages=_messages(body.get("messages")),
        model=_value(body, str, "a name", "model"),
        max_tokens=_value(body, int, "a whole number", "max_completion_tokens", "max_tokens"),
        temperature=_value(body, (int, float), "a number", "temperature"),
        seed=_value(body, int, "a whole number", "seed"),
        options=options,
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


def _value(row: Mapping[str, Any], kinds: type | tuple[type, ...], what: str, *names: str) -> Any:
    """Return the first of some fields that is given; ValueError for one that is not of a kind, or an empty text."""
    for name in names:
        value = row.get(name)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool) or value == ""):
            raise ValueError(f'"{name}" must be {what}')
        if value is not None:
            return value
    return None


def answer_row(ask: Ask, completion: Completion, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the row of an answered line; `more` says how its prompt was rewritten."""
    reason = "length" if completion.hit_limit else "stop"
    tokens = {"prompt_tokens": completion.prompt_tokens, "completion_tokens": completion.completion_tokens}
    if not ask.is_openai:
        about = {"model": completion.model, "finish_reason": reason, **tokens}
        return {"id": ask.id, "answer": completion.text, **about, **(more or {})}
    message = {"role": "assistant", "content": completion.text, "refusal": None}
    body = {
        "id": f"chatcmpl-{ask.number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": completion.model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
        "usage": {**tokens, "total_tokens": sum(tokens.values())},
    }
    response = {"status_code": 200, "request_id": f"req_{ask.number}", "body": body}
    row = {"id": f"batch_req_{ask.number}", "custom_id": ask.id, "response": response, "error": None}
    return {**row, **({"query_mutator": dict(more)} if more is not None else {})}


def error_row(ask: Ask, error: ErrorInfo) -> dict[str, Any]:
    """Return the row of a line whose call failed for good."""
    said = {"code": error.kind, "message": error.message}
    if not ask.is_openai:
        return {"line": ask.number, "id": ask.id, "error": said}
    row = {"id": f"batch_req_{ask.number}", "custom_id": ask.id, "response": None, "error": said}
    return {"line": ask.number, **row}


class BatchRows:
    """The rows of the lines that are done, as they are written."""

    def __init__(self) -> None:
        self.answers: dict[int, bytes] = {}  # by line
        self.errors: dict[int, bytes] = {}

    def write(self, answers: Path, errors: Path) -> None:
        """Write the rows of all lines in order, those without an answer to a file of their own."""
        for path, rows in ((errors, self.errors), (answers, self.answers)):
            if path == errors and not rows:
                path.unlink(missing_ok=True)
                continue
            with atomic_write(path) as file:
                file.writelines(rows[line] + b"\n" for line in sorted(rows))


def request_of(ask: Ask, *, model: str, sampling: Sampling, keeps: bool = True) -> ChatRequest:
    """Return the request of a line; what it leaves open is as in `sampling`.

    Where replies are kept (`keeps`), a random one is the draw of its line, which a resumed command finds again.
    """
    request = ChatRequest(
        model=model,
        messages=ask.messages,
        max_tokens=sampling.target_max_tokens if ask.max_tokens is None else ask.max_tokens,
        temperature=sampling.temperature if ask.temperature is None else ask.temperature,
        think=sampling.think,
        seed=ask.seed,
        options=ask.options,
    )
    return replace(request, sample=ask.number) if keeps and not is_repeatable(request) else request


def ask_once(ask: Ask, request: ChatRequest, more: dict[str, object] | None = None) -> Flow:
    """Yield the one call of a line; return its Answer."""
    completion = yield Call(request)
    return completion, more


def answer_file(
    lines: Sequence[bytes],
    rows: BatchRows,
    caller: Caller,
    encoder: CachedEncoder,
    start: Callable[[Ask], Flow],
    *,
    shown: Callable[[], object],
) -> None:
    """Answer all lines of a file; `start` returns the flow of a line, with its Answer.

    Raises TooManyFailuresError when calls fail too often; the command can be resumed.
    """
    flows = ((ask, start(ask)) for ask in _asks(lines, rows, shown))
    failures = FailureWindow(caller.max_failure_rate, unit="lines")
    at_once = AHEAD * caller.batch_size
    with closing(in_pool(caller, encoder, lambda: next(flows, None), at_once=at_once)) as finished:
        for ask, (completion, more) in finished:
            if completion.ok:
                rows.answers[ask.number] = encode(answer_row(ask, completion, more))
            elif completion.error.kind != "cancelled":
                rows.errors[ask.number] = encode(error_row(ask, completion.error))
            failures.add(np.array([completion.ok]))
            shown()


def _asks(lines: Sequence[bytes], rows: BatchRows, shown: Callable[[], object]) -> Iterator[Ask]:
    """Yield what the lines ask; lines that ask nothing are done at once."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            ask = parse_line(number, line)
        except ValueError as error:
            said = {"code": "invalid_line", "message": str(error)}
            rows.errors[number] = encode({"line": number, "id": None, "error": said})
            shown()
            continue
        yield ask
