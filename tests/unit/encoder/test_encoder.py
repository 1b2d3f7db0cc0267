"""The sentence encoder: equal to the library's, cached, and found where it should be; rows of known texts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from query_mutator.encoder import (
    PACKAGE,
    CachedEncoder,
    Encoder,
    HashEncoder,
    RemoteEncoder,
    cached,
    english_ranks,
    english_words,
    packaged_folder,
    resolve_encoder,
)
from query_mutator.encoder.known import known_rows, recorded_texts, vectors_path, write_rows
from query_mutator.encoder.weights import find_weights
from query_mutator.errors import BackendError, EncoderError, UsageError
from query_mutator.files.replies import Recording, RepliesHead, write_replies
from query_mutator.llm.recorded import BUNDLED_RECORDINGS, RecordedBackend
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
    found = packaged_folder()
    assert found is not None
    return found


def test_longer_texts_are_truncated(encoder: Encoder, folder: Path) -> None:
    first = "one two three four five six"
    for cut in (resolve_encoder(max_tokens=8), resolve_encoder(str(folder), max_tokens=8)):
        np.testing.assert_allclose(cut.encode([first + " seven eight"]), encoder.encode([first]), atol=1e-6)
        assert cut.fingerprint != encoder.fingerprint
    assert not np.allclose(encoder.encode([first + " seven eight"]), encoder.encode([first]), atol=1e-3)


def test_the_light_path_gives_the_same_rows_without_torch(encoder: Encoder) -> None:
    code = """
import sys
from query_mutator.encoder import resolve_encoder
rows = resolve_encoder(light=True).encode(eval(sys.stdin.read()))
assert "torch" not in sys.modules
sys.stdout.buffer.write(rows.tobytes())
"""
    done = subprocess.run([sys.executable, "-c", code], input=repr(TEXTS).encode(), capture_output=True, check=True)
    rows = np.frombuffer(done.stdout, np.float32).reshape(len(TEXTS), -1)
    np.testing.assert_allclose(rows, encoder.encode(TEXTS), atol=1e-5)
    np.testing.assert_allclose(resolve_encoder(light=True).encode(TEXTS[:1]), rows[:1], atol=1e-6)


def test_the_light_path_is_not_taken_where_rows_must_be_equal_to_the_bit() -> None:
    assert type(resolve_encoder(light=True).inner) is not type(resolve_encoder().inner)
    exact = resolve_encoder(light=True, deterministic=True)
    assert type(exact.inner) is type(resolve_encoder().inner)


@pytest.mark.parametrize("spec", ["hash", "ollama:all-minilm"])
def test_an_encoder_of_whole_texts_rejects_a_token_limit(spec: str) -> None:
    with pytest.raises(EncoderError, match="--encoder-max-tokens"):
        resolve_encoder(spec, max_tokens=64)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


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


def test_equals_sentence_transformers(encoder: Encoder, folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-5)


def resolve_row(encoder: Encoder, text: str) -> FloatArray:
    row: FloatArray = encoder.encode([text])[0]
    return row


def test_micro_batches_change_nothing(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("query_mutator.encoder.weights.MICRO_BATCH", 2)
    small = resolve_encoder()
    np.testing.assert_allclose(small.encode(TEXTS), encoder.encode(TEXTS), atol=1e-5)


def test_no_texts_give_no_rows(encoder: Encoder) -> None:
    assert encoder.encode([]).shape == (0, 384)


def test_deterministic_rows_do_not_depend_on_their_neighbors() -> None:
    together = resolve_encoder(deterministic=True).encode(TEXTS)
    alone = resolve_encoder(deterministic=True)
    for text, row in zip(TEXTS, together, strict=True):
        assert resolve_row(alone, text).tobytes() == row.tobytes()


def test_deterministic_rows_have_their_own_fingerprint(encoder: Encoder) -> None:
    assert resolve_encoder(deterministic=True).fingerprint != encoder.fingerprint


def test_many_threads_get_the_same_rows(encoder: Encoder) -> None:
    expected = encoder.encode(TEXTS)
    fresh = resolve_encoder()
    with ThreadPoolExecutor(8) as pool:
        for start, rows in enumerate(pool.map(lambda start: fresh.encode(TEXTS[start % 6 :]), range(16))):
            np.testing.assert_allclose(rows, expected[start % 6 :], atol=1e-5)


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


def test_the_cache_evicts_the_least_recently_used_text() -> None:
    inner = Counting()
    encoder = CachedEncoder(inner, max_texts=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        encoder.encode([text])
    assert inner.asked == [["a"], ["b"], ["c"], ["b"]]


def test_more_texts_than_the_cache_holds_are_returned() -> None:
    rows = CachedEncoder(Counting(), max_texts=2).encode(["a", "bb", "ccc", "dddd"])
    assert rows[:, 1].tolist() == [1, 2, 3, 4]


def test_close_reaches_the_encoder_inside() -> None:
    inner = Counting()
    CachedEncoder(inner).close()
    assert inner.asked == [["closed"]]


# the hash encoder


def test_hash_rows_are_the_same_in_every_process() -> None:
    code = (
        "from query_mutator.encoder import resolve_encoder;"
        "print(resolve_encoder('hash').encode(['sort a list']).tobytes().hex())"
    )
    here = resolve_encoder("hash").encode(["sort a list"]).tobytes().hex()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        there = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
        )
        assert there.stdout.strip() == here


def test_hash_rows_have_length_one_and_similarity_of_spelling() -> None:
    rows = HashEncoder().encode(["sort a list", "sort the list", "open a socket", ""])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    assert rows[0] @ rows[1] > rows[0] @ rows[2]


# sources of the weights


def test_a_local_folder_comes_first(folder: Path, tmp_path: Path, no_hub: Path) -> None:
    encoder = resolve_encoder(str(linked(folder, tmp_path / "mine")))
    assert (encoder.name, encoder.source) == ("mine", f"local folder {tmp_path / 'mine'}")


def test_the_hub_cache_comes_before_the_package(folder: Path, no_hub: Path) -> None:
    repository = no_hub / "models--sentence-transformers--all-MiniLM-L6-v2"
    linked(folder, repository / "snapshots" / "0123456789abcdef")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123456789abcdef")
    encoder = resolve_encoder("all-MiniLM-L6-v2")
    assert encoder.source == "hub cache, sentence-transformers/all-MiniLM-L6-v2 at 0123456789ab"


def test_the_package_is_used_when_nothing_is_cached(no_hub: Path) -> None:
    for spec in ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"):
        encoder = resolve_encoder(spec)
        assert encoder.name == "all-MiniLM-L6-v2"
        assert encoder.source.startswith("packaged weights")


def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Put another copy of the package first on the path, with code that must never run."""
    root = tmp_path / "site" / PACKAGE
    linked(folder, root / "model")
    (root / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return root / "model"


def test_the_package_is_never_imported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: Path
) -> None:
    package(tmp_path, monkeypatch, folder)
    assert resolve_encoder().source.startswith("packaged weights")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_packaged_files_with_another_sha256_are_not_used(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: Path
) -> None:
    model = package(tmp_path, monkeypatch, folder)
    changed = (model / name).read_bytes() + b" "
    (model / name).unlink()
    (model / name).write_bytes(changed)
    with pytest.raises(EncoderError, match=f"packaged {name} is not the published file"):
        resolve_encoder()


