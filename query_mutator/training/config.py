"""Every flag of the trainer in one frozen record, in groups, and what a run with them costs, without a server.

The estimate says whether the run can start, and what it leaves out:

checks                   its questions, its machine, its bounds
--answer learned         P(right) learned within a tenth of the calls of training
periodic evaluations     within half as many calls as training makes, unless a flag says which; all of them with
                         recorded replies, which take no time
the comparison           the same: at most as many calls as training, of which about half are made, which is a third of
                         the run; in a short run more, for the questions that a verdict needs
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ppo.config import PPOConfig
from query_mutator import settings
from query_mutator.bounds import defaults, group_of
from query_mutator.cli.console import note
from query_mutator.cli.flags import Base, parse_flags
from query_mutator.cli.outputs import rows_of
from query_mutator.data import Split
from query_mutator.env.episode import EpisodeRules
from query_mutator.errors import UsageError
from query_mutator.evaluation.heldout import SEARCH_SHARE, EvaluationCost, power_in_words
from query_mutator.files.gguf_file import gguf_address
from query_mutator.learners import LEARNERS
from query_mutator.llm.backends import ServerAddressFlags, choose_backend
from query_mutator.llm.recorded import recording_address
from query_mutator.operators import local_rewrite
from query_mutator.plan.choose import MIN_QUESTIONS
from query_mutator.session.models import call_time
from query_mutator.session.task import check_gold, guard_requests, make_reward, rewrites

PROG = "train_query_mutator.py"
EVAL_POINTS = 10  # periodic evaluations in a run, when --eval-interval leaves it open


@dataclass(frozen=True, kw_only=True)
@defaults(
    lr=2e-3,
    gamma=0.9,
    ask="form",
    max_asks=4,
    max_episode_steps=6,
    answer="learned",
    budget=2.0,
    call_price=(0.005, 0.02, 0.08),
)
class TrainConfig(
    settings.Run,
    settings.PeriodicEvaluation,
    settings.Comparison,
    settings.CallBudget,
    settings.FailureRate,
    settings.TaskSettings,
    ServerAddressFlags,
    settings.ModelSettings,
    settings.Learning,
    PPOConfig,
    settings.DirectConfig,
    settings.IQNConfig,
):
    """Learn which rewrite makes a question get a better answer.

    In each step the mutator model rewrites a question or the target model answers it. With --deterministic the results
    do not depend on --batch-size or --no-batching, to the bit; without it they agree statistically only, because the
    last bits of a matrix product depend on its number of rows.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "num_env_steps", "num_processes", "num_steps", "batch_size", "backend", "ollama_url", "gguf", "target_model",
        "mutator_model", "dataset", "algo", "seed", "lr", "save_dir", "resume", "dry_run",
    )  # fmt: skip
    IN_FILE: ClassVar[tuple[str, ...]] = (
        "answer_column", "call_price", "clip_vloss", "entropy_coef",
        "epsilon_end", "epsilon_fraction", "epsilon_start", "kappa", "keep_alive", "local_server_url",
        "max_grad_norm", "max_pending_updates", "max_reply_mb", "mutator_max_tokens", "n_step", "norm_adv",
        "num_cosines", "num_eval_quantiles", "num_models", "num_quantiles", "per_alpha", "per_beta", "price",
        "question_column", "random_share", "ray_address", "replay_size", "sample_temperature", "samples",
        "skip_unchanged", "sync_every", "target_kl", "target_tau", "value_loss_coef",
    )  # fmt: skip

    def __post_init__(self) -> None:
        object.__setattr__(self, "gguf", tuple(map(gguf_address, self.gguf)))
        if self.recording is not None:
            object.__setattr__(self, "recording", recording_address(self.recording))
        self._fit_asking()
        super().__post_init__()
        if self.latency_ms and self.running_speed:
            raise ValueError("latency_ms and running_speed both set the time of a call; leave one of them out")
        self._check_learner()

    def _fit_asking(self) -> None:
        """Drop the defaults that need several answers, or a policy that asks, where there are none."""
        if self.ask == "every_step":
            if self.max_asks not in (None, TrainConfig.max_asks):
                raise ValueError(f"--max-asks {self.max_asks} needs --ask form; add it, or leave --max-asks out")
            object.__setattr__(self, "max_asks", None)
        if self.max_asks == 1 or self.ask == "every_step":
            for name in ("answer", "budget", "call_price"):
                if getattr(self, name) == getattr(TrainConfig, name):
                    object.__setattr__(self, name, getattr(EpisodeRules, name, None))

    def _check_learner(self) -> None:
        learner = LEARNERS.get(self.algo)
        if learner.made_by:
            raise ValueError(f"--algo {self.algo} is not trained; make it with `{learner.made_by}`")
        if self.deterministic and not learner.deterministic:
            raise ValueError(f"--algo {self.algo} has no deterministic mode; leave out --deterministic")
        self._check_workers()

    def _check_workers(self) -> None:
        if self.engine == "local":
            for name, is_given in (("num_workers", self.num_workers > 1), ("local_server_url", self.local_server_url)):
                if is_given:
                    raise ValueError(f"--{name.replace('_', '-')} needs --engine ray")
            return
        if self.num_workers > self.num_processes:
            raise ValueError(f"--num-workers {self.num_workers} is more than --num-processes {self.num_processes}")
        calls, flag = (self.batch_size, "--batch-size") if self.use_batching else (1, "--no-batching")
        if self.num_workers > calls:
            raise ValueError(f"--num-workers {self.num_workers} is more than the {calls} calls in flight of {flag}")

    @property
    def updates_between_evals(self) -> int:
        """Return the updates between two periodic evaluations; 0 for none."""
        if self.eval_interval is not None:
            return self.eval_interval
        return max(1, round(self.num_updates / EVAL_POINTS))


