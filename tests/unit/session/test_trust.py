"""What counts as named by this user, and the journal of completed calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from query_mutator.env.flow import CallOutcome, CallSite
from query_mutator.errors import UnnamedError
from query_mutator.session.journal import Journal
from query_mutator.session.trust import check_reach, remember, trusted_path, unnamed
from query_mutator.types import ChatRequest, Completion, ErrorInfo

REQUEST = ChatRequest.user("why?", model="m")
SITE = CallSite(3, 7, "answer", 2)
ANSWER = CallOutcome(Completion(text="Because é\ud800.", model="m", total_s=0.1, latency_s=0.30000000000000004), 0.5)
FAILURE = CallOutcome(
    Completion(error=ErrorInfo(kind="busy", message="later", status=503, retry_after_s=2.0), attempts=0), 1.25
)


@pytest.fixture(autouse=True)
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a user who has named nothing."""
    path = tmp_path / "config" / "trusted.jsonl"
    monkeypatch.setenv("QUERY_MUTATOR_TRUSTED", str(path))
    monkeypatch.delenv("OLLAMA_HOST", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    return path


@pytest.mark.parametrize(
    "stored",
    [
        {"ollama_url": ("http://127.0.0.1:11434",)},  # where Ollama is unless something else is said
        {"encoder": "all-MiniLM-L6-v2"},
        {"encoder": "ollama:nomic-embed-text"},
        {"mutator_model": "llama3.2"},
        {"dataset": "reference_tables"},
        {"dataset": "data/questions.jsonl"},
        {"judge_rubric": "Is it right?\n"},
        {"save_dir": "runs"},
        {"ollama_url": None, "gguf": (), "openai_url": "", "target_model": "anything"},
    ],
)
def test_a_setting_that_stays_here_needs_no_name(stored: Mapping[str, Any]) -> None:
    assert unnamed(stored, {}) == []


@pytest.mark.parametrize(
    "stored",
    [
        {"openai_url": "http://127.0.0.1:11434/v1"},  # Ollama's own place, but it would get the key
        {"ollama_url": ["http://127.0.0.1:11434", "http://example.com"]},
        {"dataset": "../questions.jsonl"},
        {"dataset": "~/questions.jsonl"},
        {"dataset": "hf:stranger/questions"},
        {"save_dir": "/srv/runs"},
    ],
)
def test_a_setting_that_reaches_out_is_named_with_its_flag(stored: Mapping[str, Any]) -> None:
    ((name, value),) = unnamed(stored, {})
    with pytest.raises(UnnamedError, match=f"stranger.qm names .* --{name.replace('_', '-')} ") as caught:
        check_reach(stored, source="stranger.qm")
    assert value in str(caught.value)
    assert str(trusted_path()) in str(caught.value)
    check_reach(stored, source="stranger.qm", named=stored)
    remember(stored)
    check_reach(stored, source="stranger.qm")


def test_an_address_is_the_same_however_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    remember({"openai_url": "https://example.com"})
    assert unnamed({"openai_url": "https://example.com:443/v1/"}, {}) == []
    assert unnamed({"openai_url": "https://example.com/other"}, {})
    assert unnamed({"openai_url": "http://example.com"}, {})
    monkeypatch.setenv("OLLAMA_HOST", "10.0.0.7")
    assert unnamed({"ollama_url": "http://10.0.0.7:11434"}, {}) == []


def test_a_damaged_file_of_trust_trusts_only_what_can_be_read(trusted: Path) -> None:
    remember({"gguf": "/models/m.gguf"}, plugins=["", "ab"])
    trusted.write_bytes(b'\xff\n[1]\n{"a": 1}\n[1, 2]\n' + trusted.read_bytes() + b'["gguf", "/oth')
    assert unnamed({"gguf": "/models/m.gguf"}, {}) == []
    assert unnamed({"gguf": "/oth"}, {})
    assert b'"plugin",""' not in trusted.read_bytes()


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUERY_MUTATOR_TRUSTED", str(tmp_path / "file" / "trusted.jsonl"))
    remember({"gguf": "/models/m.gguf"})
    assert "name servers and plugins again" in caplog.text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def written(folder: Path, *, since: int = 0) -> Journal:
    journal = Journal(folder, since=since)
    journal.write_actions([(3, 7, 2)])
    journal.write(SITE, 1, REQUEST, FAILURE)
    journal.write(SITE, 2, REQUEST, ANSWER)
    return journal


def test_outcomes_and_actions_come_back_to_the_bit_and_once(folder: Path) -> None:
    written(folder).close()
    paid: list[Completion] = []
    journal = Journal(folder, on_replay=paid.append)
    assert journal.action(3, 7) == 2
    assert journal.holds(SITE, 2)
    assert [journal.find(SITE, attempt, REQUEST) for attempt in (1, 2, 3, 1)] == [FAILURE, ANSWER, None, None]
    assert journal.action(3, 7) is None
    assert paid == [ANSWER.completion]  # the other one was shared, it cost nothing
    journal.close()


def test_embeddings_come_back_to_the_bit(folder: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
    journal = Journal(folder)
    journal.write_vectors(["why?", "é\ud800"], rows)
    journal.close()
    found = Journal(folder)
    assert list(found.vectors) == ["why?", "é\ud800"]
    assert all((vector == row).all() for vector, row in zip(found.vectors.values(), rows, strict=True))
    found.close()


def test_answer_to_another_request_is_not_taken(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(folder).close()
    journal = Journal(folder)
    assert journal.find(SITE, 2, ChatRequest.user("how?", model="m")) is None
    assert "was another request then" in caplog.text
    journal.close()


@pytest.mark.parametrize("torn", [b'{"env": 3, "st', b"\x00\x00\x00\n"])
def test_torn_end_is_passed_over_and_written_behind(
    folder: Path, torn: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    written(folder).close()
    with (folder / "step_0.jsonl").open("ab") as file:
        file.write(torn)
    journal = Journal(folder)
    assert "torn after" in caplog.text
    journal.write_actions([(3, 8, 1)])
    journal.close()
    again = Journal(folder)
    assert (again.action(3, 7), again.action(3, 8), len(again)) == (2, 1, 2)
    again.close()


def test_files_before_a_checkpoint_are_left_out_and_dropped(folder: Path) -> None:
    journal = written(folder)
    journal.start(32)
    journal.write_actions([(0, 8, 1)])
    journal.start(64)
    journal.close()
    later = Journal(folder, since=32)
    assert (len(later), later.action(0, 8)) == (0, 1)
    later.drop_before(64)
    assert [path.name for path in folder.iterdir()] == ["step_64.jsonl"]
    later.close()


def test_files_behind_a_gap_are_not_taken(folder: Path) -> None:
    written(folder, since=32).close()
    journal = Journal(folder, since=0)
    assert len(journal) == 0
    journal.close()


def test_what_comes_after_the_end_is_not_written(folder: Path) -> None:
    journal = written(folder)
    journal.close()
    journal.write_actions([(9, 9, 9)])
    journal.close()
    assert Journal(folder).action(9, 9) is None


def test_a_call_that_was_ended_from_our_side_is_made_again(folder: Path) -> None:
    journal = written(folder)
    ended = CallOutcome(Completion.failed("cancelled", "the call was ended from this side"), 0.5)
    journal.write(CallSite(3, 8, "rewrite", 1), 1, REQUEST, ended)
    journal.write_actions([(3, 9, 0)])  # chosen after a step that did not come about
    journal.write(CallSite(4, 1, "rewrite", 1), 1, REQUEST, ANSWER)  # came back in time
    journal.close()
    again = Journal(folder)
    assert not again.holds(CallSite(3, 8, "rewrite", 1), 1)
    assert again.holds(CallSite(4, 1, "rewrite", 1), 1)
    assert (again.action(3, 9), again.action(3, 7)) == (None, 2)
    again.close()


def test_settled_actions_are_those_taken_before(folder: Path) -> None:
    written(folder).close()
    journal = Journal(folder)
    assert journal.replay([(3, 7), (3, 8)], np.array([0, 1])).tolist() == [2, 1]
    journal.close()
    assert Journal(folder).replay([(3, 7), (3, 8)], np.array([5, 5])).tolist() == [2, 1]


def three_files(folder: Path) -> None:
    journal = written(folder)
    for step in (8, 16):
        journal.start(step)
        journal.write_actions([(0, step, 1), (0, step + 1, 2)])
    journal.close()


@pytest.mark.parametrize("damage", ["flip", "lines", "end", "files", "torn", "removed"])
def test_nothing_behind_damage_is_taken_and_the_place_is_named(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    three_files(folder)
    path, last = folder / "step_8.jsonl", folder / "step_16.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    head, one, two = lines
    damaged = {
        "flip": [head, one.replace(b'"action":1', b'"action":0'), two],
        "lines": [head, two, one],
        "end": [head, one],
        "files": last.read_bytes().splitlines(keepends=True),
        "torn": [head, one, two[:-4]],
    }
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(b"".join(damaged[damage]))
    journal = Journal(folder)
    assert journal.action(3, 7) == 2
    assert journal.action(0, 8) == (1 if damage in ("end", "torn") else None)
    assert [journal.action(0, step) for step in (9, 16, 17)] == [None] * 3
    assert ("step_16.jsonl:1: damaged" if damage in ("end", "removed") else "step_8.jsonl") in caplog.text
    assert "calls from there on are repeated" in caplog.text
    journal.write_actions([(0, 20, 2)])
    journal.close()
    caplog.clear()
    again = Journal(folder)
    assert again.action(0, 20) == 2
    assert not caplog.text
    again.close()


def test_entries_of_an_older_version_are_taken_up_to_one_that_is_none(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    rows = ['{"env": 0, "step": 1, "action": 2}', '{"enw": 0, "step": 2, "action": 2}', '{"env": 0, "step": 3}']
    (folder / "step_0.jsonl").write_text("\n".join(rows) + "\n")
    journal = Journal(folder)
    assert (journal.action(0, 1), journal.action(0, 2), journal.action(0, 3)) == (2, None, None)
    assert "not an entry of a journal" in caplog.text
    journal.close()


def test_an_equal_request_of_another_step_shares_the_reply_until_the_run_is_past_its_kill(folder: Path) -> None:
    written(folder).close()
    paid: list[Completion] = []
    journal = Journal(folder, on_replay=paid.append)
    twin = CallSite(5, 1, "answer", 0)
    found = journal.find(twin, 2, REQUEST)
    assert found is not None
    assert (found.completion.text, found.completion.attempts, found.elapsed_s) == (ANSWER.completion.text, 0, 0.0)
    assert journal.find(twin, 1, REQUEST) is None  # that attempt failed
    assert journal.find(twin, 2, replace(REQUEST, temperature=0.7)) is None  # a random reply is not shared
    later = ChatRequest.user("in flight at the kill", model="m")
    journal.write(CallSite(6, 1, "answer", 0), 1, later, ANSWER)
    assert journal.find(CallSite(7, 1, "answer", 0), 1, later) is not None
    assert paid == []
    journal.start(32)
    assert journal.find(twin, 2, REQUEST) is None
    journal.close()


def test_a_run_that_was_not_killed_shares_nothing(folder: Path) -> None:
    journal = written(folder)
    assert journal.find(CallSite(5, 1, "answer", 0), 2, REQUEST) is None
    journal.close()
