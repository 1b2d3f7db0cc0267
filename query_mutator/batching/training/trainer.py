"""The run: build -> step -> log -> evaluate -> save, from the first step or from a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from query_mutator.batching.distributed.config import DistributedConfig
from query_mutator.batching.generation.rows import tokenizer_fingerprint
from query_mutator.batching.tokenizers import load_tokenizer, pad_id_of
from query_mutator.batching.training import build, model
from query_mutator.batching.training.config import SftFlags
from query_mutator.batching.training.stepper import Stepper, StepResult, cosine_lr
from query_mutator.cli.console import note, progress
from query_mutator.errors import CheckpointError, UsageError
from query_mutator.files import disk_errors, write_checked_json
from query_mutator.files.json_lines import check_json_lines
from query_mutator.files.lock import locked
from query_mutator.files.metrics import METRICS_FILE, MetricsWriter

__all__ = ["SftTrainer", "train"]

EVAL_POINTS = 10  # evaluations in a run without --eval-interval
MODEL_FOLDER = "model"
_OF_ONE_COMMAND = ("resume", "break_lock", "config", "json", "force")  # flags that a resumed run does not repeat


def train(flags: SftFlags) -> dict[str, Any]:
    """Train as the flags say and return the report."""
    if DistributedConfig.from_env().is_distributed:
        raise UsageError("qm train sft trains in one process; run it without a launcher of several")
    device = build.pick_device(flags)
    with locked(Path(flags.output), break_lock=flags.break_lock), closing(SftTrainer(flags, device)) as trainer:
        while trainer.steps_left and trainer.step():
            trainer.log()
            trainer.evaluate()
            trainer.save()
        return trainer.finish()


@dataclass(slots=True)
class Since:
    """The steps since the last row of metrics."""

    results: list[StepResult] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def row(self) -> dict[str, float]:
        """Return the figures under their metric keys."""
        tokens = sum(one.loss_tokens for one in self.results)
        padded = sum(one.padded_tokens for one in self.results)
        seconds = max(1e-9, time.perf_counter() - self.began)
        return {
            "sft/loss": sum(one.loss * one.loss_tokens for one in self.results) / max(tokens, 1),
            "sft/grad_norm": self.results[-1].grad_norm,
            "sft/loss_tokens": tokens / len(self.results),
            "sft/tokens_per_s": padded / seconds,
        }


class SftTrainer:
    """One run."""

    def __init__(self, flags: SftFlags, device: torch.device) -> None:
        self.flags = flags
        self.output = Path(flags.output)
        if not flags.resume and (self.output / "config.json").exists():
            raise UsageError(f"{self.output} holds a run; choose another --out, or --resume it")
        torch.manual_seed(flags.seed)
        self.tokenizer = load_tokenizer(flags.tokenizer or flags.model)
        self.tokenizer_hash = tokenizer_fingerprint(self.tokenizer)
        inputs = build.make_source(flags, self.tokenizer)
        self.source, self.notes = inputs.source, inputs.notes
        note(*self.notes)
        self.model = model.load_model(flags, device)
        model.check_fit(self.model, largest_id=inputs.largest_id, longest_row=inputs.longest_row)
        self.stepper = Stepper(
            self.model,
            pad_id=pad_id_of(self.tokenizer),
            device=device,
            bf16=build.uses_bf16(flags, device),
            max_grad_norm=flags.max_grad_norm,
        )
        self.eval_set = build.eval_microbatches(flags, self.tokenizer)
        self.optimizer = torch.optim.AdamW(_groups(self.model, flags.weight_decay), lr=flags.learning_rate)
        self.steps_done, self.tokens_done = 0, 0
        self.losses: list[float] = []
        self.eval_loss: float | None = None
        metrics_bytes = self._resume(Path(flags.resume)) if flags.resume else None
        self.num_steps = self._num_steps()
        self._steps = self.source.steps()
        self._began, self._since = time.perf_counter(), Since()
        self._metrics, self._bar = self._open(metrics_bytes)

    @property
    def steps_left(self) -> int:
        """Return the number of steps still to be taken."""
        return self.num_steps - self.steps_done

    def step(self) -> bool:
        """Take one step; return False if the source has no more."""
        microbatches = next(self._steps, None)
        if microbatches is None:
            return False
        lr = cosine_lr(
            self.steps_done,
            self.num_steps,
            peak=self.flags.learning_rate,
            warmup_ratio=self.flags.warmup_ratio,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        result = self.stepper.step(microbatches, self.optimizer)
        self.steps_done += 1
        self.tokens_done += result.loss_tokens
        self.losses.append(result.loss)
        self._since.results.append(result)
        return True

    def log(self) -> None:
        """Write a row of metrics if one is due."""
        self._bar.update()
        self._bar.set_postfix({"loss": f"{self.losses[-1]:.3f}"}, refresh=False)
        if self._due(self.flags.log_interval):
            self._write({**self._since.row(), "charts/learning_rate": self.optimizer.param_groups[0]["lr"]})
            self._since = Since()

    def evaluate(self) -> None:
        """Measure the loss on --eval-dataset if it is due."""
        if self.flags.eval_data and self._due(self.flags.eval_interval or max(1, self.num_steps // EVAL_POINTS)):
            self.eval_loss = self.stepper.mean_loss(self.eval_set)
            self._write({"sft/eval_loss": self.eval_loss})

    def save(self) -> None:
        """Write a checkpoint if one is due."""
        if not self._due(self.flags.save_interval or self.num_steps):
            return
        state = {
            "weights": model.trainable_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "source": self.source.state_dict(),
            "step": self.steps_done,
            "tokens": self.tokens_done,
            "losses": list(self.losses),
            "eval_loss": self.eval_loss,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "tokenizer_hash": self.tokenizer_hash,
            "metrics_bytes": self._metrics.rows.size_bytes,
        }
        model.write_checkpoint(self.output, state, step=self.steps_done)

    def finish(self) -> dict[str, Any]:
        """Save the finished model and return the report."""
        folder = self.output / MODEL_FOLDER
        report: dict[str, Any] = {
            "output": str(self.output),
            "model": str(folder),
            "steps": self.steps_done,
            "loss_tokens": self.tokens_done,
            "first_loss": self.losses[0] if self.losses else None,
            "last_loss": self.losses[-1] if self.losses else None,
            "eval_loss": self.eval_loss,
            "notes": list(self.notes),
        }
        model.save_model(self.model, self.tokenizer, folder)
        write_checked_json(self.output / "summary.json", report)
        return report

    def close(self) -> None:
        """Close files and bar; idempotent."""
        self._bar.close()
        self._metrics.close()

    def _num_steps(self) -> int:
        left = self.source.steps_left
        known = None if left is None else self.steps_done + left
        found = min(one for one in (known, self.flags.max_steps) if one is not None)
        if not found:
            raise UsageError("the plan has no batches: every sample was left out; raise --max-length")
        return found

    def _resume(self, resumed: Path) -> int:
        """Restore the state in a checkpoint; return the length of its metrics file."""
        state = model.read_checkpoint(resumed)
        if self._is_in_place:
            metrics = self.output / METRICS_FILE
            check_json_lines(metrics, end=state["metrics_bytes"])
        if state["tokenizer_hash"] != self.tokenizer_hash:
            raise CheckpointError(f"{resumed} was made with another tokenizer; give that one with --tokenizer")
        self.source.load_state_dict(state["source"])
        model.load_trainable(self.model, state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps_done, self.tokens_done = int(state["step"]), int(state["tokens"])
        self.losses, self.eval_loss = list(state["losses"]), state["eval_loss"]
        torch.set_rng_state(state["rng"])
        if torch.cuda.is_available() and len(state["cuda_rng"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        return int(state["metrics_bytes"])

    @property
    def _is_in_place(self) -> bool:
        """Return whether the run resumes in the folder of the checkpoint."""
        if self.flags.resume is None:
            return False
        resumed = Path(self.flags.resume)
        folder = resumed if resumed.is_dir() else resumed.parent.parent
        return folder.resolve() == self.output.resolve()

    def _open(self, metrics_bytes: int | None) -> tuple[MetricsWriter, Any]:
        """Create the output folder with config.json, metrics and a bar; a run resumed in place cuts its metrics."""
        in_place = self._is_in_place
        kept = {name: value for name, value in asdict(self.flags).items() if name not in _OF_ONE_COMMAND}
        flags = {name: value for name, value in kept.items() if value is not None}
        with disk_errors(self.output):
            self.output.mkdir(parents=True, exist_ok=True)
        write_checked_json(self.output / "config.json", {"flags": flags})
        metrics = MetricsWriter(
            self.output, cut_at=metrics_bytes if in_place else None, first_step=self.steps_done if in_place else 0
        )
        bar = progress("training", self.num_steps, unit="step")
        bar.update(self.steps_done)
        return metrics, bar

    def _due(self, interval: int) -> bool:
        return self.steps_done % interval == 0 or not self.steps_left

    def _write(self, row: Mapping[str, float]) -> None:
        self._metrics.write(row, step=self.steps_done, wall_s=time.perf_counter() - self._began)


def _groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained weights for the optimizer: matrices decay, vectors do not."""
    trained = [one for one in model.parameters() if one.requires_grad]
    if not trained:
        raise UsageError("no weight is left to train; lower --freeze-layers")
    return [
        {"params": [one for one in trained if one.ndim >= 2], "weight_decay": weight_decay},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]