def test_another_kind_of_encoder_is_run_by_its_library_without_noise(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    pooling |= {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    other = str(linked(folder, tmp_path / "cls", **{"1_Pooling/config.json": pooling}))
    encoder = resolve_encoder(other)
    rows = encoder.encode(TEXTS[:2])
    assert "SentenceTransformerEncoder" in repr(encoder)
    assert rows.shape == (2, 384)
    assert capfd.readouterr().err == ""
    cut = resolve_encoder(other, max_tokens=8).encode(["one two three four five six seven"])
    np.testing.assert_allclose(cut, encoder.encode(["one two three four five six"]), atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("./no-such-folder", "encoder folder ./no-such-folder does not exist"),
        ("someone/no-such-model", "not in the hub cache; not the packaged encoder; HF_HUB_OFFLINE forbids a download"),
        ("ollama:all-minilm", "needs an Ollama server"),
    ],
)
def test_an_unavailable_encoder_is_a_one_line_error(spec: str, says: str, no_hub: Path) -> None:
    with pytest.raises(EncoderError) as caught:
        resolve_encoder(spec)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match="is not a sentence encoder") as caught:
        resolve_encoder(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_broken_weights_are_one_line(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "broken")
    os.truncate(tmp_path / "broken" / "model.safetensors", 100_000)
    with pytest.raises(EncoderError, match="cannot be loaded") as caught:
        resolve_encoder(str(tmp_path / "broken"))
    assert "\n" not in str(caught.value)


# embeddings of a server


def test_rows_of_a_server_are_normalized_and_cached() -> None:
    asked: list[tuple[str, list[str]]] = []

    def embed(model: str, texts: Sequence[str], keep: Callable[[FloatArray], None]) -> FloatArray:
        asked.append((model, list(texts)))
        rows = np.array([[3.0, 4.0]] * len(texts), np.float32)
        keep(rows)
        return rows

    encoder = resolve_encoder("ollama:nomic-embed-text", embed=embed)
    del asked[:]
    rows = encoder.encode(["a", "", "a"])
    np.testing.assert_allclose(rows, [[0.6, 0.8]] * 3)
    assert asked == [("nomic-embed-text", ["a", " "])]  # a server has no row for an empty text
    assert (encoder.name, encoder.dim) == ("ollama:nomic-embed-text", 2)


def test_many_texts_are_asked_for_in_several_requests_and_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("query_mutator.encoder.base.TEXTS_AT_ONCE", 3)
    asked: list[list[str]] = []

    def embed(model: str, texts: Sequence[str], keep: Callable[[FloatArray], None]) -> FloatArray:
        asked.append(list(texts))
        rows = np.array([[1.0, float(len(text))] for text in texts], np.float32)
        keep(rows)
        return rows

    encoder = RemoteEncoder("m", embed)
    del asked[:]
    texts = [letter * size for size, letter in zip((7, 1, 5, 2, 6, 3, 4), "gaebfcd", strict=True)]
    rows = encoder.encode(texts)
    assert asked == [texts[:3], texts[3:6], texts[6:]]
    np.testing.assert_allclose(rows[:, 1] / rows[:, 0], [7, 1, 5, 2, 6, 3, 4], rtol=1e-5)


def test_rows_of_another_length_than_the_first_are_a_backend_error() -> None:
    dims = iter([2, 3, 2])

    def embed(model: str, texts: Sequence[str], keep: Callable[[FloatArray], None]) -> FloatArray:
        rows = np.ones((len(texts), next(dims)), np.float32)
        keep(rows)
        return rows

    encoder = resolve_encoder("ollama:m", embed=embed)
    with pytest.raises(BackendError, match="1 x 3 embeddings in place of 1 x 2"):
        encoder.encode(["a"])
    assert encoder.encode(["a"]).shape == (1, 2)


def test_rows_that_are_not_finite_are_a_backend_error() -> None:
    with pytest.raises(BackendError, match="not finite"):
        resolve_encoder("ollama:m", embed=lambda _, texts, keep: keep(np.full((len(texts), 2), np.nan, np.float32)))


def test_the_beginning_of_a_long_text_is_read(encoder: Encoder) -> None:
    long = "sort a list " * 100_000
    for any_encoder in (encoder, HashEncoder()):
        np.testing.assert_array_equal(*(any_encoder.encode([text])[0] for text in (long, long[:100_000])))


def test_the_cache_holds_texts_by_their_length_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "MAX_CHARS", 1000)
    encoder = CachedEncoder(HashEncoder())
    for letter in "abcd":
        encoder.encode([letter * 400])
    assert [encoder.get([letter * 400]) is not None for letter in "abcd"] == [False, False, True, True]
    assert encoder.encode(["x" * 2000]).shape == (1, encoder.dim)
    assert encoder.get(["d" * 400]) is None


