"""Stable-Baselines3's and sb3-contrib's learners and wrappers over GymVecEnv."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

from query_mutator.adapters.sb3 import GymVecEnv
from query_mutator.llm.client import Client
from rl_query_mutator_env import QueryMutationEnv
from tests.unit.adapters.carts import MAX_STEPS, SAME_STEP, MakeTask, Vector, cart_pole


def test_episode_statistics_of_gymnasiums_wrapper_reach_sb3s_logger(vector: Vector) -> None:
    envs = GymVecEnv(RecordEpisodeStatistics(vector([cart_pole] * 2, autoreset_mode=SAME_STEP)))
    model = PPO("MlpPolicy", envs, n_steps=16, batch_size=16, n_epochs=1, device="cpu").learn(32)
    assert model.ep_info_buffer is not None
    assert [episode["l"] for episode in model.ep_info_buffer] == [MAX_STEPS] * 4
    assert [episode["r"] for episode in model.ep_info_buffer] == [MAX_STEPS] * 4
    envs.close()


def test_sb3s_wrappers_and_evaluation_work_over_it(questions: Any) -> None:
    envs = VecNormalize(VecMonitor(questions))
    model = PPO("MlpPolicy", envs, n_steps=8, batch_size=20, n_epochs=1, device="cpu").learn(40)
    returns, lengths = evaluate_policy(model, envs, n_eval_episodes=7, return_episode_rewards=True)
    assert len(returns) == len(lengths) == 7  # type: ignore[arg-type]
    assert all(1 <= length <= 5 for length in lengths)  # type: ignore[union-attr]


def test_maskable_ppo_takes_only_allowed_actions(questions: Any) -> None:
    assert is_masking_supported(questions)
    model = MaskablePPO("MlpPolicy", questions, n_steps=8, batch_size=20, n_epochs=1, device="cpu").learn(40)
    obs = questions.reset()
    for _ in range(10):
        masks = get_action_masks(questions)
        assert np.array_equal(masks, questions.envs.unwrapped.action_masks())
        actions, _ = model.predict(obs, action_masks=masks)
        assert masks[range(5), actions].all()
        obs = questions.step(actions)[0]


def test_dqn_trains_on_it_and_its_texts_are_in_the_infos(questions: Any) -> None:
    DQN("MlpPolicy", questions, learning_starts=10, train_freq=1, device="cpu").learn(40)
    questions.reset()
    _, _, _, infos = questions.step(np.zeros(5, dtype=int))
    assert all({"question_id", "rewrite", "form", "answer"} == set(info["_text"]) for info in infos)


def test_a_single_environment_passes_sb3s_checker(tiny_task: MakeTask, tiny_client: Client) -> None:
    check_env(QueryMutationEnv(tiny_task(), client=tiny_client, on_failure="truncate"))
