"""`Rewriter`, `qm rewrite` and `qm export-policy`: a run stands alone, acts as it was trained, within its bounds."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from query_mutator import Rewrite, Rewriter
from query_mutator.cli.console import exit_code
from query_mutator.env.scheduling import Flow, run_flow
from query_mutator.errors import BackendError, CheckpointError, UsageError
from query_mutator.learners import Plan
from query_mutator.llm.client import Client
from query_mutator.session.policy_file import POLICY_FILE, read_policy, write_policy_file
from query_mutator.testing import StubServer, start_server
from query_mutator.types import Message
from tests.conftest import Librarian, Softener
from tests.fake_client import FakeClient
from tests.integration.conftest import plan_flags, write_dataset
from tests.integration.raw_http import FOREVER_MS
from tests.patience import until
from tests.qm_command import qm
from train_query_mutator import main as train_main

TEXTS = ["plz sort my list", "umm how do i kill the process", "count words plz", "join my words", "what is it"]
ROOT = Path(__file__).resolve().parents[2]


#: A policy that asks when it wants to, of a run that can be resumed for longer.
ASKS = ("--ask", "form", "--no-evaluate", "--eval-interval", "0", "--cache", "off", "--no-use-linear-lr-decay")


@pytest.fixture
def run(trained: Callable[..., Path]) -> Path:
    """Return the folder of a run whose dataset lies elsewhere."""
    return trained(*ASKS)


@pytest.fixture
def own_run(tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return the folder of a run whose dataset is the test's own."""
    assert exit_code(train_main, [*tiny_flags, *ASKS], prog="train") == 0
    capsys.readouterr()
    return (tmp_path / "runs" / "latest").resolve()


@pytest.fixture
def rewriter(run: Path) -> Iterator[Rewriter]:
    with Rewriter.load(run) as loaded:
        yield loaded


def untimed(rewrite: Rewrite) -> Rewrite:
    return replace(rewrite, seconds=0.0)


def finished(rewriter: Rewriter, flow: Flow, client: Client | None = None) -> Rewrite:
    """Run a flow of a rewriter to its end."""
    models = rewriter.models
    client = client or models.calls.client
    found: Rewrite = run_flow(flow, client=client, encoder=models.encoder, retry_policy=models.retry_policy)
    return found


# --- a run that stands alone -----------------------------------------------------------------------------------------


