"""The run: build -> step -> log -> evaluate -> save, from the first step or from a checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from query_mutator.batching.distributed.config import DistributedConfig
from query_mutator.batching.generation.rows import tokenizer_fingerprint
from query_mutator.batching.tokenizers import load_tokenizer, pad_id_of
from query_mutator.cli.console import note, progress
from query_mutator.errors import CheckpointError, UsageError
from query_mutator.files import disk_errors
from query_mutator.runs.metrics import MetricsWriter
from query_mutator.sft import build
from query_mutator.sft.checkpoint import checkpoints_in, output_of, read_checkpoint, write_checkpoint
from query_mutator.sft.config import SftFlags
from query_mutator.sft.model import check_fit, load_model, load_trainable, save_model, trainable_state
from query_mutator.sft.ranks import joined_ranks
from query_mutator.sft.schedule import cosine_lr
from query_mutator.sft.sources import PlanSource, Source
from query_mutator.sft.stepper import Stepper, StepResult

EVAL_POINTS = 10  # looks at --eval-data in a run, when --eval-interval leaves it open
MODEL_FOLDER = "model"
GYM_PROMPT = "{instruction}\n"  # how a gym's observation is put before an action


def train(flags: SftFlags) -> dict[str, Any]:
    """Train as the flags say and return the report."""
    local_rank = DistributedConfig.from_env().local_rank
    device = build.pick_device(flags, local_rank)
    with joined_ranks(device) as ranks:
        trainer = SftTrainer(flags, device, ranks)
        try:
            while trainer.steps_left and trainer.step():
                trainer.log()
                trainer.evaluate()
                trainer.save()
            return trainer.finish()
        finally:
            trainer.close()


@dataclass(slots=True)
class Since:
    """What happened since the last row of metrics."""

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
    """One run; rank 0 alone writes and speaks."""

    def __init__(self, flags: SftFlags, device: torch.device, ranks: DistributedConfig) -> None:
        self.flags, self.ranks = flags, ranks
        self.output = Path(flags.output)
        torch.manual_seed(flags.seed)
        self.tokenizer = load_tokenizer(flags.tokenizer or flags.model)
        self.tokenizer_hash = tokenizer_fingerprint(self.tokenizer)
        self.notes: list[str] = []
        self.prompt: str | None = GYM_PROMPT if flags.online else None
        self.source = self._make_source(device)
        self.eval_set = build.eval_microbatches(flags, self.tokenizer, ranks)
        self.optimizer = torch.optim.AdamW(_groups(self.model, flags.weight_decay), lr=flags.learning_rate)
        self.steps_done, self.tokens_done = 0, 0
        self.losses: list[float] = []
        self._began = time.perf_counter()
        self.eval_loss: float | None = None
        metrics_bytes = self._resume() if flags.resume else None
        self.num_steps = self._num_steps()
        self._steps = self.source.steps()
        self._since = Since()
        self._open(metrics_bytes)

    @property
    def steps_left(self) -> int:
        """Return how many steps are still to be taken."""
        return self.num_steps - self.steps_done

    def step(self) -> bool:
        """Take one step; False when the source has no more."""
        microbatches = next(self._steps, None)
        if microbatches is None:
            return False
        lr = cosine_lr(
            self.steps_done,
            self.num_steps,
            peak=self.flags.learning_rate,
            warmup_ratio=self.flags.warmup_ratio,
            min_lr_ratio=self.flags.min_lr_ratio,
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
        """Write a row of metrics when one is due."""
        if self._bar is not None:
            self._bar.update()
            self._bar.set_postfix({"loss": f"{self.losses[-1]:.3f}"}, refresh=False)
        if not self._due(self.flags.log_interval):
            return
        row = {**self._since.row(), "charts/learning_rate": self.optimizer.param_groups[0]["lr"]}
        self._write(row)
        self._since = Since()

    def evaluate(self) -> None:
        """Measure the loss on --eval-data when it is due."""
        if not self.eval_set and not self.flags.eval_data:
            return
        if self._due(self.flags.eval_interval or max(1, self.num_steps // EVAL_POINTS)):
            self.eval_loss = self.stepper.mean_loss(self.eval_set)
            self._write({"sft/eval_loss": self.eval_loss})

    def save(self) -> None:
        """Write a checkpoint when one is due."""
        interval = self.flags.save_interval or self.num_steps
        if not self.ranks.is_main or not self._due(interval):
            return
        state = {
            "weights": trainable_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "source": self.source.state_dict(),
            "step": self.steps_done,
            "tokens": self.tokens_done,
            "losses": list(self.losses),
            "eval_loss": self.eval_loss,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "max_tokens": self.stepper.max_tokens,
            "tokenizer_hash": self.tokenizer_hash,
            "metrics_bytes": self._metrics.rows.size_bytes if self._metrics else 0,
        }
        write_checkpoint(self.output, state, step=self.steps_done, keep=self.flags.keep_checkpoints)

    def finish(self) -> dict[str, Any]:
        """Save the finished model and return the report."""
        report = {
            "output": str(self.output),
            "model": str(self.output / MODEL_FOLDER),
            "steps": self.steps_done,
            "loss_tokens": self.tokens_done,
            "first_loss": self.losses[0] if self.losses else None,
            "last_loss": self.losses[-1] if self.losses else None,
            "eval_loss": self.eval_loss,
            "notes": self.notes,
        }
        if self.ranks.is_main:
            folder = self.output / MODEL_FOLDER
            with disk_errors(folder):
                save_model(self.model, self.tokenizer, folder, about={"prompt": self.prompt, "steps": self.steps_done})
                (self.output / "summary.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        return report

    def close(self) -> None:
        """Close files and bar; idempotent."""
        if self._bar is not None:
            self._bar.close()
        if self._metrics is not None:
            self._metrics.close()

    # --- building --------------------------------------------------------------------------------------------------

    def _make_source(self, device: torch.device) -> Source:
        """Load the model and return the source of its batches, after comparing the two."""
        flags, ranks = self.flags, self.ranks
        if not flags.resume and ranks.is_main and (self.output / MODEL_FOLDER).exists():
            raise UsageError(f"{self.output} holds a finished run; choose another --output, or --resume it")
        source, longest, largest_id = self._source_and_size()
        self.model = load_model(flags, device)
        check_fit(self.model, largest_id=largest_id, longest_row=longest)
        self.stepper = Stepper(
            self.model,
            pad_id=pad_id_of(self.tokenizer),
            device=device,
            bf16=build.uses_bf16(flags, device),
            attention=flags.attention,
            max_grad_norm=flags.max_grad_norm,
        )
        return source

    def _source_and_size(self) -> tuple[Source, int, int]:
        """Return the source, its longest row and its largest token id (of the tokenizer where rows are not known)."""
        flags, ranks = self.flags, self.ranks
        largest_id = len(self.tokenizer) - 1
        if flags.online:
            return build.online_source(flags, self.tokenizer, ranks), flags.row_length, largest_id
        if flags.stream:
            self.prompt = build.first_prompt(flags.data or "", self.tokenizer)
            source = build.stream_source(flags, self.tokenizer, self.tokenizer_hash, ranks)
            return source, flags.row_length, largest_id
        assert flags.data is not None
        data = build.read_data(flags, flags.data, self.tokenizer, quiet=not ranks.is_main)
        if data.bad_rows:
            self._say(f"skipped {data.bad_rows} rows, first: {data.first_errors[0]}")
        plan = build.plan_for(flags, data)
        if plan.meta.overlong.num_overlong:
            overlong = plan.meta.overlong
            self._say(
                f"{overlong.num_overlong} samples are over-long ({overlong.policy}): {overlong.tokens_lost} tokens lost"
            )
        self.prompt = data.prompt
        source = PlanSource(plan, data.rows, ranks=ranks, accumulation=flags.gradient_accumulation)
        return source, build.most_positions(plan, data), data.largest_id

    def _num_steps(self) -> int:
        left = self.source.steps_left
        known = None if left is None else self.steps_done + left
        found = min(one for one in (known, self.flags.max_steps) if one is not None)
        if not found:
            raise UsageError("the plan has no batches: every sample was left out")
        return found

    def _resume(self) -> int:
        """Go to where the checkpoint of --resume stands; return how long its file of metrics was."""
        assert self.flags.resume is not None
        state = read_checkpoint(self.flags.resume)
        if state["tokenizer_hash"] != self.tokenizer_hash:
            raise CheckpointError(f"{self.flags.resume} was made with another tokenizer")
        self.source.load_state_dict(state["source"])
        load_trainable(self.model, state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.stepper.max_tokens = state["max_tokens"]
        self.steps_done, self.tokens_done = int(state["step"]), int(state["tokens"])
        self.losses, self.eval_loss = list(state["losses"]), state["eval_loss"]
        torch.set_rng_state(state["rng"])
        if torch.cuda.is_available() and len(state["cuda_rng"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        return int(state["metrics_bytes"])

    def _open(self, metrics_bytes: int | None) -> None:
        """Make the output folder, with the flags in it, and show a bar."""
        self._metrics: MetricsWriter | None = None
        self._bar: Any = None
        if not self.ranks.is_main:
            return
        same = metrics_bytes is not None and output_of(self.flags.resume or "").resolve() == self.output.resolve()
        with disk_errors(self.output):
            self.output.mkdir(parents=True, exist_ok=True)
            (self.output / "config.json").write_text(_config_text(self.flags), encoding="utf-8")
        self._metrics = MetricsWriter(
            self.output, cut_at=metrics_bytes if same else None, first_step=self.steps_done if same else 0
        )
        self._bar = progress("training", self.num_steps, unit="step")
        self._bar.update(self.steps_done)

    # --- small things ----------------------------------------------------------------------------------------------

    def _due(self, interval: int) -> bool:
        return self.steps_done % interval == 0 or not self.steps_left

    def _write(self, row: Mapping[str, float]) -> None:
        if self._metrics is not None:
            self._metrics.write(row, step=self.steps_done, wall_s=time.perf_counter() - self._began)

    def _say(self, line: str) -> None:
        self.notes.append(line)
        if self.ranks.is_main:
            note(line)


def _groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained weights for the optimiser: matrices decay, vectors do not."""
    trained = [one for one in model.parameters() if one.requires_grad]
    if not trained:
        raise UsageError("no weight is left to train; lower --freeze-layers")
    return [
        {"params": [one for one in trained if one.ndim >= 2], "weight_decay": weight_decay},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]


def _config_text(flags: SftFlags) -> str:
    """Return the flags as --resume reads them back."""
    kept = {name: value for name, value in asdict(flags).items() if value is not None and name not in _OF_ONE_COMMAND}
    return json.dumps({"flags": kept}, indent=2, ensure_ascii=False) + "\n"


_OF_ONE_COMMAND = ("resume", "config", "json")


def resumable(output: Path) -> bool:
    """Say whether a folder has a checkpoint to go on from."""
    return bool(checkpoints_in(output))
