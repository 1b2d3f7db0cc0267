"""The frames of a TensorBoard event file: where each record begins and ends, in blocks of many records.

    length u64 | masked CRC-32C of the length u32 | the record | masked CRC-32C of the record u32

The checksums of lengths are verified, all of a block at once, so that reading stops at a damaged frame; those of the
records are not, which would take longer than everything else. Format: tensorflow/core/lib/io/record_writer.h.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.analysis.series import Ints

__all__ = ["BLOCK_BYTES", "Block", "Bytes", "read_blocks", "words"]

Bytes = NDArray[np.uint8]

HEADER_BYTES, FOOTER_BYTES = 12, 4
BLOCK_BYTES = 1 << 22
PADDING = 32  # zero bytes after a block, so that reading a word at its last byte stays inside
_CASTAGNOLI = 0x82F63B78
_MASK_DELTA = 0xA282EAD8


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Complete records of a file: `data` [bytes + padding], and where each record starts and ends in it."""

    data: Bytes
    starts: Ints
    ends: Ints


def read_blocks(path: Path, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Yield the records of a file in order; a torn last record and everything after a damaged frame are skipped."""
    with path.open("rb") as file:
        rest = b""
        while read := file.read(block_bytes + _missing(rest)):
            data = np.frombuffer(rest + read + bytes(PADDING), dtype=np.uint8)
            size = len(rest) + len(read)
            frames, used = _frames(data, size)
            ends = np.append(frames[1:], used)[: len(frames)] - FOOTER_BYTES
            yield Block(data=data, starts=frames + HEADER_BYTES, ends=ends)
            if size - used >= HEADER_BYTES and not _lengths_hold(data, np.array([used])).all():
                return
            rest = bytes(data[used:size])


def words(data: Bytes, dtype: str) -> NDArray[Any]:
    """Return a view of `data` whose item i is the little-endian `dtype` that begins at byte i."""
    size = np.dtype(dtype).itemsize
    return np.ndarray((max(0, len(data) - size + 1),), dtype=dtype, buffer=data.data, strides=(1,))


def _missing(rest: bytes) -> int:
    """Return how many bytes of the record that begins in `rest` are still to be read."""
    if len(rest) < HEADER_BYTES:
        return 0
    (length,) = struct.unpack_from("<Q", rest)
    return max(0, int(length) + HEADER_BYTES + FOOTER_BYTES - len(rest))


def _frames(data: Bytes, size: int) -> tuple[Ints, int]:
    """Return where the complete records in the first `size` bytes begin, and where the first incomplete one does.

    Headers are found without following the chain of records: the upper bytes of their length are zero and their
    checksum matches. If the headers found do not form a chain, the chain is followed record by record.
    """
    # A candidate has four zero bytes where the upper half of a length is.
    zero = data[: size + 1] == 0
    likely = zero[3 : size - 7].copy() if size > HEADER_BYTES else zero[:0]
    for place in range(4, 8):
        likely &= zero[place : len(likely) + place]
    frames = np.flatnonzero(likely)
    frames = frames[_lengths_hold(data, frames)]
    # Each record must end where the next begins; the last may be incomplete.
    after = frames + words(data, "<u8")[frames].astype(np.int64) + HEADER_BYTES + FOOTER_BYTES
    whole = len(after) - int((after[-1:] > size).sum())
    if not len(frames) or frames[0] or (after[:-1] != frames[1:]).any():
        return _follow(data, size)
    return frames[:whole], int(after[whole - 1]) if whole else 0


def _follow(data: Bytes, size: int) -> tuple[Ints, int]:
    """Return the same as `_frames`, by following the chain of records."""
    lengths = words(data, "<u8")
    frames, place, last = array("q"), 0, size - HEADER_BYTES - FOOTER_BYTES
    while place <= last:
        length = int(lengths[place])
        if length > last - place or not _lengths_hold(data, np.array([place])).all():
            break
        frames.append(place)
        place += length + HEADER_BYTES + FOOTER_BYTES
    return np.array(frames, dtype=np.int64), place


def _lengths_hold(data: Bytes, frames: Ints) -> NDArray[np.bool_]:
    """Return, for each frame, whether the checksum of its length matches."""
    stored = words(data, "<u4")[frames + 8]
    crc: NDArray[np.uint32] = np.zeros(len(frames), dtype=np.uint32)
    for place, table in enumerate(_crc_tables()):
        byte = data[frames + place]
        crc ^= table[byte ^ 0xFF if place < 4 else byte]
    crc ^= np.uint32(0xFFFFFFFF)
    masked = np.bitwise_or(crc >> np.uint32(15), crc << np.uint32(17)) + np.uint32(_MASK_DELTA)
    return np.asarray(masked == stored)


@lru_cache(maxsize=1)
def _crc_tables() -> tuple[NDArray[np.uint32], ...]:
    """Return, for each of the eight bytes of a length, its contribution to the CRC-32C (slicing by eight)."""
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = np.where(first & 1, (first >> 1) ^ _CASTAGNOLI, first >> 1).astype(np.uint32)
    tables = [first]
    for _ in range(7):
        tables.append((tables[-1] >> 8) ^ first[tables[-1] & 0xFF])
    return tuple(reversed(tables))
