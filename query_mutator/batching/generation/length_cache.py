"""Token lengths by sample id, kept so that a plan needs no second tokenisation.

    .jsonl, .json   a header line with count and checksum, then one row per sample
    anything else   a checksummed binary file: ids as one blob, lengths as int32

A file appears only when it is complete: an interrupted build leaves the one that was there before. What is added to
a loaded cache is added, nothing is lost. The async methods are the sync ones; only whole files go to a thread.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from query_mutator.batching.files import (
    BatchFileError,
    is_text,
    json_bytes,
    read_arrays,
    sha256_of,
    write_arrays,
)
from query_mutator.batching.ids import IdTable
from query_mutator.batching.records import Record
from query_mutator.batching.sync import to_async, to_async_iterator
from query_mutator.errors import UsageError
from query_mutator.files import atomic_write

logger = logging.getLogger(__name__)

KIND = "length cache"
VERSION = 1
MAX_LENGTH = 2**31 - 1


class LengthEntry(Record):
    """One sample's length in tokens, under one tokenizer."""

    sample_id: str = Field(min_length=1)
    tokenizer_hash: str
    length: int = Field(ge=0, le=MAX_LENGTH)

    def to_json(self) -> str:
        """Return the row of a `.jsonl` cache."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, line: str) -> LengthEntry:
        """Return the entry of one row."""
        return cls.model_validate_json(line)


class LengthCache:
    """Lengths in tokens by sample id; ids keep the order in which they were added, and an id comes once.

    As a context manager (sync or async) it saves itself at a clean end; an exception leaves the file as it was.
    """

    def __init__(self, path: str | Path, tokenizer_hash: str, entries: dict[str, int] | None = None) -> None:
        self.path = Path(path)
        self.tokenizer_hash = tokenizer_hash
        self._table: IdTable | None = None  # the ids as bytes: those of a loaded file until somebody asks for one
        self._names: list[str] = []
        self._lengths = array("i")
        self._index: dict[str, int] | None = None  # id -> position, made at the first look-up
        if entries:
            self.add_many_sync(list(entries), list(entries.values()))

    # --- building --------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | Path, tokenizer_hash: str) -> Self:
        """Return an empty cache that will be saved at `path`."""
        return cls(path, tokenizer_hash)

    def add_sync(self, sample_id: object, length: int) -> None:
        """Add one length; an id that is there already is a UsageError."""
        name = sample_id_of(sample_id)
        index = self._positions()
        if name in index:
            raise UsageError(f"sample id {name!r} is in the length cache already ({self.path})")
        self._lengths.append(_checked_length(name, length))
        index[name] = len(self._names)
        self._names.append(name)
        self._table = None

    def add_many_sync(self, sample_ids: Sequence[object], lengths: Sequence[int] | NDArray[Any]) -> None:
        """Add many lengths at once; an id that comes twice is a UsageError and then none is added."""
        values = np.asarray(lengths)
        if len(sample_ids) != len(values):
            raise UsageError(f"{len(sample_ids)} sample ids but {len(values)} lengths")
        if not len(values):
            return
        if values.dtype.kind not in "iu" or values.min() < 0 or values.max() > MAX_LENGTH:
            raise UsageError(f"lengths are whole numbers from 0 to {MAX_LENGTH}")
        merged = self._list() + [name if type(name) is str and name else sample_id_of(name) for name in sample_ids]
        twice = first_duplicate(merged)
        if twice is not None:
            raise UsageError(f"sample id {twice!r} comes twice in the length cache ({self.path})")
        self._names, self._table, self._index = merged, None, None
        self._lengths.frombytes(values.astype(np.intc).tobytes())

    def save_sync(self) -> None:
        """Write the cache to its path by rename; the suffix chooses the format."""
        if is_text(self.path):
            self._save_lines()
            return
        meta = {"version": VERSION, "tokenizer_hash": self.tokenizer_hash, "count": len(self)}
        write_arrays(self.path, {**self.ids.to_arrays(), "lengths": self.lengths}, kind=KIND, meta=meta)

    add = to_async(add_sync, thread=False)
    add_many = to_async(add_many_sync, thread=False)
    save = to_async(save_sync)

    def _save_lines(self) -> None:
        shared = f', "tokenizer_hash": {json.dumps(self.tokenizer_hash)}, "length": '
        rows = [f'{{"sample_id": {json.dumps(name)}{shared}{length}}}\n' for name, length in self.items()]
        body = "".join(rows).encode()
        header = {
            "tokenizer_hash": self.tokenizer_hash,
            "version": VERSION,
            "count": len(rows),
            "sha256": sha256_of([body]),
        }
        with atomic_write(self.path) as file:
            file.write(json_bytes(header) + b"\n")
            file.write(body)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.save_sync()

    __aenter__ = to_async(__enter__, thread=False)
    __aexit__ = to_async(__exit__)

    # --- loading ---------------------------------------------------------------------------------------------------

    @classmethod
    def load_sync(
        cls, path: str | Path, expected_tokenizer_hash: str | None = None, *, allow_unfinished: bool = False
    ) -> Self:
        """Read a cache; another tokenizer's is a UsageError, a damaged one a BatchFileError naming it.

        A `.jsonl` file without a count may be the beginning of an interrupted build (other tools write such files):
        it is read only with `allow_unfinished`.
        """
        cache = cls(path, "")
        if is_text(path):
            cache._load_lines(allow_unfinished=allow_unfinished)
        else:
            cache._load_binary()
        if expected_tokenizer_hash is not None and cache.tokenizer_hash != expected_tokenizer_hash:
            raise UsageError(
                f"{path} was made with tokenizer {cache.tokenizer_hash}, not {expected_tokenizer_hash}: build it again"
            )
        return cache

    @classmethod
    def load_or_create_sync(cls, path: str | Path, tokenizer_hash: str) -> Self:
        """Read the cache at `path`, or begin one; one made with another tokenizer is begun anew, with a warning."""
        if not Path(path).exists():
            return cls(path, tokenizer_hash)
        cache = cls.load_sync(path)
        if cache.tokenizer_hash == tokenizer_hash:
            return cache
        logger.warning(
            "%s was made with tokenizer %s, not %s: it will be built again", path, cache.tokenizer_hash, tokenizer_hash
        )
        return cls(path, tokenizer_hash)

    @classmethod
    async def load(
        cls, path: str | Path, expected_tokenizer_hash: str | None = None, *, allow_unfinished: bool = False
    ) -> Self:
        """Run `load_sync` in a thread."""
        return await to_async(cls.load_sync)(path, expected_tokenizer_hash, allow_unfinished=allow_unfinished)

    @classmethod
    async def load_or_create(cls, path: str | Path, tokenizer_hash: str) -> Self:
        """Run `load_or_create_sync` in a thread."""
        return await to_async(cls.load_or_create_sync)(path, tokenizer_hash)

    def _load_binary(self) -> None:
        file = read_arrays(self.path, kind=KIND)
        self._check_version(file.meta.get("version"))
        self.tokenizer_hash = str(file.meta["tokenizer_hash"])
        self._lengths.frombytes(file.arrays["lengths"].tobytes())
        self._table = IdTable.from_arrays(file.arrays, count=len(self._lengths), path=self.path)

    def _load_lines(self, *, allow_unfinished: bool) -> None:
        try:
            first, _, body = self.path.read_bytes().partition(b"\n")
        except OSError as error:
            raise BatchFileError(f"cannot read {self.path}: {error.strerror or error}") from error
        header = self._header(first)
        self.tokenizer_hash = str(header["tokenizer_hash"])
        if "count" not in header and not allow_unfinished:
            raise BatchFileError(f"{self.path} has no count: it may be the beginning of an interrupted build")
        if "count" in header and header.get("sha256") != sha256_of([body]):
            raise BatchFileError(f"{self.path} does not match its checksum: it was truncated or edited")
        rows = [self._row(line, number) for number, line in enumerate(body.split(b"\n"), start=2) if line.strip()]
        if header.get("count", len(rows)) != len(rows):
            raise BatchFileError(f"{self.path} holds {len(rows)} rows where {header['count']} were written")
        self.add_many_sync([name for name, _ in rows], [length for _, length in rows])

    def _header(self, line: bytes) -> dict[str, Any]:
        try:
            header = json.loads(line)
        except ValueError as error:
            raise BatchFileError(f"{self.path} does not begin with the header of a length cache") from error
        if not isinstance(header, dict) or "tokenizer_hash" not in header or "sample_id" in header:
            raise BatchFileError(f"{self.path} does not begin with the header of a length cache")
        self._check_version(header.get("version"))
        return header

    def _row(self, line: bytes, number: int) -> tuple[str, int]:
        try:
            row = json.loads(line)
            name = sample_id_of(row["sample_id"])
            return name, _checked_length(name, row["length"])
        except (ValueError, KeyError, TypeError) as error:
            raise BatchFileError(f"{self.path}:{number} is no row of a length cache: {error}") from error

    def _check_version(self, version: object) -> None:
        if version != VERSION:
            raise BatchFileError(f"{self.path} has version {version!r} of the length cache; {VERSION} is read here")

    # --- looking up ------------------------------------------------------------------------------------------------

    @property
    def ids(self) -> IdTable:
        """All ids in the order they were added."""
        if self._table is None:
            self._table = IdTable.from_list(self._names)
        return self._table

    @property
    def lengths(self) -> NDArray[np.int32]:
        """All lengths in the order of `ids`, int32 [N]; a copy."""
        return np.array(self._lengths, dtype=np.int32)

    def get(self, sample_id: object) -> int | None:
        """Return the length of a sample, or None."""
        position = self._positions().get(sample_id_of(sample_id))
        return None if position is None else self._lengths[position]

    def get_all(self) -> dict[str, int]:
        """Return all lengths by id."""
        return dict(self.items())

    def items(self) -> Iterable[tuple[str, int]]:
        """Return the pairs of id and length in the order they were added."""
        return zip(self._list(), self._lengths, strict=True)

    def __len__(self) -> int:
        return len(self._lengths)

    def __contains__(self, sample_id: object) -> bool:
        return self.get(sample_id) is not None

    def _positions(self) -> dict[str, int]:
        if self._index is None:
            self._index = dict(zip(self._list(), range(len(self)), strict=True))
        return self._index

    def _list(self) -> list[str]:
        if len(self._names) != len(self._lengths):  # loaded, and not looked into so far
            self._names = self.ids.to_list()
        return self._names

    # --- checking and streaming ------------------------------------------------------------------------------------

    def validate_sync(self, sample_ids: Iterable[object]) -> tuple[set[str], set[str]]:
        """Return the ids that are missing here, and the ids here that are not among `sample_ids`."""
        wanted, present = {sample_id_of(name) for name in sample_ids}, set(self._list())
        return wanted - present, present - wanted

    validate = to_async(validate_sync, thread=False)

    def is_complete(self, sample_ids: Iterable[object]) -> bool:
        """Say whether every one of `sample_ids` is here."""
        return not self.validate_sync(sample_ids)[0]

    @classmethod
    def stream_sync(cls, path: str | Path) -> Iterator[LengthEntry]:
        """Yield the entries of a verified file one by one."""
        cache = cls.load_sync(path)
        for name, length in cache.items():
            yield LengthEntry(sample_id=name, tokenizer_hash=cache.tokenizer_hash, length=length)

    @classmethod
    def stream(cls, path: str | Path) -> AsyncIterator[LengthEntry]:
        """Yield the entries of a verified file one by one."""
        return to_async_iterator(cls.stream_sync, every=1000)(path)


def sample_id_of(value: object) -> str:
    """Return an id as text: strings as they are, whole numbers in decimal (0 too); anything else is a UsageError."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return str(int(value))
    raise UsageError(f"a sample id is a string with at least one character or a whole number, not {value!r}")


def first_duplicate(ids: Sequence[str]) -> str | None:
    """Return an id that occurs twice, or None; a set of a million strings takes four times as long as their hashes."""
    hashes = np.fromiter(map(hash, ids), dtype=np.int64, count=len(ids))
    hashes.sort()
    if not np.any(hashes[1:] == hashes[:-1]):
        return None
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            return name
        seen.add(name)
    return None


def _checked_length(name: str, length: object) -> int:
    if isinstance(length, (int, np.integer)) and not isinstance(length, bool) and 0 <= length <= MAX_LENGTH:
        return int(length)
    raise UsageError(f"the length of sample {name!r} is a whole number from 0 to {MAX_LENGTH}, not {length!r}")
