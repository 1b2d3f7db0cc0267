"""`qm batch`: formats, order, errors, and a command that is interrupted and repeated."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from openai.types.chat import ChatCompletion

from query_mutator.testing import StubServer, start_server
from tests.conftest import Librarian
from tests.integration.killing import kill_when, start
from tests.promises.helpers import QM
from tests.qm_command import qm

Rows = list[dict[str, Any]]


def chat(custom_id: str, *messages: tuple[Any, Any], **body: Any) -> dict[str, Any]:
    """Return a line in OpenAI's batch format."""
    said = [{"role": role, "content": content} for role, content in messages]
    body = {"model": "librarian", "messages": said, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def batch(questions: Path, out: Path, server: StubServer, *more: str) -> int:
    return qm("batch", questions, "-o", out, "--ollama-url", server.url, *more)


def test_openai_lines_have_rows_that_the_official_client_reads(tiny_server: StubServer, tmp_path: Path) -> None:
    lines = [
        chat("a", ("user", "plz sort my list")),
        chat("b", ("system", "Be brief."), ("user", [{"type": "text", "text": "join path parts"}]), temperature=0.5),
        chat("c", ("user", "kill it"), max_completion_tokens=1, seed=3, top_p=0.9, n=1, user="me", tools=[]),
    ]
    out = tmp_path / "out.jsonl"
    assert batch(write(tmp_path / "in.jsonl", lines), out, tiny_server) == 0
    rows = read(out)
    assert [row["custom_id"] for row in rows] == ["a", "b", "c"]
    assert all(set(row) == {"id", "custom_id", "response", "error"} and row["error"] is None for row in rows)
    assert [row["response"]["status_code"] for row in rows] == [200, 200, 200]
    read_by_client = [ChatCompletion.model_validate(row["response"]["body"], strict=True) for row in rows]
    assert all(one.choices[0].message.content for one in read_by_client)
    assert [one.choices[0].finish_reason for one in read_by_client] == ["stop", "stop", "length"]
    assert all(one.usage is not None and one.usage.total_tokens > one.usage.prompt_tokens for one in read_by_client)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_lines_that_cannot_be_asked_are_in_a_file_of_their_own_with_their_number(
    tiny_server: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {
        2: ('{"id": 7', "not JSON"),
        3: ({"id": 1}, 'neither a question (query, question, prompt, text) nor "body"'),
        5: ({"id": 1, "query": " "}, '"query" is empty'),
        6: (chat("x", ("user", "a"), tools=[{"type": "function"}]), '"tools" in the body is not supported'),
        7: (chat("x", ("user", [{"type": "image_url", "image_url": {}}])), "content of a message must be text"),
        8: ({"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {}}, "/v1/embeddings"),
        9: (chat("x", ("tool", "a")), "role 'tool'"),
        10: (chat("x", ("user", "a"), max_tokens="9"), '"max_tokens" must be a whole number'),
        11: ({"id": 1, "prompt": "a", "model": 3}, '"model" must be a name'),
        12: (chat("x", ([], "a")), "role []"),
        13: (chat("x", ({"a": 1}, "a")), "role {"),
    }
    lines: list[Any] = [bad[n][0] if n in bad else "" if n == 4 else {"prompt": f"sort {n}"} for n in range(1, 15)]
    out = tmp_path / "out.jsonl"
    assert batch(write(tmp_path / "in.jsonl", lines), out, tiny_server, "--target-model", "librarian") == 3
    assert [(row["id"], bool(row["answer"])) for row in read(out)] == [(1, True), (14, True)]
    errors = read(tmp_path / "out.errors.jsonl")
    assert [row["line"] for row in errors] == list(bad)
    assert {row["error"]["code"] for row in errors} == {"invalid_line"}
    assert all(bad[row["line"]][1] in row["error"]["message"] for row in errors)
    assert "out.errors.jsonl: lines without an answer: 11" in capsys.readouterr().err


def test_rows_of_a_question_set_are_asked_too(tiny_server: StubServer, tmp_path: Path) -> None:
    lines = [
        {"query": "plz sort my list", "accept": ["sorted"], "tags": ["a"]},
        {"id": "q", "question": "plz sort my list", "answer": "sorted"},
        {"id": "t", "text": "plz sort my list"},
        {"id": "p", "prompt": "plz sort my list", "question": "another"},
    ]
    out = tmp_path / "out.jsonl"
    assert batch(write(tmp_path / "in.jsonl", lines), out, tiny_server, "--target-model", "librarian") == 0
    assert [(row["id"], row["answer"]) for row in read(out)] == [(n, "`sorted` is what you want.") for n in (1, *"qtp")]


def test_a_failed_call_is_a_row_of_the_errors(tiny_server: StubServer, tmp_path: Path) -> None:
    lines = [{"id": "a", "prompt": "sort"}, {"id": "b", "prompt": "sort", "model": "nowhere"}]
    out = tmp_path / "out.jsonl"
    # The first line names no model, the second one that the server does not have.
    assert batch(write(tmp_path / "in.jsonl", lines), out, tiny_server) == 2
    assert not out.exists()
    lines = [{"id": "a", "prompt": "sort", "model": "librarian"}, chat("b", ("user", "sort"), model="nowhere")]
    assert batch(write(tmp_path / "in.jsonl", lines), out, tiny_server) == 3
    assert [row["id"] for row in read(out)] == ["a"]
    [error] = read(tmp_path / "out.errors.jsonl")
    assert (error["line"], error["custom_id"], error["error"]["code"]) == (2, "b", "model_missing")


def test_files_are_not_replaced_nor_mixed_up(
    tiny_server: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions, out = write(tmp_path / "in.jsonl", [{"id": 1, "prompt": "sort"}]), tmp_path / "out.jsonl"
    more = ("--target-model", "librarian")
    errors = write(tmp_path / "out.errors.jsonl", [{"mine": 1}])
    for words in (more, (*more, "--force")):
        assert batch(questions, out, tiny_server, *words) == 2
        assert "out.errors.jsonl exists" in capsys.readouterr().err
    assert batch(errors, out, tiny_server, *more) == 2
    assert "which this command writes, is the input" in capsys.readouterr().err
    errors.unlink()
    with FileLock(tmp_path / "out.jsonl.replies.sqlite.lock"):
        assert batch(questions, out, tiny_server, *more) == 2
    assert "is being written by another process" in capsys.readouterr().err
    assert batch(write(tmp_path / "empty.jsonl", [""]), out, tiny_server, *more) == 2
    assert "has no lines" in capsys.readouterr().err
    assert batch(questions, out, tiny_server, *more) == 0
    before = out.read_bytes()
    assert batch(questions, out, tiny_server, *more) == 2
    assert out.read_bytes() == before
    assert batch(questions, out, tiny_server, *more, "--force") == 0


def test_lines_appended_while_it_runs_are_left_alone(tmp_path: Path) -> None:
    questions, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(questions, [{"id": number, "prompt": f"sort {number}"} for number in range(12)])
    questions.write_bytes(questions.read_bytes().rstrip())  # what is appended continues the last line

    class Appending(Librarian):
        def reply(self, prompt: str) -> str:
            if prompt == "sort 3":
                with questions.open("a") as file:
                    file.write(" \n" + '{"id": 99, "prompt": "sort"}\n' * 3)
            return super().reply(prompt)

    with start_server([Appending()]) as server:
        assert batch(questions, out, server, "--target-model", "librarian", "--batch-size", "1") == 0
    assert [row["id"] for row in read(out)] == list(range(12))


@pytest.fixture
def server() -> Iterator[StubServer]:
    with start_server([Librarian()], latency_ms=8, latency_sigma=1.0) as running:
        yield running


def test_ctrl_c_says_how_to_resume_and_what_is_done(server: StubServer, tmp_path: Path) -> None:
    questions = write(tmp_path / "in.jsonl", [{"id": n, "prompt": f"sort {n}"} for n in range(60)])
    out = tmp_path / "out.jsonl"
    argv = ["batch", str(questions), "-o", str(out), "--ollama-url", server.url, "--target-model", "librarian"]
    batch = start(argv, tmp_path, QM)
    assert kill_when(batch, lambda: server.stats()["calls"] > 30, number=signal.SIGINT)
    said = batch.stderr
    assert "lines are done; repeat the command to resume it" in said
    assert "Traceback" not in said
    assert not out.exists()
    assert qm(*argv) == 0
    assert [row["id"] for row in read(out)] == list(range(60))
    assert server.stats()["calls"] <= 60 + 8  # the calls that were in flight


@pytest.mark.parametrize("flag", ["--target-max-tokens", "--max-tokens"])
def test_the_token_limit_has_two_names_and_replaces_that_of_the_training(
    flag: str, tiny_server: StubServer, trained: Callable[..., Path], tmp_path: Path
) -> None:
    questions = write(tmp_path / "in.jsonl", [{"id": "a", "prompt": "join path parts"}])
    for name, more in (("plain", ["--target-model", "librarian"]), ("policy", ["--checkpoint", str(trained())])):
        out = tmp_path / f"{name}.jsonl"
        assert batch(questions, out, tiny_server, *more, flag, "1") == 0
        (row,) = read(out)
        assert (len(row["answer"].split()), row["finish_reason"]) == (1, "length")
