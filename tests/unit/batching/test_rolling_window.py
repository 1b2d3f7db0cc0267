"""Rolling windows: their size and overlap, each microbatch once, restored plans, fingerprints that follow the data."""

from __future__ import annotations

import asyncio
import json

import pytest
from pydantic import ValidationError

from query_mutator.batching.streaming.replay_buffer import ReplayBuffer
from query_mutator.batching.streaming.rolling_window import RollingBatchPlanWindow, WindowConfig
from query_mutator.batching.streaming.types import StreamSample
from query_mutator.errors import UsageError


def make(number: int, length: int | None = None) -> StreamSample:
    size = 10 + number % 20 if length is None else length
    return StreamSample(
        input_ids=range(size), loss_mask=[1] * size, sample_id=f"s{number:04d}", dataset_id="d", source="gym"
    )


def window_over(count: int, **fields: object) -> RollingBatchPlanWindow:
    settings = {"min_samples": 10, "bucket_edges": (16, 32), "overflow_max": 64, "token_budget": 128, **fields}
    buffer = ReplayBuffer()
    buffer.add_batch(make(number) for number in range(count))
    return RollingBatchPlanWindow(buffer, WindowConfig(**settings))


def drain(window: RollingBatchPlanWindow) -> list[str]:
    return [name for microbatch in window.iter_current() for name in microbatch.samples]


def test_the_first_window_takes_everything_once() -> None:
    window = window_over(100)
    assert window.should_build_next
    state = window.build_next_window_sync()
    assert (state.fresh_samples, state.repeated_samples) == (100, 0)
    assert sorted(drain(window)) == [f"s{number:04d}" for number in range(100)]
    assert window.current_state is not None
    assert window.current_state.is_exhausted
    assert window.should_build_next


def test_no_window_is_larger_than_asked_and_what_waits_comes_next() -> None:
    window = window_over(100, window_microbatches=3, overlap_fraction=0.0, min_samples=1)
    seen: list[str] = []
    while len(seen) < 100:
        state = window.build_next_window_sync()
        assert state.plan_microbatches <= 3
        assert state.repeated_samples == 0
        seen += drain(window)
    assert len(seen) == len(set(seen)) == 100


def test_the_overlap_is_the_share_of_samples_seen_before() -> None:
    window = window_over(90, overlap_fraction=0.25)
    window.build_next_window_sync()
    window.buffer.add_batch(make(number) for number in range(200, 230))
    state = window.build_next_window_sync()
    assert (state.fresh_samples, state.repeated_samples) == (30, 10)
    names = drain(window)
    assert sum(name >= "s0200" for name in names) == 30
    assert len(names) == 40


def test_few_new_samples_are_filled_up_to_the_minimum() -> None:
    window = window_over(50, overlap_fraction=0.0, min_samples=20)
    window.build_next_window_sync()
    window.buffer.add(make(99))
    state = window.build_next_window_sync()
    assert (state.fresh_samples, state.repeated_samples) == (1, 19)
    state = window.build_next_window_sync()
    assert (state.fresh_samples, state.repeated_samples) == (0, 51)


def test_each_microbatch_is_yielded_once() -> None:
    window = window_over(100)
    total = window.build_next_window_sync().plan_microbatches
    first = next(window.iter_current())
    rest = list(window.iter_current())
    assert first.index not in [microbatch.index for microbatch in rest]
    assert len(rest) == total - 1
    assert window.current_state is not None
    assert window.current_state.progress == 1.0
    assert window.get_remaining_microbatches() == 0
    assert list(window.iter_current()) == []
    assert window.total_microbatches == total


def test_too_few_samples_are_an_error_with_the_number() -> None:
    window = window_over(9)
    assert not window.can_build_window
    assert not window.should_build_next
    with pytest.raises(UsageError, match="holds 9 samples; a window needs 10"):
        window.build_next_window_sync()


def test_equal_buffers_give_equal_plans_and_windows_differ() -> None:
    one, two = window_over(60), window_over(60)
    states = [asyncio.run(window.build_next_window()) for window in (one, two)]
    assert states[0].plan_fingerprint == states[1].plan_fingerprint
    assert one.build_next_window_sync().plan_fingerprint != states[0].plan_fingerprint
    other = window_over(60)
    other.buffer.add(make(1))
    assert other.build_next_window_sync().plan_fingerprint != states[0].plan_fingerprint


def test_a_window_made_meanwhile_ends_the_iteration_over_the_old_one() -> None:
    window = window_over(100)
    window.build_next_window_sync()
    walk = window.iter_current()
    next(walk)
    window.build_next_window_sync()
    assert next(walk, None) is None
    assert window.get_remaining_microbatches() == window.build_next_window_sync().plan_microbatches


@pytest.mark.parametrize(("policy", "tokens"), [("drop", 0), ("truncate", 64), ("split", 100)])
def test_samples_that_fit_no_batch_are_counted_and_cut(policy: str, tokens: int) -> None:
    window = window_over(10, overlong=policy)
    window.buffer.add(make(500, length=100))
    state = window.build_next_window_sync()
    assert state.overlong_samples == 1
    found = [sample for _, samples in window.iter_current_with_samples() for sample in samples]
    assert sum(sample.length for sample in found if sample.sample_id == "s0500") == tokens
    assert max(sample.length for sample in found) <= 64
    window.buffer.add(make(501))
    assert window.build_next_window_sync().fresh_samples == 1


def test_samples_of_one_id_all_come_with_their_tokens() -> None:
    window = window_over(20)
    window.buffer.add_batch([make(3, length=5), make(3, length=6)])
    window.build_next_window_sync()
    lengths = [
        sample.length
        for _, samples in window.iter_current_with_samples()
        for sample in samples
        if sample.sample_id == "s0003"
    ]
    assert sorted(lengths) == [5, 6, 13]


def test_a_restored_window_resumes_with_the_same_microbatches() -> None:
    window = window_over(100, window_microbatches=8)
    window.build_next_window_sync()
    next(window.iter_current())
    data = json.loads(json.dumps(window.to_dict()))
    buffer = ReplayBuffer.from_dict(json.loads(json.dumps(window.buffer.to_dict())))
    twin = RollingBatchPlanWindow.from_dict(data, buffer)
    assert twin.has_window
    assert twin.get_remaining_microbatches() == window.get_remaining_microbatches()
    assert drain(twin) == drain(window)
    assert twin.build_next_window_sync().plan_fingerprint == window.build_next_window_sync().plan_fingerprint
    data["samples"]["s0000"]["input_ids"][0] += 1
    with pytest.raises(UsageError, match="edited"):
        RollingBatchPlanWindow.from_dict(data, buffer)


def test_a_discarded_window_is_gone() -> None:
    window = window_over(20)
    window.build_next_window_sync()
    window.discard_current()
    assert not window.has_window
    assert drain(window) == []
    assert window.should_build_next
    assert RollingBatchPlanWindow.from_dict(window.to_dict(), window.buffer).current_state is None


@pytest.mark.parametrize("bad", [{"overlap_fraction": 0.9}, {"window_microbatches": 0}, {"bucket_edges": (64, 32)}])
def test_settings_check_themselves(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        WindowConfig(**bad)
