"""How long the calls of a run take while as many are in flight as the server works on at once.

`qm doctor` measures a pace with the questions and the token limits of a run and keeps it in the user's cache folder,
where `--dry-run` finds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from query_mutator.env.task import CallSettings
from query_mutator.errors import DiskError
from query_mutator.files import user_cache_folder, write_json
from query_mutator.llm.backends import BACKENDS, choose_backend
from query_mutator.llm.client import Client
from query_mutator.llm.probe import together
from query_mutator.operators import Operator, OperatorContext, local_rewrite, would_change
from query_mutator.settings.models import Address, Sampling
from query_mutator.types import ChatRequest, ErrorInfo, Question

FILE = "paces.json"
KEPT = 100  # measurements in the file


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

    def call_s_with(self, operators: Sequence[Operator]) -> float:
        """Return the mean seconds of a call of a run; where no operator calls a model, all are answers."""
        return self.call_s if any(local_rewrite(one) is None for one in operators) else self.answer_s


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


def combined_pace(paces: Sequence[Pace]) -> Pace:
    """Return the pace of several servers that share the calls."""
    at_once = sum(pace.at_once for pace in paces)
    return Pace(
        at_once=at_once,
        target_model=paces[0].target_model,
        rewrite_s=sum(pace.at_once * pace.rewrite_s for pace in paces) / at_once,
        answer_s=sum(pace.at_once * pace.answer_s for pace in paces) / at_once,
        cut_answers=sum(pace.cut_answers for pace in paces),
    )


def keep_pace(pace: Pace, where: Address, limits: Sampling, *, mutator: str | None) -> None:
    """Keep a pace for runs with these settings, whether they name the target or leave it to the server's default."""
    targets = {where.target_model, pace.target_model}
    kept = _read() | {_key(where, limits, target=target, mutator=mutator): asdict(pace) for target in targets}
    with contextlib.suppress(DiskError):  # it can be measured again
        write_json(_path(), dict(list(kept.items())[-KEPT:]))


def kept_pace(where: Address, limits: Sampling, *, mutator: str | None) -> Pace | None:
    """Return the pace that was kept for a run with these settings, if any."""
    found: Any = _read().get(_key(where, limits, target=where.target_model, mutator=mutator))
    with contextlib.suppress(TypeError):  # none, or of another version
        return Pace(**found)
    return None


def _rewrite(calls: CallSettings, text: str, operators: Sequence[Operator]) -> ChatRequest:
    if not operators:
        return calls.target(text)
    context = OperatorContext(original=text)
    changing = (operator for operator in operators if would_change(operator, text, context=context))
    return calls.rewrite(next(changing, operators[0]), text, context=context)


def _path() -> Path:
    return user_cache_folder() / FILE


def _read() -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(_path().read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def _key(where: Address, limits: Sampling, *, target: str | None, mutator: str | None) -> str:
    """Return the sha256 of what decides how long a call takes: an address may hold a password."""
    kind, urls = choose_backend(where.backend, where.urls)
    backend = BACKENDS.get(kind)
    places = [backend.address(url) for url in urls] if backend.runs_files else list(urls)
    models = [name and name.removesuffix(":latest") for name in (target, mutator or target)]
    tokens = [where.num_ctx, limits.target_max_tokens, limits.mutator_max_tokens]
    facts = [kind, places or os.environ.get(backend.url_variable, ""), models, tokens]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
