"""Models of the test server: any function of a request, objects that answer prompts, and some built-in ones."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, cast

from query_mutator.errors import UsageError
from query_mutator.types import ChatRequest, Completion

#: Words in an answer of `echo`; of a rewrite new ones, and those of the question.
ANSWER_WORDS, NEW_WORDS, KEPT_WORDS = 30, 3, 11


class PromptError(UsageError):
    """A request that cannot be answered; the server replies with this message and HTTP 400, or another `status`."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class TextModel(Protocol):
    """A model that answers the text of the last user message; it is asked from one thread at a time.

    Optional attributes: `is_instant` (it is asked on the server's event loop: it neither waits nor computes for long),
    `digest` (what the replies depend on), `weights` (models with the same share a runner), `parameters` (of the model's
    file, as {"num_ctx": 2048}), `threads` (that may ask at once, where that is more than one).
    """

    name: str

    def reply(self, prompt: str) -> str:
        """Return the reply to a prompt; raise PromptError for one that cannot be answered."""
        ...


#: A function as a model. Its request has what the client sent: `max_tokens` is -1 without a limit. A completion says
#: more than a text: `logprob`, `hit_limit`, and its counts of tokens where they are above 0.
Answer: TypeAlias = "Callable[[ChatRequest], str | Completion]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model as the server lists and asks it."""

    name: str  # without tag
    digest: str
    weights: str  # models with the same share a runner
    answer: Answer
    parameters: Mapping[str, int] = field(default_factory=dict)  # of the model's file, as num_ctx
    threads: Executor | None = None  # None: it is asked on the event loop

    @property
    def tagged(self) -> str:
        """Return the name as Ollama lists it."""
        return f"{self.name}:latest"


def text_model(name: str, model: TextModel | Answer) -> Served:
    """Return what the server needs of a model that writes text."""
    ask: Any = getattr(model, "reply", None)
    threads = ThreadPoolExecutor(getattr(model, "threads", 1), thread_name_prefix=f"model-{name}")
    return Served(
        name=name.removesuffix(":latest"),
        digest=getattr(model, "digest", None) or _sha256(f"{name}\0{type(model).__qualname__}"),
        weights=getattr(model, "weights", name),
        answer=(lambda request: ask(user_text(request))) if ask else cast(Answer, model),
        threads=None if getattr(model, "is_instant", False) else threads,
        parameters=getattr(model, "parameters", {}),
    )


def user_text(request: ChatRequest) -> str:
    """Return the last user message, or the last message if no user wrote one."""
    texts = {message.role: message.content for message in request.messages}
    return texts.get("user", request.messages[-1].content if request.messages else "")


class Echo:
    """Answers with thirty words of the prompt, drawn by its hash.

    A rewrite of a `<question>` is its beginning with three of its words in front.
    """

    name = "echo"
    is_instant = True

    def reply(self, prompt: str) -> str:
        """Return the reply; equal prompts get equal ones."""
        _, opening, rest = prompt.partition("<question>")
        words = (rest.partition("</question>")[0] if opening else prompt).split() or ["nothing"]
        drawn = [words[byte % len(words)] for byte in hashlib.shake_128(_bytes(prompt)).digest(ANSWER_WORDS)]
        return " ".join([*drawn[:NEW_WORDS], *words[:KEPT_WORDS]] if opening else drawn)


@lru_cache(maxsize=1024)
def tokens_of(text: str) -> tuple[str, ...]:
    """Return the tokens of `text`, which joined are the text: words of up to eight letters, and other characters."""
    return tuple(re.findall(r"\s*\w{1,8}|\s*[^\w\s]|\s+", text))


def in_format(text: str, schema: Mapping[str, Any]) -> str:
    """Return `text` in the first string of a schema's smallest value; a JSON object stays as it is."""
    if text.lstrip().startswith("{"):
        return text
    texts = [text]

    def smallest(part: Mapping[str, Any]) -> Any:
        if choices := part.get("enum"):
            return texts.pop() if texts and text in choices else choices[0]
        kind = part.get("type", "object" if "properties" in part else "string")
        if kind == "object":
            return {name: smallest(one) for name, one in part.get("properties", {}).items()}
        if kind == "string":
            return texts.pop() if texts else ""
        return {"boolean": False, "integer": 0, "number": 0.0, "array": []}.get(kind)

    return json.dumps(smallest(schema), ensure_ascii=False)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _sha256(text: str) -> str:
    return hashlib.sha256(_bytes(text)).hexdigest()
