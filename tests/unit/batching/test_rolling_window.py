"""Rolling windows and the replay buffer: sizes, evictions, priorities, resuming."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from query_mutator.batching.files import BatchFileError
from query_mutator.batching.streaming.replay_buffer import ReplayBuffer
from query_mutator.batching.streaming.replay_types import BufferEvictionPolicy, ReplayBufferConfig
from query_mutator.batching.streaming.rolling_window import RollingBatchPlanWindow, WindowConfig
from query_mutator.batching.streaming.types import EpisodeStatus, SampleSource, StreamSample
from query_mutator.errors import UsageError

POLICIES = list(BufferEvictionPolicy)
WHAT = st.sampled_from(["add", "add", "add", "update", "remove"])  # mostly full, or nothing would be evicted


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


def stored(name: str, *, length: int = 3, **fields: object) -> StreamSample:
    return StreamSample(
        input_ids=range(length), loss_mask=[1] * length, sample_id=name, dataset_id="d", source="gym", **fields
    )


def filled(count: int, **settings: object) -> ReplayBuffer:
    buffer = ReplayBuffer(ReplayBufferConfig(**settings))
    for number in range(count):
        buffer.add(stored(f"s{number}"), priority=float(number % 7))
    return buffer


def names(samples: list[StreamSample]) -> list[str]:
    return [sample.sample_id for sample in samples]


def test_priority_evicts_the_lowest_and_of_equals_the_older() -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=3, eviction_policy="priority"))
    for name, priority in [("a", 2.0), ("b", 1.0), ("c", 1.0), ("d", 5.0), ("e", 0.5), ("f", 3.0)]:
        buffer.add(stored(name), priority=priority)
    assert names(buffer.get_all()) == ["a", "d", "f"]
    assert buffer.total_added == 6
    assert buffer.total_evicted == 3


def test_random_evicts_any_with_the_same_chance() -> None:
    left: Counter[str] = Counter()
    for seed in range(400):
        buffer = filled(5, max_size=4, eviction_policy="random", seed=seed)
        left.update({f"s{number}" for number in range(4)} - set(names(buffer.get_all())))
    assert set(left) == {"s0", "s1", "s2", "s3"}
    assert min(left.values()) > 60  # 100 expected of each


def test_draws_follow_priority_to_the_power_alpha() -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(priority_alpha=0.5))
    buffer.add_batch([stored("a"), stored("b"), stored("never")], [1.0, 9.0, 0.0])
    drawn = Counter(names(buffer.sample(20_000)))
    assert drawn["never"] == 0
    assert drawn["b"] / drawn["a"] == pytest.approx(3.0, rel=0.1)


def test_when_all_priorities_are_zero_draws_are_uniform() -> None:
    buffer = ReplayBuffer()
    buffer.add_batch([stored("a"), stored("b")], [0.0, 0.0])
    assert set(names(buffer.sample(100))) == {"a", "b"}


def test_importance_weights_undo_the_priorities() -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(priority_alpha=1.0))
    buffer.add_batch([stored("a"), stored("b")], [1.0, 3.0])
    draw = buffer.sample_weighted(500, beta=1.0)
    by_name = dict(zip(names(draw.samples), draw.weights.tolist(), strict=True))
    assert by_name["a"] == pytest.approx(1.0)
    assert by_name["b"] == pytest.approx(1 / 3)
    assert set(np.round(draw.probabilities, 6)) == {0.25, 0.75}


def test_new_priorities_of_a_draw_skip_what_is_gone() -> None:
    buffer = filled(3, max_size=3)
    draw = buffer.sample_weighted(8)
    gone = draw.samples[0].sample_id
    buffer.remove(gone)
    kept = sum(name != gone for name in names(draw.samples))
    assert buffer.update_priorities(draw.serials, [4.0] * 8) == kept


def test_sampling_waits_for_enough_samples() -> None:
    buffer = filled(2, min_samples_before_sampling=3)
    assert not buffer.can_sample
    for draw in (buffer.sample, buffer.sample_uniform, buffer.sample_weighted):
        with pytest.raises(UsageError, match="holds 2 samples"):
            draw(1)


def test_drawn_samples_are_replays_and_the_stored_one_is_not() -> None:
    buffer = ReplayBuffer()
    buffer.add(stored("a"))
    (drawn,) = buffer.sample(1)
    assert drawn == stored("a").with_replay().model_copy(update={"timestamp": drawn.timestamp})
    assert (drawn.replay_count, drawn.source) == (1, SampleSource.REPLAY)
    assert buffer.get_all()[0].replay_count == 0


def test_uniform_draws_are_different_samples() -> None:
    assert sorted(names(filled(6).sample_uniform(10))) == [f"s{number}" for number in range(6)]


def test_samples_of_one_id_are_not_merged() -> None:
    buffer = ReplayBuffer()
    buffer.add_batch([stored("a", length=1), stored("a#2", length=2), stored("a", length=3), stored("a", length=4)])
    snapshot = buffer.snapshot()
    assert snapshot.get_lengths() == {"a": 1, "a#2": 2, "a#3": 3, "a#4": 4}
    assert buffer.update_priority("a", 5.0)
    assert buffer.remove("a") == 3
    assert names(buffer.get_all()) == ["a#2"]


def test_means_are_of_what_is_held() -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=2))
    for name, difficulty, success in [("a", 1.0, False), ("b", 0.25, True), ("c", None, None)]:
        buffer.add(stored(name, difficulty=difficulty, success=success, reward=None if success is None else 2.0))
    assert buffer.mean_difficulty == 0.25
    assert buffer.success_rate == 1.0
    assert buffer.mean_reward == 2.0
    untracked = ReplayBuffer(ReplayBufferConfig(max_size=1, track_difficulty=False, track_success=False))
    untracked.add_batch([stored("a", difficulty=0.5, success=True), stored("b", difficulty=0.5)])
    assert (untracked.mean_difficulty, untracked.success_rate) == (0.0, 0.0)


def test_filters_and_bounds_of_difficulty() -> None:
    buffer = ReplayBuffer()
    buffer.add_batch([stored("easy", difficulty=0.1, success=True), stored("hard", difficulty=0.9), stored("none")])
    assert names(buffer.filter_by_difficulty(0.5, 1.0)) == ["hard"]
    assert names(buffer.filter_by_success(True)) == ["easy"]
    assert names(buffer.filter_by_source(SampleSource.GYM)) == ["easy", "hard", "none"]
    assert set(names(buffer.sample(20, min_difficulty=0.5))) == {"hard"}
    with pytest.raises(UsageError, match="difficulty"):
        buffer.sample(1, min_difficulty=0.95)


def test_stale_samples_leave_whatever_their_priority() -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(eviction_policy="priority", max_staleness=2))
    for number in range(5):
        buffer.add(stored(f"s{number}"), priority=9.0 - number)
    assert names(buffer.get_all()) == ["s3", "s4"]


def test_priorities_by_reward_move_towards_reward_plus_one() -> None:
    buffer = ReplayBuffer()
    buffer.add_batch([stored("a", reward=1.0), stored("b", reward=-3.0), stored("c")], [1.0, 1.0, 1.0])
    buffer.update_priorities_by_reward(alpha=0.5)
    assert buffer.to_dict()["priorities"] == [1.5, 0.5, 1.0]


def test_default_priority_is_for_samples_that_bring_none() -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(default_priority=4.0))
    buffer.add_batch([stored("a"), stored("b", priority=2.0)])
    assert buffer.to_dict()["priorities"] == [4.0, 2.0]


@pytest.mark.parametrize("priority", [-1.0, float("nan"), float("inf")])
def test_a_priority_is_a_number_from_zero_up(priority: float) -> None:
    buffer = ReplayBuffer()
    with pytest.raises(UsageError, match="priority"):
        buffer.add(stored("a"), priority=priority)
    assert buffer.is_empty


def test_steps_of_an_episode_and_their_return() -> None:
    buffer = ReplayBuffer()
    for step, reward in [(2, 4.0), (0, 1.0), (1, 2.0)]:
        buffer.add(stored(f"e_{step}", episode_id="e", step_index=step, reward=reward))
    assert [sample.step_index for sample in buffer.get_episode("e")] == [0, 1, 2]
    assert buffer.n_step_return(buffer.get_episode("e")[0], 2, gamma=0.5) == 2.0
    with pytest.raises(UsageError, match="not a step"):
        buffer.n_step_return(stored("x"), 2)


@pytest.mark.parametrize("name", ["buffer.json", "buffer.bin"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_restored_buffer_continues_as_the_first_would(tmp_path: Path, name: str, policy: str) -> None:
    buffer = filled(30, max_size=20, eviction_policy=policy)
    buffer.add(
        stored("full", episode_id="e", episode_status=EpisodeStatus.SUCCESS, step_index=1, total_steps=2, success=True),
        priority=6.5,
    )
    buffer.add(stored("packed", segment_ids=[0, 0, 1], reward=-0.5, difficulty=0.25, priority=2.5))
    buffer.sample(5)
    buffer.remove("s25")
    buffer.save(tmp_path / name)
    twin = ReplayBuffer.load(tmp_path / name)
    assert twin.get_all() == buffer.get_all()
    for number in range(40):
        assert names(twin.sample(3)) == names(buffer.sample(3))
        for one in (twin, buffer):
            one.add(stored(f"later{number}"), priority=number % 5)
        assert names(twin.get_all()) == names(buffer.get_all())
    assert (twin.total_added, twin.total_evicted) == (buffer.total_added, buffer.total_evicted)


@pytest.mark.parametrize("name", ["buffer.json", "buffer.bin"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    filled(5).save(path)
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    path.write_bytes(content)
    with pytest.raises(BatchFileError, match=name):
        ReplayBuffer.load(path)


def test_the_binary_file_is_compact(tmp_path: Path) -> None:
    buffer = ReplayBuffer()
    for number in range(2_000):
        buffer.add(stored(f"s{number:06d}", length=2))
    buffer.save(tmp_path / "buffer.bin")
    assert (tmp_path / "buffer.bin").stat().st_size / 2_000 < 110


@settings(max_examples=100, deadline=None)
@given(
    policy=st.sampled_from([BufferEvictionPolicy.FIFO, BufferEvictionPolicy.PRIORITY]),
    steps=st.lists(st.tuples(WHAT, st.integers(0, 9), st.integers(0, 3)), min_size=20, max_size=60),
)
def test_evictions_match_a_plain_list(policy: BufferEvictionPolicy, steps: list[tuple[str, int, int]]) -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=5, eviction_policy=policy))
    plain: list[list[object]] = []  # [name, priority], oldest first
    for what, number, priority in steps:
        name = f"s{number}"
        if what == "add":
            if len(plain) == 5:
                plain.remove(min(plain, key=lambda one: one[1]) if policy == "priority" else plain[0])
            plain.append([name, float(priority)])
            buffer.add(stored(name), priority=float(priority))
        elif what == "remove":
            plain = [one for one in plain if one[0] != name]
            buffer.remove(name)
        else:
            for one in plain:
                one[1] = float(priority) if one[0] == name else one[1]
            buffer.update_priority(name, float(priority))
        assert names(buffer.get_all()) == [one[0] for one in plain]
        by_name = dict(zip(buffer.snapshot().keys, [one[1] for one in plain], strict=True))
        assert len(by_name) == buffer.size
