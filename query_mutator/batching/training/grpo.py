"""Train a model that writes the wording by GRPO: groups of rewrites of a question, scored by the target's answers.

Group-relative policy optimization (Shao et al., 2024, arXiv:2402.03300) by TRL, with low-rank adapters; the penalty is
the KL divergence from the model that it started from. Importing this needs TRL.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from query_mutator.batching.tokenizers import load_tokenizer
from query_mutator.batching.training.model import read_model, save_model
from query_mutator.files.gguf_weights import base_of
from query_mutator.settings.grpo import GrpoSettings

__all__ = ["LOGGED", "train"]

#: TRL's names of the figures that are logged.
LOGGED = {
    "reward": "grpo/reward",
    "reward_std": "grpo/reward_std",
    "kl": "grpo/kl",
    "completions/mean_length": "grpo/tokens",
    "learning_rate": "charts/learning_rate",
}


class _Logged(TrainerCallback):
    """Tells a function of each row of figures, under our keys."""

    def __init__(self, tell: Callable[[int, Mapping[str, float]], None]) -> None:
        self.tell = tell

    def on_log(self, args: Any, state: Any, *_: Any, **told: Any) -> None:
        """Tell the figures of a step."""
        logs = told.get("logs") or {}
        if known := {key: logs[name] for name, key in LOGGED.items() if name in logs}:
            self.tell(state.global_step, known)


def train(
    spec: str,
    questions: Sequence[str],
    rewards: Callable[[Sequence[int], Sequence[str]], list[float]],
    settings: GrpoSettings,
    output: Path,
    *,
    prompt: str | None,
    seed: int,
    on_log: Callable[[int, Mapping[str, float]], None],
) -> dict[str, Any]:
    """Train a model, save it into `output` and return the report; `on_log` gets each step and its figures.

    `rewards` are those of rewrites of the questions with these indices, in groups. `prompt` has {instruction} in place
    of a question; None is the tokenizer's chat template.
    """

    def reward(completions: list[Any], index: list[int], **_: Any) -> list[float]:
        return rewards(index, [one if isinstance(one, str) else one[-1]["content"] for one in completions])

    tokenizer = load_tokenizer(spec)
    trainer = GRPOTrainer(
        model=read_model(spec),
        reward_funcs=reward,
        args=_arguments(settings, output, seed),
        train_dataset=_rows(questions, prompt),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=settings.lora_rank, lora_alpha=2 * settings.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[_Logged(on_log)],
    )
    trainer.remove_callback(PrinterCallback)  # it prints what `on_log` gets
    started = time.perf_counter()
    trainer.train()
    seconds, folder = time.perf_counter() - started, output / "model"
    about = {"prompt": prompt, "steps": settings.max_steps}
    gguf = save_model(trainer.model, tokenizer, folder, about=about, base=base_of(spec))
    return {
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "model": str(folder),
        "gguf": None if gguf is None else str(gguf),
    }


def _rows(questions: Sequence[str], prompt: str | None) -> Any:
    rows = []
    for index, question in enumerate(questions):
        turns = [{"role": "user", "content": question}]
        rows.append({"prompt": prompt.replace("{instruction}", question) if prompt else turns, "index": index})
    return Dataset.from_list(rows)


def _arguments(settings: GrpoSettings, output: Path, seed: int) -> Any:
    return GRPOConfig(
        output_dir=str(output / "trl"),
        max_steps=settings.max_steps,
        per_device_train_batch_size=settings.group_size,
        num_generations=settings.group_size,
        learning_rate=settings.learning_rate,
        beta=settings.kl_coef,
        max_completion_length=settings.write_tokens,
        temperature=settings.write_temperature,
        seed=seed,
        bf16=settings.bf16,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
