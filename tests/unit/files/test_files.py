"""Files: written whole, JSON and its lines with checksums, metrics, recorded replies, and the lock of a folder."""

from __future__ import annotations

import contextlib
import json
import lzma
import math
import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from query_mutator.errors import DiskError, UsageError
from query_mutator.files import (
    LOCK,
    JsonLines,
    atomic_write,
    check_json_lines,
    decode,
    encode,
    locked,
    parse_json,
    read_checked_json,
    read_json_lines,
    record_of,
    write_checked_json,
    write_json,
    write_text,
)
from query_mutator.files import replies as module
from query_mutator.files.replies import RepliesHead, read_replies, write_replies
from query_mutator.files.run_dir import MetricsWriter
from query_mutator.types import Completion, ErrorInfo, Question

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=20,
)
HOLD = """
import sys, time
from pathlib import Path
from query_mutator.errors import UsageError
from query_mutator.files import locked
try:
    with locked(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
except UsageError as error:
    print(error, flush=True)
"""


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
    with pytest.raises(DiskError, match="cannot be written"):
        write_json(path / "b.json", {})  # a file where a folder is needed


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
        ("[" * 200_000, "depth limit exceeded"),
        ('{"a": NaN}', "expected a JSON value"),
        ("1e400", "number is infinity"),
        ('"\\ud800"', "surrogate"),
        ('{"\\uDFFF": 1}', "surrogate"),
        ("9" * 5000, "infinity"),
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


@settings(max_examples=50)
@given(PLAIN)
def test_what_was_written_comes_back_and_json_reads_it_too(value: object) -> None:
    text = encode(value)
    assert b"\n" not in text
    assert decode(text) == json.loads(text) == value


def test_numbers_that_json_has_no_room_for_and_what_is_no_json() -> None:
    for value in ({"half a sign": "\ud83d"}, {"tiny": sys.float_info.min / 4}):  # what the quick library refuses
        assert decode(encode(value)) == value
    assert encode([10**30]) == b"[1" + b"0" * 30 + b"]"
    assert decode(encode([10**30])) == [1e30]
    assert encode([math.nan, math.inf, 1.0]) == b"[null,null,1.0]"
    assert math.isnan(decode(b'{"x": NaN}')["x"])
    for text in (b"", b"{", b'{"a": 1} x', b"\xff", b"\xef\xbb\xbf{}"):
        with pytest.raises(ValueError, match=r"."):
            decode(text)


@dataclass(frozen=True, kw_only=True)
class Settings:
    count: int
    share: float = 0.5
    names: tuple[str, ...] = ()
    mode: Literal["a", 1] | None = None
    words: frozenset[str] = frozenset()
    questions: tuple[Question, ...] = ()
    more: Mapping[str, int | str] | None = None


