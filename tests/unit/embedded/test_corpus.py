"""The corpus: what it holds, that it comes from a clean interpreter, and that its cache may be damaged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from query_mutator.data.pynames import resolve, same_object
from query_mutator.embedded.corpus import (
    Corpus,
    Entry,
    load_corpus,
    split_identifier,
)
from query_mutator.encoder import HashEncoder, cache_dir, embed_documents
from query_mutator.types import FloatArray


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


class Counting(HashEncoder):
    """A hash encoder that counts the texts it was given."""

    texts = 0

    def encode(self, texts: Sequence[str]) -> FloatArray:
        self.texts += len(texts)
        return super().encode(texts)


# what is in it


def test_at_most_1500_objects_each_once(corpus: Corpus) -> None:
    names = [entry.name for entry in corpus.entries]
    assert 1200 < len(corpus) <= 1500
    assert len(set(names)) == len(names)


def test_every_name_is_a_callable_of_the_standard_library(corpus: Corpus) -> None:
    assert [entry.name for entry in corpus.entries if not callable(resolve(entry.name))] == []


def test_an_object_is_listed_under_its_first_name(corpus: Corpus) -> None:
    names = {entry.name for entry in corpus.entries}
    assert {"os.path.join", "open", "dict.get"} <= names
    assert not {"posixpath.join", "io.open", "collections.defaultdict.get"} & names
    assert same_object("collections.defaultdict.get", "dict.get")


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("shutil.rmtree", "Recursively delete a directory tree."),
        ("str.find", "Return the lowest index in S where substring sub is found"),  # not its call form
        ("dict.clear", "Remove all items from"),  # said on the same line as the call form
        ("time.time", "Return the current time in seconds since the Epoch."),  # more than a type after the arrow
    ],
)
def test_a_summary_is_the_first_prose(corpus: Corpus, name: str, begins: str) -> None:
    (summary,) = (entry.summary for entry in corpus.entries if entry.name == name)
    assert summary.startswith(begins)


def test_signatures_and_summaries_are_one_line(corpus: Corpus) -> None:
    for entry in corpus.entries:
        assert "\n" not in entry.signature + entry.summary
        assert "(" in entry.signature
        assert " at 0x" not in entry.signature  # an address would change the corpus from run to run
    assert next(e.signature for e in corpus.entries if e.name == "shutil.rmtree").startswith("shutil.rmtree(path,")


def test_errors_records_and_deprecated_names_are_left_out(corpus: Corpus) -> None:
    left_out = {"ValueError", "ast.Add", "os.stat_result", "signal.Signals", "json.JSONDecodeError"}
    assert not left_out & {entry.name for entry in corpus.entries}


def test_the_corpus_does_not_depend_on_what_this_process_did(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(json.JSONEncoder, "__doc__", "Something else entirely.")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "shutil.py").write_text("def rmtree(path):\n    'A stranger.'\n")
    assert load_corpus(cache=tmp_path / "cache").entries == corpus.entries


def test_vocabulary_has_words_and_parts_of_identifiers() -> None:
    entry = Entry(name="collections.OrderedDict.move_to_end", signature="", summary="Move an element.")
    expected = {"collections", "ordereddict", "ordered", "dict", "move_to_end", "move", "to", "end", "an", "element"}
    assert Corpus([entry]).vocabulary() == expected


def test_identifiers_are_split_into_words() -> None:
    assert split_identifier("xml.etree.ElementTree.XMLParser") == ["xml", "etree", "element", "tree", "xml", "parser"]
    assert split_identifier("base64.b64encode") == ["base", "64", "b", "64", "encode"]


# the cache


def test_the_cached_corpus_is_read_back(corpus: Corpus, tmp_path: Path) -> None:
    load_corpus(cache=tmp_path)
    (file,) = tmp_path.glob("corpus-*.json")
    file.write_text(json.dumps(json.loads(file.read_text())[:3]))
    assert load_corpus(cache=tmp_path).entries == corpus.entries[:3]


@pytest.mark.parametrize("damage", ["[]", "{", '[{"name": "os.kill"}]'])
def test_a_damaged_corpus_is_read_again(corpus: Corpus, tmp_path: Path, damage: str) -> None:
    load_corpus(cache=tmp_path)
    (file,) = tmp_path.glob("corpus-*.json")
    file.write_text(damage)
    assert load_corpus(cache=tmp_path).entries == corpus.entries
    assert len(json.loads(file.read_text())) == len(corpus)


def test_an_unwritable_cache_is_not_an_error(corpus: Corpus, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert load_corpus(cache=blocked).entries == corpus.entries
    assert embed_documents(["a"], HashEncoder(), cache=blocked).shape == (1, 384)


def test_embeddings_are_cached_by_texts_and_weights(tmp_path: Path) -> None:
    encoder = Counting()
    first = embed_documents(["sort a list", "join"], encoder, cache=tmp_path)
    again = embed_documents(["sort a list", "join"], encoder, cache=tmp_path)
    assert encoder.texts == 2
    assert first.tobytes() == again.tobytes() == HashEncoder().encode(["sort a list", "join"]).tobytes()
    embed_documents(["sort a list", "joint"], encoder, cache=tmp_path)
    assert encoder.texts == 4
    encoder.fingerprint = "other weights"
    embed_documents(["sort a list", "join"], encoder, cache=tmp_path)
    assert encoder.texts == 6


def test_different_splits_of_a_text_have_different_keys(tmp_path: Path) -> None:
    encoder = Counting()
    embed_documents(["ab", "c"], encoder, cache=tmp_path)
    embed_documents(["a", "bc"], encoder, cache=tmp_path)
    assert encoder.texts == 4


def damaged(kind: str, file: Path) -> None:
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:100])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "pickle":
        np.savez(file, rows=np.array([{"a": 1}, {"b": 2}], dtype=object))
    elif kind == "shape":
        np.savez(file, rows=np.zeros((1, 384), np.float32))
    else:
        np.savez(file, rows=np.full((2, 384), np.nan, np.float32))


@pytest.mark.parametrize("kind", ["truncated", "empty", "pickle", "shape", "nan"])
def test_damaged_embeddings_are_computed_again(kind: str, tmp_path: Path) -> None:
    encoder = Counting()
    expected = embed_documents(["sort", "join"], encoder, cache=tmp_path)
    (file,) = tmp_path.glob("embeddings-*.npz")
    damaged(kind, file)
    assert embed_documents(["sort", "join"], encoder, cache=tmp_path).tobytes() == expected.tobytes()
    embed_documents(["sort", "join"], encoder, cache=tmp_path)
    assert encoder.texts == 4
    assert list(tmp_path.glob(".*.partial")) == []


def test_the_cache_folder_can_be_chosen() -> None:
    assert cache_dir({"QUERY_MUTATOR_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/query-mutator")
    assert cache_dir({}) == Path.home() / ".cache" / "query-mutator"
