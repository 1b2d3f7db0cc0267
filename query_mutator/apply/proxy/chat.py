"""Chat of Ollama's and OpenAI's APIs: requests to virtual models, which of them are rewritten (`skip_reason`), replies.

`llama3.2:3b+qm` is `llama3.2:3b` with rewriting of single plain questions without context. A chat page's own tasks
(titles, tags, follow-up questions, search queries), which use the chat's model too, pass unchanged.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import orjson

from query_mutator.apply.proxy.upstream import UpstreamGone, parsed
from query_mutator.files import count_values
from query_mutator.forms import Framed
from query_mutator.llm.ollama import with_tag
from query_mutator.types import Completion, Json, content_text, logprob_fields, without_thought

Api = Literal["ollama_chat", "ollama_generate", "openai_chat"]
T = TypeVar("T", list[Any], Json)

SUFFIX = "+qm"
AUTO = "auto" + SUFFIX
CHAT_PATHS: Mapping[str, Api] = {
    "/api/chat": "ollama_chat",
    "/api/generate": "ollama_generate",
    "/v1/chat/completions": "openai_chat",
}
#: What else runs a model; its calls count in the queue.
MODEL_PATHS = frozenset({
    *CHAT_PATHS, "/api/embed", "/api/embeddings", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages",
})  # fmt: skip
#: Where a virtual name stands for the upstream's; `DELETE m+qm` must not delete `m`.
NAMED_PATHS = frozenset({*MODEL_PATHS, "/api/show", "/v1/messages/count_tokens"})
STREAM_TYPES: Mapping[Api, str] = {
    "ollama_chat": "application/x-ndjson",
    "ollama_generate": "application/x-ndjson",
    "openai_chat": "text/event-stream",
}
#: What either API takes to return log probabilities; llama.cpp's server gives none with `top_logprobs` 0.
LOGPROBS: Json = {"logprobs": True, "top_logprobs": 1}
MAX_QUESTION_TOKENS = 200
MAX_PARSED_BYTES = 8_000_000  # of a request, which may have a picture; a larger one is forwarded unparsed
MAX_PARSED_VALUES = 100_000
_MAX_LINE_BYTES = 64 * 1024  # of a parsed line of a stream; a longer one is a vector, or a picture
_CHARS_PER_TOKEN = 4
_RUNNER_OPTIONS = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread")  # Ollama's api.Runner
_FORMATS = ("format", "response_format")
_NAMES = ("model", "name", "source")  # fields that name a model; older clients send `name`
#: Fields that a request with a plain question does not have, per API; the format of replies comes last.
_SPECIAL: Mapping[Api, tuple[str, ...]] = {
    "ollama_chat": ("tools", "logprobs", "format"),
    "ollama_generate": ("images", "suffix", "context", "raw", "template", "logprobs", "format"),
    "openai_chat": (
        "tools", "tool_choice", "functions", "function_call", "logprobs", "audio", "prediction",
        "documents", "continue_final_message", "echo", "grammar", "json_schema", "structured_outputs", "structural_tag",
        "regex", "ebnf", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "response_format",
    ),
}  # fmt: skip

# --- names of models -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Names:
    """Virtual models: each of the upstream with rewriting, or `auto+qm` alone, behind which several models answer."""

    first: str = ""  # of several models, whose name stands for that of `auto+qm`; "" for one

    def is_virtual(self, model: object) -> bool:
        """Return whether a client's model name asks for rewriting: `llama3.2:3b+qm`, and `llama3.2+qm:latest`."""
        return isinstance(model, str) and (with_tag(model) == with_tag(AUTO) if self.first else SUFFIX in model)

    def upstream(self, model: str) -> str:
        """Return the upstream's name of a model."""
        return (self.first or model.replace(SUFFIX, "")) if self.is_virtual(model) else model

    def virtual(self, model: str) -> str:
        """Return the name under which an upstream model is rewritten."""
        return AUTO if self.first else model + SUFFIX

    def virtual_in(self, body: object) -> str | None:
        """Return the first virtual name among the models that a request names, None without one."""
        found = (body.get(name) for name in (*_NAMES, "destination", "from")) if isinstance(body, dict) else ()
        return next((name for name in found if isinstance(name, str) and self.is_virtual(name)), None)

    def upstream_body(self, body: Json) -> Json:
        """Return a request with the upstream's names of its models."""
        return {**body, **{name: self.upstream(body[name]) for name in _NAMES if self.is_virtual(body.get(name))}}


EACH = Names()  # model has a virtual one


def model_of(body: object) -> str | None:
    """Return the model that a request names, None if it names none."""
    found = (body.get(name) for name in _NAMES) if isinstance(body, dict) else ()
    return next((model for model in found if isinstance(model, str) and model), None)


# --- requests --------------------------------------------------------------------------------------------------------


