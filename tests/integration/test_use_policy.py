"""`Rewriter`, `qm rewrite` and `qm export-policy`: a run stands alone, acts as it was trained, within its bounds."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from query_mutator import Rewrite, Rewriter
from query_mutator.cli.console import exit_code
from query_mutator.env.scheduling import run_flow
from query_mutator.errors import BackendError, CheckpointError, UsageError
from query_mutator.session.loading import load_policy
from query_mutator.session.policy_file import POLICY_FILE, read_policy, write_policy_file
from query_mutator.testing import StubServer, start_server
from tests.conftest import Librarian, Softener
from tests.integration.conftest import write_dataset
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
def plan(
    tiny_server: StubServer,
    dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Return the folder of a plan that asks once, whose server is in the environment."""
    monkeypatch.setenv("OLLAMA_HOST", tiny_server.url)
    argv = [
        *("--ollama-url", tiny_server.url, "--target-model", "librarian", "--mutator-model", "softener"),
        *("--encoder", "hash", "--dataset", str(dataset), "--operators", "spelling,neutral,filler"),
        *("--save-dir", str(tmp_path / "plans"), "--max-calls", "300", "--cache", "off", "--budget", "2"),
    ]
    assert qm("plan", *argv) == 0
    capsys.readouterr()
    return (tmp_path / "plans" / "latest").resolve()


@pytest.fixture
def rewriter(run: Path) -> Iterator[Rewriter]:
    with Rewriter.load(run) as loaded:
        yield loaded


def untimed(rewrite: Rewrite) -> Rewrite:
    return dataclasses.replace(rewrite, seconds=0.0)


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


