"""What a rollout did on the target, in `trace.info["query_rewriting"]`: enough to score it again without a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf

from query_mutator.env.episode import Asked
from query_mutator.env.task import Task
from query_mutator.session.play import Step
from query_rewriting.target import CallFailed, Usage

__all__ = ["INFO", "Record", "metrics_of", "recorded"]

INFO = "query_rewriting"


@dataclass
class Record:
    """The episode of one rollout while it is played."""

    played_by: str  # "language model", or the policy's file
    usage: Usage = field(default_factory=Usage)
    steps: list[dict[str, Any]] = field(default_factory=list)
    submitted: dict[str, Any] | None = None
    unread: int = 0  # replies of the policy without an action

    def add(self, step: Step) -> None:
        """Note an action and what it led to."""
        self.steps.append({name: getattr(step, name) for name in ("operator", "text", "form", "answer", "guard")})

    def submit(self, task: Task, asked: Asked, answer: str) -> None:
        """Note what is scored: the wording in its form, and the answer as the form reads it."""
        text, form = asked
        self.submitted = {"text": text, "form": form, "answer": task.form_named(form).answer_in(answer)}


@contextmanager
def recorded(trace: vf.Trace, *, played_by: str) -> Iterator[Record]:
    """Write what happens to the trace, whether the rollout ends well or by an exception."""
    record = Record(played_by)
    info: dict[str, Any] = {"played_by": played_by, "error": None}
    try:
        yield record
    except Exception as error:
        info["error"] = {"kind": error.error.kind if isinstance(error, CallFailed) else "other", "message": str(error)}
        raise
    finally:
        usage = record.usage
        info |= {"requests": dict(usage.requests), "tokens": dict(usage.tokens), "failed": usage.failed}
        info |= {"steps": record.steps, "submitted": record.submitted, "unread": record.unread}
        trace.info[INFO] = info
        trace.extra_usage.append(
            vf.Usage(prompt_tokens=usage.tokens["prompt"], completion_tokens=usage.tokens["completion"])
        )
        trace.record_metrics(metrics_of(trace))


def metrics_of(trace: vf.Trace) -> dict[str, float]:
    """Return the counts of a rollout, those of the policy's calls apart from those of the target and the rewriter."""
    info = trace.info[INFO]
    return {
        "policy_calls": len(trace.calls),
        "target_requests": info["requests"].get("target", 0),
        "rewriter_requests": info["requests"].get("mutate", 0),
        "failed_requests": len(info["failed"]),
        "actions": len(info["steps"]),
        "unread_replies": info["unread"],
    }
