"""The run: build -> step -> log -> evaluate -> save, from the first step or from a checkpoint.

A step sums the losses of all tokens, divides the gradient by their number, and updates. R rows, L tokens of a row.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, redirect_stderr
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ppo.algorithm import usable_device
from ppo.checkpoint import load_checkpoint, save_checkpoint
from query_mutator.batching.distributed import DistributedConfig
from query_mutator.batching.generation.io import CollatedBatch
from query_mutator.batching.generation.rows import load_tokenizer, pad_id_of, tokenizer_fingerprint
from query_mutator.batching.planning.packing import IGNORE_LABEL, PADDING_SEGMENT
from query_mutator.batching.training.config import SftFlags
from query_mutator.batching.training.sources import Microbatch, eval_microbatches, make_source
from query_mutator.cli.console import note, progress
from query_mutator.errors import CheckpointError, UsageError, reason_of
from query_mutator.files import check_json_lines, disk_errors, locked, write_checked_json
from query_mutator.files.gguf_file import source_of
from query_mutator.files.run_dir import METRICS_FILE, MetricsWriter, first_readable

EVAL_POINTS = 10  # evaluations in a run without --eval-interval
_OF_ONE_COMMAND = ("resume", "config", "json", "force")  # flags that a resumed run does not repeat
FORMAT = "sft 3"  # of a checkpoint
KEPT_CHECKPOINTS = 2
_CPU_MEMORY = ("can't allocate memory", "not enough memory")  # messages of torch's CPU allocator


def train(flags: SftFlags) -> dict[str, Any]:
    """Train as the flags say and return the report."""
    if DistributedConfig.from_env().is_distributed:
        raise UsageError("qm train sft trains in one process; run it without a launcher of several")
    device = pick_device(flags)
    with locked(Path(flags.output)), closing(SftTrainer(flags, device)) as trainer:
        while trainer.steps_left and trainer.step():
            trainer.log()
            trainer.evaluate()
            trainer.save()
        return trainer.finish()


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
        self.source, longest_row, largest_id, self.notes = make_source(flags, self.tokenizer)
        note(*self.notes)
        self.model = load_model(flags, device)
        check_fit(self.model, largest_id=largest_id, longest_row=longest_row)
        self.stepper = Stepper(
            self.model,
            pad_id=pad_id_of(self.tokenizer),
            device=device,
            bf16=uses_bf16(flags, device),
            max_grad_norm=flags.max_grad_norm,
        )
        self.eval_set = eval_microbatches(flags, self.tokenizer)
        self.optimizer = torch.optim.AdamW(_groups(self.model, flags.weight_decay), lr=flags.learning_rate)
        self.steps_done, self.tokens_done = 0, 0
        self.losses: list[float] = []
        self.eval_loss: float | None = None
        metrics_bytes = self._resume(Path(flags.resume)) if flags.resume else None
        self.num_steps = self._num_steps()
        self._steps = self.source.steps()
        self._began = self._logged = time.perf_counter()
        self._since: list[StepResult] = []  # the steps since the last row of metrics
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
        self._since.append(result)
        return True

    def log(self) -> None:
        """Write a row of metrics if one is due."""
        self._bar.update()
        self._bar.set_postfix({"loss": f"{self.losses[-1]:.3f}"}, refresh=False)
        if self._due(self.flags.log_interval):
            now, steps = time.perf_counter(), self._since
            tokens = sum(one.loss_tokens for one in steps)
            row = {
                "sft/loss": sum(one.loss * one.loss_tokens for one in steps) / max(tokens, 1),
                "sft/grad_norm": steps[-1].grad_norm,
                "sft/loss_tokens": tokens / len(steps),
                "sft/tokens_per_s": sum(one.padded_tokens for one in steps) / max(1e-9, now - self._logged),
                "charts/learning_rate": self.optimizer.param_groups[0]["lr"],
            }
            self._write(row)
            self._since, self._logged = [], now

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
            "weights": trainable_state(self.model),
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
        write_checkpoint(self.output, state, step=self.steps_done)

    def finish(self) -> dict[str, Any]:
        """Save the finished model and return the report."""
        folder = self.output / "model"
        report: dict[str, Any] = {
            "output": str(self.output),
            "model": str(folder),
            "steps": self.steps_done,
            "loss_tokens": self.tokens_done,
            "first_loss": self.losses[0] if self.losses else None,
            "last_loss": self.losses[-1] if self.losses else None,
            "eval_loss": self.eval_loss,
            "notes": self.notes,
        }
        save_model(self.model, self.tokenizer, folder)
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
        state = read_checkpoint(resumed)
        if self._is_in_place:
            metrics = self.output / METRICS_FILE
            check_json_lines(metrics, end=state["metrics_bytes"])
        if state["tokenizer_hash"] != self.tokenizer_hash:
            raise CheckpointError(f"{resumed} was made with another tokenizer; give that one with --tokenizer")
        self.source.load_state_dict(state["source"])
        load_trainable(self.model, state["weights"])
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


def pick_device(flags: SftFlags) -> torch.device:
    """Return the device to train on; UsageError for a --device that cannot be used."""
    name = flags.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        usable_device(name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return torch.device(name)


def uses_bf16(flags: SftFlags, device: torch.device) -> bool:
    """Return whether the model computes in bfloat16."""
    if flags.dtype != "auto":
        return flags.dtype == "bfloat16"
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


# --- one step --------------------------------------------------------------------------------------------------------


def cosine_lr(step: int, total_steps: int, *, peak: float, warmup_ratio: float) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then a cosine decay to 0."""
    warmup = math.ceil(warmup_ratio * total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return peak * (1 + math.cos(math.pi * min(1.0, done))) / 2


def sdpa_block_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """Return bool [R, 1, L, L] for scaled_dot_product_attention: True where a token may attend.

    Tokens attend to their own segment, not to later ones. A padding token attends to itself, because a row without any
    True gives NaN.
    """
    mask = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids != PADDING_SEGMENT)[:, :, None]
    length = segment_ids.shape[1]
    mask &= torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    mask |= torch.eye(length, dtype=torch.bool, device=segment_ids.device)
    return mask[:, None]