def answers(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, object]]:
    assert qm("rewrite", "-", "--json", *argv) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_run_works_from_any_folder_with_its_dataset_gone(
    own_run: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", TEXTS)
    before = answers(capsys, "--checkpoint", str(own_run))
    dataset.unlink()
    moved = tmp_path / "elsewhere"
    shutil.move(own_run, moved)
    monkeypatch.chdir("/")
    assert answers(capsys, "--checkpoint", str(moved)) == before

    assert qm("eval", "--checkpoint", str(moved)) == 2
    err = capsys.readouterr().err
    assert f"give --dataset {dataset} " in err
    assert err.count("\n") == 1
    others = write_dataset(tmp_path / "others.jsonl", [("sort by length plz", "sorted"), ("plz sort my list", "len")])
    assert qm("eval", "--checkpoint", str(moved), "--dataset", str(others)) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[1].startswith(f"1 question of {others} that training did not have, ")  # not the other
    assert "1 of 2 questions were trained on" in told.err


def test_the_file_of_the_training_has_its_held_out_questions(
    own_run: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = write_dataset(tmp_path / "others.jsonl", [("a question of another file", "sorted")])
    given = tmp_path / "given.qm"
    assert qm("export-policy", own_run, "-o", given) == 0
    for policy in (own_run, given):
        capsys.readouterr()
        assert qm("eval", policy, "--dataset", dataset, "--json", f"{policy.name}.json") == 0
        assert "held-out questions" in capsys.readouterr().out
    one, other = (json.loads(Path(f"{policy.name}.json").read_text()) for policy in (own_run, given))
    assert one["methods"]["policy"]["success"] == other["methods"]["policy"]["success"]
    assert qm("eval", given, "--dataset", others) == 2
    assert f"give --dataset {dataset.name}" in capsys.readouterr().err
    assert qm("eval", own_run, "--dataset", others) == 0


def test_a_policy_in_one_file_acts_as_its_run(
    own_run: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", TEXTS)
    file = tmp_path / "give" / "away.qm"
    assert qm("export-policy", str(own_run), "-o", str(file)) == 0
    assert "training questions" in capsys.readouterr().out
    before = answers(capsys, "--checkpoint", str(own_run))
    for path in (own_run, dataset):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert answers(capsys, "--checkpoint", str(file)) == before
    saved = read_policy(file)
    assert not any(question.accept or question.reference for question in saved.train)
    assert str(tmp_path).encode() not in file.read_bytes()
    assert qm("export-policy", str(tmp_path / "nowhere"), "-o", str(tmp_path / "new.qm")) == 2
    assert not (tmp_path / "new.qm").exists()


def test_the_policy_is_written_with_each_checkpoint(run: Path) -> None:
    steps = read_policy(run).env_steps
    assert exit_code(train_main, ["--resume", str(run), "--num-env-steps", str(2 * steps)], prog="train") == 0
    assert read_policy(run).env_steps == 2 * steps


def test_equal_policies_are_equal_files(run: Path, tmp_path: Path) -> None:
    write_policy_file(tmp_path / "again.qm", read_policy(run))
    assert (tmp_path / "again.qm").read_bytes() == (run / POLICY_FILE).read_bytes()


def test_another_encoder_under_the_same_name_is_refused(run: Path) -> None:
    saved = read_policy(run)
    write_policy_file(run / POLICY_FILE, replace(saved, encoder="other", probe=-saved.probe))
    with pytest.raises(CheckpointError, match="other weights of the encoder"):
        Rewriter.load(run)


# --- without torch ---------------------------------------------------------------------------------------------------


def test_rewriting_loads_no_torch(run: Path) -> None:
    code = """
import sys
from query_mutator import Rewriter
with Rewriter.load(sys.argv[1]) as rewriter:
    assert rewriter.rewrite("plz sort my list").answer
assert not {"torch", "gymnasium", "transformers"} & sys.modules.keys(), "too much is loaded"
"""
    subprocess.run([sys.executable, "-c", code, str(run)], check=True, cwd=ROOT, env={**os.environ})


# --- in Python -------------------------------------------------------------------------------------------------------


def test_many_questions_give_what_each_gives_alone(rewriter: Rewriter) -> None:
    one_by_one = [untimed(rewriter.rewrite(text)) for text in TEXTS]
    assert list(map(untimed, rewriter.rewrite_many(TEXTS, batch_size=3))) == one_by_one
    assert rewriter.rewrite_many([]) == []
    *answered, empty = rewriter.rewrite_many([*TEXTS[:1], " "])
    assert [one.answer is not None for one in (*answered, empty)] == [True, False]
    assert str(empty.error) == "request: the question is empty; give a text"


def test_a_rewrite_says_what_was_done(rewriter: Rewriter) -> None:
    for text in TEXTS:
        found = rewriter.rewrite(text)
        assert found.question == text
        assert found.stopped == "policy"
        assert found.error is None
        assert found.why
        asked = {text: found.answer} | {step.text: step.answer for step in found.steps if step.answer}
        assert asked[found.text] == found.answer
        assert len({step.text for step in found.changes}) == len(found.changes)


def test_no_more_calls_than_allowed_and_still_an_answer(rewriter: Rewriter) -> None:
    free = {text: rewriter.rewrite(text) for text in TEXTS}
    for most in range(1, 6):
        for text in TEXTS:
            before = rewriter.models.calls.eval_client.totals.calls
            bounded = rewriter.rewrite(text, max_calls=most)
            assert rewriter.models.calls.eval_client.totals.calls - before <= most
            assert bounded.calls <= most
            assert bounded.answer
            if free[text].calls <= most:
                assert untimed(bounded) == untimed(free[text])
            else:
                assert bounded.stopped == "max_calls"


class Stuck(Librarian):
    """A librarian that answers the first `quick` questions, and others once `goes_on` is set."""

    def __init__(self, quick: int) -> None:
        self.quick, self.goes_on = quick, threading.Event()

    def reply(self, prompt: str) -> str:
        self.quick -= 1
        if self.quick < 0:
            self.goes_on.wait(60)
        return super().reply(prompt)


def test_the_best_answer_so_far_at_the_deadline(run: Path) -> None:
    target = Stuck(quick=1)
    with (
        start_server([target, Softener()], num_parallel=4) as server,
        Rewriter.load(run, ollama_url=server.url) as rewriter,
    ):
        found = rewriter.rewrite(TEXTS[0], deadline_s=3.0)
        assert found.answer
        assert sum(step.answer is not None for step in found.steps) <= 1  # the second one was not waited for
        with pytest.raises(BackendError, match="no answer"):
            rewriter.rewrite(TEXTS[1], deadline_s=0.3)
        target.goes_on.set()


def test_a_cancelled_task_cuts_its_call(run: Path) -> None:
    async def leave(rewriter: Rewriter) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rewriter.arewrite(TEXTS[0]), 0.5)

    target = Stuck(quick=0)
    with start_server([target, Softener()]) as server, Rewriter.load(run, ollama_url=server.url) as rewriter:
        asyncio.run(leave(rewriter))
        until(lambda: server.stats()["cancelled"] > 0)
        assert server.stats()["calls_by_model"].get("librarian", 0) == 0
        target.goes_on.set()


def test_after_a_fork_every_process_makes_its_own_calls(rewriter: Rewriter) -> None:
    expected = [untimed(asyncio.run(rewriter.arewrite(text))) for text in TEXTS[:3]]  # threads and connections are open
    forking = multiprocessing.get_context("fork")
    answers = forking.Queue()

    def work() -> None:  # as a worker of gunicorn --preload
        answers.put([untimed(asyncio.run(rewriter.arewrite(text))) for text in TEXTS[:3]])

    workers = [forking.Process(target=work, daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        assert [answers.get(timeout=30) for _ in workers] == [expected, expected]
        assert untimed(asyncio.run(rewriter.arewrite(TEXTS[0]))) == expected[0]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def test_a_closed_rewriter_says_so(run: Path) -> None:
    async def close_meanwhile(rewriter: Rewriter) -> None:
        tasks = [asyncio.create_task(rewriter.arewrite(text)) for text in TEXTS]
        while server.stats()["in_service"] < 2:
            await asyncio.sleep(0.01)
        rewriter.close()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, BackendError), found
            assert "cancelled" in str(found)

    with start_server([Librarian(), Softener()], num_parallel=2, latency_ms=FOREVER_MS) as server:
        rewriter = Rewriter.load(run, ollama_url=server.url, batch_size=2)
        asyncio.run(close_meanwhile(rewriter))
    with pytest.raises(UsageError, match="closed"):
        asyncio.run(rewriter.arewrite(TEXTS[0]))
    with pytest.raises(UsageError, match="closed"):
        rewriter.rewrite(TEXTS[0])


def test_the_caller_asks_at_the_end_where_a_policy_asks_once(rewriter: Rewriter, plan: Path) -> None:
    assert not rewriter.asks_once
    with pytest.raises(UsageError, match="--max-asks 1"):
        rewriter.flow(TEXTS[0], asks_at_end=False)
    with Rewriter.load(plan) as planned:
        assert planned.asks_once
        found = planned.rewrite(TEXTS[0])
        assert sum(step.answer is not None for step in found.steps) == 1
        rewritten = finished(planned, planned.flow(TEXTS[0], asks_at_end=False))
        assert (rewritten.text, rewritten.answer, rewritten.calls) == (found.text, None, found.calls - 1)


def test_a_first_answer_that_is_known_costs_no_call(rewriter: Rewriter) -> None:
    client = FakeClient(rewriter.models.calls.client.complete)
    found = finished(rewriter, rewriter.flow(TEXTS[0], first_answer="`sorted` is what you want."), client)
    assert TEXTS[0] not in [request.messages[-1].content for request in client.requests]
    assert found.calls == client.calls


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda r: r.rewrite("  "), "the question is empty"),
        (lambda r: r.rewrite("x", max_calls=0), "max_calls=0 must be at least 1"),
        (lambda r: r.rewrite("x", deadline_s=0), "deadline_s=0 must be above 0"),
        (lambda r: Rewriter.load("nowhere"), "nowhere: no such file"),
        (lambda r: Rewriter.load(r.saved.path, ollama_ulr="x"), "did you mean 'ollama_url'"),
        (lambda r: Rewriter.load(r.saved.path, plugins=["mine.py"]), "mine.py: no such file"),
    ],
)
def test_mistakes_say_what_to_do(call: Callable[[Rewriter], object], says: str, rewriter: Rewriter) -> None:
    with pytest.raises(ValueError, match=says):
        call(rewriter)


