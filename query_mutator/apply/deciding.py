"""The policy's decisions on one question as a flow, from which a driver makes calls: `Rewriter`, the proxy, asyncio.

flow = rewrite_flow(task, policy)     # the task is that of one question
need = flow.send(None)                # a Call (to mutator or target), Encode or Prepare; send its result, and so on
...                                   # StopIteration.value is the Rewrite
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median_low
from typing import Literal

from query_mutator.apply.records import Rewrite
from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.flow import Flow
from query_mutator.env.task import Task
from query_mutator.forms import Framed
from query_mutator.learners.learner import InferencePolicy
from query_mutator.session.play import Limits, Played, Stopped, greedy, play

__all__ = ["Limits", "Mode", "rewrite_flow"]

#: "full": as the policy was trained; "blind": all rewrites first, then one question to the target.
Mode = Literal["full", "blind"]

_REASONS: dict[Stopped, str] = {
    "max_calls": "max_calls was reached", "deadline": "the deadline was reached", "error": "a call failed"
}  # fmt: skip


def rewrite_flow(
    task: Task,
    policy: InferencePolicy,
    *,
    limits: Limits | None = None,
    call_price: float | None = None,
    first_answer: str | None = None,
    asks_at_end: bool = True,
    usable: Callable[[Framed], bool] | None = None,
) -> Flow:
    """Yield the needs of the policy on the question of `task`; return the Rewrite.

    `call_price` is what the policy is told a call costs, by default the middle one of its training. `first_answer` is
    the target's answer to the original question, if it is known. Without `asks_at_end` a policy that asks once leaves
    that to the caller: the Rewrite has the wording to ask and no answer, and counts no call for it. A form whose
    request is not `usable` leaves the question as it is worded.
    """
    if usable is not None:
        task = replace(task, forms=tuple(form.where(usable) for form in task.forms))
    started = time.monotonic()
    engine = EpisodeEngine.open(task, 0)
    engine.episode.call_price = median_low(task.rules.call_price) if call_price is None else call_price
    played: Played = yield from play(
        greedy(policy),
        engine,
        limits=limits,
        first_answer=first_answer,
        asks_at_end=asks_at_end,
        asks_when_stopped=asks_at_end,
    )
    episode, chosen = engine.episode, engine.submitted
    text, form = episode.asked if chosen is None else chosen.asked
    request = task.target(0, text, form)
    return Rewrite(
        question=episode.original,
        text=text,
        form=form,
        messages=request.messages,
        options=request.options,
        temperature=request.temperature,
        answer=None if chosen is None else chosen.answer,
        steps=tuple(played.steps),
        calls=episode.calls,
        seconds=time.monotonic() - started,
        why=_why(engine, played.stopped),
        stopped=played.stopped or "policy",
        error=played.error,
    )


def _why(engine: EpisodeEngine, stopped: Stopped | None) -> str:
    why = engine.why()
    return why if stopped is None or not why else f"{why}; {_REASONS[stopped]}"