def test_a_model_without_embeddings_is_an_encoder_error() -> None:
    def no_rows(model: str, texts: Sequence[str], keep: Callable[[FloatArray], None]) -> FloatArray:
        keep(np.empty((1, 0), np.float32))
        raise AssertionError("unreachable")

    with pytest.raises(EncoderError, match="gave no embeddings"):
        resolve_encoder("ollama:llama3", embed=no_rows)


# words


def test_english_words_are_whole_and_ranked() -> None:
    words = english_words()
    assert {"the", "remove", "folder"} <= words
    assert len(words) > 20_000
    assert all(word.isalpha() and word == word.lower() for word in words)
    assert english_ranks()["the"] < english_ranks()["remove"] < english_ranks()["folder"]


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


def test_a_text_that_was_looked_up_stays_longer() -> None:
    encoder = CachedEncoder(HashEncoder(), max_texts=2)
    encoder.encode(["a"])
    encoder.encode(["b"])
    assert encoder.get(["a"]) is not None
    encoder.encode(["c"])
    assert encoder.get(["a"]) is not None
    assert encoder.get(["b"]) is None


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    path = tmp_path / "small.jsonl.xz"
    replies = {f"{number:016x}": [Completion(text=text, model="m")] for number, text in enumerate(("one", "two"))}
    write_replies(path, RepliesHead(model="m", model_sha256="", made_with="test", command="", date=""), replies)
    found = Recording(path)
    write_rows(vectors_path(path), rows(), recording=found.sha256, encoder="weights")
    return found


def rows() -> dict[str, np.ndarray]:
    """Return the row of the second text: the third axis."""
    pieces = np.zeros((2, 256, 2), np.float16)
    pieces[1, 7, 0] = 1
    codes = np.array([[0, 7]], np.uint8)
    return {"axes": np.eye(4, dtype=np.float16), "pieces": pieces, "codes": codes, "texts": np.array([1], np.uint32)}


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
