"""examples/: the loop of cleanrl_ppo.py, the verdict of mini_qm.py, the rows of reasoning_gym_questions.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from examples import cleanrl_ppo, mini_qm
from query_mutator.data import load_questions
from tests.qm_command import qm


class Echo(gym.Env[Any, Any]):
    """Rewards the action that the observation names; every step ends an episode."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.named = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self.named], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.eye(2, dtype=np.float32)[self.named], float(action == self.named), True, False, {}


def test_it_learns_which_action_is_right() -> None:
    lines: list[str] = []
    args = cleanrl_ppo.Args(total_timesteps=768, num_envs=4, num_steps=32, learning_rate=5e-3)
    agent = cleanrl_ppo.train(SyncVectorEnv([Echo] * 4, autoreset_mode=AutoresetMode.SAME_STEP), args, log=lines.append)
    assert agent.actor(torch.eye(2)).argmax(-1).tolist() == [0, 1]
    assert len(lines) == 6
    assert lines[-1].startswith("768 steps")


SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "reasoning_gym_questions.py"


def test_the_idea_in_one_file_learns_when_to_stop_and_what_to_submit(capsys: pytest.CaptureFixture[str]) -> None:
    mini_qm.main(["--size", "300", "--budget", "1.8"])
    *table, last = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in table}
    assert last.startswith("learned against the question as it is: ")
    assert float(rows["learned"][-1]) < float(rows["vote"][-1]) == 3.0
    assert float(rows["learned"][1]) >= float(rows["as_is"][1])
    assert len(Path(mini_qm.__file__).read_text(encoding="utf-8").splitlines()) <= 200


def test_entries_are_questions_with_gold(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    out = tmp_path / "gym.jsonl"
    subprocess.run([sys.executable, SCRIPT, "gcd", "letter_jumble", "--size", "9", "--out", out], check=True)
    questions = load_questions(out)
    assert len(questions) == 18
    assert {question.tags for question in questions} == {("gcd",), ("letter_jumble",)}
    assert all(question.accept[0] for question in questions)
    assert (
        qm("train", "--backend", "recorded", "--encoder", "hash", "--dataset", out, "--reward", "right=1", "--dry-run")
        == 0
    )
