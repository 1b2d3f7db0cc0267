"""Token lengths by sample id, stored so that planning needs no second tokenization.

    .jsonl, .json   a header line with count and checksum, then one row per sample
    anything else   a checksummed binary file: ids as one blob, lengths as int32

A file appears only when it is complete: an interrupted build leaves the previous one. Adding to a loaded cache keeps
its entries. The async methods call the sync ones; only whole files use a thread.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from query_mutator.batching.files import json_bytes, read_arrays, reading, sha256_of, write_arrays
from query_mutator.batching.lengths import IdTable
from query_mutator.batching.records import Record
from query_mutator.batching.sync import to_async, to_async_iterator
from query_mutator.errors import UsageError
from query_mutator.files import atomic_write, decode, parse_json

logger = logging.getLogger(__name__)

KIND = "length cache"
TEXT = (".jsonl", ".json")
VERSION = 1
MAX_LENGTH = 2**31 - 1


class LengthEntry(Record):
    """Length of one sample in tokens, under one tokenizer."""

    sample_id: str = Field(min_length=1)
    tokenizer_hash: str
    length: int = Field(ge=0, le=MAX_LENGTH)


class LengthCache(Mapping[str, int]):
    """Lengths in tokens by unique sample id, in the order in which they were added.

    As a context manager (sync or async) it saves itself when the block ends without an exception.
    """

    def __init__(self, path: str | Path, tokenizer_hash: str, entries: dict[str, int] | None = None) -> None:
        self.path = Path(path)
        self.tokenizer_hash = tokenizer_hash
        self.dataset_hash = ""  # fingerprint of the file that the lengths are of, if it is known
        self._entries: dict[str, int] = {}
        if entries:
            self.add_many_sync(list(entries), list(entries.values()))

    # --- building --------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | Path, tokenizer_hash: str) -> Self:
        """Return an empty cache that will be saved at `path`."""
        return cls(path, tokenizer_hash)

    def add_sync(self, sample_id: object, length: int) -> None:
        """Add one length; raise UsageError for a known id."""
        self.add_many_sync([sample_id], [length])

    def add_many_sync(self, sample_ids: Sequence[object], lengths: Sequence[int] | NDArray[Any]) -> None:
        """Add many lengths at once; for an id that occurs twice raise UsageError and add nothing."""
        values = np.asarray(lengths)
        if len(sample_ids) != len(values):
            raise UsageError(f"{len(sample_ids)} sample ids but {len(values)} lengths; give one length per id")
        if not len(values):
            return
        if values.dtype.kind not in "iu" or values.min() < 0 or values.max() > MAX_LENGTH:
            raise UsageError(f"lengths must be integers from 0 to {MAX_LENGTH}")
        names = [name if type(name) is str and name else sample_id_of(name) for name in sample_ids]
        added = dict(zip(names, values.tolist(), strict=True))
        if len(added) != len(names) or not self._entries.keys().isdisjoint(added):
            twice, _ = Counter([*self._entries, *names]).most_common(1)[0]
            raise UsageError(f"sample id {twice!r} occurs twice in the length cache ({self.path}); ids must be unique")
        self._entries.update(added)

    add = to_async(add_sync, thread=False)
    add_many = to_async(add_many_sync, thread=False)

    def save_sync(self) -> None:
        """Write the cache to its path; the suffix selects the format."""
        header: dict[str, Any] = {"tokenizer_hash": self.tokenizer_hash, "version": VERSION, "count": len(self)}
        if self.dataset_hash:
            header["dataset_hash"] = self.dataset_hash
        if self.path.suffix not in TEXT:
            ids = IdTable.from_list(list(self)).to_arrays()
            write_arrays(self.path, {**ids, "lengths": self.lengths}, kind=KIND, meta=header)
            return
        shared = f', "tokenizer_hash": {json.dumps(self.tokenizer_hash)}, "length": '
        rows = [f'{{"sample_id": {json.dumps(name)}{shared}{length}}}\n' for name, length in self.items()]
        body = "".join(rows).encode()
        header["sha256"] = sha256_of([json_bytes(header), body])
        with atomic_write(self.path) as file:
            file.write(json_bytes(header) + b"\n")
            file.write(body)

    save = to_async(save_sync)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.save_sync()

    __aenter__ = to_async(__enter__, thread=False)
    __aexit__ = to_async(__exit__)

    # --- loading ---------------------------------------------------------------------------------------------------

    @classmethod
    def load_sync(cls, path: str | Path, expected_tokenizer_hash: str | None = None) -> Self:
        """Load a cache; raise UsageError for another tokenizer's, UsageError for a damaged one."""
        cache = cls(path, "")
        cache._load_lines() if cache.path.suffix in TEXT else cache._load_binary()
        if expected_tokenizer_hash is not None and cache.tokenizer_hash != expected_tokenizer_hash:
            raise UsageError(
                f"{path} was made with tokenizer {cache.tokenizer_hash}, not {expected_tokenizer_hash}; build it again"
            )
        return cache

    @classmethod
    async def load(cls, path: str | Path, expected_tokenizer_hash: str | None = None) -> Self:
        """Run `load_sync` in a thread."""
        return await to_async(cls.load_sync)(path, expected_tokenizer_hash)

    @classmethod
    def load_or_create_sync(cls, path: str | Path, tokenizer_hash: str) -> Self:
        """Load the cache at `path`, or return an empty one if there is none or it has another tokenizer."""
        if not Path(path).exists():
            return cls(path, tokenizer_hash)
        cache = cls.load_sync(path)
        if cache.tokenizer_hash == tokenizer_hash:
            return cache
        logger.warning(
            "%s was made with tokenizer %s, not %s; it will be built again", path, cache.tokenizer_hash, tokenizer_hash
        )
        return cls(path, tokenizer_hash)

    @classmethod
    async def load_or_create(cls, path: str | Path, tokenizer_hash: str) -> Self:
        """Run `load_or_create_sync` in a thread."""
        return await to_async(cls.load_or_create_sync)(path, tokenizer_hash)

    def _load_binary(self) -> None:
        file = read_arrays(self.path, kind=KIND)
        self._check(file.meta)
        lengths = file.arrays["lengths"].tolist()
        ids = IdTable.from_arrays(file.arrays, count=len(lengths), path=self.path)
        self._entries = dict(zip(ids.to_list(), lengths, strict=True))

    def _load_lines(self) -> None:
        with reading(self.path):
            first, _, body = self.path.read_bytes().partition(b"\n")
        try:
            header = parse_json(first)
        except ValueError:
            header = None
        if not isinstance(header, dict) or "tokenizer_hash" not in header or "sample_id" in header:
            raise UsageError(f"{self.path} does not begin with the header of a length cache")
        self._check(header)
        if "count" not in header:
            raise UsageError(f"{self.path} has no count; it may be the beginning of an interrupted build")
        about = json_bytes({name: value for name, value in header.items() if name != "sha256"})
        if header.get("sha256") != sha256_of([about, body]):
            raise UsageError(f"{self.path} does not match its checksum; it was truncated or edited")
        try:
            rows = decode(b"[%b]" % b",".join(body.splitlines()))
            self.add_many_sync([row["sample_id"] for row in rows], [row["length"] for row in rows])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self.path} has a row that is not of a length cache: {error}") from error
        if header["count"] != len(rows):
            raise UsageError(f"{self.path} has {len(rows)} rows, its header says {header['count']}")

    def _check(self, header: Mapping[str, Any]) -> None:
        """Take the hashes of a file's header, whose version must be ours."""
        if header.get("version") != VERSION:
            raise UsageError(f"{self.path} has version {header.get('version')!r}, not {VERSION}; build it again")
        self.tokenizer_hash = str(header["tokenizer_hash"])
        self.dataset_hash = str(header.get("dataset_hash", ""))

    # --- looking up ------------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> NDArray[np.int32]:
        """All lengths in the order in which they were added, int32 [N]."""
        return np.fromiter(self._entries.values(), np.int32, len(self._entries))

    def get_all(self) -> dict[str, int]:
        """Return all lengths by id."""
        return dict(self._entries)

    def items(self) -> ItemsView[str, int]:
        """Return the pairs of id and length in the order in which they were added."""
        return self._entries.items()

    def values(self) -> ValuesView[int]:
        """Return the lengths in the order in which they were added."""
        return self._entries.values()

    def __getitem__(self, sample_id: object) -> int:
        return self._entries[sample_id_of(sample_id)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    # --- checking and streaming ------------------------------------------------------------------------------------

    def validate_sync(self, sample_ids: Iterable[object]) -> tuple[set[str], set[str]]:
        """Return the ids that are missing in the cache, and the cached ids that are not among `sample_ids`."""
        wanted, present = {sample_id_of(name) for name in sample_ids}, set(self._entries)
        return wanted - present, present - wanted

    validate = to_async(validate_sync, thread=False)

    def is_complete(self, sample_ids: Iterable[object]) -> bool:
        """Return whether every one of `sample_ids` is in the cache."""
        return not self.validate_sync(sample_ids)[0]

    @classmethod
    def stream_sync(cls, path: str | Path) -> Iterator[LengthEntry]:
        """Yield the entries of a verified file."""
        cache = cls.load_sync(path)
        for name, length in cache.items():
            yield LengthEntry(sample_id=name, tokenizer_hash=cache.tokenizer_hash, length=length)

    @classmethod
    def stream(cls, path: str | Path) -> AsyncIterator[LengthEntry]:
        """Yield the entries of a verified file."""
        return to_async_iterator(cls.stream_sync, every=1000)(path)


def sample_id_of(value: object) -> str:
    """Return an id as text: strings unchanged, integers in decimal (0 too); raise UsageError for anything else."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return str(int(value))
    raise UsageError(f"a sample id must be a non-empty string or an integer, not {value!r}")
