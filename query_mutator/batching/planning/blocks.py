"""Plans for more samples than fit into memory: one plan per block of the data set, one open at a time.

Samples are shuffled within their block, and the blocks' order is shuffled every epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.arrays import permutation
from query_mutator.batching.core.config import BatchingConfig
from query_mutator.batching.files import BatchFileError, json_bytes, read_checked_json, sha256_of, write_checked_json
from query_mutator.batching.ids import IdTable
from query_mutator.batching.lengths import LengthTable
from query_mutator.batching.planning.batch_plan import BatchPlan
from query_mutator.batching.planning.builder import BatchPlanBuilder
from query_mutator.batching.planning.microbatch import MicrobatchSpec
from query_mutator.batching.planning.packing import PackingConfig
from query_mutator.batching.planning.plan_files import load_batch_plan, save_batch_plan
from query_mutator.errors import UsageError

BLOCKS_FILE = "blocks.json"


def build_blocked_plan(
    lengths: NDArray[np.int32],
    config: BatchingConfig,
    folder: str | Path,
    *,
    num_epochs: int = 1,
    block_samples: int = 4_000_000,
    dataset_hash: str = "",
    tokenizer_hash: str = "",
    pack_config: PackingConfig | None = None,
) -> BlockedPlan:
    """Write one plan per `block_samples` samples and return them as one; `lengths` may be a memory-mapped array.

    Memory is bounded by the plan of one block, about 50 bytes per sample of the block.
    """
    if block_samples < 1 or not len(lengths):
        raise UsageError(f"block_samples={block_samples} and the number of lengths ({len(lengths)}) must be at least 1")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    blocks = []
    for number, first in enumerate(range(0, len(lengths), block_samples)):
        here = np.array(lengths[first : first + block_samples], np.int32)
        table = LengthTable(ids=IdTable.range(len(here), first), lengths=here)
        plan = BatchPlanBuilder(table, config, dataset_hash, tokenizer_hash, pack_config).build_lazy(num_epochs)
        save_batch_plan(plan, target / _name(number))
        blocks.append(
            {"first": first, "samples": len(here), "fingerprint": load_batch_plan(target / _name(number)).fingerprint}
        )
    write_checked_json(target / BLOCKS_FILE, {"blocks": blocks, "num_epochs": num_epochs, "seed": config.seed})
    return BlockedPlan(target)


def _name(number: int) -> str:
    return f"block_{number:04d}"


class BlockedPlan:
    """The plans of `build_blocked_plan` in a folder, as one; raises BatchFileError for a missing or exchanged block."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        body = read_checked_json(self._folder / BLOCKS_FILE)
        self._blocks = body["blocks"]
        self._seed = int(body["seed"])
        self.num_epochs = int(body["num_epochs"])

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    @property
    def num_samples(self) -> int:
        """Number of samples in all blocks."""
        return sum(int(block["samples"]) for block in self._blocks)

    @property
    def fingerprint(self) -> str:
        """Hexadecimal sha256 over the fingerprints of all blocks in their order."""
        return sha256_of([json_bytes([self._blocks, self._seed])])

    def open_block(self, number: int) -> BatchPlan:
        """Return the plan of one block; its epochs are mapped into memory when used."""
        path = self._folder / _name(number)
        plan = load_batch_plan(path)
        if plan.fingerprint != self._blocks[number]["fingerprint"]:
            raise BatchFileError(f"{path} belongs to another plan than {self._folder / BLOCKS_FILE}")
        return plan

    def block_order(self, epoch: int) -> list[int]:
        """Return the blocks in the order of an epoch."""
        if not 0 <= epoch < self.num_epochs:
            raise KeyError(f"the plan has no epoch {epoch}, it has {self.num_epochs}")
        order: list[int] = permutation(self.num_blocks, self._seed, epoch, 4).tolist()
        return order

    def iter_epoch(self, epoch: int, *, rank: int = 0, world_size: int = 1) -> Iterator[MicrobatchSpec]:
        """Yield the microbatches of an epoch, or one rank's part of every block with equal steps on all ranks."""
        for number in self.block_order(epoch):
            plan = self.open_block(number)
            yield from (plan if world_size == 1 else plan.shard(rank, world_size, equal_steps=True)).iter_epoch(epoch)
