"""The base of backends that speak JSON over HTTP: a subclass says what is sent and how a reply is read."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from query_mutator.errors import BackendError, ServerDownError
from query_mutator.llm.client import INFO_TIMEOUT_S, ModelServer
from query_mutator.llm.transport import Transport, parsed
from query_mutator.settings import Calls
from query_mutator.types import (
    MAX_NAME_CHARS,
    ChatRequest,
    Completion,
    ErrorInfo,
    Json,
    content_text,
    logprob_fields,
    thought_of,
    wire_number,
    wire_text,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

REFUSALS = (400, 422, 501)  # of a field that a server does not support
_UNSUPPORTED = (
    r"(?:unsupported|not support|unknown|unrecognized|not permitted|not allowed"
    r"|max_completion_tokens|only \S+ is allowed)"
)
_LEFT_OUT = ("max_tokens", "temperature", "seed", "n")  # where an error says so in these words
#: What an error names when a server refuses fields of a body, and these fields.
_OPTIONAL: Mapping[re.Pattern[str], tuple[str, ...]] = {
    re.compile(words, re.IGNORECASE | re.DOTALL): fields
    for words, fields in {
        **{rf"\b{name}\b.*{_UNSUPPORTED}|{_UNSUPPORTED}.*\b{name}\b": (name,) for name in _LEFT_OUT},
        "logprob": ("logprobs", "top_logprobs"),
        "think|reasoning|chat_template": ("think", "reasoning_effort", "chat_template_kwargs"),
        "format": ("response_format", "format"),
    }.items()
}
_NEW_NAMES = {"max_tokens": "max_completion_tokens"}  # of refused fields that have one
_BROKEN_OFF = ("abort", "error")  # a finish_reason of vLLM and SGLang; other servers leave the field out
_MAX_NAMES = 10_000  # of models: the nearest name to a wrong one is looked for among them


class HttpServer(ModelServer):
    """A model server behind HTTP. Never reaches loopback through a proxy; `headers` go with every request."""

    default_url = ""
    #: Makes the record of a reply of `latency_s`; any exception means a reply of another form.
    completion: ClassVar[Callable[..., Completion]]
    chat_path: ClassVar[str]
    start_advice: ClassVar[str] = "check the address"
    key_advice: str = ""  # for a server that refuses a call without a key, or with another one

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = Calls.timeout_s,
        pool_size: int = Calls.batch_size,
        max_reply_mb: float = Calls.max_reply_mb,
        headers: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(url, **settings)
        self._transport = Transport(
            url, pool_size=pool_size, timeout_s=timeout_s, headers=headers, max_reply_bytes=round(max_reply_mb * 1e6)
        )
        self.url = self._transport.url
        self._contexts: dict[str, int | None] = {}  # of loaded models
        self._refused: tuple[str, ...] = ()  # fields of a body that are renamed or left out

    # --- what a subclass says --------------------------------------------------------------------------------------

    def chat_body(self, request: ChatRequest) -> Json:
        """Return the body of a chat call."""
        raise NotImplementedError

    # --- calls -----------------------------------------------------------------------------------------------------

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply to a chat request, or a Completion that carries the error."""
        started, timeout_s = time.perf_counter(), self._transport.timeout_s
        if request.seed is not None and request.sample:
            request = replace(request, seed=request.seed + request.sample, sample=0)  # else all samples are one reply
        body = self.chat_body(request)
        if request.logprobs:
            body |= {"logprobs": True, "top_logprobs": 1}  # llama-server gives none with 0
        for name in self._refused:
            if (value := body.pop(name, None)) is not None and name in _NEW_NAMES:
                body[_NEW_NAMES[name]] = value
        if request.deadline is not None:
            timeout_s = min(timeout_s, max(0.0, request.deadline - time.monotonic()))
        reply = self._transport.post(self.chat_path, body, retry_count=request.attempt - 1, timeout_s=timeout_s)
        latency_s = time.perf_counter() - started
        if not isinstance(reply, ErrorInfo):
            return self._completion(request, reply, latency_s=latency_s)
        if refused := _refused_fields(body, reply):
            self._refused = tuple(dict.fromkeys((*self._refused, *refused)))
            level = logging.WARNING if refused[0] in ("temperature", "seed") else logging.INFO
            logger.log(level, "%s: no %s: %s; calls are made without", self.url, refused[0], reply)
            return self.complete(request)
        if reply.kind == "connect":
            self._contexts.clear()  # a restarted server may have another
        advice = f"; {self.more_context}" if reply.kind == "prompt_too_long" else ""
        return Completion(error=replace(reply, message=reply.message + advice), latency_s=latency_s)

    def _completion(self, request: ChatRequest, reply: Json, *, latency_s: float) -> Completion:
        what = "the reply's fields are not those of a chat reply"
        completion = parsed(lambda: self.completion(reply, latency_s=latency_s), what=what)
        if isinstance(completion, ErrorInfo):
            return Completion(error=completion, latency_s=latency_s)
        first, *others = (self._checked(request, one) for one in (completion, *completion.others))
        return replace(first, others=tuple(others))

    def _checked(self, request: ChatRequest, completion: Completion) -> Completion:
        if (text := self._transport.without_secrets(completion.text.encode()).decode()) != completion.text:
            completion = replace(completion, text=text)
        return self._uncut(request, completion) if completion.ok else completion

    def close(self) -> None:
        """Cancel the calls in flight and close the connections; idempotent."""
        self._transport.close()

    def info(self, path: str, read: Callable[[Json], T], *, timeout_s: float = INFO_TIMEOUT_S) -> T:
        """Return what `read` makes of the server's reply at `path`.

        ServerDownError when nothing answers, BackendError for an error and for whatever `read` raises.
        """
        reply = self._transport.get(path, timeout_s=timeout_s)
        found = reply if isinstance(reply, ErrorInfo) else parsed(lambda: read(reply), what="not the fields expected")
        if not isinstance(found, ErrorInfo):
            return found
        if found.kind in ("connect", "timeout"):
            raise ServerDownError(f"nothing answers at {self.url}: {self.start_advice} ({found.message})")
        what = f"{self.url} answers {path} with an error ({found})"
        key = f"; {self.key_advice}" if self.key_advice and found.status in (401, 403) else ""
        advice = f"check that it is the address of {self.title}{key}"
        raise BackendError(f"{what}; {advice}", kind=found.kind)

    def _uncut(self, request: ChatRequest, completion: Completion) -> Completion:
        """Return the completion, or an error if its prompt fills the context: Ollama then dropped the beginning."""
        context = self.known_context(request.model)
        if context is None:
            return completion
        if completion.prompt_tokens >= context:
            message = (
                f"the prompt fills the context of {context} tokens, its beginning may be lost; {self.more_context}"
            )
            return replace(completion, text="", error=ErrorInfo(kind="prompt_too_long", message=message))
        if completion.prompt_tokens + completion.completion_tokens > context:  # the reply pushed the prompt out
            return replace(completion, hit_limit=True)
        return completion

    def known_context(self, model: str) -> int | None:
        """Return the context of a loaded model; the server is asked once, and again after it was down."""
        if model not in self._contexts:
            try:
                self._contexts[model] = self.context(model)
            except ServerDownError:
                return None
            except BackendError:
                self._contexts[model] = None
        return self._contexts[model]


