"""The frames of a TensorBoard event file: where each record begins and ends, in blocks of many records.

    length u64 | masked CRC-32C of the length u32 | the record | masked CRC-32C of the record u32

The checksums of lengths are verified, so that reading stops at a damaged frame; those of the records are not, which
would take longer than everything else. Format: tensorflow/core/lib/io/record_writer.h.
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

BLOCK_BYTES = 1 << 22
_HEADER = struct.Struct("<QI")
_HEADER_BYTES, _FOOTER_BYTES = _HEADER.size, 4
_PADDING = bytes(32)  # after a block, so that reading a word at its last byte stays inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Complete records of a file: `data` [bytes + padding], and where each record starts and ends in it."""

    data: Bytes
    starts: Ints
    ends: Ints


def read_blocks(path: Path, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Yield the records of a file in order; a torn last record and everything after a damaged frame are skipped."""
    with path.open("rb") as file:
        rest, sound = b"", True
        while sound and (read := file.read(block_bytes)):
            data = rest + read
            frames, used, sound = _frames(data)
            rest = data[used:]
            if frames:
                padded = np.frombuffer(data + _PADDING, dtype=np.uint8)
                bounds = np.append(np.frombuffer(frames, dtype=np.int64), used)
                yield Block(data=padded, starts=bounds[:-1] + _HEADER_BYTES, ends=bounds[1:] - _FOOTER_BYTES)


def words(data: Bytes, dtype: str) -> NDArray[Any]:
    """Return a view of `data` whose item i is the little-endian `dtype` that begins at byte i."""
    size = np.dtype(dtype).itemsize
    return np.ndarray((max(0, len(data) - size + 1),), dtype=dtype, buffer=data.data, strides=(1,))


def _frames(data: bytes) -> tuple[array[int], int, bool]:
    """Return where the complete frames begin, where the rest begins, and whether its header is undamaged."""
    frames, place, size = array("q"), 0, len(data)
    unpack = _HEADER.unpack_from
    while place + _HEADER_BYTES <= size:
        length, checksum = unpack(data, place)
        if checksum != _checksum(length):
            return frames, place, False
        after = place + _HEADER_BYTES + length + _FOOTER_BYTES
        if after > size:
            break
        frames.append(place)
        place = after
    return frames, place, True


@lru_cache(maxsize=4096)  # the records of a run have few different lengths
def _checksum(length: int) -> int:
    """Return the masked CRC-32C (Castagnoli, reflected) of a length."""
    crc = 0xFFFFFFFF
    for byte in length.to_bytes(8, "little"):
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