def parse_config(argv: Sequence[str], *, base: Base | None = None, prog: str = PROG) -> TrainConfig:
    """Return the trainer's flags: the command line over --config over `base` or ./qm.toml over the defaults."""
    return parse_flags(TrainConfig, argv, prog=prog, base=base, table="train")


def remarks(config: TrainConfig) -> list[str]:
    """Return what a user should know before the run starts, one line each."""
    lines = []
    if config.total_steps != config.num_env_steps:
        lines.append(
            f"--num-env-steps {config.num_env_steps} is not a whole number of rollouts "
            f"({config.num_processes} processes x {config.num_steps} steps): rounded up to {config.total_steps}"
        )
    if not config.use_batching:
        lines.append("--no-batching: --batch-size is ignored, calls are made one at a time")
    elif not config.batch_size <= config.num_processes <= 2 * config.batch_size:
        lines.append(_size_advice(config.batch_size, config.num_processes))
    return lines


def _size_advice(batch_size: int, num_processes: int) -> str:
    rule = "advice: batch_size <= num_processes <= 2 x batch_size keeps all calls in flight"
    if num_processes < batch_size:
        return f"{rule}; {num_processes} processes cannot fill {batch_size} calls: try --batch-size {num_processes}"
    return f"{rule}; {num_processes} processes wait for {batch_size} calls: try --batch-size {-(-num_processes // 2)}"


# --- the estimate ----------------------------------------------------------------------------------------------------

STEP_S = 0.003  # embedding, scoring, policy and update, for one environment step
SHARE, IN_WORDS = 1 / 2, "half"  # of the calls of training
ANSWERS_SHARE = 1 / 10  # of them, for the answers that P(right) is learned from
FEWEST_QUESTIONS = 20  # of a periodic evaluation


