"""How long calls take: by the newest replies that are kept, else by a few calls made at once.

seconds of a run = calls x seconds of a call / calls in flight
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from query_mutator.env.task import CallSettings
from query_mutator.llm.backends import BACKENDS
from query_mutator.llm.client import Client
from query_mutator.llm.probe import together
from query_mutator.llm.store import default_cache_path, seconds_seen
from query_mutator.operators import Operator, OperatorContext, would_change
from query_mutator.settings.models import AUTO, ModelSettings
from query_mutator.types import ChatRequest, ErrorInfo, Question

MODEL_CALL_S = 2.0  # a model of about 3 B parameters on a desktop GPU


def is_instant(settings: ModelSettings) -> bool:
    """Return whether calls take next to no time, as those to recorded replies do."""
    instant = {name: BACKENDS.get(name).url_flag for name in BACKENDS if BACKENDS.get(name).is_instant}
    if settings.backend == AUTO:
        return any(settings.urls.get(flag) for flag in instant.values())
    return settings.backend in instant


def seen_call_s(settings: ModelSettings) -> float | None:
    """Return the mean seconds of the newest calls to the models of a run, None where no reply of them is kept."""
    models = {name.removesuffix(":latest") for name in (settings.target_model, settings.mutator_model) if name}
    return seconds_seen(settings.cache_path or default_cache_path(), models)


def call_time(settings: ModelSettings) -> tuple[float, str]:
    """Return the seconds of a call, divided by the calls in flight, and the words for where they come from."""
    in_flight = settings.calls_in_flight
    if is_instant(settings):
        simulated = f"{settings.simulated_s:g} s a call, {in_flight} in flight" if settings.simulated_s else "no wait"
        return settings.simulated_s / in_flight, f"{simulated}, as replies are recorded"
    seen = seen_call_s(settings)
    known = "assumed: no reply of these models is kept" if seen is None else "as the newest replies that are kept"
    call_s = MODEL_CALL_S if seen is None else seen
    return call_s / in_flight, f"{call_s:.3g} s a call, {known}, {in_flight} in flight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Mean seconds of a rewrite and of an answer with `at_once` calls in flight."""

    at_once: int
    target_model: str
    rewrite_s: float
    answer_s: float
    cut_answers: int  # of `at_once`, that ended at the token limit

    @property
    def call_s(self) -> float:
        """Return the mean seconds of a call; a step makes a rewrite and an answer."""
        return (self.rewrite_s + self.answer_s) / 2


def measure_pace(
    client: Client,
    calls: CallSettings,
    questions: Sequence[Question],
    operators: Sequence[Operator],
    *,
    at_once: int,
) -> Pace | ErrorInfo:
    """Return the pace of `at_once` rewrites, then as many answers, or the error of a call.

    `client` must let that many calls through, share none and retry none; `operators` are those that call a model.
    """
    texts = [question.text for question in itertools.islice(itertools.cycle(questions), at_once)]
    rewrites = together(client, [_rewrite(calls, text, operators) for text in texts])
    answers = together(client, [calls.target(text) for text in texts])
    errors = [reply.error for reply in (*rewrites, *answers) if reply.error is not None]
    if failed := next((error for error in errors if error.kind != "empty"), None):
        return failed
    return Pace(
        at_once=at_once,
        target_model=calls.target_model,
        rewrite_s=fmean(reply.latency_s for reply in rewrites),
        answer_s=fmean(reply.latency_s for reply in answers),
        cut_answers=sum(reply.hit_limit for reply in answers),
    )


def _rewrite(calls: CallSettings, text: str, operators: Sequence[Operator]) -> ChatRequest:
    if not operators:
        return calls.target(text)
    context = OperatorContext(original=text)
    changing = (operator for operator in operators if would_change(operator, text, context=context))
    return calls.rewrite(next(changing, operators[0]), text, context=context)
