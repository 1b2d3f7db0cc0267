"""The flags of `qm train sft`, which are the configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from cyclopts import Parameter

from ppo.fields import Ge, Le
from query_mutator.bounds import Count, Few, Parallel, Port, Rate, Retries, Seed, Share, Steps, Weight, check_values
from query_mutator.cli.outputs import JsonFlags, Output, holding

LONGEST_EDGE = 10**9  # tokens, as every other length on a command line


def parse_edges(text: str) -> tuple[int, ...]:
    """Return the numbers of `128,256,512`; ValueError unless they are whole, above 0 and increasing."""
    try:
        edges = tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        edges = ()
    if not edges or edges[0] < 1 or any(left >= right for left, right in pairwise(edges)):
        raise ValueError(f"--bucket-edges {text!r} must be increasing whole numbers, as in 128,256,512")
    if edges[-1] > LONGEST_EDGE:
        raise ValueError(f"--bucket-edges {text!r}: the last number must be at most {LONGEST_EDGE}")
    return edges


def _is_run(path: Path) -> bool:
    """Return whether a folder holds a run."""
    config = path / "config.json"
    return config.is_file() and holding(b'"flags":')(config)


@dataclass(frozen=True, kw_only=True)
class SftFlags(JsonFlags):
    """Fine-tune a causal language model on a JSONL file, a batch plan, or a gym.

    Gradients are divided by the number of learned tokens of the whole step, however these are divided into batches.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "model", "data", "output", "epochs", "max_steps", "batch_size", "learning_rate", "max_length", "batchplan",
        "pack", "use_lora", "seed", "resume", "json",
    )  # fmt: skip

    model: str
    """Folder or hub id of a model for AutoModelForCausalLM, a GGUF file of a llama model, or smollm2."""
    data: Annotated[str | None, Parameter(name=("--dataset", "--data"))] = None
    """JSONL file to learn from; not with --online."""
    eval_data: Annotated[str | None, Parameter(name=("--eval-dataset", "--eval-data"))] = None
    """JSONL file to measure the loss on."""
    output: Annotated[str, Parameter(name=("--out", "--output")), Output(_is_run, is_folder=True, resumes=True)] = (
        "runs/sft"
    )
    """Folder for checkpoints, metrics and the finished model."""
    tokenizer: str | None = None
    """Tokenizer; by default the model's own."""
    epochs: Few | None = None
    """Passes over the data: 3 without a plan, all of a plan's."""
    max_steps: Steps | None = None
    """Optimizer steps to stop after; required for a gym."""
    batch_size: Parallel = 4
    """Maximum samples (with --pack rows) in a batch; --token-budget limits tokens instead."""
    learning_rate: Annotated[Rate, Parameter(name=("--lr", "--learning-rate"))] = 1e-5
    """Learning rate of AdamW after the warm-up."""
    max_length: Count = 512
    """Longest sample in tokens."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """How to handle longer samples."""
    skip_bad: bool = False
    """Count rows without tokens instead of stopping at the first."""
    mask_prompt: bool = True
    """Learn answers only; --no-mask-prompt learns the questions too."""
    batchplan: str | None = None
    """Folder of a plan made from --dataset; it must match data and tokenizer."""
    bucket_edges: str | None = None
    """Maximum length of each bucket, as a,b,c; batches are padded to their bucket."""
    token_budget: Count | None = None
    """Maximum tokens of a batch, padding included."""
    pack: bool = False
    """Put several samples into each row, separated by mask and positions."""
    pack_max_len: Count | None = None
    """Tokens in such a row; by default --max-length."""
    pack_mode: Literal["first_fit", "best_fit", "greedy"] = "first_fit"
    """Which samples share a row."""
    online: bool = False
    """Learn from episodes of a gym as they are played."""
    gym_host: str = "localhost"
    """Host of the gym."""
    gym_port: Port = 8023
    """Port of the gym."""
    gym_transport: Literal["telnet", "tcp", "websocket"] = "telnet"
    """Protocol of the connection to the gym."""
    buffer_size: Count = 100_000
    """Samples of the gym kept for replay."""
    gradient_accumulation: Few = 1
    """Batches of each step of the optimizer."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the model; auto takes bfloat16 on a GPU that has it. Weights stay float32."""
    use_lora: bool = False
    """Train low-rank adapters (needs peft); they are merged into the finished model."""
    lora_rank: Few = 8
    """Rank of the adapters; they are scaled by 2."""
    lora_targets: str = ""
    """Modules that get adapters, as a,b,c; by default all linear ones except the last."""
    freeze_layers: Retries = 0
    """Number of first layers that are not trained, nor the embeddings."""
    warmup_ratio: Share = 0.03
    """Share of the steps in which the learning rate rises; then it decays as a cosine."""
    weight_decay: Weight = 0.0
    """Weight decay of matrices."""
    max_grad_norm: Annotated[float, Ge(0), Le(1e12)] = 1.0
    """Norm to clip the gradient to; 0 for no clipping."""
    seed: Seed = 42
    """Seed of the order, the adapters and dropout."""
    device: str = "auto"
    """Device to train on, as torch names it; auto takes a GPU if there is one."""
    log_interval: Count = 10
    """Steps between two rows of metrics."""
    eval_interval: Count | None = None
    """Steps between two evaluations on --eval-dataset; by default ten evaluations a run."""
    save_interval: Count | None = None
    """Steps between two checkpoints, of which the last two are kept; by default only that of the end."""
    resume: str | None = None
    """Resume from an output folder or a checkpoint, with its flags unless others are given."""
    config: str | None = None
    """JSON or TOML file of flags; the command line wins."""

    def __post_init__(self) -> None:
        check_values(type(self), vars(self))
        if self.bucket_edges is not None and (last := parse_edges(self.bucket_edges)[-1]) > self.row_length:
            raise ValueError(f"--bucket-edges end at {last}, above --max-length {self.row_length}; raise --max-length")
        self._check_source()

    def _check_source(self) -> None:
        """Raise a ValueError for flags that name two ways to form batches, or none."""
        if self.online and (self.data or self.batchplan or self.pack):
            raise ValueError("--online learns from a gym: leave out --dataset, --batchplan and --pack")
        if not self.online and self.data is None:
            raise ValueError("--dataset is missing; give a JSONL file, or --online for a gym")
        if self.online and self.max_steps is None:
            raise ValueError("a gym never ends; give the number of steps with --max-steps")
        if self.batchplan and (self.pack or self.bucket_edges or self.token_budget):
            raise ValueError("--batchplan fixes the batches: leave out --pack, --bucket-edges and --token-budget")
        if self.pack and self.bucket_edges:
            raise ValueError("packed rows have no buckets: leave out --bucket-edges or --pack")

    @property
    def row_length(self) -> int:
        """Return the largest number of tokens in a row: a pack, or a sample."""
        return (self.pack_max_len or self.max_length) if self.pack else self.max_length
