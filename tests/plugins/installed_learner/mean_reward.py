"""A learner of one's own: epsilon-greedy on the mean reward of each action, whatever the observation."""

import numpy as np

from query_mutator.learners import BaseLearner


class MeanReward(BaseLearner):
    def __init__(self, obs_dim, num_actions, config, *, mask_columns):
        super().__init__(obs_dim, num_actions, config, mask_columns=mask_columns)
        self.weights |= {"total": np.zeros(num_actions), "count": np.ones(num_actions)}

    @staticmethod
    def choose(weights, obs, rngs, *, greedy):
        values = np.tile(weights["total"] / weights["count"], (len(obs), 1))
        if not greedy:
            values += [rng.normal(scale=0.3, size=values.shape[1]) for rng in rngs]
        return np.where(obs[:, weights["mask_columns"]] > 0, -np.inf, values).argmax(axis=1)

    def observe(self, steps):
        np.add.at(self.weights["total"], steps.actions[steps.valid], steps.rewards[steps.valid])
        np.add.at(self.weights["count"], steps.actions[steps.valid], 1)
        self.samples_learned += int(steps.valid.sum())