def _refused_fields(body: Json, error: ErrorInfo) -> tuple[str, ...]:
    """Return the optional fields of a body that a server refused, () for an error of another kind."""
    said = error.message if error.status in REFUSALS else ""
    found = (tuple(name for name in names if name in body) for words, names in _OPTIONAL.items() if words.search(said))
    return next(filter(None, found), ())


def rows_in(reply: Json, name: str) -> list[Json]:
    """Return the objects in a list of a reply, which some servers leave out; TypeError for anything else."""
    found = reply.get(name) or []
    if not isinstance(found, list):
        raise TypeError(f"{name} is not a list")
    return [row for row in found if isinstance(row, dict)]


def names_in(rows: Sequence[Json], *keys: str) -> tuple[str, ...]:
    """Return the name of each object under the first of the keys that it has; a name beyond reason is left out."""
    names = (next((row[key] for key in keys if row.get(key)), "") for row in rows[:_MAX_NAMES])
    return tuple(wire_text(name) for name in names if isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS)


def _detail(usage: Mapping[str, Any], of: str, name: str) -> int:
    """Return a count that OpenAI gives with the tokens of prompt or reply, at most these."""
    details = usage.get(f"{of}_details") or {}
    return min(int(wire_number(details.get(name))), int(wire_number(usage.get(of))))


def samples_of(payload: Mapping[str, Any], *, latency_s: float = 0.0) -> Completion:
    """Return the record of a chat completion; of several choices the others are in `others`, after the one prompt."""
    choices, usage = payload.get("choices") or (), payload.get("usage") or {}
    if len(choices) < 2 or payload.get("error"):
        return completion_of(payload, latency_s=latency_s)
    usage = {**usage, "completion_tokens": wire_number(usage.get("completion_tokens")) // len(choices)}
    rows = ({**payload, "choices": [choice], "usage": usage} for choice in choices)
    first, *others = (completion_of(row, latency_s=latency_s) for row in rows)
    return replace(first, others=tuple(replace(one, cached_tokens=one.prompt_tokens) for one in others))


def completion_of(payload: Mapping[str, Any], *, latency_s: float = 0.0) -> Completion:
    """Return the record of one chat completion; its times are known where a server adds `timings` (llama-server)."""
    if payload.get("error"):
        said = payload["error"]
        return Completion.failed("server", str(said.get("message", said) if isinstance(said, dict) else said))
    choice = payload["choices"][0]
    message, usage, timings = choice["message"], payload.get("usage") or {}, payload.get("timings") or {}
    logprobs = choice.get("logprobs") or {}
    text = wire_text(content_text(message) or message.get("refusal")).strip()
    error = None
    if choice.get("finish_reason") in _BROKEN_OFF:
        error = ErrorInfo(kind="incomplete", message="the reply stopped before it was done")
    elif not text:
        error = ErrorInfo(kind="empty", message="the reply has no text")
    return Completion(
        text=text if error is None else "",
        thought=thought_of(message),
        model=wire_text(payload.get("model"))[:MAX_NAME_CHARS],
        error=error,
        prompt_tokens=int(wire_number(usage.get("prompt_tokens"))),
        completion_tokens=int(wire_number(usage.get("completion_tokens"))),
        cached_tokens=_detail(usage, "prompt_tokens", "cached_tokens"),
        reasoning_tokens=_detail(usage, "completion_tokens", "reasoning_tokens"),
        total_s=latency_s if timings else 0.0,
        prompt_eval_s=wire_number(timings.get("prompt_ms")) / 1000,
        eval_s=wire_number(timings.get("predicted_ms")) / 1000,
        latency_s=latency_s,
        hit_limit=choice.get("finish_reason") == "length",
        **logprob_fields(logprobs.get("content")),
    )