def test_lists_objects_and_whole_numbers_become_what_the_fields_are() -> None:
    values: dict[str, Any] = {
        "count": 3, "share": 1, "names": ["a", "b"], "mode": "a", "words": ["x"], "more": {"k": 1}, "later": [],
        "questions": [{"id": "q", "text": "t", "tags": ["x"]}],
    }  # fmt: skip
    assert record_of(Settings, values, where="it") == Settings(
        count=3, share=1.0, names=("a", "b"), mode="a", words=frozenset("x"), more={"k": 1},
        questions=(Question(id="q", text="t", tags=("x",)),),
    )  # fmt: skip
    assert record_of(Settings, {"count": 1, "names": "a"}, where="it").names == ("a",)  # as earlier versions wrote it


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([], "it is not an object"),
        ({}, "missing 1 required keyword-only argument: 'count'"),
        ({"count": True}, "it.count is True, not int"),
        ({"count": 1, "share": float("nan")}, "it.share is nan, not float"),
        ({"count": 1, "share": 10**400}, "it.share is 1000"),
        ({"count": 1, "names": [1]}, "it.names is 1, not str"),
        ({"count": 1, "questions": [{"id": 1}]}, "it.questions.id is 1, not str"),
        ({"count": "x" * 10**6}, "it.count is 'xxx"),
    ],
)
def test_another_type_is_one_short_line(values: object, says: str) -> None:
    with pytest.raises(ValueError, match="it") as caught:
        record_of(Settings, values, where="it")
    assert says in str(caught.value)
    assert len(str(caught.value)) < 300


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", code, str(folder)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_of_processes_that_start_at_once_one_holds_the_lock(tmp_path: Path) -> None:
    processes = [start(HOLD, tmp_path) for _ in range(4)]
    lines = [first_line(process) for process in processes]
    holder = processes[lines.index("held")]
    refused = [line for line in lines if line != "held"]
    assert refused == [f"{tmp_path} is being written by process {holder.pid} on this host; wait for it, or stop it"] * 3
    for process in processes:
        process.communicate("")
    with locked(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()


def test_the_lock_of_a_killed_process_is_taken_over_also_where_its_id_was_given_to_another(tmp_path: Path) -> None:
    process = start(HOLD, tmp_path)
    assert first_line(process) == "held"
    process.kill()
    process.communicate()
    _, host, began = (tmp_path / LOCK).read_text().split()
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text().startswith(f"{os.getpid()}\n")
    (tmp_path / LOCK).write_text(f"{os.getppid()}\n{host}\n{began}\n")
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("owner", ["17\nnode-7\n", ""])
def test_a_lock_whose_owner_cannot_be_checked_is_deleted_by_its_user(tmp_path: Path, owner: str) -> None:
    (tmp_path / LOCK).write_text(owner)
    with pytest.raises(UsageError, match=f"delete {tmp_path / LOCK}"), locked(tmp_path):
        pass
    (tmp_path / LOCK).unlink()
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_a_disk_error_and_one_that_stayed_empty_is_removed(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "b"):
        pass
    assert not (tmp_path / "a" / "b").exists()
    (tmp_path / "file").touch()
    for folder in (Path("/proc/self"), Path("/proc/nowhere"), tmp_path / "file"):
        with pytest.raises(DiskError, match="cannot be written"), locked(folder):
            pass


def test_row_has_step_clock_and_the_finite_numbers_of_known_keys(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    numbers = {"validation/success": 0.25, "llm/calls": 12, "validation/score": float("nan")}
    writer.write(numbers, step=512, wall_s=1.23456)
    with pytest.raises(UsageError, match="validation/sucess"):
        writer.write({"validation/sucess": 1.0}, step=1, wall_s=0)
    writer.close()
    writer.close()
    (row,) = read_json_lines(tmp_path / "metrics.jsonl")
    assert row == {"step": 512, "wall_s": 1.235, "validation/success": 0.25, "llm/calls": 12.0}


def scalars(folder: Path, key: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(key)]


def test_going_on_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    first = MetricsWriter(tmp_path)
    first.write({"validation/success": 0.25}, step=1, wall_s=1)
    kept = first.rows.size_bytes
    first.write({"validation/success": 0.9}, step=2, wall_s=2)
    first.close()
    second = MetricsWriter(tmp_path, cut_at=kept, first_step=1)
    second.write({"validation/success": 0.5}, step=2, wall_s=2)
    second.close()
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["validation/success"]) for row in rows] == [(1, 0.25), (2, 0.5)]
    assert scalars(tmp_path, "validation/success") == [(1, 0.25), (2, 0.5)]


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


def test_a_hostile_recording_is_read_at_once_or_refused(tmp_path: Path) -> None:
    write_replies(tmp_path / "own.jsonl.xz", HEAD, {KEY: [REPLY] * 10_000})
    assert len(read_replies(tmp_path / "own.jsonl.xz")[1][KEY]) == 10_000
    lines = lzma.decompress((tmp_path / "own.jsonl.xz").read_bytes()).replace(b"-0.2131", b"-" + b"9" * 401)
    (tmp_path / "own.jsonl.xz").write_bytes(lzma.compress(lines))
    with pytest.raises(UsageError, match=r"own\.jsonl\.xz: line 2: "):
        read_replies(tmp_path / "own.jsonl.xz")


