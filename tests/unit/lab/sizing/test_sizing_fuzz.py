"""The arithmetic of sizes with extreme and missing numbers: a size, None, or a clear error."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from query_mutator.errors import UsageError
from query_mutator.lab.sizing.cards import GIB, Fit, fit_calibration, vram_bytes
from query_mutator.lab.sizing.collecting import cache_bytes, replay_bytes, size_calls
from query_mutator.lab.sizing.lerobot import LoggedTimes, read_times, verdict
from query_mutator.lab.sizing.stalls import predicted_stall

FEW = settings(max_examples=80, deadline=None, derandomize=True)
numbers = st.sampled_from([0.0, 1e-300, 0.1, 1.0, 1e18, 1e300, math.inf, math.nan, -1.0]) | st.floats(0, 1e12)


@FEW
@given(measured=st.lists(numbers, max_size=4), estimated=st.lists(numbers, max_size=4), totals=st.booleans())
def test_a_calibration_is_usable_or_refused(measured: list[float], estimated: list[float], totals: bool) -> None:
    n = min(len(measured), len(estimated))
    try:
        found = fit_calibration(measured[:n], estimated[:n], totals=totals)
    except ValueError:
        return
    assert 0 < found.factor < math.inf
    assert found.context_bytes >= 0
    assert math.isfinite(found.room(24 * GIB))
    assert Fit(floor=GIB, base=GIB, slope=1e6).largest(found.room(24 * GIB)) >= 0


@FEW
@given(
    info=st.dictionaries(
        st.sampled_from(["block_count", "attention.head_count", "attention.head_count_kv", "embedding_length"]).map(
            "llama.".__add__
        ),
        st.none() | st.integers(-1, 10**12) | st.text(max_size=3) | st.lists(st.integers(0, 64), max_size=3) | numbers,
    )
)
def test_what_a_server_says_of_its_model_is_a_size_or_nothing(info: dict[str, object]) -> None:
    found = cache_bytes(info, num_ctx=4096, slots=4)
    assert found is None or found > 0


def test_heads_that_differ_by_layer_are_summed() -> None:
    info = {"m.block_count": 3, "m.attention.head_count_kv": [8, 0, 4], "m.attention.key_length": 64}
    assert cache_bytes(info, num_ctx=10, slots=2) == 2 * 2 * 12 * 64 * 10 * 2


@FEW
@given(slots=st.none() | st.integers(-1, 4096), service_s=st.none() | numbers)
def test_advice_on_calls_is_finite_or_none(slots: int | None, service_s: float | None) -> None:
    found = size_calls(slots, width=16, service_s=service_s)
    assert found is None or (found.batch_size >= 1 and found.steps_per_s > 0 and "nan" not in str(found))


@FEW
@given(
    batch_s=st.lists(st.floats(0, 100), max_size=20),
    workers=st.integers(0, 6),
    prefetch=st.integers(1, 4),
    step_s=st.sampled_from([0.0, 1e-9, 0.1, 10.0]),
)
def test_a_predicted_stall_is_a_share(batch_s: list[float], workers: int, prefetch: int, step_s: float) -> None:
    assert 0 <= predicted_stall(batch_s, workers=workers, prefetch=prefetch, step_s=step_s) <= 1


@FEW
@given(capacity=st.integers(0, 10**12), obs=st.integers(0, 10**9))
def test_a_replay_buffer_has_a_size(capacity: int, obs: int) -> None:
    assert replay_bytes(obs, capacity=capacity, prioritized=True) >= capacity * obs


@pytest.mark.parametrize("text", ["data_s: 1.2.3 updt_s: 0.1", "data_s: 9e400 updt_s: 1", "data_s:5 updt_s: 1e-300"])
def test_odd_figures_of_a_log_have_a_verdict(text: str, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(text)
    times = read_times(str(path), workers=4)
    assert 0 <= times.stall <= 1
    assert "nan" not in verdict(times)


def test_a_verdict_asks_for_no_more_workers_than_there_can_be() -> None:
    assert "about 1000000 workers" in verdict(LoggedTimes(wait_s=1e300, step_s=1e-300, workers=2))


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "nan", "1e9GB", "infGB", "12 PB"])
def test_memory_that_is_not_an_amount_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not an amount or a known card"):
        vram_bytes(text)
