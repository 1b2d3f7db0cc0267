"""Groups of samples that stay in one microbatch: chosen and rejected answers, all answers to one prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.arrays import IndexArray, offsets_of, ranges_of
from query_mutator.batching.core.filling import Items
from query_mutator.batching.files import sha256_of
from query_mutator.batching.lengths import LengthTable
from query_mutator.errors import UsageError

GroupSource = Mapping[str, str] | Sequence[str | int] | NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Group g has members[offsets[g]:offsets[g+1]]; a sample without a label is a group by itself."""

    members: IndexArray
    offsets: NDArray[np.int64]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of members of every group."""
        return np.diff(self.offsets)

    @property
    def digest(self) -> str:
        """Hexadecimal sha256 of the membership."""
        return sha256_of([self.members.astype(np.int64), self.offsets])

    def size_per_sample(self) -> NDArray[np.int64]:
        """Return the size of every sample's group."""
        sizes = np.empty(len(self.members), np.int64)
        sizes[self.members] = np.repeat(self.sizes, self.sizes)
        return sizes

    def whole(self, kept: IndexArray | None) -> Groups:
        """Return the groups with all members kept."""
        if kept is None:
            return self
        # A group is complete if the logical and over its members holds.
        present = np.zeros(len(self.members), bool)
        present[kept] = True
        complete = np.flatnonzero(np.logical_and.reduceat(present[self.members], self.offsets[:-1]))
        sizes = self.sizes[complete]
        return Groups(members=self.members[ranges_of(self.offsets[complete], sizes)], offsets=offsets_of(sizes))

    def items(self, lengths: NDArray[Any], loss: NDArray[Any]) -> Items:
        """Return the groups as items: longest member, number of members, summed loss tokens."""
        if not len(self.sizes):
            return Items(lengths[:0], self.sizes, loss[:0])
        begins = self.offsets[:-1]
        longest = np.maximum.reduceat(lengths[self.members], begins)
        return Items(longest, self.sizes, np.add.reduceat(loss[self.members], begins, dtype=np.int64))


def find_groups(source: GroupSource, table: LengthTable) -> Groups:
    """Return groups from one label per sample: a list in the table's order, or a mapping by id of those in groups."""
    if isinstance(source, Mapping):
        unknown = set(source) - set(table.ids.to_list())
        if unknown:
            raise UsageError(f"groups name unknown sample {min(unknown)!r} ({len(unknown)} in all)")
        # A prefix keeps a sample without a label out of a group named like it.
        labels = [f"g{source[one]}" if one in source else f"s{one}" for one in table.ids.to_list()]
    elif len(source) != len(table) or not table.ids.is_range:
        raise UsageError("groups must be a mapping by id, or one label per length if the lengths have no ids")
    else:
        labels = [str(label) for label in source]
    _, number = np.unique(np.array(labels, dtype=object).astype(str), return_inverse=True)
    members = np.argsort(number, kind="stable")
    return Groups(members=members, offsets=offsets_of(np.bincount(number)))