def check_run(config: TrainConfig, split: Split) -> None:
    """Raise a UsageError for settings that do not fit the questions."""
    if split.validation and not split.train:
        raise UsageError(
            f"{config.dataset}: --validation-fold {config.validation_fold} takes all {len(split.validation)} questions "
            "that are not held out; give another fold, or none"
        )
    if not split.train:
        raise UsageError(f"{config.dataset}: no question is left to train on, all are held out; add more questions")
    choose_backend(config.backend, config.urls)
    if len(config.targets) > 1 and config.engine == "ray":
        raise UsageError(f"--engine ray takes one --target-model, not {', '.join(config.targets)}; leave it out")
    is_needed = config.resume is not None or any(
        local_rewrite(one) is None for one in rewrites(config, tuple(config.targets))[0]
    )
    if config.mutator_model not in (None, config.first_model) and not is_needed:
        raise UsageError(
            f"--mutator-model {config.mutator_model} would never be called: no model carries out "
            f"{config.operators or 'a rewrite'}; leave it out, or name other --operators, as spelling,neutral"
        )
    check_gold([*split.train, *split.validation, *split.test], config)
    if config.evaluate and not split.test:
        note(f"{config.dataset}: no question is held out, so the run ends without a comparison; add more questions")
    comparison_cost(config, split).within(config.eval_calls)


def use_device(config: TrainConfig) -> None:
    """Load torch with one thread: more would compete with calls. UsageError for a device that is not there."""
    import torch

    from ppo.algorithm import usable_device

    try:
        usable_device(config.device)
    except ValueError as error:
        raise UsageError(str(error)) from error
    torch.set_num_threads(1)


