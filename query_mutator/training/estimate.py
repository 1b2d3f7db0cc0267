"""Estimate the cost of a run from its flags; no server is started or asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from query_mutator.bounds import group_of
from query_mutator.data import Split
from query_mutator.env.rules import EpisodeRules
from query_mutator.evaluation.power import power_in_words
from query_mutator.learners.named import LEARNERS
from query_mutator.operators import local_rewrite
from query_mutator.session.checkpoint import Checkpoint
from query_mutator.session.dataset import split_dataset
from query_mutator.session.judging import make_reward
from query_mutator.session.task import rewrites
from query_mutator.training.checks import check_run, comparison
from query_mutator.training.config import TrainConfig
from query_mutator.training.random_play import Play, random_play
from query_mutator.training.timing import Timing, time_of
from query_mutator.types import Question

__all__ = ["Estimate", "duration", "estimate", "size_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The size of a run; calls and times assume episodes of a policy that chooses uniformly, `play`."""

    config: TrainConfig
    num_actions: int
    play: Play
    num_train: int
    num_validation: int
    test: Sequence[Question]
    asking: int = 0  # parts of the reward that ask a model about each answer
    comparison_calls: int  # of the final comparison with the baselines, at most
    compared: int  # held-out questions that are sure to be asked in it
    decided: tuple[str, ...] = ()  # lines about what the run leaves out

    @property
    def calls(self) -> int:
        """Return the calls for training, those of judges about every answer included."""
        episodes = self.config.total_steps / self.play.steps
        return math.ceil(episodes * (self.play.calls + self.asking * self.play.answers))

    @property
    def gradient_steps(self) -> int:
        """Return the learner's gradient steps; 0 for one that solves for its coefficients."""
        return LEARNERS.get(self.config.algo).planned_updates(self.config)

    @property
    def evaluations(self) -> int:
        """Return the number of periodic evaluations, those at the start and the end included."""
        every = self.config.updates_between_evals
        return 1 + -(-self.config.num_updates // every) if every and self.num_validation else 0

    @property
    def evaluation_questions(self) -> int:
        """Return the questions of a periodic evaluation."""
        return min(self.config.eval_questions, self.num_validation)

    @property
    def evaluation_steps(self) -> int:
        """Return the environment steps of the periodic evaluations."""
        return math.ceil(self.evaluations * self.evaluation_questions * self.play.steps)

    @property
    def timing(self) -> Timing:
        """Return the time of a step on this machine."""
        return time_of(self.config, calls_per_step=self.calls / self.config.total_steps)

    def __str__(self) -> str:
        config, timing = self.config, self.timing
        # The time of a measured step includes its share of the evaluations.
        steps = config.total_steps + (0 if timing.is_measured else self.evaluation_steps)
        comparison_steps = self.comparison_calls * config.total_steps / self.calls
        rows = [
            (
                "questions to learn from / for validation / held out",
                f"{self.num_train} / {self.num_validation} / {len(self.test)}",
            ),
            ("actions (operators, undo, submit)", str(self.num_actions)),
            ("updates", str(config.num_updates)),
            ("gradient steps, about", str(self.gradient_steps)),
            (
                "environment steps",
                f"{config.total_steps} = {config.num_updates} x {config.num_processes} processes"
                f" x {config.num_steps} steps",
            ),
            *(
                [("model calls to learn P(right), at most", str(config.answer_calls))]
                if config.answer == "learned"
                else []
            ),
            ("model calls for training, about", str(self.calls)),
            ("calls in flight", str(config.calls_in_flight)),
            ("evaluations on validation questions", f"{self.evaluations} x {self.evaluation_questions} questions"),
            ("time for training, about", duration(steps * timing.step_s)),
            ("model calls of the final comparison, at most", str(self.comparison_calls)),
            ("time for it, at most about", duration(comparison_steps * timing.step_s)),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name.ljust(width)}  {value}" for name, value in rows]
        power = [power_in_words(self.test[: self.compared], config)] if self.compared else []
        last = [f"by {timing.source}", *power, *self.decided]
        return "\n".join(["estimate (nothing was started)", *lines, *last])


def estimate(config: TrainConfig, checkpoint: Checkpoint | None = None) -> Estimate:
    """Return the size and cost of the run; what a run checks before it starts servers is checked here too."""
    split = split_dataset(config)
    check_run(config, split, checkpoint)
    return size_of(config, split)


def size_of(config: TrainConfig, split: Split) -> Estimate:
    """Return the size of a run on the questions of a split."""
    operators, forms = rewrites(config)
    local, rules = sum(local_rewrite(operator) is not None for operator in operators), group_of(EpisodeRules, config)
    calls, compared = comparison(config, split) if config.evaluate and split.test else (0, 0)
    return Estimate(
        config=config,
        num_actions=len(operators) + len(forms) + len(rules.controls),
        play=random_play(rules, asked=len(operators) - local, local=local, forms=len(forms)),
        num_train=len(split.train),
        num_validation=len(split.validation),
        test=split.test,
        asking=make_reward(config).asking,
        comparison_calls=calls,
        compared=compared,
    )


def duration(seconds: float) -> str:
    """Return a time in words."""
    minutes = seconds / 60
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
