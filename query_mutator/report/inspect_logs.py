"""Evaluations as logs of inspect_ai, which is imported here: one log for each method and set of questions.

task      the questions: those of a dataset, or `guard`, requests that should be refused
model     the target; solver: the method, as identity, best_plan or policy
sample    a question: what is accepted as its target, request and answer that were submitted as its messages and
          output, an event for every answer of the target, a failed call as its error
scores    success (of the guard: refused) first, then score, refused and the parts of the reward
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from importlib import metadata
from operator import add
from pathlib import Path
from typing import Any

from inspect_ai.event import ModelEvent
from inspect_ai.log import (
    EvalError,
    EvalLog,
    EvalPlan,
    EvalPlanStep,
    EvalResults,
    EvalSample,
    EvalSpec,
    EvalStats,
    recompute_metrics,
    write_eval_log,
)
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageUser,
    GenerateConfig,
    ModelOutput,
    ModelUsage,
)
from inspect_ai.scorer import CORRECT, INCORRECT, Score

from query_mutator.data.split import target_key
from query_mutator.env.task import Task
from query_mutator.evaluation.comparison import QuestionTasks
from query_mutator.evaluation.outcomes import Outcome, scored
from query_mutator.evaluation.summary import Results
from query_mutator.types import ChatRequest, Message, Question
from query_mutator.version import __version__

__all__ = ["Evaluated", "write_logs"]

GUARD, SUCCESS, REFUSED = "guard", "success", "refused"
_ROLES = {"system": ChatMessageSystem, "user": ChatMessageUser, "assistant": ChatMessageAssistant}
_CLUSTER = "target"  # entry of a sample's metadata: questions about one target succeed and fail together


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What was evaluated: the name of the questions, who answered, and entries of the logs' metadata."""

    dataset: str
    provider: str  # a backend
    about: Mapping[str, Any]
    started: datetime

    def model(self, name: str) -> str:
        """Return a model's name as inspect_ai writes it."""
        return f"{self.provider}/{name}"


def write_logs(folder: Path, results: Results, tasks: QuestionTasks, evaluated: Evaluated) -> list[Path]:
    """Add a log to a folder for each method and set of questions; return their paths, which are new."""
    sets = [(evaluated.dataset, results.questions, results.outcomes, tasks.test)]
    if tasks.guard is not None:
        sets.append((GUARD, results.guard, results.guarded, tasks.guard))
    run_id = uuid.uuid4().hex
    paths = []
    for name, questions, by_method, task in sets:
        for method, outcomes in by_method.items():
            log = _log(name, method, questions, outcomes, task, evaluated, run_id=run_id)
            paths.append(folder / _file_name(log))
            write_eval_log(log, paths[-1])
    return paths


def _file_name(log: EvalLog) -> str:
    """Return a name as inspect_ai gives: time, task and id; only `_` separates them."""
    task, solver = (re.sub(r"[^\w.]+|_", "-", text).strip("-") for text in (log.eval.task, log.eval.solver))
    return f"{log.eval.created.replace(':', '-')}_{task}-{solver}_{log.eval.task_id}.eval"


def _log(
    name: str,
    method: str,
    questions: Sequence[Question],
    outcomes: Sequence[Outcome],
    task: Task,
    evaluated: Evaluated,
    *,
    run_id: str,
) -> EvalLog:
    places = {question.id: place for place, question in enumerate(task.questions)}
    samples = []
    for question, outcome in zip(questions, outcomes, strict=True):
        conversations = _conversations(task, places[question.id], outcome)
        samples.append(_sample(question, outcome, conversations, evaluated, is_guard=name == GUARD))
    usage = [sample.model_usage for sample in samples]
    log = EvalLog(
        status="success",
        eval=_spec(name, method, samples, task, evaluated, run_id=run_id),
        plan=EvalPlan(steps=[EvalPlanStep(solver=method)]),
        results=EvalResults(total_samples=len(samples), completed_samples=len(scored(outcomes))),
        stats=EvalStats(
            started_at=evaluated.started.isoformat(),
            completed_at=datetime.now(UTC).isoformat(),
            model_usage={
                model: reduce(add, (one[model] for one in usage if model in one))
                for model in dict.fromkeys(model for one in usage for model in one)
            },
        ),
        samples=samples,
    )
    recompute_metrics(log)
    return log