def comparison_cost(config: TrainConfig, split: Split) -> EvaluationCost:
    """Return the final comparison on all held-out questions."""
    operators, forms = rewrites(config, tuple(config.targets))
    asked = sum(local_rewrite(operator) is None for operator in operators)
    return EvaluationCost(
        num_test=len(split.test),
        num_guard=len(guard_requests(split.guard, with_bundled=config.guard)),
        num_train=len(split.train),
        num_operators=len(operators) + len(forms),
        num_asked=asked,
        episode_calls=group_of(EpisodeRules, config).max_calls(asked=asked),
        asking=make_reward(config).asking,
        search_calls=config.plan_calls,
        num_models=len(config.targets),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The size of a run; calls and times assume a policy that chooses uniformly."""

    config: TrainConfig
    split: Split
    calls: int  # for training, those of judges about every answer included
    decided: tuple[str, ...] = ()  # lines about what the run leaves out

    @property
    def comparison(self) -> tuple[int, int]:
        """Return the calls of the final comparison at most, and the held-out questions that are sure to be asked."""
        if not (self.config.evaluate and self.split.test):
            return 0, 0
        cost, bound = comparison_cost(self.config, self.split), self.config.eval_calls
        return min(cost.calls, bound or cost.calls), cost.within(bound).num_test

    @property
    def evaluations(self) -> tuple[int, int]:
        """Return the number of periodic evaluations, those at the start and the end included, and their questions."""
        every = self.config.updates_between_evals
        times = 1 + -(-self.config.num_updates // every) if every and self.split.validation else 0
        return times, min(self.config.eval_questions, len(self.split.validation))

    def __str__(self) -> str:
        config, (call_s, source), (times, questions) = self.config, call_time(self.config), self.evaluations
        (operators, forms), (comparison_calls, compared) = rewrites(config, tuple(config.targets)), self.comparison
        controls = group_of(EpisodeRules, config).controls
        calls_per_step = self.calls / config.total_steps
        step_s = calls_per_step * call_s + STEP_S
        steps = config.total_steps + times * questions * config.max_episode_steps
        parts = f"{config.num_updates} x {config.num_processes} processes x {config.num_steps} steps"
        to_learn = {"model calls to learn P(right), at most": config.answer_calls} if config.answer == "learned" else {}
        sets = (self.split.train, self.split.validation, self.split.test)
        rows = {
            "questions to learn from / for validation / held out": " / ".join(str(len(one)) for one in sets),
            "actions: operators, forms, ask, undo, submit": len((*operators, *forms, *controls)),
            "updates": config.num_updates,
            "gradient steps, about": LEARNERS.get(config.algo).planned_updates(config),
            "environment steps": f"{config.total_steps} = {parts}",
            **to_learn,
            "model calls for training, about": self.calls,
            "calls in flight": config.calls_in_flight,
            "evaluations on validation questions": f"{times} x {questions} questions",
            "time for training, about": duration(steps * step_s),
            "model calls of the final comparison, at most": comparison_calls,
            "time for it, at most about": duration(comparison_calls / calls_per_step * step_s),
        }
        power = [power_in_words(self.split.test[:compared])] if compared else []
        last = [f"by {source}", *power, *self.decided]
        return "\n".join(["estimate (nothing was started)", textwrap.indent(rows_of(rows), "  "), *last])


def estimate(config: TrainConfig, split: Split, *, is_live: bool) -> Estimate:
    """Return the size of a run on the questions of a split, with what its flags leave open decided.

    No evaluation is left out unless a model `is_live`: other calls take next to no time.
    """
    operators, forms = rewrites(config, tuple(config.targets))
    local, rules = sum(local_rewrite(operator) is not None for operator in operators), group_of(EpisodeRules, config)
    rewritten, answers = calls_per_step(rules, asked=len(operators) - local, local=local, forms=len(forms))
    per_step = rewritten + (1 + make_reward(config).asking) * answers
    size = Estimate(config=config, split=split, calls=math.ceil(config.total_steps * per_step))
    return bounded(with_shorter_comparison(size) if is_live else size, is_live=is_live)


def with_shorter_comparison(size: Estimate) -> Estimate:
    """Return the size of a run whose final comparison takes a share of its calls, unless flags say how many.

    The questions that a verdict needs are asked even so, then without a search for a plan.
    """
    config, (bound, asked) = size.config, size.comparison
    if not asked or {"eval_calls", "plan_calls"} & config.given:
        return size
    whole = comparison_cost(config, size.split)
    few = {name: min(MIN_QUESTIONS, getattr(whole, name)) for name in ("num_test", "num_guard", "num_train")}
    least = replace(whole, search_calls=0, **few).calls
    most, searches = max(size.calls, least), size.calls * (1 - SEARCH_SHARE) >= least
    if most >= bound:
        return size
    size = replace(size, config=replace(config, eval_calls=most, plan_calls=config.plan_calls if searches else 0))
    calls, compared = size.comparison
    line = (
        f"final comparison: {compared} of {len(size.split.test)} questions, "
        f"{'' if searches else 'without a search for a plan, '}at most {calls:,} calls, fewer where shared, after "
        f"{size.calls:,} of training; --eval-calls N asks more, --no-evaluate none"
    )
    return replace(size, decided=(line,))


def bounded(size: Estimate, *, is_live: bool) -> Estimate:
    """Return the size of a run whose answers to learn from and periodic evaluations take a share of its calls."""
    config = size.config
    if config.answer == "learned" and "answer_calls" not in config.given:
        config = replace(config, answer_calls=min(config.answer_calls, max(1, int(ANSWERS_SHARE * size.calls))))
    (times, questions), most = size.evaluations, SHARE * config.total_steps / config.max_episode_steps  # in episodes
    if not is_live or {"eval_interval", "eval_questions"} & config.given or times * questions <= most:
        return replace(size, config=config)
    share, fewest = f"{IN_WORDS} of the {size.calls:,} calls of training", min(FEWEST_QUESTIONS, questions)
    for every, number in ((config.updates_between_evals, times), (config.num_updates, 2)):
        if (count := int(most / number)) >= fewest:
            line = f"periodic evaluations: {number} x {count} questions, {share}; --eval-questions N asks others"
            config = replace(config, eval_interval=every, eval_questions=count)
            return replace(size, config=config, decided=(*size.decided, line))
    line = f"periodic evaluations: none (two, of {fewest} questions, exceed {share}); --eval-questions N makes them"
    return replace(size, config=replace(config, eval_interval=0), decided=(*size.decided, line))


def calls_per_step(rules: EpisodeRules, *, asked: int, local: int, forms: int) -> tuple[float, float]:
    """Return the mean calls to mutator and target in a step of uniform actions, of which a model carries out `asked`.

    A form asks, and so does *ask*; what is asked before submit is one step in many.
    """
    count, answers = asked + local + forms + len(rules.controls), forms + 1
    if not rules.policy_asks:
        answers = asked + local + forms + 2  # every rewrite, and the original question
    elif rules.max_asks == 1:
        count = asked + local + 2 * forms + 1  # a form is followed by submit
    return asked / count, answers / count


def duration(seconds: float) -> str:
    """Return a time in words."""
    minutes = seconds / 60
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