def to_tensors(batch: CollatedBatch, device: torch.device) -> dict[str, torch.Tensor]:
    """Return `input_ids`, `labels`, `position_ids` int64 [R, L] and the attention mask.

    Without packs the mask is [R, L]; packs get a block-diagonal causal one, [R, 1, L, L].
    """
    names = ("input_ids", "labels", "position_ids", "attention_mask")
    tensors = {name: torch.from_numpy(batch[name]).to(device, torch.int64) for name in names}
    if batch.segment_ids is not None:
        tensors["attention_mask"] = sdpa_block_mask(torch.from_numpy(batch.segment_ids).to(device))
    return tensors


def token_losses(model: Any, tensors: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss of every predicted token, float32 [R, L-1]; 0 where the label is not learned."""
    inputs = {name: tensors[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    labels = tensors["labels"][:, 1:]
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_LABEL, reduction="none"
    )
    return losses.view(labels.shape)


def learned_tokens(tensors: Mapping[str, Any]) -> int:
    """Return the number of tokens that have a loss."""
    return int((tensors["labels"][:, 1:] != IGNORE_LABEL).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Figures of a step: mean loss of a learned token, learned and padded tokens, gradient norm."""

    loss: float
    loss_tokens: int
    padded_tokens: int
    grad_norm: float


class Stepper:
    """Runs steps of a model."""

    def __init__(self, model: Any, *, pad_id: int, device: torch.device, bf16: bool, max_grad_norm: float) -> None:
        self.model = model
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self._pad_id, self._device, self._bf16 = pad_id, device, bf16
        self._max_grad_norm = max_grad_norm

    def step(self, microbatches: Sequence[Microbatch], optimizer: torch.optim.Optimizer) -> StepResult:
        """Take one step on the mean loss of all learned tokens."""
        self.model.train()
        # 1. Sum the gradients of all tokens.
        loss, tokens = 0.0, 0
        for one in microbatches:
            found = self._backward(one)
            loss, tokens = loss + found[0], tokens + found[1]
        # 2. Divide by the tokens, clip, update.
        norm = 0.0
        if tokens:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(tokens)
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self._max_grad_norm or math.inf))
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return StepResult(
            loss=loss / max(tokens, 1),
            loss_tokens=tokens,
            padded_tokens=sum(one.spec.num_rows * one.spec.max_len for one in microbatches),
            grad_norm=norm,
        )

    def mean_loss(self, microbatches: Sequence[Microbatch]) -> float:
        """Return the mean loss of a learned token, without learning."""
        self.model.eval()
        total, tokens = 0.0, 0
        with torch.no_grad(), self._precision():
            for one in microbatches:
                tensors = self._tensors(one)
                total += float(token_losses(self.model, tensors).sum())
                tokens += learned_tokens(tensors)
        return total / max(tokens, 1)

    def _backward(self, microbatch: Microbatch) -> tuple[float, int]:
        """Add one microbatch's gradient; return its summed loss and learned tokens."""
        try:
            tensors = self._tensors(microbatch)
            tokens = learned_tokens(tensors)
            if tokens == 0 or microbatch.spec.is_padding:
                return 0.0, 0
            with self._precision():
                loss = token_losses(self.model, tensors).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach()), tokens
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if type(error) is RuntimeError and not any(words in str(error) for words in _CPU_MEMORY):
                raise
        rows, length = microbatch.spec.num_rows, microbatch.spec.max_len
        raise UsageError(
            f"a batch of {rows} rows of {length} tokens does not fit into memory; resume with a smaller --batch-size "
            "or --token-budget and a larger --gradient-accumulation, or try --gradient-checkpointing, --use-lora or "
            "--dtype bfloat16"
        )

    def _tensors(self, microbatch: Microbatch) -> dict[str, torch.Tensor]:
        return to_tensors(microbatch.collated(self._pad_id), self._device)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._bf16)


