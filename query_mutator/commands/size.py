"""`qm size`, `qm size replay` and `qm size workers`: memory of a training step and of a buffer, a loader's workers."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ppo.fields import Ge, Le, Matches
from query_mutator.bounds import CountOrNone, Few, Parallel, Seconds, Size, Wait
from query_mutator.cli.console import note, table
from query_mutator.cli.flags import Positional
from query_mutator.cli.outputs import JsonFlags, show
from query_mutator.errors import UsageError
from query_mutator.lab.sizing import Workload, sizes
from query_mutator.lab.sizing.collecting import PROCESS_BYTES, replay_bytes, rollout_bytes
from query_mutator.lab.sizing.machine import MIB, load_target, machine_budget
from query_mutator.lab.sizing.workers import advice_text, advise, log_verdict
from query_mutator.registry import check_known

_POLICIES = ("act", "smolvla")  # that LeRobot trains
_NOT_COUNTED = {
    "cpu": "all that PyTorch and oneDNN allocate",
    "cuda": "reserved is what a caching allocator may hold; workspaces of cuBLAS and cuDNN are not counted",
}


@dataclass(frozen=True, kw_only=True)
class SizeFlags(JsonFlags):
    """Estimate the memory of a training step on a CPU or GPU, and the largest batch that fits; needs no GPU.

    The figures are what PyTorch allocates.
    The CUDA context, fragmentation and workspaces of cuBLAS and cuDNN are not known.
    """

    model: Positional[str] = "gpt"
    """A preset (a wrong name lists them), or package.module:function that returns a Workload."""
    cameras: Size | None = None
    """Cameras of act and smolvla."""
    resolution: Annotated[str, Matches(r"[1-9]\d*x[1-9]\d*", "must be height and width, as 480x640")] | None = None
    """Height and width of act's images, as 480x640."""
    tokens: Size | None = None
    """Tokens of a row, for language models."""
    batch: tuple[Size, ...] = (1, 8, 32)
    """Batch sizes to estimate."""
    vram: str | None = None
    """Memory of the GPU, as 12GB, or its name, as rtx4090: prints the largest batch that fits."""
    what_if: tuple[str, ...] = ()
    """Variants to estimate too: bf16, fp16, checkpointing, accumulate:4, frozen, frozen:PREFIX, sgd; + joins them."""
    optimizer: sizes.Optimizer = "adamw"
    """The optimizer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu or cuda, which need not be present; auto is cuda with --vram or if there is a GPU."""
    onednn: bool = True
    """On a CPU: whether the run uses oneDNN, PyTorch's default; it changes what layers allocate."""
    context_mib: Wait = 600.0
    """Memory of the CUDA context; 300 to 1300, depending on GPU and version."""

    def __post_init__(self) -> None:
        if self.vram is not None:
            sizes.vram_bytes(self.vram)

    @property
    def given(self) -> dict[str, Any]:
        """Return the sizes that were given."""
        height_width = tuple(map(int, self.resolution.split("x"))) if self.resolution else None
        given = {"cameras": self.cameras, "resolution": height_width, "tokens": self.tokens}
        return {name: value for name, value in given.items() if value is not None}

    def workload(self) -> Workload:
        """Return what to train; UsageError for an unknown preset or a function that returns something else."""
        from query_mutator.lab.sizing.models import MODELS, model

        if ":" not in self.model:
            check_known("preset", self.model, [*MODELS, *sizes.TABLED])
            return model(self.model, **self.given)
        made = load_target(self.model)(**self.given)
        if not isinstance(made, Workload):
            raise UsageError(
                f"{self.model} returns a {type(made).__name__}; return a query_mutator.lab.sizing.Workload"
            )
        return made


#: The table, the rows and the largest batch by variant as data, and how all that is known.
_Sizes = tuple[str, Sequence[Mapping[str, Any]], Mapping[str, int], str]


