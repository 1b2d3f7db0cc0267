"""Every flag of `qm train sft`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from query_mutator.cli.common import JsonFlags, check_at_least, parse_edges

_AT_LEAST_ONE = (
    "epochs", "max_steps", "batch_size", "max_length", "lora_rank", "log_interval", "token_budget", "pack_max_len",
    "buffer_size", "gradient_accumulation", "eval_interval", "save_interval", "keep_checkpoints", "stream_window",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SftFlags(JsonFlags):
    """Fine-tune a causal language model on a JSONL file, a batch plan, or a gym.

    Gradients are divided by the number of learned tokens of the whole step, however those fall into batches and ranks.
    Under torchrun every rank takes its share of each step; the loss curve is that of one process with as many more
    --gradient-accumulation.
    """

    model: str
    """Folder or hub id of a model for AutoModelForCausalLM."""
    data: str | None = None
    """JSONL file to learn from; --online needs none."""
    eval_data: str | None = None
    """JSONL file whose loss is measured."""
    output: str = "runs/sft"
    """Folder for checkpoints, metrics and the finished model."""
    tokenizer: str | None = None
    """Tokenizer, when it is not the model's own."""
    epochs: int | None = None
    """Passes over the data: 3 without a plan, all of a plan's."""
    max_steps: int | None = None
    """Optimiser steps to stop after; a stream or a gym needs this."""
    batch_size: int = 4
    """Most samples (with --pack rows) in a batch, unless --token-budget says how many tokens."""
    learning_rate: float = 1e-5
    """Step size of AdamW after the warm-up."""
    max_length: int = 512
    """Longest sample in tokens."""
    overlong: Literal["error", "drop", "truncate", "split"] = "error"
    """What becomes of longer ones."""
    skip_bad: bool = False
    """Count rows that give nothing instead of stopping at the first."""
    mask_prompt: bool = True
    """Learn answers only; with --no-mask-prompt the questions too."""
    batchplan: str | None = None
    """Folder of a plan made from --data; it must match data and tokenizer."""
    bucket_edges: str | None = None
    """Longest length of each bucket, as a,b,c; batches are padded to their bucket."""
    token_budget: int | None = None
    """Most tokens of a batch, padding included."""
    pack: bool = False
    """Put several samples into each row, kept apart by mask and positions."""
    pack_max_len: int | None = None
    """Tokens in such a row; by default --max-length."""
    pack_mode: Literal["first_fit", "best_fit", "greedy", "order_preserving"] = "first_fit"
    """Which samples share a row."""
    stream: bool = False
    """Read the file while training, so that it need not fit into memory."""
    stream_window: int = 4096
    """Rows read ahead, shuffled and batched at a time."""
    online: bool = False
    """Learn from episodes of a gym while they are played."""
    gym_host: str = "localhost"
    """Where the gym is."""
    gym_port: int = 8023
    """Its port."""
    gym_transport: Literal["telnet", "tcp", "websocket"] = "telnet"
    """How lines travel to it."""
    buffer_size: int = 100_000
    """Samples of the gym kept for replay."""
    gradient_accumulation: int = 1
    """Batches a rank runs before each step of the optimiser."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, a third more time."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the model; auto takes bfloat16 on a GPU that has it. Weights stay float32."""
    attention: Literal["sdpa", "eager", "flex_attention"] = "sdpa"
    """How attention is computed."""
    use_lora: bool = False
    """Train low-rank adapters (needs peft); they are merged into the finished model."""
    lora_rank: int = 8
    """Rank of the adapters; they are scaled by 2."""
    lora_targets: str = ""
    """Modules that get adapters, as a,b,c; by default all linear ones but the last."""
    freeze_layers: int = 0
    """First layers, with the embeddings, that are not trained."""
    warmup_ratio: float = 0.03
    """Share of the steps in which the step size rises to --learning-rate; then it falls as a cosine."""
    min_lr_ratio: float = 0.0
    """Where the cosine ends, as a share of --learning-rate."""
    weight_decay: float = 0.0
    """Decay of weight matrices."""
    max_grad_norm: float = 1.0
    """Norm the gradient is clipped to; 0 leaves it."""
    seed: int = 42
    """Seed of the order, the adapters and dropout."""
    device: str = "auto"
    """Where to train, as torch names it; auto takes a GPU if there is one."""
    log_interval: int = 10
    """Steps between two rows of metrics."""
    eval_interval: int | None = None
    """Steps between two looks at --eval-data; by default ten looks a run."""
    save_interval: int | None = None
    """Steps between two checkpoints; by default only the last is kept."""
    keep_checkpoints: int = 2
    """Newest checkpoints that stay."""
    resume: str | None = None
    """Go on from an output folder or a checkpoint, with its flags unless others are given."""
    config: str | None = None
    """JSON file of flags; the command line wins."""

    def __post_init__(self) -> None:
        check_at_least(1, **{name: getattr(self, name) for name in _AT_LEAST_ONE})
        check_at_least(0, freeze_layers=self.freeze_layers, seed=self.seed)
        if self.bucket_edges is not None:
            parse_edges(self.bucket_edges)
        if not (0 < self.learning_rate < math.inf and 0 <= self.warmup_ratio <= 1 and 0 <= self.min_lr_ratio <= 1):
            raise ValueError("--learning-rate must be above 0, --warmup-ratio and --min-lr-ratio lie from 0 to 1")
        if self.weight_decay < 0 or self.max_grad_norm < 0:
            raise ValueError("--weight-decay and --max-grad-norm must not be negative")
        self._check_source()

    def _check_source(self) -> None:
        """Refuse flags that name two ways to form batches, or none."""
        if self.online and (self.data or self.batchplan or self.stream or self.pack):
            raise ValueError("--online learns from a gym: leave out --data, --batchplan, --stream and --pack")
        if not self.online and self.data is None:
            raise ValueError("--data is missing; give a JSONL file, or --online for a gym")
        if (self.online or self.stream) and self.max_steps is None:
            raise ValueError("a stream has no end that is known: say when to stop with --max-steps")
        if self.batchplan and (self.pack or self.stream or self.bucket_edges or self.token_budget):
            raise ValueError(
                "--batchplan says how batches are formed: leave out --pack, --stream, --bucket-edges and --token-budget"
            )
        if self.pack and self.bucket_edges:
            raise ValueError("packed rows have no buckets: leave out --bucket-edges or --pack")

    @property
    def row_length(self) -> int:
        """Return the most tokens of a row: a pack, or a sample."""
        return (self.pack_max_len or self.max_length) if self.pack else self.max_length