# --- the model: load it, add adapters, freeze layers, check it against the data, save it -----------------------------


def load_model(flags: SftFlags, device: torch.device) -> Any:
    """Return the model of --model in float32 on `device`, with layers frozen and adapters added as the flags say."""
    model = read_model(flags.model)
    _freeze(model, flags.freeze_layers)
    if flags.gradient_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if flags.use_lora:
        model = _with_adapters(model, flags)
    return model.to(device)


def read_model(spec: str) -> Any:
    """Return a model in float32; UsageError for what is none."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source, of_gguf = source_of(spec)
    model: Any
    try:
        if of_gguf:
            _check_memory(spec, Path(source, of_gguf["gguf_file"]))
        with redirect_stderr(StringIO()):  # a bar that nothing else disables
            model = AutoModelForCausalLM.from_pretrained(
                source, **of_gguf, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
            )
    except UsageError:
        raise
    except Exception as error:  # files that are not a model fail in many ways
        what = "no model can be read from it" if Path(spec).exists() else "not a folder, and not on the hub"
        reason = reason_of(error)
        raise UsageError(f"--model {spec!r}: {what} ({reason}); give a folder, a GGUF file or a hub id") from None
    if of_gguf:  # the weights are float32 now, and are saved as such
        model.hf_quantizer.remove_quantization_config(model)
    return model


def _check_memory(spec: str, path: Path) -> None:
    """Raise a UsageError for weights that take more than the memory of the machine, where the system tells it."""
    from gguf import GGUFReader

    needed = 4 * sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf
    if needed > memory:
        raise UsageError(
            f"--model {spec}: in float32, as it is trained, it takes {needed / 1e9:.1f} GB, and this machine has "
            f"{memory / 1e9:.1f} GB; give a smaller model"
        )


def _freeze(model: Any, count: int) -> None:
    if not count:
        return
    layers = max((one for one in model.modules() if isinstance(one, torch.nn.ModuleList)), key=len, default=())
    if count > len(layers):
        raise UsageError(f"--freeze-layers {count}: the model has {len(layers)} layers; freeze fewer")
    for part in (model.get_input_embeddings(), *layers[:count]):
        part.requires_grad_(False)


def _with_adapters(model: Any, flags: SftFlags) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UsageError("--use-lora needs peft: pip install 'query-mutator[sft]'") from None
    names = [name.strip() for name in flags.lora_targets.split(",") if name.strip()]
    config = LoraConfig(
        r=flags.lora_rank, lora_alpha=2 * flags.lora_rank, target_modules=names or "all-linear", task_type="CAUSAL_LM"
    )
    torch.manual_seed(flags.seed)  # the adapters' first weights are drawn
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        reason = str(error).partition(".")[0]
        raise UsageError(f"--lora-targets {flags.lora_targets or 'all-linear'}: {reason}") from None


def check_fit(model: Any, *, largest_id: int, longest_row: int) -> None:
    """Raise a UsageError if token ids or row lengths exceed what the model was built for."""
    size = model.get_input_embeddings().weight.shape[0]
    if largest_id >= size:
        raise UsageError(f"the data have token id {largest_id}, the model knows {size}; give the model's --tokenizer")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and longest_row > limit:
        raise UsageError(f"rows of {longest_row} tokens do not fit the model's {limit} positions; lower --max-length")


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save model (adapters merged) and tokenizer, as `from_pretrained` and model servers read them."""
    with disk_errors(folder):
        whole = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
        whole.save_pretrained(folder)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)


