"""Encode the replies of a recording and write their rows next to it, 32 bytes each (see `session/models.py`).

    python scripts/reply_vectors.py query_mutator/data/recorded/smollm2-135m.jsonl.xz \
        --dataset query_mutator/data/questions/general.jsonl query_mutator/data/questions/general_2.jsonl

Rewrites are left out: guards compare them with the question, to the last digit.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import MiniBatchKMeans
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from recorded_requests import rewriting, task_of

from query_mutator.encoder import resolve_encoder
from query_mutator.env.task import CallSettings
from query_mutator.files import atomic_write
from query_mutator.files.replies import Recording
from query_mutator.session.models import VECTORS_FORMAT, recorded_texts, vectors_path
from query_mutator.types import FloatArray, read_part

KEPT, PIECES, TYPICAL = 256, 32, 256
CHUNK = 64


def main() -> None:
    """Encode, quantize and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--dataset", nargs="+", required=True, help="JSON-lines files of the recorded questions")
    arguments = parser.parse_args()
    recording = Recording(arguments.recording)
    rewrites = rewrites_in(recording, arguments.dataset)
    texts = recorded_texts(recording)
    places = np.array([place for place, text in enumerate(texts) if text not in rewrites], np.uint32)
    encoder = resolve_encoder()
    rows = encoded(encoder.inner, [texts[place] for place in places])
    quantized = quantize(rows, places)
    path = vectors_path(arguments.recording)
    about = json.dumps({"format": VECTORS_FORMAT, "recording": recording.sha256, "encoder": encoder.fingerprint})
    with atomic_write(path) as file:
        np.savez(file, about=np.array(about), **quantized)
    print(f"{path}: {len(rows):,} rows, {path.stat().st_size / 1e6:.2f} MB")


def rewrites_in(recording: Recording, datasets: list[str]) -> set[str]:
    """Return the texts of questions and of the rewrites of them by the model."""
    head, found = recording.head, set()
    calls = CallSettings(target_model=head.model, mutator_model=head.model, target_max_tokens=head.max_tokens)
    for dataset in datasets:
        task = task_of(dataset, calls, encoder="hash")
        found |= {question.text for question in task.questions}
        replies = (recording.find(request) for request in rewriting(task, head.operators))
        found |= {read_part(reply.text) for reply in replies if reply is not None}
    return found


def encoded(encoder: object, texts: list[str]) -> FloatArray:
    """Return the rows [n, D] of texts, those of similar length together."""
    rows = np.empty((len(texts), encoder.dim), np.float32)
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    for start in tqdm(range(0, len(order), CHUNK), unit_scale=CHUNK, unit="text"):
        chunk = order[start : start + CHUNK]
        rows[chunk] = encoder.encode([texts[place] for place in chunk])
    return rows


def quantize(rows: FloatArray, places: NDArray[np.uint32]) -> dict[str, NDArray[Any]]:
    """Return rows [n, D] as a file holds them."""
    axes = np.linalg.eigh(rows.T @ rows)[1][:, ::-1][:, :KEPT]
    # Each piece gets axes of large and of small variance, so that all are equally hard to tell apart.
    axes = axes[:, np.concatenate([np.arange(piece, KEPT, PIECES) for piece in range(PIECES)])].T
    cut = (rows @ axes.T).reshape(len(rows), PIECES, -1)
    pieces, codes = np.empty((PIECES, TYPICAL, cut.shape[2]), np.float16), np.empty((len(rows), PIECES), np.uint8)
    for piece in tqdm(range(PIECES), unit="piece"):
        model = MiniBatchKMeans(TYPICAL, random_state=piece, n_init=1, batch_size=4096).fit(cut[:, piece])
        pieces[piece], codes[:, piece] = model.cluster_centers_, model.labels_
    return {"axes": axes.astype(np.float16), "pieces": pieces, "codes": codes, "texts": places}


if __name__ == "__main__":
    main()
