"""The replay buffer: three evictions, priorities, weights, resume; against a naive model where it matters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from query_mutator.batching.files import BatchFileError
from query_mutator.batching.streaming.replay_buffer import ReplayBuffer
from query_mutator.batching.streaming.replay_types import BufferEvictionPolicy, ReplayBufferConfig
from query_mutator.batching.streaming.types import EpisodeStatus, SampleSource, StreamSample
from query_mutator.errors import UsageError

POLICIES = list(BufferEvictionPolicy)


def make(name: str, *, length: int = 3, **fields: object) -> StreamSample:
    return StreamSample(
        input_ids=range(length), loss_mask=[1] * length, sample_id=name, dataset_id="d", source="gym", **fields
    )


def filled(count: int, **settings: object) -> ReplayBuffer:
    buffer = ReplayBuffer(ReplayBufferConfig(**settings))
    for number in range(count):
        buffer.add(make(f"s{number}"), priority=float(number % 7))
    return buffer


def names(samples: list[StreamSample]) -> list[str]:
    return [sample.sample_id for sample in samples]


def test_priority_evicts_the_lowest_and_of_equals_the_older() -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=3, eviction_policy="priority"))
    for name, priority in [("a", 2.0), ("b", 1.0), ("c", 1.0), ("d", 5.0), ("e", 0.5), ("f", 3.0)]:
        buffer.add(make(name), priority=priority)
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
    buffer.add_batch([make("a"), make("b"), make("never")], [1.0, 9.0, 0.0])
    drawn = Counter(names(buffer.sample(20_000)))
    assert drawn["never"] == 0
    assert drawn["b"] / drawn["a"] == pytest.approx(3.0, rel=0.1)


def test_when_all_priorities_are_zero_draws_are_uniform() -> None:
    buffer = ReplayBuffer()
    buffer.add_batch([make("a"), make("b")], [0.0, 0.0])
    assert set(names(buffer.sample(100))) == {"a", "b"}


def test_importance_weights_undo_the_priorities() -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(priority_alpha=1.0))
    buffer.add_batch([make("a"), make("b")], [1.0, 3.0])
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
    buffer.add(make("a"))
    (drawn,) = buffer.sample(1)
    assert drawn == make("a").with_replay().model_copy(update={"timestamp": drawn.timestamp})
    assert (drawn.replay_count, drawn.source) == (1, SampleSource.REPLAY)
    assert buffer.get_all()[0].replay_count == 0


def test_uniform_draws_are_different_samples() -> None:
    assert sorted(names(filled(6).sample_uniform(10))) == [f"s{number}" for number in range(6)]


def test_samples_of_one_id_are_not_merged() -> None:
    buffer = ReplayBuffer()
    buffer.add_batch([make("a", length=1), make("a#2", length=2), make("a", length=3), make("a", length=4)])
    snapshot = buffer.snapshot()
    assert snapshot.get_lengths() == {"a": 1, "a#2": 2, "a#3": 3, "a#4": 4}
    assert buffer.update_priority("a", 5.0)
    assert buffer.remove("a") == 3
    assert names(buffer.get_all()) == ["a#2"]


def test_means_are_of_what_is_held() -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=2))
    for name, difficulty, success in [("a", 1.0, False), ("b", 0.25, True), ("c", None, None)]:
        buffer.add(make(name, difficulty=difficulty, success=success, reward=None if success is None else 2.0))
    assert buffer.mean_difficulty == 0.25
    assert buffer.success_rate == 1.0
    assert buffer.mean_reward == 2.0
    untracked = ReplayBuffer(ReplayBufferConfig(max_size=1, track_difficulty=False, track_success=False))
    untracked.add_batch([make("a", difficulty=0.5, success=True), make("b", difficulty=0.5)])
    assert (untracked.mean_difficulty, untracked.success_rate) == (0.0, 0.0)


def test_filters_and_bounds_of_difficulty() -> None:
    buffer = ReplayBuffer()
    buffer.add_batch([make("easy", difficulty=0.1, success=True), make("hard", difficulty=0.9), make("none")])
    assert names(buffer.filter_by_difficulty(0.5, 1.0)) == ["hard"]
    assert names(buffer.filter_by_success(True)) == ["easy"]
    assert names(buffer.filter_by_source(SampleSource.GYM)) == ["easy", "hard", "none"]
    assert set(names(buffer.sample(20, min_difficulty=0.5))) == {"hard"}
    with pytest.raises(UsageError, match="difficulty"):
        buffer.sample(1, min_difficulty=0.95)


def test_stale_samples_leave_whatever_their_priority() -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(eviction_policy="priority", max_staleness=2))
    for number in range(5):
        buffer.add(make(f"s{number}"), priority=9.0 - number)
    assert names(buffer.get_all()) == ["s3", "s4"]


def test_priorities_by_reward_move_towards_reward_plus_one() -> None:
    buffer = ReplayBuffer()
    buffer.add_batch([make("a", reward=1.0), make("b", reward=-3.0), make("c")], [1.0, 1.0, 1.0])
    buffer.update_priorities_by_reward(alpha=0.5)
    assert buffer.to_dict()["priorities"] == [1.5, 0.5, 1.0]


def test_default_priority_is_for_samples_that_bring_none() -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(default_priority=4.0))
    buffer.add_batch([make("a"), make("b", priority=2.0)])
    assert buffer.to_dict()["priorities"] == [4.0, 2.0]


@pytest.mark.parametrize("priority", [-1.0, float("nan"), float("inf")])
def test_a_priority_is_a_number_from_zero_up(priority: float) -> None:
    buffer = ReplayBuffer()
    with pytest.raises(UsageError, match="priority"):
        buffer.add(make("a"), priority=priority)
    assert buffer.is_empty


def test_steps_of_an_episode_and_their_return() -> None:
    buffer = ReplayBuffer()
    for step, reward in [(2, 4.0), (0, 1.0), (1, 2.0)]:
        buffer.add(make(f"e_{step}", episode_id="e", step_index=step, reward=reward))
    assert [sample.step_index for sample in buffer.get_episode("e")] == [0, 1, 2]
    assert buffer.n_step_return(buffer.get_episode("e")[0], 2, gamma=0.5) == 2.0
    with pytest.raises(UsageError, match="not a step"):
        buffer.n_step_return(make("x"), 2)


@pytest.mark.parametrize("name", ["buffer.json", "buffer.bin"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_restored_buffer_continues_as_the_first_would(tmp_path: Path, name: str, policy: str) -> None:
    buffer = filled(30, max_size=20, eviction_policy=policy)
    buffer.add(
        make("full", episode_id="e", episode_status=EpisodeStatus.SUCCESS, step_index=1, total_steps=2, success=True),
        priority=6.5,
    )
    buffer.add(make("packed", segment_ids=[0, 0, 1], reward=-0.5, difficulty=0.25, priority=2.5))
    buffer.sample(5)
    buffer.remove("s25")
    buffer.save(tmp_path / name)
    twin = ReplayBuffer.load(tmp_path / name)
    assert twin.get_all() == buffer.get_all()
    for number in range(40):
        assert names(twin.sample(3)) == names(buffer.sample(3))
        for one in (twin, buffer):
            one.add(make(f"later{number}"), priority=number % 5)
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
        buffer.add(make(f"s{number:06d}", length=2))
    buffer.save(tmp_path / "buffer.bin")
    assert (tmp_path / "buffer.bin").stat().st_size / 2_000 < 110


WHAT = st.sampled_from(["add", "add", "add", "update", "remove"])  # mostly full, or nothing would be evicted


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
            buffer.add(make(name), priority=float(priority))
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
