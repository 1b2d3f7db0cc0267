"""What a server does with calls like ours, found by a few short ones: a sentence each, for `qm doctor`.

schema_sentence     whether replies keep to a JSON schema, with `think: false` as all calls have it, and without
reload_sentence     whether a model was loaded again: by another context, or because a second model pushed it out
judge_form          the most reliable of three ways to get a yes/no verdict from a judge
context_sentence    how many tokens fit, and how many the model could have
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from query_mutator.files import decode_object
from query_mutator.llm.client import ModelServer
from query_mutator.settings.models import Sampling
from query_mutator.types import ChatRequest, Completion

#: How a judge's verdict comes: JSON of a schema, probabilities of yes and no as the first token, or a word.
JudgeForm = Literal["schema", "logprobs", "words"]

_QUESTION = "Is water wet? Explain in one sentence."  # no model answers it in JSON on its own
_YES_OR_NO = "Is water wet? Reply with one word, yes or no."
_SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
_REPLY_TOKENS, _THOUGHT_TOKENS = 128, 1024
_LOAD_S = 0.3  # a call to a loaded model reports some milliseconds


def schema_sentence(server: ModelServer, model: str) -> str:
    """Return whether the model's replies keep to a JSON schema, which a judge needs."""
    reply, think = _schema_reply(server, model)
    if _keeps(reply) and think:
        return "think: false makes the server ignore format: leave think out of calls that need JSON"
    if _keeps(reply):
        return "think: false and format work together" if server.sends_think else "replies keep to a JSON schema"
    if reply.error is not None and reply.error.kind != "empty":
        return f"no JSON of a schema ({reply.error})"
    return "the server ignores the JSON schema: do not rely on JSON from this model"


def judge_form(server: ModelServer, model: str) -> tuple[JudgeForm, bool]:
    """Return the most reliable way to get a yes/no verdict, and whether the model must think first."""
    reply, think = _schema_reply(server, model)
    if _keeps(reply):
        return "schema", think
    asked = ChatRequest.user(_YES_OR_NO, model=model, max_tokens=1, seed=0, choices=("yes", "no"))
    return ("logprobs" if _has_choice(server.complete(asked)) else "words"), False


def _schema_reply(server: ModelServer, model: str) -> tuple[Completion, bool]:
    """Return a reply to a request for JSON, and whether the model had to think first for it."""
    request = ChatRequest.user(_QUESTION, model=model, max_tokens=_REPLY_TOKENS, seed=0)
    reply = server.complete(replace(request, json_schema=_SCHEMA))
    if _keeps(reply) or not server.sends_think:
        return reply, False
    longer = server.complete(replace(request, max_tokens=_THOUGHT_TOKENS, json_schema=_SCHEMA, think=True))
    return (longer, True) if _keeps(longer) else (reply, False)


def _has_choice(reply: Completion) -> bool:
    """Return whether a reply holds probabilities; a backend that knows none answers in words."""
    try:
        return reply.ok and sum(map(float, decode_object(reply.text.encode()).values())) > 0
    except (ValueError, TypeError):
        return False


def _keeps(reply: Completion) -> bool:
    try:
        return decode_object(reply.text.encode()).get("answer") in ("yes", "no")
    except ValueError:
        return False


def reload_sentence(server: ModelServer, models: Sequence[str], *, before: Mapping[str, int | None]) -> str:
    """Return which our calls loaded a model again; `before` has the contexts they were loaded with before all."""
    for model in models:
        was, now = before.get(model), server.loaded_context(model)
        if was is not None and now is not None and was != now:
            return (
                f"{model} was loaded with num_ctx={was}, these calls loaded it again with {now}: give --num-ctx {was}, "
                "or have the server's other clients send what these calls do"
            )
    if len(models) > 1:
        first, second = models[:2]
        for model in (first, second, first):
            last = server.complete(ChatRequest.user("Hello", model=model, max_tokens=1))
        if last.load_s > _LOAD_S:
            return (
                f"{first} was loaded again ({last.load_s:.1f} s) after a call to {second}, and so in every step: use "
                f"one model for both, or {server.more_loaded}"
            )
    if not server.has_runner_options:
        return "none, calls set no options of the loaded model"
    return "none now; a call of any client with another num_ctx, num_batch or num_gpu loads the model again"


def context_sentence(server: ModelServer, model: str, *, reply_tokens: int = Sampling.target_max_tokens) -> str:
    """Return how many tokens a call has, how many the model could have, and what the longest reply leaves of them."""
    context = server.context(model)
    if context is None:
        return "unknown, so prompts that lose their beginning cannot be told; give --num-ctx"
    info = server.model_info(model).items()
    limit = max((value for key, value in info if key.endswith(".context_length") and isinstance(value, int)), default=0)
    more = f" of the model's {limit}" if limit > context else ""
    if context <= reply_tokens:
        return f"{context} tokens{more}: too few for a reply of {reply_tokens}; {server.more_context}"
    return f"{context} tokens{more}: a reply of {reply_tokens} leaves {context - reply_tokens} for a prompt"
