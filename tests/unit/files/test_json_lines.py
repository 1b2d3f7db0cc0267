"""JSON-lines files and files of replies: every row is verified, and damage is named by file and line."""

from __future__ import annotations

import errno
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from query_mutator.errors import DiskError, UsageError
from query_mutator.files import read_checked_json, write_checked_json
from query_mutator.files import replies as module
from query_mutator.files.json_lines import JsonLines, check_json_lines, read_json_lines
from query_mutator.files.replies import RepliesHead, read_replies, write_replies
from query_mutator.types import Completion, ErrorInfo

ROWS = [{"step": step, "text": f"é{step}", "nested": {"a": [1.5, None]}} for step in range(6)]
HEAD = RepliesHead(model="m", model_sha256="ab", made_with="llama.cpp 1", command="record", date="2026-11-23")
KEY, OTHER = "0123456789abcdef", "fedcba9876543210"
REPLY = Completion(
    text="Paris,\nin France.",
    model="m",
    prompt_tokens=41,
    completion_tokens=3,
    prompt_eval_s=0.25,
    eval_s=0.5,
    total_s=0.75,
    logprob=-0.2131,
    token_logprobs=(-0.401, -0.025),
)
CUT = Completion(text="It is", model="m", hit_limit=True)
EMPTY = Completion(model="m", error=ErrorInfo(kind="empty", message="the reply has no text"))


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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_replies(tmp_path / "some.xz", HEAD, {KEY: [REPLY, CUT], OTHER: [EMPTY]})
    return tmp_path / "some.xz"


def test_replies_are_read_as_they_were_written(file: Path) -> None:
    head, replies = read_replies(file)
    assert (head.model, head.made_with, head.rows) == ("m", "llama.cpp 1", 3)
    assert replies == {KEY: (REPLY, CUT), OTHER: (EMPTY,)}


def test_the_same_replies_give_the_same_bytes(file: Path, tmp_path: Path) -> None:
    write_replies(tmp_path / "again.xz", *read_replies(file))
    assert (tmp_path / "again.xz").read_bytes() == file.read_bytes()


def test_a_file_cut_anywhere_is_refused(file: Path, tmp_path: Path) -> None:
    whole, cut = file.read_bytes(), tmp_path / "cut.xz"
    for end in range(0, len(whole), 7):
        cut.write_bytes(whole[:end])
        with pytest.raises(UsageError, match=r"cut\.xz: .*damaged, or not a file of recorded replies: restore it"):
            read_replies(cut)


def test_a_flipped_bit_is_found(file: Path) -> None:
    whole = file.read_bytes()
    for at in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        file.write_bytes(flipped)
        with pytest.raises(UsageError):
            read_replies(file)


def rewritten(file: Path, change: Callable[[list[Any]], object]) -> None:
    rows = [json.loads(line) for line in lzma.decompress(file.read_bytes()).splitlines()]
    change(rows)
    file.write_bytes(lzma.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.pop(), "it has not the 3 replies"),
        (lambda rows: rows.append(rows[-1]), "it has not the 3 replies"),
        (lambda rows: rows.pop(0), "not an? object|list where an object"),
        (lambda rows: rows[0].update(format="other"), "its format is 'other'"),
        (lambda rows: rows[0].update(rows=10**9), "of at most 1,000,000"),
        (lambda rows: rows[0].update(model=7), "its first line.model is 7"),
        (lambda rows: rows[2].pop(), "line 3: "),
        (lambda rows: rows[1].__setitem__(0, "no key"), "line 2: a key that is not hexadecimal digits"),
        (lambda rows: rows[1].__setitem__(1, 7), "line 2: int in place of a text"),
        (lambda rows: rows[1].__setitem__(2, "many"), "line 2: "),
        (lambda rows: rows[1].__setitem__(4, 1e300), "line 2: .* in place of a count or time"),
        (lambda rows: rows[1].__setitem__(6, 0.5), "line 2: a log probability above 0"),
        (lambda rows: rows[1].__setitem__(7, "soon"), "line 2: a reply that ends in no known way"),
        (lambda rows: rows[1].__setitem__(8, [0.5]), "line 2: log probabilities of tokens that are not whole"),
        (lambda rows: rows[1].__setitem__(1, ""), "line 2: a reply that ends in no known way"),
    ],
)
def test_content_of_another_kind_is_named_with_its_line(
    file: Path, change: Callable[[list[Any]], object], said: str
) -> None:
    rewritten(file, change)
    with pytest.raises(UsageError, match=said):
        read_replies(file)


def test_an_endless_file_is_not_unpacked(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(lzma.compress(b"[" * 3 * 2**20))
    with pytest.raises(UsageError, match="too large"):
        read_replies(file)
    monkeypatch.setattr(module, "_MAX_BYTES", 1000)
    file.write_bytes(lzma.compress(b'{"format"' + b" \n" * 1000))
    with pytest.raises(UsageError, match="damaged"):
        read_replies(file)


def test_bytes_behind_the_end_and_other_files_are_refused(file: Path, tmp_path: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(UsageError, match="does not end with a line"):
        read_replies(file)
    (tmp_path / "text.xz").write_text('{"query": "why?"}\n')
    with pytest.raises(UsageError, match="not a file of recorded replies"):
        read_replies(tmp_path / "text.xz")
    with pytest.raises(UsageError, match="cannot be read"):
        read_replies(tmp_path / "missing.xz")