# --- checkpoints: OUTPUT/checkpoints/step_N.pt -----------------------------------------------------------------------


def trainable_state(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights that are trained, on the CPU, by name."""
    return {name: one.detach().cpu().clone() for name, one in model.named_parameters() if one.requires_grad}


def load_trainable(model: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Load the weights of `trainable_state`; UsageError for other names or shapes."""
    mine = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if mine.keys() != state.keys() or any(mine[name].shape != state[name].shape for name in mine):
        raise UsageError("the checkpoint is of another model, or of other trained layers; give the same flags")
    with torch.no_grad():
        for name, one in mine.items():
            one.copy_(state[name])


def write_checkpoint(output: Path, state: Mapping[str, Any], *, step: int) -> None:
    """Write a checkpoint atomically and remove all but the newest two; DiskError if it cannot be written."""
    path = output / "checkpoints" / f"step_{step}.pt"
    with disk_errors(path):
        save_checkpoint(path, {"format": FORMAT, **state})
        for old in checkpoints_in(output)[KEPT_CHECKPOINTS:]:
            old.unlink(missing_ok=True)


def checkpoints_in(output: Path) -> list[Path]:
    """Return the checkpoints in an output folder, the newest first."""
    found = [path for path in (output / "checkpoints").glob("step_*.pt") if path.stem[5:].isdecimal()]
    return sorted(found, key=lambda path: -int(path.stem[5:]))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in a `.pt`, or in the newest readable one of an output folder; CheckpointError without one."""
    if not (found := checkpoints_in(path) if path.is_dir() else [path]):
        raise CheckpointError(f"{path}: no checkpoint in it; give an output folder of `qm train sft`, or a .pt")
    return first_readable(found, _read)


def _read(path: Path) -> dict[str, Any]:
    try:
        state = load_checkpoint(path, entry="format")
    except ValueError as error:
        raise CheckpointError(f"{error}; give an output folder of `qm train sft`") from None
    if state["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {state['format']!r}, not {FORMAT!r} of this `qm train sft`")
    return state
