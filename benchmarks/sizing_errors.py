"""Errors of `qm size` for models of many kinds: estimates against what real steps allocate.

    python -m benchmarks.sizing_errors                  # all kinds, oneDNN on and off: about ten minutes
    python -m benchmarks.sizing_errors lstm conv3d      # kinds whose name contains a word

The truth on a CPU is what the profiler counts, which includes oneDNN's, and each kind is one child process; on a GPU it
is the allocator's statistics, and each row is one child process.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from query_mutator.errors import UsageError
from query_mutator.lab.sizing.memory import Trainer, estimate
from query_mutator.lab.sizing.sizes import Batch, Recipe, Workload
from query_mutator.lab.sizing.tracker import onednn, peak_of, recorded_allocations

__all__ = ["KINDS", "OPTIMIZERS", "Kind", "Row", "compare", "measured_peak", "workload_of"]

OPTIMIZERS = ("sgd-momentum", "adamw", "adafactor")
STEPS, FEATURES, UNITS = 100, 64, 256
MIB = 2**20


class Recurrent(nn.Module):
    """An LSTM or GRU of 64 -> 256 units; `packed` sequences have half to all of the steps."""

    def __init__(self, kind: Callable[..., Any], *, packed: bool = False, **settings: Any) -> None:
        super().__init__()
        self.inner, self.packed = kind(FEATURES, UNITS, batch_first=True, **settings), packed

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return the outputs [B, T, H]."""
        if not self.packed:
            return self.inner(x)[0]  # type: ignore[no-any-return]
        rows = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.inner(rows)[0], batch_first=True)[0]


class UNet1d(nn.Module):
    """Three levels of Conv1d down, transposed convolutions up, with skip connections."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128)) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, widths[0], 5, padding=2)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(nn.Conv1d(one, two, 4, stride=2, padding=1) for one, two in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose1d(two, one, 4, stride=2, padding=1) for one, two in reversed(pairs))
        self.join = nn.ModuleList(nn.Conv1d(2 * one, one, 5, padding=2) for one, _ in reversed(pairs))
        self.last = nn.Conv1d(widths[0], 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a signal of the same shape."""
        levels = [F.relu(self.first(x))]
        for down in self.down:
            levels.append(F.relu(down(levels[-1])))
        y = levels.pop()
        for up, join in zip(self.up, self.join, strict=True):
            y = F.relu(join(torch.cat([up(y), levels.pop()], dim=1)))
        return self.last(y)  # type: ignore[no-any-return]


class FanOut(nn.Module):
    """Six branches read one representation, and their sum is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(256, 512), nn.Linear(512, 10)
        self.branches = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        h = torch.tanh(self.stem(x))
        return self.head(torch.stack([torch.tanh(branch(h)) for branch in self.branches]).sum(0))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """An embedding whose weights are also those of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(5000, 128), nn.Linear(128, 128)
        self.out = nn.Linear(128, 5000, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, V]."""
        return self.out(torch.tanh(self.hidden(self.embedding(tokens))))  # type: ignore[no-any-return]


class Spectral(nn.Module):
    """Weights of frequencies, between two FFTs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 513, 2))
        self.lift = nn.Linear(1, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Return a signal of the same length."""
        lifted = self.lift(x[..., None]).transpose(1, 2)
        return torch.fft.irfft(torch.fft.rfft(lifted) * torch.view_as_complex(self.weight), n=1024)


class Masked(nn.Module):
    """Keeps the rows that a mask selects: by lengths that the batch holds, or by signs of activations."""

    def __init__(self, *, by_values: bool) -> None:
        super().__init__()
        self.first, self.second, self.by_values = nn.Linear(64, 512), nn.Linear(512, 512), by_values

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return one row per selected step."""
        h = torch.tanh(self.first(x))
        mask = h[..., 0] > 0 if self.by_values else torch.arange(x.shape[1])[None] < lengths[:, None]
        return self.second(h[mask])  # type: ignore[no-any-return]


class Cropped(Masked):
    """Crops the batch to its longest sequence, whose length is read by .item()."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return one row per step that is left."""
        longest = int((x.abs().sum(-1) > 0).sum(1).max().item()) if self.by_values else int(lengths.max().item())
        return self.second(torch.tanh(self.first(x[:, :longest])))  # type: ignore[no-any-return]


def _sequences(batch: int) -> Batch:
    return torch.randn(batch, STEPS, FEATURES), torch.arange(batch) * (STEPS // 2) // batch + STEPS // 2


def _tokens(batch: int) -> Batch:
    return (torch.randint(0, 5000, (batch, 64)),)


def _normal(*shape: int) -> Callable[[int], Batch]:
    return lambda batch: (torch.randn(batch, *shape),)


def _mean_square(module: nn.Module, *inputs: Tensor) -> Tensor:
    return module(*inputs).square().mean()  # type: ignore[no-any-return]


def _next_token(module: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())


def _labels_of(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"])


def _conv3d() -> nn.Module:
    layers = (nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 32, 3, stride=2, padding=1), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 10))


def _depthwise() -> nn.Module:
    def block(one: int, two: int) -> list[nn.Module]:
        return [nn.Conv2d(one, one, 3, padding=1, groups=one), nn.ReLU(), nn.Conv2d(one, two, 1), nn.ReLU()]

    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *block(32, 64), *block(64, 64), nn.Conv2d(64, 64, 3, groups=4))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of model: how to build it, its batches and loss, two batch sizes, and precisions besides fp32."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[..., Tensor] = _mean_square
    sizes: tuple[int, int] = (8, 32)
    precisions: tuple[str, ...] = ("fp32",)


