"""Rows that come with a recording: near those of the encoder, used by name of recording and weights alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from query_mutator.encoder.base import HashEncoder
from query_mutator.encoder.cached import CachedEncoder, resolve_encoder
from query_mutator.encoder.known import Quantized, known_rows, recorded_texts, vectors_path, write_rows
from query_mutator.encoder.weights import find_weights
from query_mutator.errors import UsageError
from query_mutator.files.replies import Recording, RepliesHead, write_replies
from query_mutator.llm.recorded import BUNDLED_RECORDINGS, RecordedBackend
from query_mutator.types import Completion


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    path = tmp_path / "small.jsonl.xz"
    replies = {f"{number:016x}": [Completion(text=text, model="m")] for number, text in enumerate(("one", "two"))}
    write_replies(path, RepliesHead(model="m", model_sha256="", made_with="test", command="", date=""), replies)
    found = Recording(path)
    write_rows(vectors_path(path), rows(), recording=found.sha256, encoder="weights")
    return found


def rows() -> Quantized:
    """Return the row of the second text: the third axis."""
    pieces = np.zeros((2, 256, 2), np.float16)
    pieces[1, 7, 0] = 1
    codes = np.array([[0, 7]], np.uint8)
    return Quantized(axes=np.eye(4, dtype=np.float16), pieces=pieces, codes=codes, texts=np.array([1], np.uint32))


def test_a_text_of_the_file_is_not_encoded_and_another_one_is(recording: Recording) -> None:
    encoder = CachedEncoder(HashEncoder(4))
    encoder.known = known_rows(recording, "weights:one-row")
    assert list(encoder.known) == ["two"]
    assert len(encoder.known) == 1
    found = encoder.encode(["one", "two"])
    assert found[1].tolist() == [0, 0, 1, 0]
    assert found[0].tolist() == HashEncoder(4).encode(["one"])[0].tolist()
    assert encoder.get(["two", "one"]) is not None


def test_rows_of_other_weights_or_another_recording_are_not_used(recording: Recording) -> None:
    assert not known_rows(recording, "others")
    write_rows(vectors_path(recording.path), rows(), recording="another", encoder="weights")
    assert not known_rows(recording, "weights")
    vectors_path(recording.path).unlink()
    assert not known_rows(recording, "weights")


def test_a_damaged_file_is_one_line(recording: Recording) -> None:
    path = vectors_path(recording.path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UsageError, match="damaged: restore it, or delete it"):
        known_rows(recording, "weights")


def test_the_bundled_rows_are_near_those_of_the_encoder() -> None:
    recording = RecordedBackend(BUNDLED_RECORDINGS[0]).recording
    known = known_rows(recording, find_weights("all-MiniLM-L6-v2").sha256)
    texts = [text for text in recorded_texts(recording)[::997] if text in known]
    assert len(texts) > 40
    cosines = (resolve_encoder().encode(texts) * np.stack([known[text] for text in texts])).sum(axis=1)
    assert cosines.mean() > 0.88
    assert cosines.min() > 0.6
