"""PPO as a Learner: what it stores of a step, worked out by hand."""

from __future__ import annotations

import numpy as np

from ppo.config import PPOConfig
from query_mutator.learners.learner import Steps
from query_mutator.learners.ppo import PPOLearner

NUM_ENVS, NUM_STEPS, OBS = 3, 2, 2


def learner_and_steps() -> tuple[PPOLearner, Steps]:
    """Return a learner after its first choice, and the steps that came of it: the second invalid, the third cut."""
    config = PPOConfig(num_processes=NUM_ENVS, num_steps=NUM_STEPS, num_mini_batch=1)
    learner = PPOLearner(OBS, 4, config, mask_columns=None)
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(size=(2, NUM_ENVS, OBS)).astype(np.float32)
    steps = Steps(
        env_ids=np.arange(NUM_ENVS),
        obs=obs,
        actions=learner.act(obs, range(NUM_ENVS)),
        rewards=np.array([0.5, 0.0, -0.25]),
        next_obs=next_obs,
        terminations=np.zeros(NUM_ENVS, dtype=np.bool_),
        truncations=np.array([False, False, True]),
        valid=np.array([True, False, True]),
        versions=np.zeros(NUM_ENVS, dtype=np.int64),
        calls=np.zeros(NUM_ENVS, dtype=np.int64),
    )
    return learner, steps


def test_an_invalid_step_is_stored_as_such() -> None:
    learner, steps = learner_and_steps()
    learner.observe(steps)
    buffer = learner._buffer
    assert buffer.valid[0].tolist() == [True, False, True]
    assert buffer.rewards[0].tolist() == [0.5, 0.0, -0.25]


def test_a_truncated_step_bootstraps_from_the_value_of_its_last_observation() -> None:
    learner, steps = learner_and_steps()
    learner.observe(steps)
    values = learner.frozen.get_value(steps.next_obs)
    stored = learner._buffer.final_values[0].numpy()
    np.testing.assert_allclose(stored, [0.0, 0.0, values[2]], rtol=1e-5)


def test_an_action_from_the_journal_gets_its_own_log_probability() -> None:
    learner, steps = learner_and_steps()
    other = (steps.actions + 1) % 4
    learner.observe(steps._replace(actions=other))
    expected = learner.frozen.logprobs(steps.obs, other)
    np.testing.assert_allclose(learner._buffer.logprobs[0].numpy(), expected, rtol=1e-5)
