"""`qm size` and `qm size replay`: memory of a training step without a GPU, of a replay buffer and of collectors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from cyclopts import Parameter

from ppo.fields import Matches
from query_mutator.bounds import CountOrNone, Few, Size, Wait
from query_mutator.cli.console import table
from query_mutator.cli.flags import Positional
from query_mutator.cli.outputs import JsonFlags, show
from query_mutator.errors import UsageError
from query_mutator.lab.sizing.collecting import PROCESS_BYTES, replay_bytes, rollout_bytes
from query_mutator.lab.sizing.machine import MIB
from query_mutator.lab.sizing.sizes import PLAIN, TABLED, room_on, tabled, train_line, vram_bytes
from query_mutator.lab.sizing.steps import ModelSpec, pick_device
from query_mutator.lab.sizing.workload import Optimizer
from query_mutator.registry import check_known

#: The trainer's own networks
_OURS = {name: f"query_mutator.commands.size_presets:{name}" for name in ("policy", "iqn")}
_POLICIES = ("act", "smolvla")  # that LeRobot trains
_NOT_COUNTED = {
    "cpu": "all that PyTorch and oneDNN allocate",
    "cuda": "reserved is what a caching allocator may hold; workspaces of cuBLAS and cuDNN are not counted",
}
TrainingDevice = Annotated[str, Matches(r"auto|cpu|cuda(:\d+)?", "must be auto, cpu, cuda or cuda:N")]


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """What to train, how, and where."""

    model: Positional[str] = "policy"
    """A preset (a wrong name lists them), or package.module:function that returns a Workload."""
    cameras: Size | None = None
    """Cameras of act and smolvla."""
    resolution: Annotated[str, Matches(r"[1-9]\d*x[1-9]\d*", "must be height and width, as 480x640")] | None = None
    """Height and width of act's images, as 480x640."""
    tokens: Size | None = None
    """Tokens of a row, for language models."""
    optimizer: Optimizer = "adamw"
    """The optimizer."""
    device: TrainingDevice = "auto"
    """cpu, cuda or cuda:1; auto takes a GPU if there is one."""
    onednn: bool = True
    """On a CPU: whether the run leaves oneDNN on, as PyTorch does; it changes what layers allocate."""

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the sizes that were given."""
        height_width = tuple(map(int, self.resolution.split("x"))) if self.resolution else None
        given = {"cameras": self.cameras, "resolution": height_width, "tokens": self.tokens}
        return {name: value for name, value in given.items() if value is not None}

    def spec(self, variant: str | None = None) -> ModelSpec:
        """Return the model in a variant; UsageError for one that is only in the table."""
        from query_mutator.lab.sizing.models import MODELS

        if ":" not in self.model:
            check_known("preset", self.model, [*_OURS, *MODELS, *TABLED])
        if self.model in TABLED:
            raise UsageError(f"{self.model} is in a table alone; name package.module:function of the real model")
        return ModelSpec(
            model=_OURS.get(self.model, self.model),
            sizes=self.sizes,
            optimizer=self.optimizer,
            variant=variant,
            onednn=self.onednn,
        )

    def titled(self, name: str, device: str) -> str:
        """Return the model and where it is trained, in words."""
        return f"{name} (oneDNN {'on' if self.onednn else 'off'}) on cpu" if device == "cpu" else f"{name} on {device}"


@dataclass(frozen=True, kw_only=True)
class SizeFlags(ModelFlags, JsonFlags):
    """Estimate the memory of a training step on a CPU or a GPU, without a GPU, and the batch that fits a card.

    The figures are what PyTorch allocates.
    The CUDA context, fragmentation and workspaces of cuBLAS and cuDNN are not known.
    """

    device: TrainingDevice = "auto"
    """cpu or cuda, which need not be here; auto is cuda with --vram or if there is a GPU."""

    batch: tuple[Size, ...] = (1, 8, 32)
    """Batch sizes to estimate."""
    vram: str | None = None
    """Memory of the card, as 12GB, or its name, as rtx4090: prints the largest batch that fits."""
    what_if: tuple[str, ...] = ()
    """Variants to estimate too: bf16, fp16, checkpointing, accumulate:4, frozen, frozen:PREFIX, sgd; + joins them."""
    context_mib: Wait = 600.0
    """Memory of the CUDA context; 300 to 1300 by card and version."""

    def __post_init__(self) -> None:
        if self.vram is not None:
            vram_bytes(self.vram)


#: The table, the rows and the largest batch by variant as data, and how all that is known.
_Sizes = tuple[str, Sequence[Mapping[str, Any]], Mapping[str, int], str]


def size(flags: SizeFlags) -> None:
    """Print memory by batch size and variant, and the largest batch for the card."""
    room = None if flags.vram is None else room_on(flags.vram, context_bytes=flags.context_mib * MIB)
    device = flags.device.partition(":")[0]
    if device == "auto":
        device = pick_device("auto") if room is None else "cuda"
    sized = _tabled(flags, room) if flags.model in TABLED else _tracked(flags, device, room)
    shown, estimates, largest, source = sized
    lines = [shown]
    for name, batch in largest.items():
        found = batch or "none, not even one sample fits"
        why = f"{source}, context and fragmentation by rule of thumb"
        lines.append(f"largest batch on {flags.vram} ({name}): {found} ({why})")
    if any("accumulate" in item for item in flags.what_if):
        lines.append("accumulation at the same micro-batch takes one more gradient buffer; it allows smaller ones")
    if flags.model in _POLICIES and largest.get(PLAIN):
        half = max(1, largest[PLAIN] // 2)  # to start with
        lines.append(train_line(policy=flags.model, batch_size=half))
    lines.append("the largest batch is not the best: throughput has a knee (qm size throughput), learning an optimum")
    data = {"model": flags.model, "device": device, "estimates": estimates, "largest_batch": largest}
    show(flags, data, "\n".join(lines))


def _tracked(flags: SizeFlags, device: str, room: float | None) -> _Sizes:
    """Return the sizes of a model whose step is tracked."""
    from query_mutator.lab.sizing.memory import estimate, largest_batch
    from query_mutator.lab.sizing.tracker import onednn

    workload = flags.spec().workload()
    recipes = {variant or PLAIN: flags.spec(variant).recipe().on(device) for variant in (None, *flags.what_if)}
    found, largest = [], {}
    with onednn(flags.onednn):
        for name, recipe in recipes.items():
            found += [(name, estimate(workload, batch, recipe)) for batch in flags.batch]
            if any(one.data_dependent for _, one in found):
                raise UsageError(
                    f"{flags.model} cannot be sized: its code branches on values of tensors or takes shapes from them, "
                    f"which only data decide; measure it with qm size verify {flags.model} --batch {flags.batch[0]}"
                )
            if room is not None:
                largest[name] = largest_batch(workload, room, recipe)[0]
    rows = [
        (
            variant,
            str(one.batch),
            mib_range(one.low, one.peak, digits=0),
            "" if device == "cpu" else f"{one.reserved / MIB:,.0f}",
            *(f"{part / MIB:,.0f}" for part in (one.parameters, one.gradients, one.optimizer, one.activations)),
            max(one.phases, key=lambda phase: one.phases[phase]),
        )
        for variant, one in found
    ]
    parts = ("peak", "reserved", "weights", "gradients", "optimizer", "the rest")
    title = f"{flags.titled(workload.name, device)}: MiB of a training step (estimated; {_NOT_COUNTED[device]})"
    shown = table(title, ("variant", "batch", *parts, "peak in"), rows)
    estimates = [{"variant": name, **asdict(one), "activations": one.activations} for name, one in found]
    return shown, estimates, largest, "estimated"


def mib_range(low: float, high: float, *, digits: int) -> str:
    """Return bytes as MiB, as a range if they are not known exactly."""
    texts = [f"{size / MIB:,.{digits}f}" for size in (low, high)]
    return texts[1] if texts[0] == texts[1] else " to ".join(texts)


def _tabled(flags: SizeFlags, room: float | None) -> _Sizes:
    """Return the sizes of a model in the table, of fp32 with AdamW."""
    if flags.optimizer != "adamw":
        raise UsageError(f"--optimizer {flags.optimizer}: the table of {flags.model} is of adamw")
    fits = {variant: tabled(flags.model, variant, **flags.sizes) for variant in (PLAIN, *flags.what_if)}
    estimates: list[dict[str, Any]] = [
        {"variant": name, "batch": batch, "peak": round(fit.at(batch))}
        for name, fit in fits.items()
        for batch in flags.batch
    ]
    rows = [
        (
            str(row["variant"]),
            str(row["batch"]),
            f"{row['peak'] / MIB:,.0f}",
            f"{fits[row['variant']].slope / MIB:,.4g}",
        )
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
    """Type of an observation's numbers."""
    capacity: Annotated[int, Ge(0), Le(10**15)] = 1_000_000
    """Transitions that the replay buffer keeps."""
    one_copy: bool = False
    """Keep each observation once, without its successor (optimize_memory_usage of Stable-Baselines3)."""
    prioritized: Annotated[bool, Parameter(alias="--prioritised")] = False
    """Keep a sum tree of priorities too."""
    action_numbers: Size = 1
    """Numbers in an action."""
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
    numbers, num_envs = flags.action_numbers, flags.num_envs
    parts = {
        "replay buffer": replay_bytes(
            obs,
            capacity=flags.capacity,
            action_numbers=numbers,
            one_copy=flags.one_copy,
            prioritized=flags.prioritized,
        ),
        "rollout": rollout_bytes(obs, steps=flags.rollout_steps, num_envs=num_envs, action_numbers=numbers),
        "current observations": 2 * num_envs * obs,
        "collectors": flags.num_collectors * (PROCESS_BYTES + 4 * flags.parameters),
    }
    rows = [(name, f"{size / MIB:,.1f}") for name, size in parts.items() if size]
    rows.append(("total", f"{sum(parts.values()) / MIB:,.1f}"))
    print(table(f"an observation takes {obs:,} bytes", ("part", "MiB"), rows))
    print("estimated: sizes of arrays, and by rule of thumb 256 MiB a collecting process")
