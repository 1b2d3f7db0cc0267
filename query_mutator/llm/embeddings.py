"""Rows of texts that are not encoded here: a model server's embeddings, and those that come with recorded replies.

    n texts, D dimensions of an encoder, K of them kept, P pieces

A recorded row is turned to its K principal axes and cut into P pieces, and of each piece the number of the nearest of
256 typical ones is kept, a byte (product quantization, Jégou et al. 2011, doi:10.1109/TPAMI.2010.57). The file lies
beside the recording; scripts/reply_vectors.py makes it: axes [K, D] and pieces [P, 256, K / P], the typical ones, in
float16; codes [n, P], their numbers; texts [n], places among the recording's texts.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.encoder import CachedEncoder, resolve_encoder, unit_rows
from query_mutator.errors import BackendError, EncoderError, UsageError
from query_mutator.files.replies import Recording
from query_mutator.types import FloatArray, read_part

FORMAT = "query_mutator/reply-vectors/1"
PREFIX = "ollama:"
PROBE = "What does this encoder make of a plain sentence?"
TEXTS_AT_ONCE = 256  # in a request: a server's replies are bounded

#: (model, texts, keep) -> rows [n, dim]; calls `keep` with the rows while the call still counts as in flight
Embed = Callable[[str, Sequence[str], Callable[[FloatArray], None]], FloatArray]


class ServerEncoder:
    """Normalizes the embeddings of a model server; `embed(model, texts, keep)` makes the call."""

    is_remote = True

    def __init__(self, model: str, embed: Embed) -> None:
        self.name, self.source = f"{PREFIX}{model}", f"model {model} on the Ollama server"
        self._model, self._embed = model, embed
        #: Callback for texts and their unit rows [n, dim], called before they are used.
        self.on_encoded: Callable[[Sequence[str], FloatArray], None] = lambda texts, rows: None
        self.dim = 0  # unknown until the first row
        probe = self._encode([PROBE])
        self.dim = int(probe.shape[1])
        # A server may serve other weights under the same name: the vector of one sentence tells them apart.
        self.fingerprint = hashlib.sha256(f"{model}:{np.round(probe, 3).tolist()}".encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]; BackendError for rows of another length than the first ones."""
        starts = range(0, len(texts), TEXTS_AT_ONCE)
        rows = [self._encode(texts[start : start + TEXTS_AT_ONCE]) for start in starts]
        return np.concatenate(rows) if rows else np.empty((0, self.dim), np.float32)

    def _encode(self, texts: Sequence[str]) -> FloatArray:
        kept: list[FloatArray] = []

        def keep(rows: FloatArray) -> None:
            kept.append(self._unit(np.asarray(rows, np.float32), count=len(texts)))
            self.on_encoded(texts, kept[-1])

        self._embed(self._model, [text or " " for text in texts], keep)  # servers reject ""
        return kept[-1]

    def _unit(self, rows: FloatArray, *, count: int) -> FloatArray:
        if rows.ndim != 2 or rows.shape[1] == 0 or not (self.dim or rows.any()):
            raise EncoderError(f"model {self._model!r} gave no embeddings; choose another, such as ollama:all-minilm")
        if rows.shape != (count, self.dim or rows.shape[1]):
            shape = " x ".join(map(str, rows.shape))
            raise BackendError(f"model {self._model!r} gave {shape} embeddings in place of {count} x {self.dim}")
        if not np.isfinite(rows).all():
            raise BackendError(f"model {self._model!r} gave embeddings that are not finite numbers")
        with np.errstate(over="ignore"):  # beyond 1e19 a row's norm is infinite, and the row becomes zero
            return unit_rows(rows)


def encoder_named(spec: str, embed: Embed | None, *, device: str = "cpu", deterministic: bool = False) -> CachedEncoder:
    """Return the encoder that `spec` names as `resolve_encoder` does, or one on the server that `embed` calls."""
    if spec.startswith(PREFIX) and embed is not None:
        return CachedEncoder(ServerEncoder(spec.removeprefix(PREFIX), embed))
    return resolve_encoder(spec, device=device, deterministic=deterministic)


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