def size(flags: SizeFlags) -> None:
    """Print memory by batch size and variant, and the largest batch for the card."""
    room = None if flags.vram is None else sizes.room_on(flags.vram, context_bytes=flags.context_mib * MIB)
    device = "cuda" if flags.device == "auto" and room is not None else flags.device
    sized = _tabled(flags, room) if flags.model in sizes.TABLED else _tracked(flags, device, room)
    shown, estimates, largest, source = sized
    lines = [shown]
    for name, batch in largest.items():
        found = batch or "none, not even one sample fits"
        why = f"{source}, context and fragmentation by rule of thumb"
        lines.append(f"largest batch on {flags.vram} ({name}): {found} ({why})")
    if any("accumulate" in item for item in flags.what_if):
        lines.append("accumulation at the same micro-batch takes one more gradient buffer; it allows smaller ones")
    if flags.model in _POLICIES and largest.get(sizes.PLAIN):
        half = max(1, largest[sizes.PLAIN] // 2)  # to start with
        lines.append(sizes.train_line(policy=flags.model, batch_size=half))
    lines.append("the largest batch is not the best: throughput has a knee, learning an optimum (qm sweep)")
    data = {"model": flags.model, "device": device, "estimates": estimates, "largest_batch": largest}
    show(flags, data, "\n".join(lines))


def _tracked(flags: SizeFlags, device: str, room: float | None) -> _Sizes:
    """Return the sizes of a model whose step is tracked."""
    import torch

    from query_mutator.lab.sizing.memory import estimate, largest_batch
    from query_mutator.lab.sizing.tracker import onednn

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    workload = flags.workload()
    recipes = {name or sizes.PLAIN: sizes.recipe_of(name, flags.optimizer, device) for name in (None, *flags.what_if)}
    found, largest = [], {}
    with onednn(flags.onednn):
        for name, recipe in recipes.items():
            found += [(name, estimate(workload, batch, recipe)) for batch in flags.batch]
            if any(one.data_dependent for _, one in found):
                raise UsageError(
                    f"{flags.model} cannot be sized: its code branches on values of tensors or takes shapes from them, "
                    "which only data decide; take real steps and read torch.cuda.max_memory_allocated()"
                )
            if room is not None:
                largest[name] = largest_batch(workload, room, recipe)[0]
    rows = [
        (
            variant,
            str(one.batch),
            _mib_range(one.low, one.peak),
            "" if device == "cpu" else f"{one.reserved / MIB:,.0f}",
            *(f"{part / MIB:,.0f}" for part in (one.parameters, one.gradients, one.optimizer, one.activations)),
            max(one.phases, key=lambda phase: one.phases[phase]),
        )
        for variant, one in found
    ]
    parts = ("peak", "reserved", "weights", "gradients", "optimizer", "the rest")
    where = f" (oneDNN {'on' if flags.onednn else 'off'})" if device == "cpu" else ""
    title = f"{workload.name}{where} on {device}: MiB of a training step (estimated; {_NOT_COUNTED[device]})"
    shown = table(title, ("variant", "batch", *parts, "peak in"), rows)
    estimates = [{"variant": name, **asdict(one), "activations": one.activations} for name, one in found]
    return shown, estimates, largest, "estimated"


def _mib_range(low: float, high: float) -> str:
    """Return bytes as MiB, as a range if they are not known exactly."""
    texts = [f"{size / MIB:,.0f}" for size in (low, high)]
    return texts[1] if texts[0] == texts[1] else " to ".join(texts)


def _tabled(flags: SizeFlags, room: float | None) -> _Sizes:
    """Return the sizes of a model in the table, of fp32 with AdamW."""
    if flags.optimizer != "adamw":
        raise UsageError(f"--optimizer {flags.optimizer}: the table of {flags.model} is of adamw")
    fits = {variant: sizes.tabled(flags.model, variant, **flags.given) for variant in (sizes.PLAIN, *flags.what_if)}
    estimates: list[dict[str, Any]] = [
        {"variant": name, "batch": batch, "peak": round(fit.at(batch))}
        for name, fit in fits.items()
        for batch in flags.batch
    ]
    rows = [
        (row["variant"], str(row["batch"]), f"{row['peak'] / MIB:,.0f}", f"{fits[row['variant']].slope / MIB:,.4g}")
        for row in estimates
    ]
    title = f"{flags.model}: MiB of a training step (from a table of tracked steps: fp32, AdamW, on a GPU)"
    largest = {} if room is None else {name: fit.largest(room) for name, fit in fits.items()}
    return table(title, ("variant", "batch", "peak", "a sample"), rows), estimates, largest, "from a table"


# --- qm size replay --------------------------------------------------------------------------------------------------

_DTYPE_BYTES = {"uint8": 1, "float16": 2, "float32": 4, "float64": 8, "int64": 8}


@dataclass(frozen=True, kw_only=True)
class SizeReplayFlags:
    """Estimate the main memory of a replay buffer, a rollout and collectors."""

    obs: Annotated[str, Matches(r"[1-9]\d*(x[1-9]\d*)*", "is not a shape; write a shape as 4x84x84 or 384")] = "4x84x84"
    """Shape of an observation, as 4x84x84 or 384."""
    dtype: Literal["uint8", "float16", "float32", "float64", "int64"] = "uint8"
    """dtype of observations."""
    capacity: Annotated[int, Ge(0), Le(10**15)] = 1_000_000
    """Transitions that the replay buffer keeps."""
    prioritized: Annotated[bool, Parameter(alias="--prioritised")] = False
    """Also keep a sum tree of priorities."""
    num_envs: Few = 8
    """Environments that hold a current observation, and fill a rollout."""
    rollout_steps: CountOrNone = 0
    """Steps of an on-policy rollout for each environment; 0 for none."""
    num_collectors: Annotated[int, Ge(0), Le(1024)] = 0
    """Processes that collect, each with a copy of the network."""
    parameters: Annotated[int, Ge(0), Le(10**15)] = 0
    """Parameters of the network that each collector copies."""


def size_replay(flags: SizeReplayFlags) -> None:
    """Print the memory of each part and their sum."""
    obs = math.prod(map(int, flags.obs.split("x"))) * _DTYPE_BYTES[flags.dtype]
    parts = {
        "replay buffer": replay_bytes(obs, capacity=flags.capacity, prioritized=flags.prioritized),
        "rollout": rollout_bytes(obs, steps=flags.rollout_steps, num_envs=flags.num_envs),
        "current observations": 2 * flags.num_envs * obs,
        "collectors": flags.num_collectors * (PROCESS_BYTES + 4 * flags.parameters),
    }
    rows = [(name, f"{size / MIB:,.1f}") for name, size in parts.items() if size]
    rows.append(("total", f"{sum(parts.values()) / MIB:,.1f}"))
    print(table(f"an observation takes {obs:,} bytes", ("part", "MiB"), rows))
    print("estimated: sizes of arrays, and by rule of thumb 256 MiB a collecting process")


# --- qm size workers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SizeWorkersFlags(JsonFlags):
    """Find the number of worker processes with which training steps hardly wait for data.

    Times single items and simulates workers: the smallest number whose steps wait at most 5 % of the time.
    """

    dataset: str | None = None
    """package.module:name of a dataset, or lerobot:REPO; of a DataLoader, batch size and collate function are kept."""
    batch_size: Parallel | None = None
    """Items of a batch; by default the loader's, else 8."""
    step_ms: Seconds | None = None
    """Milliseconds of a training step; without it and --step, find the fastest loading."""
    step: str | None = None
    """package.module:function, the real step, called with each batch and timed."""
    seconds: Seconds = 3.0
    """Seconds spent reading items."""
    from_logs: str | None = None
    """A log of LeRobot, or a run folder with waiting times and step times: says whether its steps wait."""
    num_workers: Annotated[int, Ge(0), Le(1024)] | None = None
    """With --from-logs: number of workers in that run."""

    def __post_init__(self) -> None:
        if (self.dataset is None) == (self.from_logs is None):
            raise ValueError("give either --dataset or --from-logs")
        if self.step is not None and self.step_ms is not None:
            raise ValueError("give --step or --step-ms, not both")


def size_workers(flags: SizeWorkersFlags) -> None:
    """Print the number of workers, the figures behind it, and command lines."""
    if flags.from_logs is not None:
        print(log_verdict(flags.from_logs, workers=flags.num_workers))
        return
    budget = machine_budget()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > budget.cpus:
        note(f"other programs keep this machine busy (load {load:.1f}), which slows what is measured now")
    from query_mutator.lab.sizing.loading import profile_items

    profile = profile_items(flags.dataset or "", batch_size=flags.batch_size, step=flags.step, seconds=flags.seconds)
    advice = advise(profile, budget, step_s=profile.step_s if flags.step else (flags.step_ms or 0.0) / 1000)
    show(flags, asdict(advice), f"machine: {budget}\n{advice_text(advice)}")
