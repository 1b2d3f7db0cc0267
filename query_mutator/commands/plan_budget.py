"""How many calls `qm plan` makes: those that fit into --minutes at the measured speed, unless --max-calls is given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from query_mutator.commands.plan_flags import PlanFlags
from query_mutator.evaluation.plan_search import MAX_CALLS, MIN_CALLS, is_wide, questions_searched
from query_mutator.session.pace import keep_pace, kept_pace, measure_pace
from query_mutator.training.estimate import duration
from query_mutator.training.timing import call_time, text_time
from query_mutator.types import ErrorInfo

if TYPE_CHECKING:
    from query_mutator.env.task import Task
    from query_mutator.session.models import OpenModels

__all__ = ["CallBudget", "calls_in", "measured_budget"]


@dataclass(frozen=True, slots=True)
class CallBudget:
    """A bound on calls, and the seconds that one takes while others are in flight, None where it is unknown."""

    max_calls: int
    call_s: float | None
    learned: bool  # whether some of them go to P(right)

    def announced(self, task: Task) -> str:
        """Return what a search will take, in one line."""
        wide = is_wide(task, self.max_calls)
        count = questions_searched(len(task.questions), self.max_calls, is_wide=wide, learned=self.learned)
        line = f"{count} questions, at most {self.max_calls:,} calls"
        if self.call_s is None:
            return f"{line} (qm doctor measures how long they take)"
        return f"{line}, about {duration(self.max_calls * self.call_s)} at {1 / self.call_s:.3g} calls/s"


def calls_in(seconds: float, call_s: float) -> int:
    """Return the calls that fit into some time, rounded to two digits so that a search can be repeated."""
    fitting = min(MAX_CALLS, max(MIN_CALLS, seconds / call_s))
    unit = 10 ** (math.floor(math.log10(fitting)) - 1)
    return int(fitting // unit * unit)


def measured_budget(flags: PlanFlags, models: OpenModels, task: Task) -> CallBudget:
    """Return the bound on the calls of a search; without --max-calls the speed of the models is measured.

    Recorded replies answer MAX_CALLS calls within minutes.
    """
    learned = flags.answer == "learned"
    is_instant = models.calls.backend_class.is_instant
    pace = None if is_instant else kept_pace(flags, flags, mutator=flags.mutator_model)
    if not is_instant and pace is None and flags.max_calls is not None:
        return CallBudget(flags.max_calls, None, learned)
    if not is_instant and pace is None:
        client, at_once = models.calls.limit, flags.calls_in_flight
        calling = [one for place, one in enumerate(task.operators) if not task.is_local(place)]
        client.complete(task.calls.target(task.questions[0].text))  # loads the model
        measured = measure_pace(client, task.calls, task.questions, calling, at_once=at_once)
        if not isinstance(measured, ErrorInfo):
            keep_pace(measured, flags, flags, mutator=flags.mutator_model)
    call_s = text_time(models.encoder) + call_time(flags, flags, operators=flags.operators)[0]
    fitting = MAX_CALLS if is_instant else calls_in(60 * flags.minutes, call_s)
    return CallBudget(flags.max_calls or fitting, call_s, learned)
