"""Rows of recorded replies that come in a file, so that a run on a recording encodes none of them again.

    n texts, D dimensions of the encoder, K of them kept, P pieces

A row is turned to its K principal axes and cut into P pieces, and of each piece the number of the nearest of 256
typical ones is kept, a byte (product quantization, Jégou et al. 2011, doi:10.1109/TPAMI.2010.57). The file of a
recording lies beside it; scripts/reply_vectors.py makes it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.encoder.base import unit_rows
from query_mutator.errors import UsageError
from query_mutator.files import atomic_write
from query_mutator.files.replies import Recording
from query_mutator.types import FloatArray, read_part

FORMAT = "query_mutator/reply-vectors/1"
_ENDING = ".vectors.npz"
#: What a file holds: axes [K, D] and pieces [P, 256, K / P], the typical ones, in float16; codes [n, P], their numbers;
#: texts [n], places among the recording's texts.
_ARRAYS = ("axes", "pieces", "codes", "texts")


class KnownRows(Mapping[str, FloatArray]):
    """Rows of texts by what a file holds of them."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], texts: Mapping[str, int]) -> None:
        """`texts` have their places in `codes`."""
        self._axes, self._pieces = arrays["axes"].astype(np.float32), arrays["pieces"].astype(np.float32)
        self._codes, self._places = arrays["codes"], texts
        self._numbers = np.arange(len(self._pieces))

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __getitem__(self, text: str) -> FloatArray:
        """Return the unit row [D] of a text."""
        kept = self._pieces[self._numbers, self._codes[self._places[text]]].reshape(1, -1)
        row: FloatArray = unit_rows(kept @ self._axes)[0]
        return row


def vectors_path(recording: Path) -> Path:
    """Return where the rows of a recording's replies are."""
    return recording.with_name(recording.name.partition(".")[0] + _ENDING)


def write_rows(path: Path, arrays: Mapping[str, Any], *, recording: str, encoder: str) -> None:
    """Write rows; `recording` and `encoder` are the sha256 of the replies and of the weights."""
    about = json.dumps({"format": FORMAT, "recording": recording, "encoder": encoder})
    with atomic_write(path) as file:
        np.savez(file, about=np.array(about), **arrays)


def known_rows(recording: Recording, fingerprint: str) -> Mapping[str, FloatArray]:
    """Return the rows of a recording's replies by the encoder of a fingerprint; none where no file has them.

    UsageError for a damaged file.
    """
    path = vectors_path(recording.path)
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as saved:
            about: dict[str, Any] = json.loads(str(saved["about"]))
            if about != {"format": FORMAT, "recording": recording.sha256, "encoder": fingerprint.partition(":")[0]}:
                return {}
            arrays = {name: saved[name] for name in _ARRAYS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: {error}; damaged: restore it, or delete it to encode the replies anew") from None
    texts = recorded_texts(recording)
    return KnownRows(arrays, {texts[place]: row for row, place in enumerate(arrays["texts"].tolist())})


def recorded_texts(recording: Recording) -> list[str]:
    """Return what is read of the replies of a recording, each text once."""
    return list(dict.fromkeys(read_part(reply.text) for reply in recording))
