"""Length caches: both formats, damage, interruption, adding to a loaded cache."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from query_mutator.batching.files import BatchFileError
from query_mutator.batching.generation.length_cache import LengthCache, LengthEntry
from query_mutator.errors import UsageError

SUFFIXES = ["lengths.jsonl", "lengths.json", "lengths.bin"]


@pytest.fixture(params=SUFFIXES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def build(path: Path, entries: dict[object, int], tokenizer_hash: str = "tok") -> None:
    with LengthCache.create(path, tokenizer_hash) as cache:
        for name, length in entries.items():
            cache.add_sync(name, length)


def test_what_was_added_is_read_back_in_order(path: Path) -> None:
    build(path, {"b": 3, "ä/ö": 0, 0: 7})
    cache = LengthCache.load_sync(path, "tok")
    assert list(cache.items()) == [("b", 3), ("ä/ö", 0), ("0", 7)]
    assert cache.get(0) == 7
    assert cache.get("nobody") is None
    assert len(cache) == 3
    assert "b" in cache
    assert cache.lengths.tolist() == [3, 0, 7]


def test_async_methods_are_the_sync_ones(path: Path) -> None:
    async def run() -> None:
        async with LengthCache.create(path, "tok") as cache:
            await cache.add("a", 1)
            await cache.add_many(["b", "c"], [2, 3])
        loaded = await LengthCache.load(path)
        assert loaded.get_all() == {"a": 1, "b": 2, "c": 3}
        assert [entry async for entry in LengthCache.stream(path)] == list(LengthCache.stream_sync(path))
        assert await loaded.validate({"a", "z"}) == ({"z"}, {"b", "c"})
        assert len(await LengthCache.load_or_create(path, "tok")) == 3

    asyncio.run(run())


def test_adding_to_a_loaded_cache_keeps_what_was_there(path: Path) -> None:
    build(path, {"a": 1})
    with LengthCache.load_sync(path) as cache:
        cache.add_sync("b", 2)
        cache.add_many_sync(["c"], np.array([3]))
    assert LengthCache.load_sync(path).get_all() == {"a": 1, "b": 2, "c": 3}


def test_an_interrupted_build_leaves_the_file_that_was_there(path: Path) -> None:
    build(path, {"a": 1})

    def interrupted() -> None:
        with LengthCache.create(path, "tok") as cache:
            cache.add_sync("b", 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert LengthCache.load_sync(path).get_all() == {"a": 1}
    assert [found.name for found in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_truncated_file_is_an_error_that_names_it(path: Path, cut: int) -> None:
    build(path, {f"sample{index}": index for index in range(9)})
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(BatchFileError, match=path.name):
        LengthCache.load_sync(path)


def test_an_edited_file_is_an_error_that_names_it(path: Path) -> None:
    build(path, {"sample_one": 5, "sample_two": 6})
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)
    with pytest.raises(BatchFileError, match=path.name):
        LengthCache.load_sync(path)


def test_another_tokenizer_is_refused_and_begun_anew_when_asked(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(path, {"a": 1}, tokenizer_hash="old")
    with pytest.raises(UsageError, match=r"tokenizer old, not new"):
        LengthCache.load_sync(path, "new")
    assert len(LengthCache.load_or_create_sync(path, "new")) == 0
    assert "built again" in caplog.text
    assert LengthCache.load_sync(path).get("a") == 1


def test_an_id_comes_once_and_a_refused_batch_adds_nothing(path: Path) -> None:
    cache = LengthCache.create(path, "tok")
    cache.add_sync("1", 4)
    with pytest.raises(UsageError, match="'1'"):
        cache.add_sync(1, 4)
    with pytest.raises(UsageError, match="occurs twice"):
        cache.add_many_sync(["2", "3", "2"], [1, 1, 1])
    assert len(cache) == 1


@pytest.mark.parametrize("length", [-1, 1.5, True, 2**31, "7"])
def test_lengths_are_whole_numbers(path: Path, length: object) -> None:
    with pytest.raises(UsageError):
        LengthCache.create(path, "tok").add_sync("a", length)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", None, 1.0, True])
def test_ids_are_text_or_whole_numbers(path: Path, name: object) -> None:
    with pytest.raises(UsageError, match="sample id"):
        LengthCache.create(path, "tok").add_sync(name, 1)


def test_lines_without_header_count_or_version_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    row = json.dumps({"sample_id": "a", "tokenizer_hash": "tok", "length": 3})
    path.write_text(row + "\n")
    with pytest.raises(BatchFileError, match="header"):
        LengthCache.load_sync(path)
    path.write_text('{"tokenizer_hash": "tok", "version": 2}\n' + row)
    with pytest.raises(BatchFileError, match="version 2"):
        LengthCache.load_sync(path)
    path.write_text('{"tokenizer_hash": "tok", "version": 1}\n' + row)
    with pytest.raises(BatchFileError, match="interrupted"):
        LengthCache.load_sync(path)
    assert LengthCache.load_sync(path, allow_unfinished=True).get("a") == 3


def test_a_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"none\.bin"):
        LengthCache.load_sync(tmp_path / "none.bin")
    (tmp_path / "other.bin").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(BatchFileError, match=r"other\.bin"):
        LengthCache.load_sync(tmp_path / "other.bin")


def test_an_entry_goes_through_its_row() -> None:
    entry = LengthEntry(sample_id="a", tokenizer_hash="tok", length=3)
    assert LengthEntry.from_json(entry.to_json()) == entry


def test_the_binary_file_is_small(tmp_path: Path) -> None:
    path = tmp_path / "lengths.bin"
    with LengthCache.create(path, "tok") as cache:
        cache.add_many_sync([f"s{index:06d}" for index in range(10_000)], np.arange(10_000))
    assert path.stat().st_size < 10_000 * (8 + 4) + 1_000


def test_a_changed_hash_in_the_header_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    with LengthCache.create(path, "0123abcd") as cache:
        cache.add_sync("a", 3)
    path.write_text(path.read_text().replace("0123abcd", "0133abcd", 1))
    with pytest.raises(BatchFileError, match="checksum"):
        LengthCache.load_sync(path)
