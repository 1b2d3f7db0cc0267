"""JSON-lines files: every row is verified, and damage is named by file and line."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from query_mutator.errors import DiskError, UsageError
from query_mutator.files import read_checked_json, write_checked_json
from query_mutator.files.json_lines import JsonLines, check_json_lines, read_json_lines

ROWS = [{"step": step, "text": f"é{step}", "nested": {"a": [1.5, None]}} for step in range(6)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = JsonLines(tmp_path / "rows.jsonl")
    rows.append(*ROWS[:4])
    rows.append(*ROWS[4:])
    rows.close()
    return rows.path


def test_rows_come_back_without_their_checksum(path: Path) -> None:
    assert list(read_json_lines(path)) == ROWS
    assert all(line.endswith(b'"}') and b',"crc":"' in line for line in path.read_bytes().splitlines())


def test_a_flipped_bit_is_found_or_harmless(path: Path) -> None:
    content, rng, found = path.read_bytes(), random.Random(1), 0
    for _ in range(600):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            rows = list(read_json_lines(path))
        except UsageError as error:
            found += f"{path}:" in str(error)
        else:
            pytest.fail(f"{bytes(damaged)!r} gave {rows}")
    assert found == 600


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: [lines[1], lines[0], *lines[2:]], 1),
        (lambda lines: [*lines[:3], lines[4], lines[3], lines[5]], 4),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], 4),
        (lambda lines: [*lines[:2], *lines[3:]], 3),
        (lambda lines: lines[1:], 1),
        (lambda lines: [*lines[:2], b'{"step":2}\n', *lines[3:]], 3),
    ],
    ids=["first two exchanged", "two exchanged", "repeated", "removed", "first removed", "replaced"],
)
def test_rows_at_the_wrong_place_are_found(path: Path, change: Callable[[list[bytes]], list[bytes]], line: int) -> None:
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(UsageError, match=rf"rows\.jsonl:{line}: damaged"):
        list(read_json_lines(path))


@pytest.mark.parametrize("lost", [1, 2, 10, 30])
def test_a_last_line_that_was_cut_off_is_left_out_and_written_behind(path: Path, lost: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-lost])
    kept = ROWS if lost == 1 else ROWS[:-1]  # without its line feed the row is whole
    assert list(read_json_lines(path)) == kept
    rows = JsonLines(path)
    rows.append({"step": 9})
    rows.close()
    assert list(read_json_lines(path)) == [*kept, {"step": 9}]


def test_zeros_at_the_end_are_a_cut_and_elsewhere_damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content + b"\0\0\0\n")
    assert list(read_json_lines(path)) == ROWS
    path.write_bytes(b"\0\0\0\n" + content)
    with pytest.raises(UsageError, match=r"rows\.jsonl:1: not JSON"):
        list(read_json_lines(path))


def test_a_file_of_the_other_name_is_found_and_a_copy_under_a_free_name_is_read(tmp_path: Path) -> None:
    rows = JsonLines(tmp_path / "metrics.jsonl")
    rows.append(*ROWS)
    rows.close()
    (tmp_path / "transcripts.jsonl").write_bytes(rows.path.read_bytes())
    (tmp_path / "baseline.jsonl").write_bytes(rows.path.read_bytes())
    assert list(read_json_lines(tmp_path / "baseline.jsonl")) == ROWS
    with pytest.raises(UsageError, match=r"transcripts\.jsonl:1: damaged"):
        list(read_json_lines(tmp_path / "transcripts.jsonl"))


def test_rows_of_an_older_version_are_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    rows = JsonLines(path)
    rows.append({"a": 3}, {"a": 4})
    rows.close()
    assert list(read_json_lines(path)) == [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 4}]
    path.write_text(path.read_text().replace('"a":3', '"a":8'))
    with pytest.raises(UsageError, match=r"rows\.jsonl:3: damaged"):
        JsonLines(path)


def test_a_prefix_is_checked_by_length_and_checksum(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    end = sum(map(len, lines[:4]))
    first = JsonLines(path, cut_at=end)
    check_json_lines(path, end=end, crc=first.crc)
    for other in (end - 3, end + 1):
        with pytest.raises(UsageError, match=r"rows\.jsonl:4: damaged"):
            check_json_lines(path, end=other, crc=first.crc)
    with pytest.raises(UsageError, match="not the rows that were written"):
        check_json_lines(path, end=end, crc=first.crc + 1)
    first.close()


def test_a_checked_object_is_verified_and_one_without_a_checksum_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_checked_json(path, {"flags": {1: (0.1, float("inf"))}, "started": "é"})
    expected = {"flags": {"1": [0.1, None]}, "started": "é"}
    assert read_checked_json(path) == expected
    content, rng = path.read_bytes(), random.Random(1)
    for _ in range(600):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            found = read_checked_json(path)
        except UsageError:
            continue
        assert {name: value for name, value in found.items() if name in expected} == expected
    path.write_bytes(content)
    with pytest.raises(UsageError, match="damaged, edited or renamed"):
        read_checked_json(path.rename(tmp_path / "summary.json"))
    path.write_text('{"flags": {}}')
    assert read_checked_json(path) == {"flags": {}}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("the user's\n")
    (tmp_path / "transcripts.jsonl").symlink_to(own)
    with pytest.raises(DiskError, match=r"transcripts\.jsonl"):
        JsonLines(tmp_path / "transcripts.jsonl", cut_at=0)
    assert own.read_text() == "the user's\n"


def test_half_a_row_of_a_full_disk_is_taken_back(path: Path) -> None:
    class FullDisk:
        """Writes the beginning of what it is given, then fails."""

        def __init__(self, file: Any) -> None:
            self._file, self._calls = file, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def write(self, data: bytes) -> int:
            self._calls += 1
            if self._calls > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return int(self._file.write(data[:9]))

    rows = JsonLines(path)
    whole, rows._file = rows._file, FullDisk(rows._file)
    with pytest.raises(DiskError):
        rows.append({"step": 6})
    rows._file = whole
    rows.append({"step": 7})
    rows.close()
    assert list(read_json_lines(path)) == [*ROWS, {"step": 7}]
