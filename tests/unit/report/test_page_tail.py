"""Following a run's files: only what is new is read; a truncated or replaced file is read again."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from query_mutator.errors import UsageError
from query_mutator.files import write_checked_json
from query_mutator.files.json_lines import JsonLines
from query_mutator.report.page.tail import FollowedJson, FollowedRows

ALL = 1000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, *steps: int, cut_at: int | None = None) -> int:
    """Append rows; return the size of the file."""
    with closing(JsonLines(path, cut_at=cut_at)) as file:
        file.append(*({"step": step} for step in steps))
        return file.size_bytes


def steps_of(found: tuple[list[dict[str, int]], bool]) -> tuple[list[int], bool]:
    rows, is_reset = found
    return [row["step"] for row in rows], is_reset


def test_only_new_rows_are_read(path: Path) -> None:
    followed = FollowedRows(path)
    assert steps_of(followed.read(limit=ALL)) == ([], False)
    write(path, 1)
    assert steps_of(followed.read(limit=ALL)) == ([1], False)
    write(path, 2, 3)
    assert steps_of(followed.read(limit=ALL)) == ([2, 3], False)
    assert steps_of(followed.read(limit=ALL)) == ([], False)


def test_many_rows_come_in_parts(path: Path) -> None:
    write(path, *range(5))
    followed = FollowedRows(path)
    parts = []
    while not parts or followed.has_more:
        parts.append(steps_of(followed.read(limit=2)))
    assert parts == [([0, 1], False), ([2, 3], False), ([4], False)]


def test_a_row_that_is_being_written_is_read_once_it_is_whole(path: Path) -> None:
    write(path, 1, 2)
    whole = path.read_bytes()
    followed = FollowedRows(path)
    path.write_bytes(whole[:-7])
    assert steps_of(followed.read(limit=ALL)) == ([1], False)
    path.write_bytes(whole)
    assert steps_of(followed.read(limit=ALL)) == ([2], False)


@pytest.mark.parametrize("more", [(), (9,), (9, 10, 11, 12)], ids=["shorter", "as long", "longer"])
def test_a_file_that_a_resumed_run_truncated_is_read_again(path: Path, more: tuple[int, ...]) -> None:
    size = write(path, 1)
    write(path, 2, 3)
    followed = FollowedRows(path)
    followed.read(limit=ALL)
    write(path, 8, *more, cut_at=size)
    assert steps_of(followed.read(limit=ALL)) == ([1, 8, *more], True)


def test_a_file_that_vanished_is_read_when_it_is_there_again(path: Path) -> None:
    write(path, 1)
    followed = FollowedRows(path)
    followed.read(limit=ALL)
    path.unlink()
    assert steps_of(followed.read(limit=ALL)) == ([], True)
    write(path, 1)
    assert steps_of(followed.read(limit=ALL)) == ([1], False)


def test_rows_of_older_versions_have_no_checksum(path: Path) -> None:
    path.write_text('{"step": 1}\n{"step": 2}\n')
    followed = FollowedRows(path)
    assert steps_of(followed.read(limit=ALL)) == ([1, 2], False)
    write(path, 3)  # resumed by this version
    assert steps_of(followed.read(limit=ALL)) == ([3], False)
    write(path, 4)
    assert steps_of(followed.read(limit=ALL)) == ([4], False)


def test_a_damaged_row_is_named(path: Path) -> None:
    write(path, 1, 2, 3)
    path.write_bytes(path.read_bytes().replace(b'"step":2', b'"step":7'))
    with pytest.raises(UsageError, match=r"metrics\.jsonl:2: damaged"):
        FollowedRows(path).read(limit=ALL)


def test_a_small_file_is_read_when_it_changed(tmp_path: Path) -> None:
    followed = FollowedJson(tmp_path / "summary.json")
    assert not followed.read()
    for steps in (1, 2):
        write_checked_json(followed.path, {"env_steps": steps})
        assert followed.read()
        assert followed.value == {"env_steps": steps}
        assert not followed.read()