def is_small(content: bytes) -> bool:
    """Return whether a request is parsed; nobody else is served in that time."""
    return len(content) <= MAX_PARSED_BYTES and count_values(content) <= MAX_PARSED_VALUES


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A request to a virtual model; `question` is the text of its last user turn, None where it is not plain text."""

    api: Api
    body: Json  # as the client sent it, with the upstream's model name
    model: str  # as the client sent it
    question: str | None

    @property
    def streams(self) -> bool:
        """Return whether the client wants a stream: the default of Ollama, not of OpenAI."""
        return bool(self.body.get("stream", self.api != "openai_chat"))

    @property
    def upstream_model(self) -> str:
        """Return the name of the model that answers."""
        return str(self.body["model"])

    @property
    def special(self) -> str | None:
        """Return the first field that a plain question does not have, None without one."""
        if self.api == "openai_chat" and self.body.get("n") not in (None, 1):
            return "n"  # several answers, of which the modes would look at one
        return next((name for name in _SPECIAL[self.api] if self.body.get(name) not in (None, [], "", {}, False)), None)

    @property
    def turns(self) -> Sequence[Json]:
        """Return the messages."""
        messages = self.body.get("messages")
        return [row for row in messages if isinstance(row, dict)] if isinstance(messages, list) else []

    def to(self, model: str) -> ChatCall:
        """Return the request to another model."""
        return replace(self, body={**self.body, "model": model})

    def runner_options(self, model: str) -> Json:
        """Return the options with which the call's model runs, if that is `model`; others would load it again."""
        is_same = with_tag(model) == with_tag(self.upstream_model)
        options = self.body.get("options") if is_same and self.api != "openai_chat" else None
        return {name: options[name] for name in _RUNNER_OPTIONS if name in options} if isinstance(options, dict) else {}

    def takes(self, framed: Framed) -> bool:
        """Return whether a form can be asked in this request: where there are other turns or texts than the client's
        question, or stops of the client, only as a text; Ollama's /api/generate has no earlier turns.
        """
        if framed.text is not None:
            return True
        if any(self.body.get(name) for name in _FORMATS):  # whose replies examples and stops do not show
            return False
        roles = [message.role for message in framed.messages]
        has_words = self.api != "ollama_generate" or roles in (["user"], ["system", "user"])
        options = self.body if self.api == "openai_chat" else self.body.get("options") or {}
        stops = not isinstance(options, dict) or bool(options.get("stop"))
        return has_words and roles[-1:] == ["user"] and not (self.body.get("system") or stops or len(self.turns) > 1)

    def asking(self, framed: Framed, *, stream: bool | None = None) -> Json:
        """Return the body that asks a question in the place of the client's; what the client set is as it was.

        A token limit of the form is not sent: its answers in training were only to be judged.
        """
        body = self.body if stream is None else {**self.body, "stream": stream}
        if stream is False:
            body = {name: value for name, value in body.items() if name != "stream_options"}
        body = self.with_options(body, {"temperature": framed.temperature, **framed.options})
        *before, question = framed.messages
        if self.api == "ollama_generate":
            return {**body, **{one.role: one.content for one in before}, "prompt": question.content}
        *earlier, last = body["messages"]
        earlier += [{"role": one.role, "content": one.content} for one in before]
        return {**body, "messages": [*earlier, {**last, "content": question.content}]}

    def key(self, framed: Framed) -> bytes:
        """Return what is equal for requests that ask the same."""
        return orjson.dumps(self.asking(framed, stream=False))

    def with_options(self, body: Json, options: Mapping[str, Any]) -> Json:
        """Return a body with those options that are not None and that the client left open."""
        options = {name: value for name, value in options.items() if value is not None}
        if not options:
            return body
        if self.api == "openai_chat":
            return {**body, **{name: value for name, value in options.items() if body.get(name) is None}}
        return {**body, "options": {**options, **(body.get("options") or {})}}


def read_call(path: str, body: object, names: Names = EACH) -> ChatCall | None:
    """Return the request if it is one to a virtual model, else None; the upstream judges all others."""
    api = CHAT_PATHS.get(path)
    if api is None or not isinstance(body, dict) or not names.is_virtual(body.get("model")):
        return None
    model = body["model"]
    call = ChatCall(api=api, body={**body, "model": names.upstream(model)}, model=model, question=None)
    return replace(call, question=_question(call))


def _question(call: ChatCall) -> str | None:
    """Return the last user turn's text; None for parts other than text, and where the last turn is not the user's."""
    if call.api == "ollama_generate":
        prompt = call.body.get("prompt", "")
        return prompt if isinstance(prompt, str) else None
    messages = call.body.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return None
    last = messages[-1]
    content = last.get("content")
    if last.get("role") != "user" or last.get("tool_calls"):
        return None
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        content = content[0].get("text") if content[0].get("type") == "text" else None
    return content if isinstance(content, str) else None


# --- which requests are rewritten ------------------------------------------------------------------------------------

_UI_TASK = re.compile(
    r"\A\s*(?:#{1,4}\s*Task:"  # Open WebUI: title, tags, follow-ups, queries, image prompt, completion, documents
    r"|Your task is to reflect the speaker's likely facial expression"
    r"|You have been provided with a set of responses from various models"
    r"|Create a concise, 3-5 word (?:title|phrase)"  # before templates had headings
    r"|Available Tools:)",
    re.IGNORECASE,
)
_CHAT_HISTORY = re.compile(r"<chat_history>|<context>|<source\b|Chat History:", re.IGNORECASE)
_CODE = re.compile(r"```|~~~|^(?: {4}|\t)\S", re.MULTILINE)


