"""Runs and evaluations against servers that fail: counted, reported, never a score."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from query_mutator.data import load_questions, split_questions
from query_mutator.env.task import Task
from query_mutator.evaluation.comparison import Evaluator
from query_mutator.evaluation.summary import failure_kinds, mean
from query_mutator.llm.client import RetryPolicy
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.stack import Limit
from query_mutator.session.play import script
from query_mutator.testing import StubServer, start_server
from tests.conftest import QUESTIONS, Librarian, Softener
from tests.integration.training_runs import rows, summary, the_run, train
from tests.patience import until
from tests.qm_command import qm

Serve = Callable[..., StubServer]


class Silent(Librarian):
    """A librarian that says nothing to the prompts with one of these texts."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def reply(self, prompt: str) -> str:
        return "" if any(text in prompt for text in self.texts) else super().reply(prompt)


class Mute(Softener):
    """A mutator without a reply."""

    def reply(self, prompt: str) -> str:
        return ""


@pytest.fixture
def serve() -> Iterator[Serve]:
    running: list[StubServer] = []

    def begin(target: Librarian, mutator: Softener | None = None) -> StubServer:
        models: Sequence[Any] = [target, mutator or Softener()]
        running.append(start_server(models, num_parallel=16))
        return running[-1]

    yield begin
    for server in running:
        server.close()


@pytest.fixture
def held_out(dataset: Path) -> list[str]:
    """The held-out questions of the tiny dataset."""
    return [question.text for question in split_questions(load_questions(dataset)).test]


@pytest.fixture
def flags(tiny_flags: list[str]) -> list[str]:
    return [*tiny_flags[2:], "--max-retries", "0", "--num-env-steps", "32"]


