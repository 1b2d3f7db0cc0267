"""Prioritized replay: draws by priority, importance weights, overwriting the oldest, and resuming from a state."""

from __future__ import annotations

import numpy as np
import pytest

from query_mutator.learners.iqn.replay import SMALLEST_ERROR, Replay, Transition


def transition(number: int) -> Transition:
    obs = np.full(2, number, dtype=np.float32)
    return Transition(obs, number % 3, float(number), obs + 1, 0.5)


def replay_of(count: int, *, capacity: int = 8, alpha: float = 1.0) -> Replay:
    replay = Replay(capacity, 2, alpha=alpha, rng=np.random.default_rng(0))
    replay.add([transition(number) for number in range(count)])
    return replay


def test_a_sample_holds_whole_transitions() -> None:
    sample = replay_of(5).sample(16, beta=0.4)
    assert sample.obs[:, 0].tolist() == sample.returns.tolist()
    assert (sample.next_obs[:, 0] == sample.obs[:, 0] + 1).all()
    assert (sample.actions == sample.returns.long() % 3).all()
    assert sample.weights.tolist() == [1.0] * 16  # all are new and equally likely


def test_the_oldest_make_room() -> None:
    replay = replay_of(11)
    assert len(replay) == 8
    assert set(replay.sample(64, beta=0.4).returns.tolist()) == set(map(float, range(3, 11)))


def test_draws_follow_priorities_and_weights_undo_them() -> None:
    replay = replay_of(4, capacity=4)
    replay.set_errors(np.arange(4), np.array([1.0, 2.0, 3.0, 4.0]) - SMALLEST_ERROR)
    sample = replay.sample(1000, beta=1.0)
    counts = np.bincount(sample.slots, minlength=4)
    assert counts == pytest.approx([100, 200, 300, 400], abs=1)
    weights = {int(slot): float(weight) for slot, weight in zip(sample.slots, sample.weights, strict=True)}
    assert weights == pytest.approx({0: 1.0, 1: 1 / 2, 2: 1 / 3, 3: 1 / 4})


def test_alpha_0_draws_evenly_whatever_the_errors() -> None:
    replay = replay_of(4, capacity=4, alpha=0.0)
    replay.set_errors(np.arange(4), np.array([0.1, 2.0, 30.0, 400.0]))
    assert np.bincount(replay.sample(400, beta=0.4).slots).tolist() == pytest.approx([100] * 4, abs=1)


def test_new_transitions_have_the_largest_priority_there_was() -> None:
    replay = replay_of(2, capacity=4)
    replay.set_errors(np.arange(2), np.array([1.0, 6.0]) - SMALLEST_ERROR)
    replay.add([transition(2)])
    assert np.bincount(replay.sample(1300, beta=0.4).slots) == pytest.approx([100, 600, 600], abs=1)


def test_it_resumes_from_its_state() -> None:
    replay = replay_of(11)
    replay.set_errors(np.arange(8), np.linspace(0.1, 2.0, 8))
    copy = Replay(8, 2, alpha=1.0, rng=np.random.default_rng(0))
    copy.load_state_dict(replay.state_dict())
    copy.rng.bit_generator.state = replay.rng.bit_generator.state
    for one in (replay, copy):
        one.add([transition(11)])
    ours, theirs = replay.sample(32, beta=0.5), copy.sample(32, beta=0.5)
    assert ours.slots.tolist() == theirs.slots.tolist()
    assert ours.returns.tolist() == theirs.returns.tolist()
    assert ours.weights.tolist() == theirs.weights.tolist()


def test_the_error_for_a_state_too_large_names_the_size() -> None:
    with pytest.raises(ValueError, match="replay_size=5"):
        replay_of(0, capacity=4).load_state_dict(replay_of(5).state_dict())