def test_rows_come_back_without_their_checksum_or_damage_is_named_with_its_line(path: Path) -> None:
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    assert all(line.endswith(b'"}\n') and b',"crc":"' in line for line in lines)
    end = sum(map(len, lines[:4]))
    check_json_lines(path, end=end)
    for other in (end - 3, end + 1):
        with pytest.raises(UsageError, match=r"rows\.jsonl:\d: damaged"):
            check_json_lines(path, end=other)
    for whole in (content, content + b"\0\0\0\n"):  # zeros at the end are a cut
        path.write_bytes(whole)
        assert list(read_json_lines(path)) == ROWS
    for damaged, said in (
        (b"".join([*lines[:2], b'{"step":2}\n', *lines[3:]]), r"rows\.jsonl:3: damaged"),  # without a checksum
        (b"\0\0\0\n" + content, r"rows\.jsonl:1: not JSON"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match=said):
            list(read_json_lines(path))


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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_replies(tmp_path / "some.xz", HEAD, {KEY: [REPLY, CUT], OTHER: [EMPTY]})
    return tmp_path / "some.xz"


def test_replies_are_read_as_they_were_written_and_the_same_ones_give_the_same_bytes(
    file: Path, tmp_path: Path
) -> None:
    head, replies = read_replies(file)
    assert (head.model, head.made_with, head.rows) == ("m", "llama.cpp 1", 3)
    assert replies == {KEY: (REPLY, CUT), OTHER: (EMPTY,)}
    write_replies(tmp_path / "again.xz", head, replies)
    assert (tmp_path / "again.xz").read_bytes() == file.read_bytes()


def test_a_file_that_is_cut_or_longer_or_another_or_endless_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, other = file.read_bytes(), tmp_path / "other.xz"
    for content in [*(whole[:end] for end in range(0, len(whole), 7)), b'{"query": "why?"}\n']:
        other.write_bytes(content)
        with pytest.raises(UsageError, match=r"other\.xz: .*damaged, or not a file of recorded replies: restore it"):
            read_replies(other)
    file.write_bytes(whole + b"more")
    with pytest.raises(UsageError, match="does not end with a line"):
        read_replies(file)
    with pytest.raises(UsageError, match="cannot be read"):
        read_replies(tmp_path / "missing.xz")
    monkeypatch.setattr(module, "_MAX_BYTES", 1000)
    file.write_bytes(lzma.compress(b'{"format"' + b" \n" * 1000))
    with pytest.raises(UsageError, match="too large"):
        read_replies(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.pop(), "it has not the 3 replies"),
        (lambda rows: rows.pop(0), "not an? object|list where an object"),
        (lambda rows: rows[0].update(format="other"), "its format is 'other'"),
        (lambda rows: rows[0].update(model=7), "its first line.model is 7"),
        (lambda rows: rows[2].pop(), "line 3: "),
        *(
            (lambda rows, at=at, value=value: rows[1].__setitem__(at, value), f"line 2: {said}")
            for at, value, said in (
                (0, 7, "a reply without a key"),
                (1, "", ".* ends in no known way"),
                (4, 1e300, ".* in place of a count or time"),
                (6, 0.5, "a log probability above 0"),
                (7, "soon", ".* ends in no known way"),
            )
        ),
    ],
)
def test_content_of_another_kind_is_named_with_its_line(
    file: Path, change: Callable[[list[Any]], object], said: str
) -> None:
    rows = [json.loads(line) for line in lzma.decompress(file.read_bytes()).splitlines()]
    change(rows)
    file.write_bytes(lzma.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode()))
    with pytest.raises(UsageError, match=said):
        read_replies(file)
