"""Estimate the cost of a run from its flags alone; nothing is started and no server is asked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from query_mutator.embedded.latency import Latency
from query_mutator.llm.backends import AUTO, EMBEDDED
from query_mutator.training.config import TrainConfig
from query_mutator.training.learners import LEARNERS

EMBEDDED_CALL_S = 0.003  # computing time of the embedded assistant for one call, on one core
MODEL_CALL_S = 2.0  # a model of about 3 B parameters on a desktop GPU
STEP_S = 0.003  # embedding, scoring, policy and update, for one environment step


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The size of a run; calls and times assume a policy that chooses uniformly among `num_actions`."""

    config: TrainConfig
    num_actions: int
    num_train: int
    num_test: int

    @property
    def episode_steps(self) -> float:
        """Return the mean length of an episode, which ends with probability 1/A at each step, or at the limit."""
        stays = 1 - 1 / self.num_actions
        return sum(stays**step for step in range(self.config.max_episode_steps))

    @property
    def calls(self) -> int:
        """Return the calls for training: two per rewrite, and the first answer of every episode."""
        rewrites = (self.num_actions - 2) / self.num_actions
        episodes = self.config.total_steps / self.episode_steps + self.config.num_processes
        return math.ceil(2 * rewrites * self.config.total_steps + episodes)

    @property
    def gradient_steps(self) -> int:
        """Return the learner's gradient steps; 0 for one that solves for its coefficients."""
        return LEARNERS.get(self.config.algo).planned_updates(self.config)

    @property
    def evaluations(self) -> int:
        """Return the number of periodic evaluations, the one at the start included."""
        every = self.config.updates_between_evals
        return 1 + self.config.num_updates // every if every and self.num_test else 0

    @property
    def call_s(self) -> float:
        """Return the assumed time of one call in seconds."""
        config = self.config
        if config.backend not in (AUTO, EMBEDDED) or config.ollama_url or config.openai_url or config.target_model:
            return MODEL_CALL_S
        latency = Latency.from_settings(
            latency_ms=config.latency_ms, sigma=config.latency_sigma, running_speed=config.running_speed, seed=0
        )
        return max(EMBEDDED_CALL_S, latency.mean_s)

    @property
    def seconds(self) -> float:
        """Return the time training takes: calls in parallel, everything else in sequence."""
        return self.calls * self.call_s / self.config.calls_in_flight + self.config.total_steps * STEP_S

    def __str__(self) -> str:
        config = self.config
        rows = [
            ("questions to learn from / held out", f"{self.num_train} / {self.num_test}"),
            ("actions (operators, undo, submit)", str(self.num_actions)),
            ("updates", str(config.num_updates)),
            ("gradient steps, about", str(self.gradient_steps)),
            (
                "environment steps",
                f"{config.total_steps} = {config.num_updates} x {config.num_processes} processes"
                f" x {config.num_steps} steps",
            ),
            ("model calls for training, about", str(self.calls)),
            ("calls in flight", str(config.calls_in_flight)),
            (
                "evaluations on held-out questions",
                f"{self.evaluations} x {min(config.eval_questions, self.num_test)} questions",
            ),
            ("time for training, about", _duration(self.seconds)),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name.ljust(width)}  {value}" for name, value in rows]
        assumed = f"assumed: {1000 * self.call_s:.0f} ms a call, actions chosen evenly"
        return "\n".join(
            ["plan (nothing was started)", *lines, f"{assumed}; evaluations and the final comparison are extra"]
        )


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
