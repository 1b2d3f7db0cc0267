"""A policy that chooses forms acts outside of its training: in Python, from one file, on a file of questions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from query_mutator import Rewriter
from query_mutator.env.scheduling import run_flow
from query_mutator.learners.plan import Plan
from query_mutator.session.policy_file import read_policy, write_policy_file
from query_mutator.testing import StubServer
from query_mutator.types import Message
from tests.qm_command import qm

SORT = "plz sort the names"  # none of the training's
QUESTION, FRAMED = "sort the names", "Question: sort the names\nAnswer:"
MakePlan = Callable[..., Path]


@pytest.fixture
def run(
    tiny_server: StubServer,
    dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Return the folder of a plan over operators and forms, whose server is in the environment."""
    monkeypatch.setenv("OLLAMA_HOST", tiny_server.url)
    argv = [
        *("--ollama-url", tiny_server.url, "--target-model", "librarian", "--mutator-model", "softener"),
        *("--encoder", "hash", "--dataset", dataset, "--operators", "neutral", "--max-calls", 40, "--cache", "off"),
        *("--forms", "question_answer,examples", "--save-dir", tmp_path / "plans", "--budget", 2, "--max-asks", 1),
    ]
    assert qm("plan", *argv) == 0
    capsys.readouterr()
    return (tmp_path / "plans" / "latest").resolve()


@pytest.fixture
def make_plan(run: Path, tmp_path: Path) -> MakePlan:
    """Return a function that writes the run's policy file with a plan of these steps."""

    def make(*steps: str) -> Path:
        saved = read_policy(run)
        task = replace(saved.task, max_episode_steps=len(steps) + 1)
        path = tmp_path / "plan.qm"
        write_policy_file(path, replace(saved, flags=replace(saved.flags, plan=Plan(steps=steps)), task=task))
        return path

    return make


def test_a_blind_caller_sends_the_request_itself(make_plan: MakePlan) -> None:
    with Rewriter.load(make_plan("neutral", "examples")) as rewriter:
        assert [one.name for one in rewriter.task.operators] == ["neutral"]
        assert [one.name for one in rewriter.task.forms] == ["question_answer", "examples"]
        models = rewriter.models
        found = run_flow(
            rewriter.flow(SORT, asks_at_end=False),
            client=models.calls.client,
            encoder=models.encoder,
            retry_policy=models.retry_policy,
        )
        assert (found.text, found.form, found.answer, found.calls) == (QUESTION, "examples", None, 1)
        assert found.messages[-1] == Message(role="user", content=QUESTION)
        assert len(found.messages) > 2
        request = replace(rewriter.task.calls.target(found.text), messages=found.messages, options=found.options)
        answer = models.calls.client.complete(request).text
        assert answer == rewriter.rewrite(SORT).answer


def test_an_exported_policy_shows_the_examples_of_its_training(
    make_plan: MakePlan, run: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "given.qm"
    path = make_plan("examples")
    assert qm("export-policy", path, "-o", given) == 0
    assert "with the accepted answers that its examples show" in capsys.readouterr().out
    with Rewriter.load(path) as rewriter:
        before = rewriter.rewrite(SORT).messages
    dataset.unlink()
    with Rewriter.load(given) as rewriter:
        assert rewriter.rewrite(SORT).messages == before
    assert len(before) > 1
    saved = read_policy(given)
    assert not saved.has_gold
    assert all(len(question.accept) == 1 and not question.reference for question in saved.train)


def test_rows_of_a_file_name_the_form_that_was_asked(make_plan: MakePlan, tmp_path: Path) -> None:
    questions, out = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SORT}]
    body = {"model": "librarian", "messages": messages}
    rows = [{"id": "a", "prompt": SORT}, {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions"}]
    rows[1]["body"] = body  # type: ignore[assignment]
    questions.write_text("\n".join(map(json.dumps, rows)))
    assert qm("batch", questions, "-o", out, "--checkpoint", make_plan("neutral", "question_answer")) == 0
    one, other = map(json.loads, out.read_text().splitlines())
    assert (one["rewrite"], one["form"]) == (QUESTION, "question_answer")
    assert one["prompt_tokens"] > 0
    assert (other["query_mutator"]["form"], other["query_mutator"]["rewrite"]) == ("as_is", None)
