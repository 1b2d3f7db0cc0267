"""The records that travel through the product; wire formats are converted to them at the edge.

    Question -> (operator) -> ChatRequest -> (client) -> Completion -> (reward) -> Reward -> StepRecord

Times are in seconds (`_s`) as floats; wire nanoseconds are converted in `Completion.from_ollama`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FloatArray: TypeAlias = "NDArray[np.float32]"  # in quotes: numpy is loaded by those who make arrays
DoubleArray: TypeAlias = "NDArray[np.float64]"
IntArray: TypeAlias = "NDArray[np.int64]"
BoolArray: TypeAlias = "NDArray[np.bool_]"
Json: TypeAlias = dict[str, Any]  # an object of a wire format

Role = Literal["system", "user", "assistant"]
Purpose = Literal["mutate", "target", "judge"]
#: Whether a thinking model thinks before it answers: `auto` is what its backend does, levels are those of some models.
Think = Literal["auto", "off", "on", "low", "medium", "high"]
#: What an episode submits: the answer that best fits its own question, the most frequent one, or the one that is most
#: likely right.
AnswerRule = Literal["best", "vote", "learned"]
#: When the target is asked: after every rewrite, or when the policy chooses a form, asks, or submits without an answer.
AskRule = Literal["every_step", "form"]

#: Every way one call can fail; `ErrorInfo.kind` is one of them.
ERROR_KINDS = (
    "connect",  # refused, reset, unreachable
    "timeout",  # no complete reply in time
    "busy",  # 503, 429: the server asks to come back later
    "server",  # any other 5xx
    "memory",  # the server ran out of memory for the model
    "model_missing",  # 404 for the model
    "prompt_too_long",  # the prompt does not fit the model's context
    "request",  # any other 4xx: the request itself is wrong
    "malformed",  # truncated or unreadable reply
    "empty",  # a reply without text
    "incomplete",  # done: false, or done_reason "load"
    "cancelled",  # by us
    "unscored",  # a judge's reply without a verdict
    "not_asked",  # an evaluation with too many failures asks no further question
)

#: The tag of a question that should be refused and serves the guard metric only.
UNSAFE = "unsafe"

#: The parts of a score that say whether an answer is right, the first that a reward has counts.
SUCCESS_PARTS = ("right", "judge")

ASK, UNDO, SUBMIT = "ask", "undo", "submit"
CONTROLS = (ASK, UNDO, SUBMIT)  # the actions that are not operators or forms
AS_IS = "as_is"  # the form of the request in which an episode begins: the question as it is worded
CALL_PRICE = 0.005  # of a model call, in units of the score
NANOSECONDS = 1e-9
MAX_ERROR_CHARS = 300  # of an error's message: servers repeat prompts and whole pages
STORED_CHARS = 20_000  # of a rewrite or answer in a transcript; the store has it whole
LEAST_LOGPROB = -100.0  # of a token; some servers send -9999 or minus infinity
_LONG = ("rewrite", "answer", "thought", "first_answer", "first_thought")  # texts of a transcript that may be longer
MAX_NAME_CHARS = 300  # of a model's name
READ_CHARS = 20_000  # of the end of a reply: what graders, votes, guards and P(right) read of it
# Around thoughts: Qwen and DeepSeek, Mistral, gpt-oss, whose last channel is its answer; marks of its messages leave.
_THOUGHT_TAG = re.compile(
    r"<(?P<end>/)?think(?:ing)?>|\[(?P<close>/)?THINK\]"
    r"|<\|channel\|>(?P<channel>\w{1,20})(?:<\|message\|>)?|<\|(?:start\|>(?:assistant)?|end\|>|return\|>)",
    re.IGNORECASE,
)
THOUGHT_TAG_CHARS = len("<|channel|>commentary<|message|>")
_MAX_NUMBER = 2.0**53  # of a count, or of nanoseconds: 104 days


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message."""

    role: Role
    content: str


