"""The embeddings that come with recorded replies, so that a run on them encodes few texts.

    n texts, D dimensions of an encoder, K of them kept, P pieces

A row is turned to its K principal axes and cut into P pieces, and of each piece the number of the nearest of 256
typical ones is kept, a byte (product quantization, Jégou et al. 2011, doi:10.1109/TPAMI.2010.57). The file lies
next to the recording; scripts/reply_vectors.py makes it: axes [K, D] and pieces [P, 256, K / P], the typical ones, in
float16; codes [n, P], their numbers; texts [n], places among the recording's texts.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.encoder import unit_rows
from query_mutator.errors import UsageError
from query_mutator.files.replies import Recording
from query_mutator.types import FloatArray, read_part

FORMAT = "query_mutator/reply-vectors/1"


def vectors_path(recording: Path) -> Path:
    """Return where the rows of a recording's replies are."""
    return recording.with_name(recording.name.partition(".")[0] + ".vectors.npz")


def known_rows(recording: Recording, fingerprint: str) -> Callable[[str], FloatArray | None]:
    """Return what gives the unit rows [D] of a recording's replies by the encoder of a fingerprint, as far as known.

    UsageError for a damaged file.
    """
    path = vectors_path(recording.path)
    if not path.exists():
        return lambda text: None
    try:
        with np.load(path, allow_pickle=False) as saved:
            about: dict[str, Any] = json.loads(str(saved["about"]))
            if about != {"format": FORMAT, "recording": recording.sha256, "encoder": fingerprint.partition(":")[0]}:
                return lambda text: None
            axes, pieces = saved["axes"].astype(np.float32), saved["pieces"].astype(np.float32)
            codes, places = saved["codes"], saved["texts"].tolist()
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: {error}; damaged: restore it, or delete it to encode the replies again") from None
    texts, numbers = recorded_texts(recording), np.arange(len(pieces))
    code_of = {texts[place]: code for place, code in zip(places, codes, strict=True)}

    def row_of(text: str) -> FloatArray | None:
        code = code_of.get(text)
        return None if code is None else unit_rows(pieces[numbers, code].reshape(1, -1) @ axes)[0]

    return row_of


def recorded_texts(recording: Recording) -> list[str]:
    """Return what is read of the replies of a recording, each text once."""
    return list(dict.fromkeys(read_part(reply.text) for reply in recording))
