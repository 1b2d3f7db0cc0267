"""Replies of Ollama's and OpenAI's APIs: their text, and the same reply under the client's model name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

import orjson

from query_mutator.apply.proxy.requests import Api, ChatCall
from query_mutator.apply.proxy.upstream import MAX_REPLY_VALUES, UpstreamGone
from query_mutator.files import count_values
from query_mutator.types import Completion, Json, mean_logprob, without_thought

__all__ = [
    "STREAM_TYPES", "LineReader", "answer_of", "as_stream", "choice_of", "parsed", "read_lines", "renamed",
    "renamed_lines", "text_of", "tokens_of", "with_fields",
]  # fmt: skip

T = TypeVar("T", list[Any], Json)

STREAM_TYPES = {
    "ollama_chat": b"application/x-ndjson",
    "ollama_generate": b"application/x-ndjson",
    "openai_chat": b"text/event-stream",
}
_DATA = b"data:"
_MAX_PARSED_LINE_BYTES = 64 * 1024  # a longer one is a vector, or a picture


def text_of(api: Api, reply: Json) -> str:
    """Return the text in a reply, or in a line of a stream; UpstreamGone for a reply of another shape."""
    if api == "ollama_generate":
        found = reply.get("response")
    elif api == "ollama_chat":
        found = _shaped(reply.get("message"), dict).get("content")
    else:
        found = _message_of(reply).get("content")
    return found if isinstance(found, str) else ""


def answer_of(api: Api, reply: Json) -> Completion:
    """Return what a policy reads of a reply, and drop the log probabilities from it, which no client asked for."""
    if api == "openai_chat":
        choice = choice_of(reply)
        rows, end = _shaped(choice.pop("logprobs", None), dict).get("content"), choice.get("finish_reason")
    else:
        rows, end = reply.pop("logprobs", None), reply.get("done_reason")
    text, model = without_thought(text_of(api, reply)), str(reply.get("model") or "upstream")
    return Completion(text=text, model=model, logprob=mean_logprob(rows), hit_limit=end == "length")


def choice_of(reply: Json) -> Json:
    """Return the first choice of a reply, {} without one; UpstreamGone for a reply of another shape."""
    choices = _shaped(reply.get("choices"), list)
    return _shaped(choices[0] if choices else None, dict)


def _message_of(reply: Json) -> Json:
    choice = choice_of(reply)
    return _shaped(choice.get("message") or choice.get("delta"), dict)


def _shaped(found: Any, kind: type[T]) -> T:
    """Return a part of a reply, empty where there is none; UpstreamGone for one of another type."""
    if found and not isinstance(found, kind):
        raise UpstreamGone("sent a reply that is not one of a chat")
    return found or kind()


def tokens_of(reply: Json) -> int | None:
    """Return the tokens of a reply's text as its server counted them, None where it does not say."""
    usage = reply.get("usage")
    found = usage.get("completion_tokens") if isinstance(usage, dict) else reply.get("eval_count")
    return found if isinstance(found, int) else None


class LineReader:
    """Splits a stream into lines; the bytes of an incomplete line wait for the rest."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def lines(self, chunk: bytes) -> list[bytes]:
        """Return the lines that a chunk completes, each with its line end."""
        *ends, rest = chunk.split(b"\n")
        lines = [end + b"\n" for end in ends]
        if lines and self._rest:
            lines[0] = bytes(self._rest + lines[0])
            self._rest.clear()
        self._rest += rest
        return lines

    def rest(self) -> bytes:
        """Return what follows the last line end."""
        return bytes(self._rest)


async def read_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """Yield the lines of a stream, each with its end, as they arrive."""
    reader = LineReader()
    async for chunk in chunks:
        if lines := reader.lines(chunk):
            yield lines
    if rest := reader.rest():
        yield [rest]


def parsed(line: bytes) -> Json | None:
    """Return the JSON object in a line of a stream, None for blank lines, comments, `[DONE]` and too many values."""
    if (line := line.strip()) == b"":
        return None
    if len(line) > MAX_REPLY_VALUES and count_values(line) > MAX_REPLY_VALUES:
        return None
    try:
        found = orjson.loads(line[len(_DATA) :] if line.startswith(_DATA) else line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def renamed(line: bytes, model: str) -> bytes:
    """Return a line with the client's model name in the place of the upstream's; a long one is left as it is."""
    found = parsed(line) if len(line) <= _MAX_PARSED_LINE_BYTES else None
    inner = found.get("response") if found is not None else None  # of an event of OpenAI's responses
    if found is None or not ("model" in found or (isinstance(inner, dict) and "model" in inner)):
        return line
    prefix = b"data: " if line.lstrip().startswith(_DATA) else b""
    named = {"model": model} if "model" in found else {"response": {**found["response"], "model": model}}
    return prefix + orjson.dumps({**found, **named}) + b"\n"


async def renamed_lines(lines: AsyncIterator[list[bytes]], model: str) -> AsyncIterator[bytes]:
    """Yield the lines of a reply with the client's model name, those that arrive together in one piece."""
    async for together in lines:
        piece = b"".join(together)
        yield b"".join(renamed(line, model) for line in together) if b'"model"' in piece else piece


def with_fields(reply: Json, model: str, qm: Json | None) -> bytes:
    """Return a whole reply under the client's model name, with a field `qm` if there is one."""
    return orjson.dumps({**reply, "model": model, **({} if qm is None else {"qm": qm})})


def as_stream(call: ChatCall, reply: Json) -> Iterator[bytes]:
    """Yield a whole reply as the lines of a stream: the text in one piece, then the end with counts and times."""
    reply = {**reply, "model": call.model}
    if call.api != "openai_chat":
        yield from (orjson.dumps(line) + b"\n" for line in _ollama_lines(call.api, reply))
        return
    for chunk in _openai_chunks(call, reply):
        yield b"data: " + orjson.dumps(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _ollama_lines(api: Api, reply: Json) -> Iterator[Json]:
    kept = {"model": reply["model"], "created_at": reply.get("created_at", "")}
    if api == "ollama_generate":
        thought = {"thinking": reply.pop("thinking")} if "thinking" in reply else {}
        yield {**kept, **thought, "response": text_of(api, reply), "done": False}
        yield {**reply, "response": ""}
        return
    message = _shaped(reply.get("message"), dict)
    yield {**kept, "message": message, "done": False}
    yield {**reply, "message": {"role": message.get("role", "assistant"), "content": ""}}


def _openai_chunks(call: ChatCall, reply: Json) -> Iterator[Json]:
    names = ("id", "created", "model", "system_fingerprint")
    kept: Json = {"object": "chat.completion.chunk", **{name: reply[name] for name in names if name in reply}}
    choice = choice_of(reply)
    message = _shaped(choice.get("message"), dict)
    asked = call.body.get("stream_options")
    counts = isinstance(asked, dict) and bool(asked.get("include_usage"))
    usage: Json = {"usage": None} if counts else {}
    delta = {"role": "assistant", **message, "content": message.get("content") or ""}  # with its reasoning_content
    yield {**kept, "choices": [{"index": 0, "delta": delta, "finish_reason": None}], **usage}
    end = choice.get("finish_reason") or "stop"
    yield {**kept, "choices": [{"index": 0, "delta": {}, "finish_reason": end}], **usage}
    if counts:
        yield {**kept, "choices": [], "usage": reply.get("usage")}
