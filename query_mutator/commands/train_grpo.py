"""`qm train grpo`: train a model that writes the wording by the answers that its rewrites get."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.conf import arg

from query_mutator.bounds import group_of
from query_mutator.cli.common import JsonFlags, rows_of, show
from query_mutator.cli.console import progress
from query_mutator.cli.outputs import Output, holding
from query_mutator.errors import UsageError
from query_mutator.files import write_checked_json
from query_mutator.files.lock import locked
from query_mutator.files.metrics import MetricsWriter
from query_mutator.llm.flags import ServerAddressFlags
from query_mutator.llm.hf import training_prompt
from query_mutator.session.dataset import split_dataset
from query_mutator.session.models import open_models
from query_mutator.session.task import make_task
from query_mutator.settings.episode import TaskSettings
from query_mutator.settings.grpo import GrpoSettings
from query_mutator.settings.models import ModelSettings, Sampling
from query_mutator.settings.output import Lock
from query_mutator.settings.questions import Questions, Reward
from query_mutator.training.group_rewards import GroupRewards
from query_mutator.types import AS_IS

__all__ = ["GrpoFlags", "train_grpo"]


def _is_run(path: Path) -> bool:
    config = path / "config.json"
    return config.is_file() and holding(b'"grpo":')(config)


@dataclass(frozen=True, kw_only=True)
class GrpoFlags(GrpoSettings, ServerAddressFlags, ModelSettings, Questions, Reward, Sampling, Lock, JsonFlags):
    """Train a model that rewrites questions in one call, by the target's answers to groups of its rewrites.

    Start from a model of `qm train sft`. Training questions are asked; the target answers, and the model is in this
    process.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "model", "output", "max_steps", "group_size", "learning_rate", "kl_coef", "form", "write_price", "dataset",
        "backend", "ollama_url", "gguf", "target_model", "target_max_tokens", "batch_size", "seed", "json",
    )  # fmt: skip

    model: str
    """Folder of a model that writes, a GGUF file of a llama model, or smollm2."""
    output: Annotated[str, arg(name="out", aliases=["--output"]), Output(_is_run, is_folder=True)] = "runs/grpo"
    """Folder for metrics and the finished model."""
    form: str = AS_IS
    """Form in which the target is asked."""


def train_grpo(flags: GrpoFlags) -> None:
    """Train, and print where the model is."""
    if missing := [name for name in ("trl", "peft", "datasets") if importlib.util.find_spec(name) is None]:
        raise UsageError(f"qm train grpo needs {missing[0]}: pip install 'query-mutator[grpo]'")
    output = Path(flags.output)
    with ExitStack() as stack:
        stack.enter_context(locked(output, break_lock=flags.break_lock))
        report = _trained(flags, output, stack)
    rows = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in report.items()}
    show(flags, report, rows_of(rows))


def _trained(flags: GrpoFlags, output: Path, stack: ExitStack) -> dict[str, Any]:
    """Train with the models open and return the report."""
    from query_mutator.batching.training.grpo import train

    choices = (
        {"operators": "tidy", "forms": "none"} if flags.form == AS_IS else {"operators": "none", "forms": flags.form}
    )
    settings = group_of(TaskSettings, flags, **choices)  # nobody chooses among them
    models = stack.enter_context(open_models(group_of(ModelSettings, flags)))
    task = make_task(models, settings, split_dataset(settings).train)
    rewards = GroupRewards(models, task, flags.form, flags.write_price, flags.group_size)
    output.mkdir(parents=True, exist_ok=True)
    write_checked_json(output / "config.json", {"flags": asdict(flags), "grpo": 1})
    metrics = stack.enter_context(closing(MetricsWriter(output, cut_at=0)))
    bar = stack.enter_context(closing(progress("training", flags.max_steps, unit="step")))
    began = time.perf_counter()

    def log(step: int, values: Mapping[str, float]) -> None:
        bar.update()
        metrics.write(values, step=step, wall_s=time.perf_counter() - began)

    questions, prompt = (
        [question.text for question in task.questions],
        (training_prompt(flags.model) or {}).get("prompt"),
    )
    grpo = group_of(GrpoSettings, flags)
    report = train(flags.model, questions, rewards.of, grpo, output, prompt=prompt, seed=flags.seed, on_log=log)
    report |= {"rejected_rewrites": rewards.rejected, "failed_calls": rewards.failed}
    write_checked_json(output / "summary.json", report)
    return report
