"""Files of recorded replies: what is read again, and one clear line about a damaged one."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from query_mutator.errors import UsageError
from query_mutator.files import replies as module
from query_mutator.files.replies import RepliesHead, read_replies, write_replies
from query_mutator.types import Completion, ErrorInfo

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