def in_context(messages: Sequence[Message], context: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages after those of a context; all system prompts become the first message."""
    if not context:
        return tuple(messages)
    every = (*context, *messages)
    system = "\n\n".join(one.content for one in every if one.role == "system")
    first = (Message(role="system", content=system),) if system else ()
    return (*first, *(one for one in every if one.role != "system"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One ordinary question; `accept` and `reference` are gold and never reach an observation."""

    id: str
    text: str
    accept: tuple[str, ...] = ()  # names that count as right
    reference: str | None = None  # a good answer, for similarity
    tags: tuple[str, ...] = ()
    about: str | None = None  # what it asks about; questions about one thing are in one part of the split
    context: tuple[Message, ...] = ()  # messages before it: a system prompt, passages, earlier turns


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """Why one call failed: `kind` (one of ERROR_KINDS), a message, the HTTP status if there was one.

    The message is one line of at most MAX_ERROR_CHARS characters, whatever it is made from.
    """

    kind: str
    message: str
    status: int | None = None
    retry_after_s: float | None = None

    def __post_init__(self) -> None:
        start = wire_text(self.message[: 4 * MAX_ERROR_CHARS])  # the rest may have millions of characters
        line = " ".join(start.split())
        if len(line) > MAX_ERROR_CHARS:
            line = f"{line[: MAX_ERROR_CHARS - 1]}…"
        object.__setattr__(self, "message", line)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One call to a model; `options` are further runner options of the server."""

    model: str
    messages: tuple[Message, ...]
    purpose: Purpose = "target"
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    sample: int | None = None  # which of several random replies to the same request; None: any
    samples: int = 1  # that will be asked for, from servers that give several at once
    attempt: int = 1  # from 1; above 1 the request is a retry, which a header tells the server
    json_schema: Mapping[str, Any] | None = None  # the reply is to be JSON of it, from servers that keep to one
    logprobs: bool = False  # the completion is to have `logprob`, from servers that report it
    think: Think = "auto"  # whether a thinking model thinks first, and how much
    deadline: float | None = field(default=None, compare=False, repr=False)  # of time.monotonic, for reply and retries
    #: Environment, its step and the call within it, if a failure is to be found again when the step is played again.
    turn: tuple[int, int, str] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def user(cls, text: str, **fields: Any) -> ChatRequest:
        """Return a request with one user message."""
        return cls(messages=(Message(role="user", content=text),), **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A model's reply, or the error in its place; `queue_wait_s` is the time the request waited for a slot.

    The text is what the model said, without its `thought`. A reply that is a thought alone is an error: of the kind
    `thought`, which no retry helps, where the token limit ended it, else `empty`.
    """

    text: str = ""
    thought: str = ""
    model: str = ""
    error: ErrorInfo | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, that the server had in its cache
    reasoning_tokens: int = 0  # of the reply, that are its thought
    total_s: float = 0.0  # as the server reports it
    load_s: float = 0.0
    prompt_eval_s: float = 0.0
    eval_s: float = 0.0
    latency_s: float = 0.0  # as the client measured it
    attempts: int = 1
    hit_limit: bool = False  # the reply ended at the token limit, not where the model ended it
    logprob: float | None = None  # mean log probability of the reply's tokens; None where it was not reported
    token_logprobs: tuple[float, ...] = ()  # of each of them; empty where they were not reported
    others: tuple[Completion, ...] = ()  # further samples that came with it

    def __post_init__(self) -> None:
        if _THOUGHT_TAG.search(self.text):
            object.__setattr__(self, "thought", self.thought or self.text[-STORED_CHARS:])
            object.__setattr__(self, "text", without_thought(self.text))
            object.__setattr__(self, "logprob", None)  # it is a mean over the thought too
            object.__setattr__(self, "token_logprobs", ())
        if self.thought and not self.text and (self.error is None or self.error.kind == "empty"):
            error = ErrorInfo(kind="empty", message="the reply is a thought without an answer")
            if self.hit_limit:
                advice = "raise --target-max-tokens, or turn thinking off with --think off"
                error = ErrorInfo(kind="thought", message=f"the token limit went into the model's thought; {advice}")
            object.__setattr__(self, "error", error)

    @property
    def ok(self) -> bool:
        """Return whether the reply is an answer."""
        return self.error is None

    @property
    def queue_wait_s(self) -> float:
        """Return total - load - prompt_eval - eval, never below 0 (how Ollama's durations add up)."""
        return max(0.0, self.total_s - self.load_s - self.prompt_eval_s - self.eval_s)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as plain types."""
        return {
            name: asdict(value) if isinstance(value, ErrorInfo) else value
            for name, default in _completion_defaults()
            if (value := getattr(self, name)) != default
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Return what `to_json` gave; unknown fields are left out."""
        known = {name: row[name] for name, _ in _completion_defaults() if name in row}
        if known.get("error") is not None:
            known["error"] = ErrorInfo(**known["error"])
        return cls(**known | {"token_logprobs": tuple(known.get("token_logprobs", ()))})

    @classmethod
    def failed(cls, kind: str, message: str, **fields: Any) -> Completion:
        """Return a completion that carries only an error; `status`, `retry_after_s` go to the error."""
        about = {name: fields.pop(name) for name in ("status", "retry_after_s") if name in fields}
        return cls(error=ErrorInfo(kind=kind, message=message, **about), **fields)

    @classmethod
    def from_ollama(cls, payload: Mapping[str, Any], *, latency_s: float = 0.0) -> Completion:
        """Return the record of one final `/api/chat` or `/api/generate` object (durations in ns).

        A reply that is not an answer (an `error` key, `done` false, `done_reason` "load", no text) carries an error.
        AttributeError, TypeError or ValueError for fields of another type.
        """
        message = payload.get("message") or {}
        text = wire_text(message.get("content") or payload.get("response")).strip()
        error = None
        if payload.get("error"):
            error = ErrorInfo(kind="server", message=str(payload["error"]))
        elif payload.get("done_reason") == "load":
            error = ErrorInfo(kind="incomplete", message="the server only loaded the model")
        elif payload.get("done") is not True:
            error = ErrorInfo(kind="incomplete", message="the reply stopped before it was done")
        elif not text:
            error = ErrorInfo(kind="empty", message="the reply has no text")
        return cls(
            text=text if error is None else "",
            thought=thought_of(message) or thought_of(payload),
            model=wire_text(payload.get("model"))[:MAX_NAME_CHARS],
            error=error,
            prompt_tokens=int(wire_number(payload.get("prompt_eval_count"))),
            completion_tokens=int(wire_number(payload.get("eval_count"))),
            total_s=_seconds(payload, "total_duration"),
            load_s=_seconds(payload, "load_duration"),
            prompt_eval_s=_seconds(payload, "prompt_eval_duration"),
            eval_s=_seconds(payload, "eval_duration"),
            latency_s=latency_s,
            hit_limit=payload.get("done_reason") == "length",
            **logprob_fields(payload.get("logprobs")),
        )


def _seconds(payload: Mapping[str, Any], key: str) -> float:
    return wire_number(payload.get(key)) * NANOSECONDS


def content_text(message: Mapping[str, Any]) -> Any:
    """Return the content of a message; of a list of parts, which some servers send, the texts without thoughts."""
    content = message.get("content")
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    return "".join(str(part.get("text") or "") for part in content if part.get("type") == "text")


def wire_text(value: object) -> str:
    """Return a text that a server sent, "" for none; lone surrogates, which no file or encoder takes, become U+FFFD.

    TypeError for a value of another type, whose `str` would pass for an answer.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in place of a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def thought_of(message: Mapping[str, Any]) -> str:
    """Return the thought in a field of a server's message: Ollama's, vLLM's and SGLang's, OpenRouter's."""
    found = (message.get(name) for name in ("thinking", "reasoning_content", "reasoning"))
    return next((wire_text(thought) for thought in found if thought and isinstance(thought, str)), "")


def said_in(text: str) -> tuple[str, bool]:
    """Return a reply, or its beginning, without thoughts, and whether it ends within one.

    A thought stands between `<think>` and `</think>`, or what other models write; without the first tag, which the
    prompt may have had, it begins with the reply, and without the second it ends with it.
    """
    said: list[str] = []
    start, thinks = 0, False
    for tag in _THOUGHT_TAG.finditer(text):
        is_end = bool(tag["end"] or tag["close"]) or tag["channel"] in ("final", "FINAL")
        is_begin = not is_end and (tag["channel"] is not None or tag[0][1:].lower().startswith("think"))
        if not (is_end or thinks):
            said.append(text[start : tag.start()])
        if is_end:
            said = said if thinks else []
        if is_end or not thinks:
            start = tag.end()
        thinks = is_begin or (thinks and not is_end)
    if not thinks:
        said.append(text[start:])
    return " ".join(said), thinks  # with a space, so that what is left forms no tag


def without_thought(text: str) -> str:
    """Return what a reply says in addition to its thoughts, stripped if it has any."""
    return said_in(text)[0].strip() if _THOUGHT_TAG.search(text) else text


def read_part(text: str) -> str:
    """Return what readers of a reply see: its last READ_CHARS characters, without thoughts.

    Patterns may take the square of a text's length, and a reply may have megabytes.
    """
    return without_thought(text)[-READ_CHARS:]


def wire_number(value: Any) -> float:
    """Return a count or time that a server sent, 0 for none and for one below 0; ValueError beyond reason."""
    number = float(value or 0)
    if not math.isfinite(number) or number > _MAX_NUMBER:
        raise ValueError(f"{number} in place of a count or time")
    return max(0.0, number)


def logprob_fields(rows: object) -> dict[str, Any]:
    """Return `logprob` and `token_logprobs` of a completion from what a server sent of its tokens, {} for nothing."""
    values = [row.get("logprob") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    found = [
        max(LEAST_LOGPROB, min(0.0, one))
        for one in values
        if isinstance(one, (int, float)) and -math.inf <= one < math.inf
    ]
    return {"logprob": sum(found) / len(found), "token_logprobs": tuple(found)} if found else {}


@cache
def _completion_defaults() -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.default) for field in fields(Completion))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A score in [0, 1] and its named parts."""

    score: float
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def success(self) -> float:
        """Return the part that says whether the answer is right."""
        return success_in(self.parts)


def success_in(parts: Mapping[str, float]) -> float:
    """Return the first of SUCCESS_PARTS among the parts of a score, 0 without any."""
    return float(next((parts[name] for name in SUCCESS_PARTS if name in parts), 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One environment step, a row of `transcripts.jsonl`; everything that depends on the clock is in `timing`."""

    env: int
    step: int  # counts this environment's steps in the run, from 0
    episode: int  # counts this environment's episodes, from 0
    question_id: str
    operator: str
    question: str  # the original
    rewrite: str  # the question after this step
    form: str = AS_IS  # in which the target gets it after this step
    answer: str
    thought: str = ""  # of the model before the answer
    baseline_score: float | None  # None if the original was not asked
    score: float  # of what would be submitted now
    parts: Mapping[str, float]
    reward: float
    valid: bool = True
    error: ErrorInfo | None = None
    calls: int = 0  # of this step; 0 for a rewrite that would change nothing
    guard: str | None = None  # that rejected the rewrite of this step
    submitted: int | None = None  # place, among the episode's answers so far, of the one that would be submitted now
    first_answer: str | None = None  # to the original question, of an episode that asks it; in its first row
    first_thought: str | None = None
    first_parts: Mapping[str, float] | None = None  # of that answer's score
    timing: Mapping[str, float] = field(default_factory=dict)  # seconds: step_s, mutator_s, target_s, queue_wait_s

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; texts beyond STORED_CHARS are cut, and `cut` has their whole lengths."""
        values = {name: getattr(self, name) for name in self.__slots__}  # thirty times as fast as `asdict`
        long = {name: len(values[name]) for name in _LONG if len(values[name] or "") > STORED_CHARS}
        if long:
            values |= {"cut": long, **{name: values[name][:STORED_CHARS] for name in long}}
        return values | {"error": asdict(self.error) if self.error is not None else None}