def skip_reason(call: ChatCall, *, max_tokens: int = MAX_QUESTION_TOKENS, keeps_format: bool = False) -> str | None:
    """Return in one word why a request passes untouched, None if its question is rewritten.

    With `keeps_format` one that sets the format of replies is rewritten too.
    """
    max_chars = max_tokens * _CHARS_PER_TOKEN
    text = None if call.question is None else call.question[: max_chars + 1]  # a longer one is not searched
    if (special := call.special) is not None and not (keeps_format and special in _FORMATS):
        return special
    if any(turn.get("images") for turn in call.turns):
        return "images"
    if (call.api != "ollama_generate" and not call.body.get("messages")) or (text is not None and not text.strip()):
        return "empty"
    if text is None:
        return "content"
    metadata = call.body.get("metadata")
    is_marked = isinstance(metadata, dict) and bool(metadata.get("task"))
    if is_marked or _UI_TASK.search(text) or _CHAT_HISTORY.search(text):  # a chat page sent it for itself
        return "ui-task"
    if _CODE.search(text):
        return "code"
    if len(text) > max_chars:
        return "length"
    is_later = any(turn.get("role") in ("user", "assistant") for turn in call.turns[:-1])
    return "context" if is_later else None  # whoever rewrites does not see the earlier turns


# --- replies ---------------------------------------------------------------------------------------------------------


def text_of(api: Api, reply: Json) -> str:
    """Return the text in a reply, or in a line of a stream; UpstreamGone for a reply of another shape."""
    if api == "ollama_generate":
        found = reply.get("response")
    elif api == "ollama_chat":
        found = content_text(_shaped(reply.get("message"), dict))
    else:
        choice = _choice(reply)
        found = content_text(_shaped(choice.get("message") or choice.get("delta"), dict))
    return found if isinstance(found, str) else ""


def answer_of(api: Api, reply: Json) -> Completion:
    """Return what a policy reads of a reply, and drop the log probabilities from it, which no client asked for."""
    if api == "openai_chat":
        choice = _choice(reply)
        rows, end = _shaped(choice.pop("logprobs", None), dict).get("content"), choice.get("finish_reason")
    else:
        rows, end = reply.pop("logprobs", None), reply.get("done_reason")
    text, model = without_thought(text_of(api, reply)), str(reply.get("model") or "upstream")
    return Completion(text=text, model=model, hit_limit=end == "length", **logprob_fields(rows))


def _choice(reply: Json) -> Json:
    """Return the first choice of a reply, {} without one; UpstreamGone for a reply of another shape."""
    choices = _shaped(reply.get("choices"), list)
    return _shaped(choices[0] if choices else None, dict)


def _shaped(found: Any, kind: type[T]) -> T:
    """Return a part of a reply, empty where there is none; UpstreamGone for one of another type."""
    if found and not isinstance(found, kind):
        raise UpstreamGone("sent a reply that is not one of a chat")
    return found or kind()


def texts_of(api: Api, lines: Sequence[bytes]) -> Iterator[str]:
    """Yield the texts in lines of a stream; UpstreamGone for one of another shape."""
    for found in map(parsed, lines) if any(b'"' in line for line in lines) else ():
        if found is not None:
            yield text_of(api, found)


async def read_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """Yield the lines of a stream, each with its end, as they arrive."""
    rest = bytearray()
    async for chunk in chunks:
        *lines, last = chunk.split(b"\n")
        if lines:
            lines[0] = bytes(rest) + lines[0]
            rest.clear()
            yield [line + b"\n" for line in lines]
        rest += last
    if rest:
        yield [bytes(rest)]


def renamed(line: bytes, model: str) -> bytes:
    """Return a line with the client's model name in the place of the upstream's; a long one is left as it is."""
    found = parsed(line) if len(line) <= _MAX_LINE_BYTES else None
    if found is None or "model" not in found:
        return line
    prefix = b"data: " if line.lstrip().startswith(b"data:") else b""
    return prefix + orjson.dumps({**found, "model": model}) + b"\n"


async def renamed_lines(lines: AsyncIterator[list[bytes]], model: str) -> AsyncIterator[bytes]:
    """Yield the lines of a reply with the client's model name, those that arrive together in one piece."""
    async for together in lines:
        piece = b"".join(together)
        yield b"".join(renamed(line, model) for line in together) if b'"model"' in piece else piece


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
    choice = _choice(reply)
    message = _shaped(choice.get("message"), dict)
    asked = call.body.get("stream_options")
    counts = isinstance(asked, dict) and bool(asked.get("include_usage"))
    usage: Json = {"usage": None} if counts else {}
    delta = {"role": "assistant", **message, "content": message.get("content") or ""}  # with its reasoning_content
    end = choice.get("finish_reason") or "stop"
    yield {**kept, "choices": [{"index": 0, "delta": delta, "finish_reason": end}], **usage}
    if counts:
        yield {**kept, "choices": [], "usage": reply.get("usage")}
