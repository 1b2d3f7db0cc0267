"""Chat requests of Ollama's and OpenAI's APIs: the model, the question, and the request that asks another one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import orjson

from query_mutator.files import count_values
from query_mutator.forms import Framed
from query_mutator.llm.ollama import with_tag
from query_mutator.types import Json

__all__ = [
    "CHAT_PATHS", "LOGPROBS", "MAX_PARSED_BYTES", "MAX_PARSED_VALUES", "MODEL_PATHS", "NAMED_PATHS", "SUFFIX",
    "ChatCall", "is_small", "is_virtual", "model_of", "names_virtual", "read_call", "upstream_body", "upstream_name",
    "virtual_in", "virtual_name",
]  # fmt: skip

Api = Literal["ollama_chat", "ollama_generate", "openai_chat"]

SUFFIX = "+qm"
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
MAX_PARSED_BYTES = 8_000_000  # of a request, which may have a picture; a larger one is forwarded unparsed
MAX_PARSED_VALUES = 100_000
_SOUGHT_BYTES = 64 * 1024  # at either end of what is not parsed
_RUNNER_OPTIONS = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread")  # Ollama's api.Runner
_NAMES = ("model", "name", "source")  # fields that name a model; older clients send `name`
_VIRTUAL_FIELD = re.compile(rb'"(?:model|name|source|destination|from)"\s*:\s*"[^"\\]*\+qm')
#: Where a client limits the tokens of an answer; Ollama has it in `options`.
_LIMITS: Mapping[str, tuple[str, ...]] = {
    "ollama_chat": ("num_predict",),
    "ollama_generate": ("num_predict",),
    "openai_chat": ("max_tokens", "max_completion_tokens", "n_predict"),  # n_predict is llama.cpp's
}
#: Fields that a request with a plain question does not have, per API.
_SPECIAL: Mapping[str, tuple[str, ...]] = {
    "ollama_chat": ("tools", "format", "logprobs"),
    "ollama_generate": ("images", "suffix", "context", "format", "raw", "template", "logprobs"),
    "openai_chat": (
        "tools", "tool_choice", "functions", "function_call", "response_format", "logprobs", "audio", "prediction",
        "documents", "continue_final_message", "echo", "grammar", "json_schema", "structured_outputs", "structural_tag",
        "regex", "ebnf", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    ),
}  # fmt: skip


def is_virtual(model: object) -> bool:
    """Return whether a client's model name asks for rewriting: `llama3.2:3b+qm`, and `llama3.2+qm:latest`."""
    return isinstance(model, str) and SUFFIX in model


def upstream_name(model: str) -> str:
    """Return the upstream's name of a virtual model."""
    return model.replace(SUFFIX, "")


def virtual_name(model: str) -> str:
    """Return the name under which an upstream model is rewritten."""
    return model + SUFFIX


def model_of(body: object) -> str | None:
    """Return the model that a request names, None if it names none."""
    found = (body.get(name) for name in _NAMES) if isinstance(body, dict) else ()
    return next((model for model in found if isinstance(model, str) and model), None)


def virtual_in(body: object) -> str | None:
    """Return the first virtual name among the models that a request names, None without one."""
    found = (body.get(name) for name in (*_NAMES, "destination", "from")) if isinstance(body, dict) else ()
    return next((name for name in found if isinstance(name, str) and SUFFIX in name), None)


def is_small(content: bytes) -> bool:
    """Return whether a request is parsed; nobody else is served in that time."""
    return len(content) <= MAX_PARSED_BYTES and (
        len(content) <= MAX_PARSED_VALUES or count_values(content) <= MAX_PARSED_VALUES
    )


def names_virtual(content: bytes) -> bool:
    """Return whether a body that is not parsed seems to name a virtual model, near its beginning or its end."""
    ends = content if len(content) <= 2 * _SOUGHT_BYTES else content[:_SOUGHT_BYTES] + content[-_SOUGHT_BYTES:]
    return _VIRTUAL_FIELD.search(ends) is not None


def upstream_body(body: Json) -> Json:
    """Return a request with the upstream's names of its models."""
    return {**body, **{name: upstream_name(body[name]) for name in _NAMES if is_virtual(body.get(name))}}


