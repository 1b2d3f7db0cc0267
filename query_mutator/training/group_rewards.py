"""What the rewrites of a group are worth, for `qm train grpo`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.scheduling import run_flow
from query_mutator.env.task import Task
from query_mutator.llm.prompts import clean_rewrite
from query_mutator.operators import WRITE, OperatorContext, rejecting_guard
from query_mutator.session.models import OpenModels
from query_mutator.types import ErrorInfo

__all__ = ["GroupRewards"]


@dataclass
class GroupRewards:
    """What rewrites are worth: the score of the target's answer to each in a form, minus the price of both calls.

    A rewrite that fails a guard counts as the question as it stands, as when a policy uses it. A call that failed is no
    reward: its rewrite gets the mean of its group, which teaches nothing.
    """

    models: OpenModels
    task: Task
    form: str
    price: float  # of both calls
    group_size: int
    rejected: int = 0
    failed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def of(self, indices: Sequence[int], texts: Sequence[str]) -> list[float]:
        """Return the rewards [n] of rewrites of the questions `indices`, in groups."""
        with ThreadPoolExecutor(self.models.settings.batch_size) as pool:
            scores = np.array(list(pool.map(self._score, indices, texts))).reshape(-1, self.group_size)
        known = ~np.isnan(scores)
        self.failed += int((~known).sum())
        means = np.where(known, scores, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
        return [float(score) - self.price for score in np.where(known, scores, means[:, None]).ravel()]

    def _score(self, index: int, text: str) -> float:
        """Return the score of the answer to a rewrite, NaN when a call failed for good."""
        engine = EpisodeEngine.open(self.task, index, observes=False)
        flow = engine.ask(asked=(self.wording(index, text), self.form))
        models = self.models
        error = run_flow(flow, client=models.calls.client, encoder=models.encoder, retry_policy=models.retry_policy)
        return float("nan") if isinstance(error, ErrorInfo) else engine.score

    def wording(self, index: int, text: str) -> str:
        """Return the wording that is asked after a reply of the model."""
        question = self.task.questions[index].text
        rewrite = clean_rewrite(text) or question
        if rejecting_guard(WRITE, question, rewrite, context=OperatorContext()) is None:
            return rewrite
        with self._lock:
            self.rejected += 1
        return question
