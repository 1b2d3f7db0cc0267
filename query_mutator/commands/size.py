"""`qm size` and `qm size replay`: memory of a training step without a GPU, of a replay buffer and of collectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from cyclopts import Parameter

from ppo.fields import Matches
from query_mutator.bounds import CountOrNone, Few, Size, Wait
from query_mutator.cli.console import table
from query_mutator.cli.flags import Positional
from query_mutator.cli.outputs import JsonFlags, show
from query_mutator.errors import UsageError
from query_mutator.lab.sizing.cards import MIB, Calibration, read_calibration, vram_bytes
from query_mutator.lab.sizing.collecting import PROCESS_BYTES, replay_bytes, rollout_bytes
from query_mutator.lab.sizing.lerobot import smolvla, train_line
from query_mutator.lab.sizing.real_steps import ModelSpec, pick_device
from query_mutator.lab.sizing.workload import Optimizer

SMOLVLA = "smolvla"
_PRESETS = "query_mutator.commands.size_presets"  # registers those of the trainer's learners
_NOT_COUNTED = {
    "cpu": "all that PyTorch and oneDNN allocate",
    "cuda": "reserved is what a caching allocator may hold; workspaces of cuBLAS and cuDNN are not counted",
}
PLAIN = "as it is"  # the variant without --what-if
TrainingDevice = Annotated[str, Matches(r"auto|cpu|cuda(:\d+)?", "must be auto, cpu, cuda or cuda:N")]


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """What to train, and how."""

    model: Positional[str] = "policy"
    """A preset (a wrong name lists them), or package.module:function that returns a Workload."""
    cameras: Size | None = None
    """Cameras of act and smolvla."""
    resolution: Annotated[str, Matches(r"[1-9]\d*x[1-9]\d*", "must be height and width, as 480x640")] | None = None
    """Height and width of their images, as 480x640."""
    tokens: Size | None = None
    """Tokens of a row, for language models."""
    optimizer: Optimizer = "adamw"
    """The optimizer."""

    def spec(self, variant: str | None = None) -> ModelSpec:
        """Return the model in a variant, with the sizes that were given."""
        height_width = tuple(map(int, self.resolution.split("x"))) if self.resolution else None
        given = {"cameras": self.cameras, "resolution": height_width, "tokens": self.tokens}
        sizes = {name: value for name, value in given.items() if value is not None}
        return ModelSpec(model=self.model, sizes=sizes, optimizer=self.optimizer, variant=variant, plugins=(_PRESETS,))


@dataclass(frozen=True, kw_only=True)
class DeviceFlags(ModelFlags):
    """What to train, how, and where."""

    device: TrainingDevice = "auto"
    """cpu, cuda or cuda:1; auto takes a GPU if there is one."""
    onednn: bool = True
    """On a CPU: whether the run leaves oneDNN on, as PyTorch does; it changes what layers allocate."""

    def spec(self, variant: str | None = None) -> ModelSpec:
        """Return the model in a variant, with or without oneDNN."""
        return replace(super().spec(variant), onednn=self.onednn)

    def titled(self, name: str, device: str) -> str:
        """Return the model and where it is trained, in words."""
        return f"{name} (oneDNN {'on' if self.onednn else 'off'}) on cpu" if device == "cpu" else f"{name} on {device}"


@dataclass(frozen=True, kw_only=True)
class SizeFlags(DeviceFlags, JsonFlags):
    """Estimate the memory of a training step on a CPU or a GPU, without a GPU, and the batch that fits a card.

    The figures are what PyTorch allocates.
    The CUDA context, fragmentation and workspaces of cuBLAS and cuDNN are not known.
    """

    device: TrainingDevice = "auto"
    """cpu or cuda, which need not be here; auto is cuda with --vram, with --calibration or if there is a GPU."""

    batch: tuple[Size, ...] = (1, 8, 32)
    """Batch sizes to estimate."""
    vram: str | None = None
    """Memory of the card, as 12GB, or its name, as rtx4090: prints the largest batch that fits."""
    what_if: tuple[str, ...] = ()
    """Variants to estimate too: bf16, fp16, checkpointing, accumulate:4, frozen, frozen:PREFIX, sgd; + joins them."""
    context_mib: Wait = 600.0
    """Memory of the CUDA context; 300 to 1300 by card and version."""
    calibration: str | None = None
    """File of `qm size calibrate`: what this card takes in addition to the estimate."""

    def __post_init__(self) -> None:
        if self.vram is not None:
            vram_bytes(self.vram)


#: The table, the largest batch by variant, how that is known, and all of it as data for --json.
_Sizes = tuple[str, Mapping[str, int], str, dict[str, Any]]


def size(flags: SizeFlags) -> None:
    """Print memory by batch size and variant, and the largest batch for the card."""
    calibration = Calibration(context_bytes=int(flags.context_mib * MIB))
    if flags.calibration is not None:
        calibration = read_calibration(flags.calibration)
    room = None if flags.vram is None else calibration.room(vram_bytes(flags.vram))
    sized = _tabled if flags.model == SMOLVLA else _tracked
    shown, largest, source, data = sized(flags, calibration.factor, room)
    lines = [shown]
    for name, batch in largest.items():
        found = batch or "none, not even one sample fits"
        lines.append(f"largest batch on {flags.vram} ({name}): {found} ({source}, {calibration.rests_on})")
    if any("accumulate" in item for item in flags.what_if):
        lines.append("accumulation at the same micro-batch takes one more gradient buffer; it allows smaller ones")
    if flags.model in (SMOLVLA, "act") and largest.get(PLAIN):
        half = max(1, largest[PLAIN] // 2)  # to start with
        lines.append(train_line(policy=flags.model, batch_size=half))
    lines.append("the largest batch is not the best: throughput has a knee (qm size throughput), learning an optimum")
    show(flags, data, "\n".join(lines))


def _tracked(flags: SizeFlags, factor: float, room: float | None) -> _Sizes:
    """Return the sizes of a model whose step is tracked."""
    from query_mutator.lab.sizing.memory import estimate, largest_batch
    from query_mutator.lab.sizing.scratch import onednn

    device = flags.device.partition(":")[0]
    if device == "auto":
        device = "cuda" if room is not None or flags.calibration is not None else pick_device("auto")
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
            mib_range(factor * one.low, factor * one.peak, digits=0),
            "" if device == "cpu" else f"{factor * one.reserved / MIB:,.0f}",
            *(f"{part / MIB:,.0f}" for part in (one.parameters, one.gradients, one.optimizer, one.activations)),
            max(one.phases, key=lambda phase: one.phases[phase]),
            f"{one.flops / 1e9:,.1f}",
        )
        for variant, one in found
    ]
    estimates = [{"variant": name, **asdict(one), "activations": one.activations} for name, one in found]
    parts = ("peak", "reserved", "weights", "gradients", "optimizer", "the rest")
    title = f"{flags.titled(workload.name, device)}: MiB of a training step (estimated; {_NOT_COUNTED[device]})"
    data = {
        "model": workload.name,
        "device": device,
        "onednn": flags.onednn,
        "estimates": estimates,
        "largest_batch": largest,
    }
    return table(title, ("variant", "batch", *parts, "peak in", "GFLOP"), rows), largest, "estimated", data


def mib_range(low: float, high: float, *, digits: int) -> str:
    """Return bytes as MiB, as a range if they are not known exactly."""
    texts = [f"{size / MIB:,.{digits}f}" for size in (low, high)]
    return texts[1] if texts[0] == texts[1] else " to ".join(texts)


def _tabled(flags: SizeFlags, factor: float, room: float | None) -> _Sizes:
    """Return the sizes of SmolVLA, which is in a table."""
    if set(flags.what_if) - {"unfrozen"}:
        raise UsageError(f"--what-if {' '.join(flags.what_if)}: the table of smolvla knows unfrozen alone")
    cameras = flags.cameras or 2
    variants = {name: smolvla(cameras=cameras, unfrozen=name != PLAIN) for name in (PLAIN, *flags.what_if)}
    rows = [
        (name, str(batch), f"{factor * row.fit.at(batch) / MIB:,.0f}", f"{row.fit.slope / MIB:,.0f}")
        for name, row in variants.items()
        for batch in flags.batch
    ]
    first = variants[PLAIN]
    largest = {} if room is None else {name: row.fit.largest(room) for name, row in variants.items()}
    title = f"{first.name}: MiB of a training step ({first.source}); {first.parameters_m} M parameters"
    fits = {name: asdict(row) for name, row in variants.items()}
    data = {"model": first.name, "fits": fits, "largest": largest}
    return table(title, ("variant", "batch", "peak", "a sample"), rows), largest, "from a table", data


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