def _recurrent(kind: Callable[..., Any], **settings: Any) -> Kind:
    return Kind(build=lambda: Recurrent(kind, **settings), batch=_sequences)


def _masked(kind: type[Masked], *, by_values: bool) -> Kind:
    return Kind(build=lambda: kind(by_values=by_values), batch=_sequences)


KINDS = {
    f"{name}{title}": _recurrent(kind, **settings)
    for name, kind in (("lstm", nn.LSTM), ("gru", nn.GRU))
    for title, settings in {
        "": {}, " 2 layers": {"num_layers": 2}, " both ways": {"bidirectional": True}, " packed": {"packed": True},
    }.items()
} | {
    "conv1d u-net": Kind(build=UNet1d, batch=_normal(4, 1024), precisions=("fp32", "bf16")),
    "conv3d": Kind(build=_conv3d, batch=_normal(1, 24, 24, 24), sizes=(4, 16)),
    "depthwise": Kind(build=_depthwise, batch=_normal(3, 32, 32)),
    "fan-out": Kind(build=FanOut, batch=_normal(256), sizes=(64, 1024)),
    "dict batch": Kind(
        build=lambda: nn.Linear(256, 10),
        batch=lambda size: {"x": torch.randn(size, 256), "y": torch.randint(0, 10, (size,))},
        loss=_labels_of,
        sizes=(64, 1024),
    ),
    "tied": Kind(build=Tied, batch=_tokens, loss=_next_token),
    "fft": Kind(build=Spectral, batch=_normal(1024)),
    "mask by lengths": _masked(Masked, by_values=False),
    "mask by values": _masked(Masked, by_values=True),
    "crop by lengths": _masked(Cropped, by_values=False),
    "crop by values": _masked(Cropped, by_values=True),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Bytes estimated, from `low` to `high`, and measured; `refused` if the sizes depend on the data."""

    low: int
    high: int
    truth: int
    refused: bool

    @property
    def error(self) -> float:
        """Return the estimate's relative error."""
        return self.high / self.truth - 1

    @property
    def holds(self) -> bool:
        """Return whether the estimate is within 3 %, or its range holds the truth and is within 20 % of its middle."""
        middle = (self.low + self.high) / 2
        in_range = self.low <= self.truth <= self.high and self.high <= 1.2 * middle
        return self.refused or abs(self.error) <= 0.03 or in_range


def workload_of(name: str) -> Workload:
    """Return the workload of a kind."""
    kind = KINDS[name]
    return Workload(name=name, build=kind.build, batch=kind.batch, loss=kind.loss)


def measured_peak(workload: Workload, batch: int, recipe: Recipe) -> int:
    """Return the real peak on this CPU in bytes, summed from the profiler's record of every block."""
    with recorded_allocations() as sizes:
        trainer = Trainer(workload, recipe, batch)
        for _ in range(2):
            trainer.step(micro_batches=recipe.accumulate)
    return peak_of(sizes)


def compare(name: str, batch: int, recipe: Recipe, *, with_onednn: bool) -> Row:
    """Estimate and measure in this process."""
    with onednn(with_onednn):
        truth = measured_peak(workload_of(name), batch, recipe)
        try:
            found = estimate(workload_of(name), batch, recipe, rounding=1)
        except UsageError:
            return Row(low=0, high=0, truth=truth, refused=True)
    return Row(low=found.low, high=found.peak, truth=truth, refused=found.data_dependent)


def measure_rows(name: str, precision: str, optimizers: list[str]) -> list[tuple[str, str, str, Row]]:
    """Compare one kind, in a child process: both batch sizes, oneDNN off and on."""
    torch.set_num_threads(1)
    rows = []
    for optimizer, with_onednn, batch in itertools.product(optimizers, (False, True), KINDS[name].sizes):
        recipe = Recipe(optimizer=optimizer, precision=precision, device="cpu")  # type: ignore[arg-type]
        row = compare(name, batch, recipe, with_onednn=with_onednn)
        rows.append((optimizer, "on" if with_onednn else "off", str(batch), row))
    return rows


def main() -> None:
    """Print a row for each kind, batch size, optimizer, precision and oneDNN on and off, and how many hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only kinds whose name contains one of these")
    parser.add_argument("--optimizers", nargs="*", choices=OPTIMIZERS, default=OPTIMIZERS)
    arguments = parser.parse_args()
    names = [name for name in KINDS if not arguments.words or any(word in name for word in arguments.words)]
    print("| kind | precision | optimizer | oneDNN | batch | estimated | measured | off by |")
    print("|---|---|---|---|---|---|---|---|")
    held = []
    for name in names:
        for precision in KINDS[name].precisions:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                found = pool.submit(measure_rows, name, precision, arguments.optimizers).result()
            for *cells, row in found:
                held.append(row.holds)
                print(f"| {' | '.join([name, precision, *cells, *_said(row)])} |", flush=True)
    print(f"{sum(held)} of {len(held)} rows hold")


def _said(row: Row) -> tuple[str, str, str]:
    said = f"{row.low / MIB:,.2f} to " if row.low < row.high else ""
    said, off = ("refused", "") if row.refused else (f"{said}{row.high / MIB:,.2f}", f"{row.error:+.1%}")
    return said, f"{row.truth / MIB:,.2f}", off if row.holds else f"{off} MISSED"


if __name__ == "__main__":
    main()