def test_a_server_that_is_down_is_an_error_and_one_answer_of_many_may_fail(run: Path) -> None:
    with (
        start_server([Librarian(), Softener()], num_parallel=4) as server,
        Rewriter.load(run, ollama_url=server.url, max_retries=0, timeout_s=2) as rewriter,
    ):
        server.close()
        with pytest.raises(BackendError, match="connect"):
            rewriter.rewrite(TEXTS[0])
        found = rewriter.rewrite_many(TEXTS[:2])
    assert [one.answer for one in found] == [None, None]
    assert all(one.error is not None and one.error.kind == "connect" for one in found)


# --- examples --------------------------------------------------------------------------------------------------------


def test_a_langchain_runnable_and_a_llama_index_transform(rewriter: Rewriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from langchain_core.runnables import RunnableLambda
    from langchain_runnable import answering, rewriting
    from llama_index.core.schema import QueryBundle
    from llama_index_transform import QueryMutatorTransform

    found = rewriter.rewrite_many(TEXTS)
    assert answering(rewriter).batch(TEXTS) == [one.answer for one in found]
    asked = rewriting(rewriter) | RunnableLambda(str.upper)
    assert asyncio.run(asked.ainvoke(TEXTS[0])) == found[0].text.upper()
    transform = QueryMutatorTransform(rewriter)
    assert transform.run(TEXTS[0]).query_str == found[0].text
    assert transform.run(QueryBundle(TEXTS[1])).query_str == found[1].text


# --- a policy that chooses forms --------------------------------------------------------------------------------------

SORT = "plz sort the names"  # none of the training's
QUESTION = "sort the names"
MakePlan = Callable[..., Path]


@pytest.fixture
def formed(
    tiny_server: StubServer,
    dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Return the folder of a plan over operators and forms, whose server is in the environment."""
    monkeypatch.setenv("OLLAMA_HOST", tiny_server.url)
    more = ["--operators", "neutral", "--forms", "question_answer,examples", "--max-calls", 40]
    flags = plan_flags(tiny_server, dataset, tmp_path / "plans")
    assert qm("plan", *flags, *more, "--budget", 2, "--max-asks", 1) == 0
    capsys.readouterr()
    return (tmp_path / "plans" / "latest").resolve()


@pytest.fixture
def make_plan(formed: Path, tmp_path: Path) -> MakePlan:
    """Return a function that writes the run's policy file with a plan of these steps."""

    def make(*steps: str) -> Path:
        saved = read_policy(formed)
        task = replace(saved.task, max_episode_steps=len(steps) + 1)
        path = tmp_path / "plan.qm"
        write_policy_file(path, replace(saved, flags=replace(saved.flags, plan=Plan(steps=steps)), task=task))
        return path

    return make


def test_a_blind_caller_sends_the_request_itself(make_plan: MakePlan) -> None:
    with Rewriter.load(make_plan("neutral", "examples")) as rewriter:
        assert [one.name for one in rewriter.task.operators] == ["neutral"]
        assert [one.name for one in rewriter.task.forms] == ["question_answer", "examples"]
        found = finished(rewriter, rewriter.flow(SORT, asks_at_end=False))
        assert (found.text, found.form, found.answer, found.calls) == (QUESTION, "examples", None, 1)
        assert found.messages[-1] == Message(role="user", content=QUESTION)
        assert len(found.messages) > 2
        request = replace(rewriter.task.calls.target(found.text), messages=found.messages, options=found.options)
        answer = rewriter.models.calls.client.complete(request).text
        assert answer == rewriter.rewrite(SORT).answer


def test_an_exported_policy_shows_the_examples_of_its_training(
    make_plan: MakePlan, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert (other["query_mutator"]["form"], other["query_mutator"]["rewrite"]) == ("question_answer", QUESTION)
