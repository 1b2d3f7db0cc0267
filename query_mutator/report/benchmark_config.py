"""The settings of `benchmark_batching.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le
from tyro.conf import arg

from query_mutator.bounds import Million, Seconds, Sigma, Wait
from query_mutator.cli.flags import JsonTo
from query_mutator.cli.outputs import FIGURE, OutputFlags
from query_mutator.llm.backends import ADDRESS_FLAGS
from query_mutator.llm.flags import ServerFlags
from query_mutator.llm.probe import PROBE_WIDTH

__all__ = ["BenchmarkConfig"]

NUM_QUERIES = 64
BATCH_SIZES = "1,2,4,8,16,32"
LATENCY_MS, NUM_PARALLEL = 100.0, 64  # of the embedded server


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(OutputFlags, ServerFlags):
    """Compare sequential, phase-batched, pipelined and asynchronous calls over several batch sizes.

    Without a server the embedded one is started in its own process; it answers with fixed words after a fixed time,
    which measures the scheduling and not a language model.
    """

    mutator_model: str | None = None
    """The model that carries out rewrites; by default the target model."""
    latency_ms: Wait | None = None
    """Mean time the embedded server takes for a call; by default 100."""
    latency_sigma: Sigma | None = None
    """Log-normal spread of that time; by default 0."""
    num_parallel: Annotated[int, Ge(1), Le(4096)] | None = None
    """Slots of the embedded server; by default 64."""
    batch_sizes: str | None = None
    """Batch sizes to compare, with commas; by default 1,2,4,8,16,32 and the slots that the probe finds."""
    num_queries: Million = NUM_QUERIES
    """Queries of each measurement; each takes two calls."""
    repeats: Annotated[int, Ge(1), Le(4096)] = 3
    """Measurements of each row, in turns; the table has their medians."""
    budget_s: Seconds = 120.0
    """Seconds for all measurements, once models are loaded; the plan that is printed first says what is left out."""
    picture: Annotated[str | None, arg(name="figure", aliases=["--picture"]), FIGURE] = None
    """Write the speed-up against the batch size as a PNG to this file."""
    json: JsonTo = None
    """Write table, slots and recommendation as JSON to FILE; without FILE, or with -, print them in place of text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for path in (self.picture, self.json):
            if path not in (None, "-") and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
                raise ValueError(f"{path}: cannot be written; give a file in a folder that exists")
        if self.picture is not None and Path(self.picture).suffix.lower() != ".png":
            raise ValueError(f"--figure {self.picture} must end in .png")
        self._check_sizes()
        self._check_server()

    @property
    def sizes(self) -> list[int]:
        """Return the batch sizes in increasing order, without duplicates."""
        text = BATCH_SIZES if self.batch_sizes is None else self.batch_sizes
        return sorted({int(size) for size in text.split(",")})

    def sizes_with(self, slots: int | None) -> list[int]:
        """Return the batch sizes, by default with the server's slots among them, which is what `qm doctor` sets."""
        found = {slots} if slots and self.batch_sizes is None and slots <= max(self.sizes) else set()
        return sorted({*self.sizes, *found})

    @property
    def is_embedded(self) -> bool:
        """Return whether to start the embedded server."""
        return not self.names_server

    @property
    def probe_width(self) -> int:
        """Return how many calls to send at once to count the server's slots."""
        return max(PROBE_WIDTH, *self.sizes)

    @property
    def embedded(self) -> dict[str, Any]:
        """Return how the embedded server behaves, as `embedded_process` takes it."""
        latency_ms = LATENCY_MS if self.latency_ms is None else self.latency_ms
        return {
            "num_parallel": self.num_parallel or NUM_PARALLEL,
            "latency_ms": latency_ms,
            "latency_sigma": self.latency_sigma or 0.0,
        }

    def _check_sizes(self) -> None:
        try:
            in_range = all(1 <= size <= 1024 for size in self.sizes)
        except ValueError:
            in_range = False
        if not in_range:
            raise ValueError(
                f"batch_sizes={self.batch_sizes} must be whole numbers from 1 to 1024 with commas, as 1,2,4,8"
            )

    def _check_server(self) -> None:
        embedded_only = ("latency_ms", "latency_sigma", "num_parallel")
        running_only = (*ADDRESS_FLAGS, "target_model", "mutator_model", "num_ctx")
        wrong: tuple[str, ...] = running_only
        kind = "an Ollama server or another that runs already"
        if not self.is_embedded:
            wrong, kind = embedded_only, "the embedded server"
        given = [f"--{name.replace('_', '-')}" for name in wrong if getattr(self, name) not in (None, ())]
        if given:
            used = "the embedded server" if self.is_embedded else "a running one"
            raise ValueError(f"{given[0]} is for {kind}, and this run uses {used}; leave one of them out")