def test_a_target_without_a_usable_reply_still_has_its_row(
    flags: list[str], serve: Serve, held_out: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(Silent(*held_out))
    flags = [*flags, "--ollama-url", server.url, "--eval-interval", "0"]
    assert train(*flags) == 3
    out, err = capsys.readouterr()
    assert f"no replies: empty ×{len(held_out)}" in out
    assert "most often 'empty'" in err
    assert "--max-failure-rate" in err
    identity = summary(tmp_path)["eval"]["methods"]["identity"]
    assert (identity["success"], identity["scored"]) == (None, 0)
    assert "--resume" not in err  # nothing is left to do but `qm eval`


def test_a_mutator_without_a_usable_reply_leaves_the_rows_without_rewrites(
    flags: list[str], serve: Serve, held_out: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(Librarian(), Mute())
    flags = [*flags, "--ollama-url", server.url, "--eval-interval", "0", "--max-failure-rate", "1"]
    (tmp_path / "all.json").write_text('{"skip_unchanged": false}')
    assert train(*flags, "--config", str(tmp_path / "all.json")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "no replies: empty ×" in next(line for line in lines if line.startswith("best_single"))
    assert "no replies" not in next(line for line in lines if line.startswith("identity"))


def test_a_periodic_evaluation_past_the_rate_ends_with_a_checkpoint(
    flags: list[str], serve: Serve, validation: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(Silent(*validation))
    assert train(*flags, "--ollama-url", server.url) == 3
    err = capsys.readouterr().err
    assert "questions of the evaluation, most often 'empty'" in err
    [config] = (tmp_path / "runs").glob("2*/config.json")
    assert f"continue with --resume {config.parent}" in err


@pytest.fixture
def run(trained: Callable[..., Path]) -> str:
    return str(trained("--no-evaluate", "--eval-interval", "0", "--max-retries", "0"))


def test_qm_eval_counts_and_continues(
    run: str, serve: Serve, held_out: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, out = serve(Silent(held_out[0])), tmp_path / "report.json"
    argv = ["eval", "--checkpoint", run, "--ollama-url", server.url, "--json", str(out)]
    assert qm(*argv, "--max-failure-rate", "0.9") == 0
    text = capsys.readouterr().out
    assert "empty ×1" in text
    report = json.loads(out.read_text())
    assert report["methods"]["policy"]["unscored"] == {"empty": 1}
    assert {row["kind"] for row in report["unscored"]} == {"empty"}
    assert qm(*argv, "--force", "--max-failure-rate", "0") == 3
    assert "empty ×1" in capsys.readouterr().out  # the table was printed all the same


def test_qm_rewrite_says_which_question_failed(
    run: str, serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(Silent("join"))
    argv = ["rewrite", "-", "--checkpoint", run, "--ollama-url", server.url, "--json"]
    monkeypatch.setattr("sys.stdin", io.StringIO("join my words\nplz sort my list\n"))
    assert qm(*argv) == 3
    out, err = capsys.readouterr()
    failed, fine = (json.loads(line) for line in out.splitlines())
    assert failed == {"question": "join my words", "error": "empty: the reply has no text"}
    assert fine["answer"] == "`sorted` is what you want."
    assert "1 of 2" in err


def test_a_method_past_the_rate_asks_no_further_questions(
    serve: Serve, tiny_task: Callable[..., Task], tmp_path: Path
) -> None:
    questions = [replace(QUESTIONS[0], id=str(number), text=f"sort my list {number}") for number in range(140)]
    server = serve(Silent(*(f"list {number}" for number in range(1, 140))))
    with closing(Limit(OllamaBackend(server.url, timeout_s=20, pool_size=8), limit=8)) as client:
        settings: dict[str, Any] = {"client": client, "batch_size": 8, "retry_policy": RetryPolicy(max_retries=0)}
        evaluator = Evaluator(max_failure_rate=0.5, **settings)
        task = tiny_task(questions)
        outcomes = evaluator.run(task, script([task.actions.index("submit")]))
    kinds = failure_kinds(outcomes)
    assert len(outcomes) == 140
    assert kinds["empty"] >= 99
    assert kinds["not_asked"] == 140 - 1 - kinds["empty"]
    assert outcomes[0].error is None
    assert mean(outcomes, "success") == 1.0


@pytest.mark.parametrize("behave_as", ["0.9", "0.24"])
def test_a_question_beyond_the_context_is_unscored_in_every_evaluation_until_there_is_more(
    behave_as: str,
    flags: list[str],
    held_out: list[str],
    validation: list[str],
    dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = dataset.read_text()
    for question in (held_out[0], validation[0]):
        text = text.replace(question, question + " and then" * 1000)
    dataset.write_text(text)
    models: Sequence[Any] = [Librarian(), Softener()]
    with start_server(models, num_parallel=16, behave_as=behave_as) as server:
        argv = [*flags, "--ollama-url", server.url, "--num-ctx", "1024", "--max-failure-rate", "0.9"]
        assert train(*argv) == 0
        capsys.readouterr()
        assert qm("eval", the_run(tmp_path), *argv[-6:-4], "--num-ctx", "32768", "--json") == 0
    evaluated = [row for row in rows(the_run(tmp_path), "metrics") if "validation/success" in row]
    assert [row["validation/unscored"] for row in evaluated] == [1] * len(evaluated)
    methods = summary(tmp_path)["eval"]["methods"]
    assert all(method["unscored"] == {"prompt_too_long": 1} for method in methods.values())
    assert json.loads(capsys.readouterr().out)["methods"]["identity"]["unscored"] == {}


@pytest.mark.parametrize("wait_s", ["0", "0.5"])
def test_server_that_goes_away_for_good_ends_the_run_with_exit_code_three(
    wait_s: str, flags: list[str], serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(Librarian())
    end = threading.Thread(target=lambda: (until(lambda: server.stats()["calls"] > 30), server.close()))
    end.start()
    more = ["--cache", "off", "--no-evaluate", "--eval-interval", "0", "--num-env-steps", "40960"]
    assert train(*flags, *more, "--ollama-url", server.url, "--wait-for-server", wait_s) == 3
    end.join()
    assert "connect" in capsys.readouterr().err