def _spec(
    name: str, method: str, samples: Sequence[EvalSample], task: Task, evaluated: Evaluated, *, run_id: str
) -> EvalSpec:
    names = dict.fromkeys(name for sample in samples for name in sample.scores or ())
    values: dict[str, Any] = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "run_id": run_id,
        "task": name,
        "task_id": uuid.uuid4().hex,
        "task_args": {"method": method},
        "solver": method,
        "dataset": {"name": name, "samples": len(samples), "sample_ids": [sample.id for sample in samples]},
        "model": evaluated.model(task.calls.target_model),
        "model_generate_config": _config(task.calls.target("")),
        "config": {"fail_on_error": False},
        "packages": {"query-mutator": __version__, "inspect_ai": metadata.version("inspect_ai")},
        "metadata": dict(evaluated.about),
        "scorers": [{"name": one, "metrics": _metrics(one, is_guard=name == GUARD)} for one in names],
    }
    return EvalSpec.model_validate(values)


def _metrics(score: str, *, is_guard: bool) -> list[dict[str, Any]]:
    mean = "accuracy" if score == SUCCESS or is_guard else "mean"
    return [{"name": f"inspect_ai/{mean}"}, {"name": "inspect_ai/stderr", "options": {"cluster": _CLUSTER}}]


# --- one question ----------------------------------------------------------------------------------------------------

#: The requests to the target with its answers, in the order in which it was asked.
Conversations = Sequence[tuple[ChatRequest, str]]


def _conversations(task: Task, index: int, outcome: Outcome) -> Conversations:
    asked = zip(outcome.asked, outcome.forms, outcome.answers, strict=True)
    return [(task.target(index, text, form), answer) for text, form, answer in asked]


def _sample(
    question: Question, outcome: Outcome, conversations: Conversations, evaluated: Evaluated, *, is_guard: bool
) -> EvalSample:
    usage = {
        evaluated.model(model): ModelUsage(input_tokens=prompt, output_tokens=reply, total_tokens=prompt + reply)
        for model, (prompt, reply) in outcome.usage.items()
    }
    values: dict[str, Any] = {
        "id": question.id,
        "epoch": 1,
        "input": question.text,
        "target": list(question.accept or filter(None, [question.reference])),
        "metadata": _metadata(question, outcome),
        "events": [_event(request, answer, evaluated) for request, answer in conversations],
        "model_usage": usage,
        "total_time": outcome.seconds,
    }
    if outcome.error is not None:
        error = EvalError(message=str(outcome.error), traceback=str(outcome.error), traceback_ansi=str(outcome.error))
        return EvalSample(**values, messages=[ChatMessageUser(content=question.text)], error=error)
    assert outcome.submitted is not None
    request, answer = conversations[outcome.submitted]
    messages = [*map(_message, request.messages), ChatMessageAssistant(content=answer, model=request.model)]
    output = ModelOutput.from_content(evaluated.model(request.model), answer)
    return EvalSample(**values, messages=messages, output=output, scores=_scores(outcome, is_guard=is_guard))


def _scores(outcome: Outcome, *, is_guard: bool) -> dict[str, Score]:
    """Return the named scores, the main one first; an unscored question has none."""
    main = outcome.refused if is_guard else outcome.is_right
    verdict = Score(value=CORRECT if main else INCORRECT, answer=outcome.answer, explanation=outcome.why or None)
    if is_guard:
        return {REFUSED: verdict}
    assert outcome.submitted is not None
    numbers = {"score": outcome.score, REFUSED: float(outcome.refused), **outcome.parts[outcome.submitted]}
    return {SUCCESS: verdict, **{name: Score(value=value) for name, value in numbers.items() if name != SUCCESS}}


def _metadata(question: Question, outcome: Outcome) -> dict[str, Any]:
    return {
        _CLUSTER: target_key(question),
        "tags": list(question.tags),
        "steps": list(outcome.actions),
        "rewrites": list(outcome.rewrites),
        "guards": list(outcome.guards),
        "forms": list(outcome.forms),
        "submitted": outcome.rewrite,
        "why": outcome.why,
        "calls": outcome.calls,
    }


def _event(request: ChatRequest, answer: str, evaluated: Evaluated) -> ModelEvent:
    model = evaluated.model(request.model)
    return ModelEvent(
        model=model,
        input=list(map(_message, request.messages)),
        tools=[],
        tool_choice="none",
        config=_config(request),
        output=ModelOutput.from_content(model, answer),
    )


def _message(message: Message) -> Any:
    return _ROLES[message.role](content=message.content)


def _config(request: ChatRequest) -> GenerateConfig:
    return GenerateConfig(temperature=request.temperature, max_tokens=request.max_tokens, seed=request.seed)
