"""Prioritized replay: draws, weights, overwriting, resuming; and n-step transitions."""

from __future__ import annotations

import numpy as np
import pytest

from query_mutator.learners.iqn.replay import SMALLEST_ERROR, NStep, Replay, Transition
from query_mutator.learners.learner import Steps


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


def obs(number: int) -> np.ndarray:
    return np.array([number], dtype=np.float32)


def one_step(env: int, i: int, reward: float, *, end: str = "", valid: bool = True) -> Steps:
    """Action i in one environment, which sees i and leads to i + 1."""
    return Steps(
        env_ids=np.array([env]),
        obs=obs(i)[None],
        actions=np.array([i]),
        rewards=np.array([reward]),
        next_obs=obs(i + 1)[None],
        terminations=np.array([end == "terminated"]),
        truncations=np.array([end == "truncated"]),
        valid=np.array([valid]),
        versions=np.array([0]),
        calls=np.array([0]),
    )


def steps(nstep: NStep, *rewards: float, end: str = "", failed: tuple[int, ...] = (), env: int = 0) -> list[Transition]:
    """Take a step for each reward, action i seeing i and leading to i + 1; `end` is how the last one ended."""
    done: list[Transition] = []
    for i, reward in enumerate(rewards):
        last = i == len(rewards) - 1
        done += nstep.add(one_step(env, i, reward, end=end if last else "", valid=i not in failed))
    return done


def rounded(transitions: list[Transition]) -> list[tuple[int, float, int, float]]:
    return [(int(t.obs[0]), round(t.n_return, 6), int(t.next_obs[0]), round(t.discount, 6)) for t in transitions]


def test_two_steps_are_summed_and_the_third_is_looked_up() -> None:
    assert rounded(steps(NStep(1, 2, 0.5), 1.0, 2.0, 4.0)) == [(0, 2.0, 2, 0.25), (1, 4.0, 3, 0.25)]


@pytest.mark.parametrize(("end", "future"), [("terminated", (0.0, 0.0)), ("truncated", (0.25, 0.5))])
def test_a_terminated_episode_has_no_future_and_a_truncated_one_would_have_gone_on(
    end: str, future: tuple[float, float]
) -> None:
    found = rounded(steps(NStep(1, 3, 0.5), 1.0, 2.0, end=end))
    assert found == [(0, 2.0, 2, future[0]), (1, 2.0, 2, future[1])]


def test_the_next_episode_starts_without_pending_steps() -> None:
    nstep = NStep(1, 3, 0.5)
    steps(nstep, 1.0, end="terminated")
    assert rounded(steps(nstep, 5.0, 5.0, end="terminated")) == [(0, 7.5, 2, 0.0), (1, 5.0, 2, 0.0)]


def test_a_failed_step_is_skipped_as_if_it_had_not_happened() -> None:
    found = steps(NStep(1, 2, 0.5), 1.0, 99.0, 2.0, 4.0, failed=(1,))
    assert rounded(found) == [(0, 2.0, 3, 0.25), (2, 4.0, 4, 0.25)]
    assert [t.action for t in found] == [0, 2]


def test_an_episode_cut_off_at_a_failed_step_still_ends() -> None:
    assert rounded(steps(NStep(1, 3, 0.5), 1.0, 99.0, end="truncated", failed=(1,))) == [(0, 1.0, 2, 0.5)]


def test_environments_do_not_mix() -> None:
    nstep = NStep(2, 2, 0.5)
    assert steps(nstep, 1.0, env=0) == []
    assert steps(nstep, 7.0, env=1) == []
    assert rounded(nstep.add(one_step(0, 1, 2.0))) == [(0, 2.0, 2, 0.25)]


def test_it_resumes_from_its_state_and_can_forget() -> None:
    first, second = NStep(1, 3, 0.5), NStep(1, 3, 0.5)
    steps(first, 1.0, 2.0)
    second.load_state_dict(first.state_dict())
    (whole,) = second.add(one_step(0, 2, 4.0))
    assert whole.n_return == pytest.approx(1.0 + 1.0 + 1.0)
    first.forget()
    assert first.add(one_step(0, 2, 4.0)) == []