#: What either API takes to return log probabilities; llama.cpp's server gives none with `top_logprobs` 0.
LOGPROBS: Json = {"logprobs": True, "top_logprobs": 1}


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
    def is_empty(self) -> bool:
        """Return whether the request has no turn at all, which only loads the model."""
        return self.api != "ollama_generate" and self.body.get("messages") in (None, [])

    @property
    def earlier_turns(self) -> int:
        """Return the number of user and assistant turns before the last one."""
        return max(0, sum(message.get("role") in ("user", "assistant") for message in self._messages()) - 1)

    @property
    def has_images(self) -> bool:
        """Return whether a message carries images."""
        return any(message.get("images") for message in self._messages())

    def runner_options(self, model: str) -> Json:
        """Return what another call of `model` must send, lest Ollama load the client's model again."""
        options = self.body.get("options")
        if self.api == "openai_chat" or not isinstance(options, dict) or not same_model(model, self.upstream_model):
            return {}
        return {name: options[name] for name in _RUNNER_OPTIONS if name in options}

    def takes(self, framed: Framed) -> bool:
        """Return whether the request may be put so: in a conversation, or with a stop of the client's, only as a text.

        Ollama's /api/generate has no earlier turns.
        """
        if framed.text is not None:
            return True
        turns = [message.role for message in framed.messages]
        has_words = self.api != "ollama_generate" or turns in (["user"], ["system", "user"])
        return has_words and turns[-1:] == ["user"] and not (self.body.get("system") or self._stops or self._others)

    def asking(self, framed: Framed, *, stream: bool | None = None) -> Json:
        """Return the body that asks a question in the place of the client's; what the client set is as it was.

        A token limit of the form is not sent: its answers in training were only to be judged.
        """
        body = self.body if stream is None else {**self.body, "stream": stream}
        if stream is False:
            body = {name: value for name, value in body.items() if name != "stream_options"}
        body = self._with_options(body, framed)
        *before, question = framed.messages
        if self.api == "ollama_generate":
            return {**body, **{one.role: one.content for one in before}, "prompt": question.content}
        *earlier, last = body["messages"]
        earlier += [{"role": one.role, "content": one.content} for one in before]
        return {**body, "messages": [*earlier, {**last, "content": question.content}]}

    def key(self, framed: Framed) -> bytes:
        """Return what is equal for requests that ask the same."""
        return orjson.dumps(self.asking(framed, stream=False))

    def _with_options(self, body: Json, framed: Framed) -> Json:
        """Return a body with the options of a form that the client left open."""
        options = dict(framed.options)
        if framed.temperature is not None:
            options["temperature"] = framed.temperature
        if not options:
            return body
        if self.api == "openai_chat":
            return {**body, **{name: value for name, value in options.items() if body.get(name) is None}}
        return {**body, "options": {**options, **(body.get("options") or {})}}

    def limited(self, max_tokens: int, *, openai_field: str) -> ChatCall:
        """Return the call with a limit on the tokens of the answer, unless the client set one; 0 sets none."""
        is_openai = self.api == "openai_chat"
        fields = self.body if is_openai else self.body.get("options") or {}
        has_limit = not isinstance(fields, dict) or any(fields.get(name) is not None for name in _LIMITS[self.api])
        if has_limit or not max_tokens:
            return self
        fields = {**fields, openai_field if is_openai else "num_predict": max_tokens}
        return replace(self, body=fields if is_openai else {**self.body, "options": fields})

    @property
    def _stops(self) -> bool:
        """Return whether the client says where an answer ends."""
        options = self.body if self.api == "openai_chat" else self.body.get("options") or {}
        return not isinstance(options, dict) or bool(options.get("stop"))

    @property
    def _others(self) -> bool:
        """Return whether there are messages besides the question."""
        return len(self._messages()) > 1

    def _messages(self) -> Sequence[Json]:
        messages = self.body.get("messages")
        return [row for row in messages if isinstance(row, dict)] if isinstance(messages, list) else []


def read_call(path: str, body: object) -> ChatCall | None:
    """Return the request if it is one to a virtual model, else None; the upstream judges all others."""
    api = CHAT_PATHS.get(path)
    if api is None or not isinstance(body, dict) or not is_virtual(body.get("model")):
        return None
    model = body["model"]
    call = ChatCall(api=api, body={**body, "model": upstream_name(model)}, model=model, question=None)
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


def same_model(first: str, second: str) -> bool:
    """Return whether two names mean the same installed model."""
    return with_tag(first) == with_tag(second)