def test_a_damaged_file_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = run / POLICY_FILE
    whole = own.read_bytes()
    for at in (10, 100, len(whole) // 2, len(whole) - 1):
        own.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert qm("rewrite", "--checkpoint", run, "plz sort") == 2
        err = capsys.readouterr().err
        assert "damaged" in err
        assert err.count("\n") == 1
    own.unlink()
    assert qm("rewrite", "--checkpoint", run, "plz sort") == 2
    assert f"{run} was stopped before its first checkpoint, and has no policy" in capsys.readouterr().err


def test_the_policy_is_written_with_each_checkpoint(run: Path) -> None:
    steps = read_policy(run).env_steps
    assert exit_code(train_main, ["--resume", str(run), "--num-env-steps", str(2 * steps)], prog="train") == 0
    assert read_policy(run).env_steps == 2 * steps


def test_equal_policies_are_equal_files(run: Path, tmp_path: Path) -> None:
    write_policy_file(tmp_path / "again.qm", read_policy(run))
    assert (tmp_path / "again.qm").read_bytes() == (run / POLICY_FILE).read_bytes()


def test_another_encoder_under_the_same_name_is_refused(run: Path) -> None:
    saved = read_policy(run)
    write_policy_file(run / POLICY_FILE, dataclasses.replace(saved, encoder="other", probe=-saved.probe))
    with pytest.raises(CheckpointError, match="other weights of the encoder"):
        Rewriter.load(run)


# --- without torch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo", "iqn", "direct"])
def test_every_learners_policy_acts_in_numpy_as_the_trained_one(
    name: str, trained: Callable[..., Path], tmp_path: Path
) -> None:
    found = read_policy(trained("--algo", name, "--learning-starts", "16"))
    policy = load_policy(found)
    saved = found.weights
    write_policy_file(tmp_path / "policy.qm", found)
    first = {"ppo": "hidden.0.weight", "iqn": "trunk.0.weight"}
    width = int(saved["obs_dim"]) if name == "direct" else saved[first[name]].shape[1]
    obs = np.random.default_rng(3).normal(size=(4000, width)).astype(np.float32)
    obs[:, 16:] = np.random.default_rng(4).random(obs[:, 16:].shape) < 0.4  # used operators and masks
    np.save(tmp_path / "obs.npy", obs)
    code = """
import sys, numpy as np
from query_mutator.session.loading import load_policy
from query_mutator.session.policy_file import read_policy
policy = load_policy(read_policy(sys.argv[1] + "/policy.qm"))
np.save(sys.argv[1] + "/actions.npy", policy.act(np.load(sys.argv[1] + "/obs.npy"), (), greedy=True).actions)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT)
    actions = np.load(tmp_path / "actions.npy")
    np.testing.assert_array_equal(actions, policy.act(obs, (), greedy=True).actions)
    assert len(set(actions.tolist())) > 1


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


class Slow(Librarian):
    """A librarian that takes a while from the second question on."""

    def __init__(self) -> None:
        self.asked = 0

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        self.asked += len(prompts)
        time.sleep(2.0 if self.asked > 1 else 0.0)
        return super().reply_many(prompts)


def test_the_best_answer_so_far_at_the_deadline(run: Path) -> None:
    with (
        start_server([Slow(), Softener()], num_parallel=4) as server,
        Rewriter.load(run, ollama_url=server.url) as rewriter,
    ):
        found = rewriter.rewrite(TEXTS[0], deadline_s=0.6)
        assert found.answer
        assert sum(step.answer is not None for step in found.steps) <= 1  # the second one was not waited for
        with pytest.raises(BackendError, match="no answer"):
            rewriter.rewrite(TEXTS[1], deadline_s=0.3)


def test_a_cancelled_task_cuts_its_call(run: Path) -> None:
    async def leave(rewriter: Rewriter) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rewriter.arewrite(TEXTS[0]), 0.5)

    class Stuck(Librarian):
        def reply_many(self, prompts: Sequence[str]) -> list[str]:
            time.sleep(1.5)
            return super().reply_many(prompts)

    with start_server([Stuck(), Softener()]) as server, Rewriter.load(run, ollama_url=server.url) as rewriter:
        asyncio.run(leave(rewriter))
        end = time.monotonic() + 5
        while server.stats()["cancelled"] == 0:
            assert time.monotonic() < end, server.stats()
            time.sleep(0.01)
        assert server.stats()["calls_by_model"].get("librarian", 0) == 0


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
        await asyncio.sleep(0.3)
        rewriter.close()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, BackendError), found
            assert "cancelled" in str(found)

    with start_server([Librarian(), Softener()], latency_ms=2_000) as server:
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
        flow = planned.flow(TEXTS[0], asks_at_end=False)
        rewritten: Rewrite = run_flow(
            flow,
            client=planned.models.calls.client,
            encoder=planned.models.encoder,
            retry_policy=planned.models.retry_policy,
        )
        assert (rewritten.text, rewritten.answer, rewritten.calls) == (found.text, None, found.calls - 1)


def test_a_first_answer_that_is_known_costs_no_call(rewriter: Rewriter) -> None:
    found = rewriter.flow(TEXTS[0], first_answer="`sorted` is what you want.")
    asked: list[str] = []
    result: object = None
    while True:
        try:
            need = found.send(result)
        except StopIteration as stop:
            rewrite: Rewrite = stop.value
            break
        request = getattr(need, "request", None)
        if request is not None:
            asked.append(request.messages[-1].content)
            result = rewriter.models.calls.client.complete(request)
        else:
            result = rewriter.models.encoder.encode(need.texts)
    assert TEXTS[0] not in asked
    assert rewrite.calls == len(asked)


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


def test_qm_rewrite_prints_each_wording_once_and_marks_the_submitted_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert qm("rewrite", "--checkpoint", str(run), TEXTS[0]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.strip().splitlines()]
    texts = [text.removeprefix("* ") for name, text in lines if name not in ("submitted", "answer")]
    assert len(set(texts)) == len(texts)
    marked = [text for name, text in lines if text.startswith("* ") and name != "submitted"]
    assert len(marked) == 1
    assert next(text for name, text in lines if name == "submitted").startswith("* ")


# --- examples --------------------------------------------------------------------------------------------------------


def test_the_program_in_the_readme_runs(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"^```python[^\n]*\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "Rewriter" in block)
    monkeypatch.chdir(tmp_path)  # has runs/latest
    exec(compile(block, "README.md", "exec"), {})
    assert "`sorted` is what you want." in capsys.readouterr().out


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
