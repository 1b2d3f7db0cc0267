"""Train a model that writes the wording by GRPO: groups of rewrites of a question, scored by the target's answers.

Group-relative policy optimization (Shao et al., 2024, arXiv:2402.03300) by TRL, with low-rank adapters; the penalty is
the KL divergence from the model that it started from.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.scheduling import run_flow
from query_mutator.env.task import Task
from query_mutator.llm.prompts import clean_rewrite
from query_mutator.operators import WRITE, OperatorContext, rejecting_guard
from query_mutator.session.models import OpenModels
from query_mutator.settings.grpo import GrpoSettings
from query_mutator.types import ErrorInfo

__all__ = ["LOGGED", "GroupRewards", "train_grpo"]

#: TRL's names of the figures that are logged.
LOGGED = {
    "reward": "grpo/reward",
    "reward_std": "grpo/reward_std",
    "kl": "grpo/kl",
    "completions/mean_length": "grpo/tokens",
    "learning_rate": "charts/learning_rate",
}


@dataclass
class GroupRewards:
    """What rewrites are worth: the score of the target's answer to each in a form, minus the price of both calls.

    A rewrite that fails a guard counts as the question as it stands, as when a policy uses it. A call that failed is no
    reward: its rewrite gets the mean of its group, which teaches nothing.
    """

    models: OpenModels
    task: Task
    form: str
    call_price: float
    group_size: int
    rejected: int = 0
    failed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def of(self, indices: Sequence[int], texts: Sequence[str]) -> list[float]:
        """Return the rewards [n] of rewrites of the questions `indices`, in groups."""
        with ThreadPoolExecutor(self.models.settings.batch_size) as pool:
            scores = np.array(list(pool.map(self._score, indices, texts))).reshape(-1, self.group_size)
        known = ~np.isnan(scores)
        self.failed += int((~known).sum())
        means = np.where(known, scores, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
        return [float(score) - 2 * self.call_price for score in np.where(known, scores, means[:, None]).ravel()]

    def _score(self, index: int, text: str) -> float:
        """Return the score of the answer to a rewrite, NaN when a call failed for good."""
        engine = EpisodeEngine.open(self.task, index, observes=False)
        flow = engine.ask(asked=(self.wording(index, text), self.form))
        models = self.models
        error = run_flow(flow, client=models.calls.client, encoder=models.encoder, retry_policy=models.retry_policy)
        return float("nan") if isinstance(error, ErrorInfo) else engine.score

    def wording(self, index: int, text: str) -> str:
        """Return the wording that is asked after a reply of the model."""
        question = self.task.questions[index].text
        rewrite = clean_rewrite(text) or question
        if rejecting_guard(WRITE, question, rewrite, context=OperatorContext()) is None:
            return rewrite
        with self._lock:
            self.rejected += 1
        return question


def train_grpo(
    model: Any,
    tokenizer: Any,
    rewards: GroupRewards,
    settings: GrpoSettings,
    *,
    prompt: str | None,
    work: Path,
    on_log: Callable[[int, Mapping[str, float]], None],
) -> tuple[Any, dict[str, Any]]:
    """Return the trained model with its adapters, and the report; TRL uses the folder `work`.

    `prompt` has {instruction} for the question; None is the tokenizer's chat template. `on_log` gets a step and its
    figures under TRL's names.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Logged(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            on_log(state.global_step, logs or {})

    def reward(completions: list[Any], index: list[int], **_: Any) -> list[float]:
        return rewards.of(index, [one if isinstance(one, str) else one[-1]["content"] for one in completions])

    arguments = GRPOConfig(
        output_dir=str(work),
        max_steps=settings.max_steps,
        per_device_train_batch_size=settings.group_size,
        num_generations=settings.group_size,
        learning_rate=settings.learning_rate,
        beta=settings.kl_coef,
        max_completion_length=settings.write_tokens,
        temperature=settings.write_temperature,
        seed=settings.seed,
        bf16=settings.bf16,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    texts = [question.text for question in rewards.task.questions]
    rows = [
        {
            "prompt": prompt.replace("{instruction}", text) if prompt else [{"role": "user", "content": text}],
            "index": at,
        }
        for at, text in enumerate(texts)
    ]
    adapters = LoraConfig(
        r=settings.lora_rank, lora_alpha=2 * settings.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=adapters,
        callbacks=[Logged()],
    )
    trainer.remove_callback(PrinterCallback)  # it prints what `on_log` gets
    started = time.perf_counter()
    trainer.train()
    return trainer.model, {
        "steps": trainer.state.global_step,
        "seconds": round(time.perf_counter() - started, 1),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "rejected_rewrites": rewards.rejected,
        "failed_calls": rewards.failed,
    }
