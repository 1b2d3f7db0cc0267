"""Plans that stop by P(right): thresholds and what they cost."""

from __future__ import annotations

import numpy as np

from query_mutator.confidence.stopping import StoppingRule
from query_mutator.evaluation.plan_learned import AnswerPaths


def test_the_threshold_of_a_plan_is_rounded_down_so_that_it_asks_no_more_than_its_rule() -> None:
    p = [[0.56789, 0.9], [0.2, 0.9]]
    paths = AnswerPaths(order=("a", "b"), p=p, right=np.eye(2), scores=np.eye(2))
    point = paths.point(StoppingRule(threshold=0.56789, max_calls=2))
    assert point.plan.stop_fit == 0.5678
    assert (point.calls, point.success) == (1.5, 1.0)


def test_a_threshold_above_1_asks_all() -> None:
    paths = AnswerPaths(order=("a", "b"), p=[[1.0, 1.0]], right=np.eye(2)[:1], scores=np.eye(2)[:1])
    point = paths.point(StoppingRule(threshold=1.5, max_calls=2))
    assert (point.plan.stop_fit, point.calls, point.success) == (None, 2.0, 0.0)
