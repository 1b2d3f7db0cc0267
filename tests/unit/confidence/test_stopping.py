"""Stopping: dearer calls are made less often, and a budget is kept on training questions."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression

from query_mutator.confidence import Stopping, rule_for_budget, stopping
from query_mutator.errors import CheckpointError, UsageError


def episodes(n: int, calls: int, seed: int = 0) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return np.maximum.accumulate(rng.beta(1, 2, (n, calls)), axis=1).tolist()


@pytest.mark.parametrize("calls", [1, 3])
def test_the_threshold_never_rises_with_the_price(calls: int) -> None:
    curve = Stopping.fit(episodes(300, calls))
    prices = np.linspace(0, 1, 60)
    thresholds = [curve.rule_for_price(price, max_calls=4).threshold for price in prices]
    assert thresholds == sorted(thresholds, reverse=True)
    assert thresholds[0] > 0.6
    assert thresholds[-1] == 0
    assert (np.diff(curve.gains) <= 0).all()


def test_a_call_is_made_exactly_while_its_gain_is_above_its_price() -> None:
    curve = Stopping.fit(episodes(300, 1))
    rule = curve.rule_for_price(0.1, max_calls=3)
    for p in np.linspace(0, 1, 101):
        assert rule.ask_again(p, calls=1) == (curve.gain(p) > 0.1 + 1e-12) or abs(p - rule.threshold) < 1e-9
    assert not rule.ask_again(0.0, calls=3)


@pytest.mark.parametrize(("budget", "most"), [(1.0, None), (1.5, None), (2.0, None), (2.5, 4), (3.0, 3)])
def test_a_budget_is_the_mean_number_of_calls(budget: float, most: int | None) -> None:
    paths = episodes(400, 5)
    rule = rule_for_budget(paths, budget, max_calls=most)
    made = []
    for path in paths:
        calls = 1
        while rule.ask_again(path[calls - 1], calls=calls):
            calls += 1
        made.append(calls)
    assert np.mean(made) == pytest.approx(budget, abs=0.01)


@pytest.mark.parametrize(("budget", "most"), [(0.5, 2), (3.0, 2), (float("nan"), 2)])
def test_a_budget_out_of_reach_is_an_error(budget: float, most: int) -> None:
    with pytest.raises(UsageError, match="calls"):
        rule_for_budget(episodes(10, 2), budget, max_calls=most)


def test_prices_and_episodes_are_checked() -> None:
    with pytest.raises(UsageError, match="cannot cost"):
        Stopping.fit(episodes(10, 1)).rule_for_price(-1, max_calls=2)
    with pytest.raises(UsageError, match="episodes"):
        Stopping.fit([])


def test_arrays_come_back_and_hostile_ones_are_refused() -> None:
    curve = Stopping.fit(episodes(60, 2))
    arrays = curve.to_arrays()
    assert Stopping.from_arrays(arrays).gain(0.3) == curve.gain(0.3)
    for broken in (arrays["stopping_gains"][::-1], arrays["stopping_gains"][:3], np.full(41, np.nan), np.full(41, 2.0)):
        with pytest.raises(CheckpointError):
            Stopping.from_arrays({**arrays, "stopping_gains": broken.copy()})


def test_pooled_gains_are_those_of_isotonic_regression() -> None:
    values = np.random.default_rng(0).normal(size=200) - np.linspace(0, 2, 200)
    known = IsotonicRegression(increasing=False).fit_transform(np.arange(200), values)
    assert stopping._falling(values) == pytest.approx(known)
