"""Rows of a JSONL file by number or by id: any row is read by one seek, whatever is wrong names file and line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from query_mutator.batching.files import BatchFileError, reading
from query_mutator.batching.generation.length_cache import sample_id_of
from query_mutator.batching.generation.rows import RowTokenizer, Tokenizer, TokenRow
from query_mutator.errors import DatasetError
from query_mutator.files import parse_json_object


class JsonlIndex:
    """Byte offsets of the rows of a JSONL file: any row is read by one seek; 16 bytes per row in memory.

    BatchFileError if the file does not match the checksum next to it, which `save_samples` writes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        begins, lines, position = [], [], 0
        with reading(path), self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    begins.append(position)
                    lines.append(number)
                position += len(line)
        self._check_sum()
        self.begins = np.array(begins, dtype=np.int64)  # [rows]
        self.lines = np.array(lines, dtype=np.int64)  # [rows], from 1

    def _check_sum(self) -> None:
        sums = checksum_path(self.path)
        if not sums.is_file():  # a file of another tool
            return
        with reading(self.path), self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with reading(sums):
            known = sums.read_bytes().split()
        if known[:1] != [digest.encode()]:
            raise BatchFileError(
                f"{self.path} does not match {sums.name}; it was truncated or edited (delete {sums.name} if you did)"
            )

    def __len__(self) -> int:
        return len(self.begins)

    def rows(self, order: NDArray[np.int64] | None = None, *, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield row number and raw line, in the file's order or in `order`, from position `start`."""
        numbers = np.arange(len(self)) if order is None else order
        with self.path.open("rb") as file:
            for number in numbers[start:].tolist():
                file.seek(int(self.begins[number]))
                yield number, file.readline()

    def where(self, number: int) -> str:
        """Return `file:line` of a row."""
        return f"{self.path}:{int(self.lines[number])}"


def checksum_path(path: Path) -> Path:
    """Return the file with a file's checksum, in the format of `sha256sum`."""
    return path.with_name(f"{path.name}.sha256")


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """Return the object of one line; raise DatasetError, prefixed with `where`, for any other line."""
    try:
        return parse_json_object(line)
    except ValueError as error:
        raise DatasetError(f"{where}: {error}") from error


@contextmanager
def row_errors(where: str) -> Iterator[None]:
    """Turn whatever the content of a row raises into a DatasetError that begins with `where`."""
    try:
        yield
    except DatasetError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        raise DatasetError(f"{where}: {'.'.join(map(str, first['loc']))} {first['msg']}".strip()) from error
    except (ValueError, TypeError, OverflowError) as error:
        raise DatasetError(f"{where}: {error}") from error


def row_id(row: Mapping[str, Any], number: int, *, dataset_id: str) -> str:
    """Return the id of a row (0 is valid), else the data set's name and the row's number.

    The id is `sample_id` or `id`, or `sample_id` in `meta`, where `save_samples` writes it.
    """
    meta = row.get("meta")
    for source, key in ((row, "sample_id"), (row, "id"), (meta if isinstance(meta, dict) else {}, "sample_id")):
        if source.get(key) is not None:
            return sample_id_of(source[key])
    return f"{dataset_id}_{number:06d}"


class JsonlSamples(Mapping[str, TokenRow]):
    """Rows of a JSONL file by sample id, tokenized on access, so that a BatchWriter holds few in memory.

    `skip_bad` leaves out rows without tokens and counts them in `bad_rows`.
    """

    def __init__(
        self, path: str | Path, tokenizer: Tokenizer | None, *, mask_prompt: bool = True, skip_bad: bool = False
    ) -> None:
        self.index = JsonlIndex(path)
        self.rows = RowTokenizer(tokenizer, mask_prompt=mask_prompt)
        self.skip_bad = skip_bad
        self.bad_rows = 0
        self.first_errors: list[str] = []
        self.on_read: Callable[[], object] | None = None  # called for each row read, for a progress bar
        self._numbers: dict[str, int] = {}
        for number, line in self.index.rows():
            self._note(number, line)
        self._file = self.index.path.open("rb")

    def _note(self, number: int, line: bytes) -> None:
        where = self.index.where(number)
        try:
            with row_errors(where):
                name = row_id(parse_row(line, where), number, dataset_id=self.index.path.stem)
            if name in self._numbers:
                raise DatasetError(f"{where}: sample id {name!r} occurs twice")
        except DatasetError as error:
            self._bad(error)
            return
        self._numbers[name] = number

    def _bad(self, error: DatasetError) -> None:
        if not self.skip_bad:
            raise error
        self.bad_rows += 1
        if len(self.first_errors) < 10:
            self.first_errors.append(str(error))

    def row(self, sample_id: str) -> dict[str, Any]:
        """Return the row of a sample in the file."""
        number = self._numbers[sample_id]
        self._file.seek(int(self.index.begins[number]))
        return parse_row(self._file.readline(), self.index.where(number))

    def __getitem__(self, sample_id: str) -> TokenRow:
        where = self.index.where(self._numbers[sample_id])
        if self.on_read is not None:
            self.on_read()
        with row_errors(where):
            return self.rows.tokens(self.row(sample_id))

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def lengths(self) -> dict[str, int]:
        """Return the length of every row by id; see `tokenized` for rows without tokens."""
        return {name: row.length for name, row in self.tokenized()}

    def tokenized(self) -> Iterator[tuple[str, TokenRow]]:
        """Yield id and tokens of every row; rows without tokens are errors, or counted and removed with `skip_bad`."""
        for name in list(self._numbers):
            try:
                row = self[name]
            except DatasetError as error:
                self._bad(error)
                del self._numbers[name]
            else:
                yield name, row

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()
