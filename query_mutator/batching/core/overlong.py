"""Over-long samples: error, drop, truncate or split them, and count what was done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from query_mutator.batching.arrays import IndexArray
from query_mutator.batching.lengths import LengthTable
from query_mutator.batching.records import Record
from query_mutator.errors import UsageError


class OverlongPolicy(StrEnum):
    """How to handle a sample longer than the budget or the longest bucket."""

    ERROR = "error"
    DROP = "drop"
    TRUNCATE = "truncate"
    SPLIT = "split"


class OverlongReport(Record):
    """Number of samples over `limit`, how they were handled, and the tokens left out of all batches."""

    policy: OverlongPolicy
    limit: int = Field(ge=1)
    num_overlong: int = 0
    num_dropped: int = 0
    num_truncated: int = 0
    num_split: int = 0
    num_pieces: int = 0
    tokens_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Units that are part of a sample: unit number (ascending), sample, its tokens [start, stop), each int32 [c]."""

    unit: NDArray[np.int32]
    sample: NDArray[np.int32]
    start: NDArray[np.int32]
    stop: NDArray[np.int32]

    @classmethod
    def none(cls) -> Cuts:
        """Return no cuts: every unit is the sample of the same number."""
        empty = np.empty(0, np.int32)
        return cls(unit=empty, sample=empty, start=empty, stop=empty)

    def __len__(self) -> int:
        return len(self.unit)

    def resolve(self, units: NDArray[Any]) -> tuple[IndexArray, NDArray[np.int32] | None, NDArray[np.int32] | None]:
        """Return sample, start and stop (−1: the end) of every unit; no starts and stops if all are whole samples."""
        if not len(self):
            return units, None, None
        rows = np.searchsorted(self.unit, units)
        cut = rows < len(self)
        cut[cut] = self.unit[rows[cut]] == units[cut]
        if not cut.any():
            return units, None, None
        samples = np.array(units)
        starts, stops = np.zeros(len(units), np.int32), np.full(len(units), -1, np.int32)
        for column, values in ((samples, self.sample), (starts, self.start), (stops, self.stop)):
            column[cut] = values[rows[cut]]
        return samples, starts, stops


def is_cut(starts: NDArray[Any], stops: NDArray[Any]) -> bool:
    """Return whether one of these ranges of tokens is less than a whole sample."""
    return bool(starts.any() or (stops != -1).any())


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Units of a batch: unit i < n is sample i, whole or cut; later ones are further pieces of samples."""

    lengths: NDArray[np.int32]  # [u]
    loss: NDArray[Any] | None  # [u]; None: all tokens but the first of each unit
    kept: IndexArray | None  # units that take part, None for all
    cuts: Cuts
    report: OverlongReport

    @property
    def members(self) -> IndexArray:
        """Units that take part."""
        return np.arange(len(self.lengths), dtype=np.int32) if self.kept is None else self.kept

    @property
    def targets(self) -> NDArray[Any]:
        """Tokens with a loss in each unit [u]."""
        return self.lengths - 1 if self.loss is None else self.loss


def fit_units(
    table: LengthTable,
    limits: int | NDArray[Any],
    policy: OverlongPolicy,
    *,
    loss: NDArray[Any] | None = None,
    loss_limit: int | None = None,
) -> Units:
    """Apply the policy to every sample longer than its limit, or with more loss tokens than `loss_limit`.

    In a sample that is cut, the last tokens are assumed to have the loss (an answer after its prompt).
    """
    lengths, policy = table.lengths, OverlongPolicy(policy)
    limit = int(np.min(limits)) if np.size(limits) else 1
    report = OverlongReport(policy=policy, limit=max(limit, 1))
    over = np.flatnonzero(lengths > limits)
    heavy = np.empty(0, np.int64)
    if loss_limit is not None:
        heavy = np.flatnonzero((lengths - 1 if loss is None else loss) > loss_limit)
    if len(over) + len(heavy) == 0:
        return Units(lengths=lengths, loss=loss, kept=None, cuts=Cuts.none(), report=report)
    if policy is OverlongPolicy.DROP:
        return _drop(table, np.union1d(over, heavy), loss, report)
    if policy is OverlongPolicy.ERROR or len(heavy):
        _refuse(table, over, heavy, limit, loss_limit)
    each = np.broadcast_to(np.asarray(limits), lengths.shape)[over].astype(np.int64)
    return _cut(table, over, each, loss, report)


def _refuse(table: LengthTable, over: IndexArray, heavy: IndexArray, limit: int, loss_limit: int | None) -> None:
    which = over if len(over) else heavy
    what = f"longer than {limit} tokens" if len(over) else f"with more than {loss_limit} loss tokens"
    longest = int(table.lengths[which].max())
    policies = "drop, truncate or split" if len(over) else "drop"
    raise UsageError(
        f"{len(which)} of {len(table)} samples are {what} (first {table.ids[int(which[0])]!r}, longest {longest}); "
        f"raise the budget and the last bucket, or choose an over-long policy: {policies}"
    )


def _drop(table: LengthTable, over: IndexArray, loss: NDArray[Any] | None, report: OverlongReport) -> Units:
    keep = np.ones(len(table), bool)
    keep[over] = False
    lost = int(table.lengths[over].sum(dtype=np.int64))
    report = report.model_copy(update={"num_overlong": len(over), "num_dropped": len(over), "tokens_lost": lost})
    return Units(lengths=table.lengths, loss=loss, kept=np.flatnonzero(keep), cuts=Cuts.none(), report=report)


def _cut(
    table: LengthTable, over: IndexArray, limits: IndexArray, loss: NDArray[Any] | None, report: OverlongReport
) -> Units:
    """Cut over-long samples at their limits; under policy "truncate" keep the first piece alone."""
    truncate = report.policy is OverlongPolicy.TRUNCATE
    whole = table.lengths[over].astype(np.int64)
    pieces = np.ones_like(whole) if truncate else -(-whole // limits)
    sample = np.repeat(over, pieces)
    number = np.arange(len(sample)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = number * np.repeat(limits, pieces)
    stop = np.minimum(start + np.repeat(limits, pieces), np.repeat(whole, pieces))
    # The first piece of a sample keeps its number; further pieces become new units after all samples.
    unit = np.where(number == 0, sample, len(table) + np.cumsum(number > 0) - 1)
    more = int((number > 0).sum())
    lengths = np.concatenate([table.lengths, np.zeros(more, np.int32)])
    lengths[unit] = stop - start
    if loss is not None:
        parts = _loss_between(start, stop, np.repeat(whole, pieces), loss[sample])
        loss = np.concatenate([loss, np.zeros(more, loss.dtype)])
        loss[unit] = parts
    by_unit = np.argsort(unit)
    columns = {"unit": unit, "sample": sample, "start": start, "stop": stop}
    cuts = Cuts(**{name: column[by_unit].astype(np.int32) for name, column in columns.items()})
    counts = {"num_overlong": len(over)}
    if truncate:
        counts |= {"num_truncated": len(over), "tokens_lost": int((whole - limits).sum())}
    else:
        counts |= {"num_split": len(over), "num_pieces": len(sample)}
    return Units(lengths=lengths, loss=loss, kept=None, cuts=cuts, report=report.model_copy(update=counts))


def _loss_between(start: IndexArray, stop: IndexArray, whole: IndexArray, loss: NDArray[Any]) -> IndexArray:
    """Return how many of the last `loss` tokens lie in [start, stop), without the first token of the piece."""
    between: IndexArray = np.maximum(stop - np.maximum(start + 1, whole - loss), 0)
    return between
