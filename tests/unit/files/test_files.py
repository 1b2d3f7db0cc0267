"""Whole files: the content is synced before the rename and the folder after it; a failed write leaves the old file."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from query_mutator.errors import DiskError
from query_mutator.files import atomic_write, parse_json, write_json, write_text


def test_content_and_folder_are_synced_around_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "a.json", list[tuple[str, bool]]()
    sync = os.fsync

    def recorded(handle: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        seen.append((kind, path.exists()))
        sync(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    write_json(path, {"a": 1})
    assert seen == [("file", False), ("folder", True)]
    assert path.read_text() == '{\n  "a": 1\n}\n'


def test_an_error_inside_the_block_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with contextlib.suppress(RuntimeError), atomic_write(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file where a folder is needed")
    with pytest.raises(DiskError, match="cannot be written"):
        write_json(tmp_path / "a" / "b.json", {})


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        reader = pool.submit(pipe.read_text)
        write_text(pipe, "hello")
        assert reader.result() == "hello"
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 200_000, "nested more than 100 levels deep"),
        ("[" * 101 + "]" * 101, "nested more than 100 levels deep"),
        ('{"a": NaN}', "NaN is not a JSON number; write null"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ("1e400", "the number 1e400 is too large"),
        ('"\\ud800"', "a lone surrogate"),
        ('{"\\uDFFF": 1}', "a lone surrogate"),
        ("9" * 5000, "Exceeds the limit"),
    ],
)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_json_of_a_user_that_cannot_be_written_back_is_refused(text: str, says: str, as_bytes: bool) -> None:
    with pytest.raises(ValueError, match=says):
        parse_json(text.encode() if as_bytes else text)


def test_json_of_a_user_is_read_as_it_is() -> None:
    deep = "[" * 100 + "]" * 100
    for text in (deep, '{"a": "\\ud83d\\ude00", "b": 123456789012345678901234567890}', '"\u2028"'):
        assert parse_json(text) == parse_json(text.encode()) == json.loads(text)
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]
