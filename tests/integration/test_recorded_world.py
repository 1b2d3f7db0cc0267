"""Runs on recorded replies: all learners and commands, nothing that an episode may ask is missing, one-line errors."""

from __future__ import annotations

import json
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.attack.policies import packed, parts_of
from query_mutator import operators
from query_mutator.data import FOLDER
from query_mutator.encoder import DEFAULT_ENCODER
from query_mutator.env.task import CallSettings, Task
from query_mutator.files.replies import RepliesHead, read_replies, reply_key, write_replies
from query_mutator.llm.llama import LlamaBackend
from query_mutator.llm.recorded import BUNDLED_RECORDINGS, RecordedBackend
from query_mutator.operators import local_rewrite
from query_mutator.report.run_reader import RunReader
from query_mutator.session.policy_file import read_policy
from query_mutator.training.config import parse_config
from query_mutator.training.run_folder import read_checkpoint
from query_mutator.types import ChatRequest, Completion
from scripts.recorded_requests import MAX_TOKENS, answers_to_rewrites, requests_of, rewriting, task_of, versions_of
from tests.integration.training_runs import rows, the_run, train
from tests.qm_command import qm

ROOT = Path(__file__).resolve().parents[2]
GENERAL = FOLDER / "general.jsonl"
MODEL = "small"
CALLS = CallSettings(target_model=MODEL, mutator_model=MODEL, target_max_tokens=MAX_TOKENS)
CLEAN = "clean"
NUM_QUESTIONS = 60


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a file of questions, and replies to them that are right in the form of a quiz."""
    folder = tmp_path_factory.mktemp("world")
    dataset, recording = folder / "questions.jsonl", folder / "own.jsonl.xz"
    dataset.write_text("".join(GENERAL.read_text().splitlines(keepends=True)[:NUM_QUESTIONS]))
    task = task_of(str(dataset), CALLS, encoder="hash")
    answers = {question.text: question.accept for question in task.questions}
    replies = {
        reply_key(request): [reply_to(request, answers)]
        for request in requests_of(task, versions_of(str(dataset), task))
    }
    head = RepliesHead(model=MODEL, model_sha256="ab" * 32, made_with="hand", command="x", date="2026-11-23")
    write_replies(recording, head, replies)
    return dataset, recording


def reply_to(request: ChatRequest, answers: dict[str, tuple[str, ...]]) -> Completion:
    said = request.messages[-1].content
    accept = answers.get(said.removeprefix("Question: ").removesuffix("\nAnswer:"), ())
    is_quiz = said.startswith("Question: ") and accept
    return Completion(text=accept[0] if is_quiz else "I cannot tell you.", model=MODEL, completion_tokens=3)


@pytest.fixture
def flags(world: tuple[Path, Path], tmp_path: Path) -> list[str]:
    dataset, recording = map(str, world)
    return [
        "--recording", recording, "--dataset", dataset, "--reward", "right=1", "--operators", CLEAN,
        "--forms", "question_answer,few_words,restate", "--ask", "form", "--max-asks", "1",
        "--target-max-tokens", str(MAX_TOKENS), "--encoder", "hash", "--save-dir", str(tmp_path / "runs"),
    ]  # fmt: skip


def test_what_is_not_recorded_is_masked(world: tuple[Path, Path], flags: list[str], tmp_path: Path) -> None:
    """Half of the questions have a rewrite, asked in some forms only: to ask what is not there is an error."""
    dataset, recording = world
    _, replies = read_replies(recording)
    task = task_of(str(dataset), CALLS, encoder="hash")
    asked = [f"Tell me: {question.text}" for question in task.questions]
    for index, request in enumerate(rewriting(task, ["expand"])):
        if index % 2:
            replies[reply_key(request)] = (Completion(text=asked[index], model=MODEL),)

    def reply(request: ChatRequest) -> Completion | None:
        return replies.get(reply_key(request), (None,))[0]

    answers = {
        reply_key(request): (Completion(text="No."),) for request in answers_to_rewrites(task, ["expand"], reply)
    }
    head = RepliesHead(
        model=MODEL, model_sha256="", made_with="hand", command="x", date="2026-11-29", operators=("expand",)
    )
    write_replies(tmp_path / "some.jsonl.xz", head, {**replies, **answers})
    flags = ["--recording", str(tmp_path / "some.jsonl.xz"), *flags[2:], "--operators", f"expand,{CLEAN}"]
    asks = flags.index("--ask")
    flags = [*flags[:asks], *flags[asks + 4 :]]
    small = ["--num-processes", "4", "--num-steps", "32"]
    small += ["--num-env-steps", "256", "--forms", "question_answer,few_words"]
    for more in (("--max-asks", "1"), ("--max-asks", "3"), ("--ask", "every_step", "--max-episode-steps", "3")):
        assert train(*flags, *small, *more) == 0
        steps = rows(the_run(tmp_path), "transcripts")
        assert all(row["valid"] for row in steps)
        rewritten = {row["rewrite"] for row in steps if row["operator"] == "expand"} & set(asked)
        assert rewritten
        assert rewritten <= set(asked[1::2])


@pytest.mark.parametrize("algo", ["ppo", "iqn", "direct"])
def test_every_learner_trains_resumes_and_is_evaluated(algo: str, flags: list[str], tmp_path: Path) -> None:
    small = ["--num-processes", "4", "--no-evaluate", "--no-use-linear-lr-decay"]
    small += ["--num-steps", "16"]
    assert train(*flags, *small, "--algo", algo, "--num-env-steps", "128") == 0
    run = the_run(tmp_path)
    assert train("--resume", str(run), *flags[:4], "--num-env-steps", "256") == 0
    steps = rows(run, "transcripts")
    assert all(row["valid"] for row in steps)
    assert {"question_answer", "few_words"} <= {row["operator"] for row in steps}
    assert qm("eval", "--checkpoint", run, *flags[:4], "--json", tmp_path / "eval.json") == 0
    methods = json.loads((tmp_path / "eval.json").read_text())["methods"]
    assert methods["identity"]["success"] == 0 < methods["best_single"]["success"] == 1
    assert qm("report", run, "--output", tmp_path / "report.html") == 0


@pytest.fixture(scope="module")
def two_forms_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Task]:
    """Return the flags of a world in which half of the questions are right in one form, the others in another."""
    folder = tmp_path_factory.mktemp("two")
    dataset, recording = folder / "two.jsonl", folder / "two.jsonl.xz"
    dataset.write_text("".join(GENERAL.read_text().splitlines(keepends=True)[:120]))  # 50 and more to learn from
    task = task_of(str(dataset), CALLS, encoder="hash", forms_asked="question_answer,few_words,restate")
    wanted = list(requests_of(task, versions_of(str(dataset), task)))
    accept = {question.text: question.accept for question in task.questions}

    def reply(request: ChatRequest) -> Completion:
        """Answer half of the questions in one form, the other half in another."""
        said = "\n".join(message.content for message in request.messages)
        text = max((text for text in accept if text in said), key=len, default="")
        half = zlib.crc32(accept[text][0].encode()) % 2 if accept.get(text) else None
        is_quiz = said.startswith("Question: ")
        right = half is not None and (is_quiz if half else not is_quiz and said != text)
        return Completion(text=accept[text][0] if right else "I cannot tell you.", model=MODEL, completion_tokens=3)

    head = RepliesHead(model=MODEL, model_sha256="ab" * 32, made_with="hand", command="x", date="2026-11-24")
    write_replies(recording, head, {reply_key(request): [reply(request)] for request in wanted})
    flags = ["--recording", recording, "--dataset", dataset, "--reward", "right=1", "--operators", CLEAN,
             "--forms", "question_answer,few_words,restate", "--target-max-tokens", MAX_TOKENS]  # fmt: skip
    return list(map(str, flags)), task


@pytest.fixture
def two_forms(two_forms_once: tuple[list[str], Task], tmp_path: Path) -> tuple[list[str], Task]:
    flags, task = two_forms_once
    return [*flags, "--encoder", "hash", "--save-dir", str(tmp_path / "runs")], task


def test_a_plan_asks_in_another_form_where_the_first_answer_is_not_likely_right(
    two_forms: tuple[list[str], Task], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, task = two_forms
    recording = flags[1]
    assert qm("plan", *flags, "--max-calls", "4000", "--answer", "learned", "--budget", "2") == 0
    run = the_run(tmp_path)
    assert "(learned answer, stop at P(right)" in capsys.readouterr().out
    found = json.loads((run / "summary.json").read_text())
    assert found["search"]["p_right"]["auroc"] > 0.9
    assert len(RunReader(run).results["p_right"]["reliability"]) == 10
    assert qm("eval", "--checkpoint", run, *flags[:4], "--json", tmp_path / "eval.json") == 0
    methods = json.loads((tmp_path / "eval.json").read_text())["methods"]
    assert methods["policy"]["success"] > methods["best_single"]["success"] + 0.2
    assert methods["policy"]["success"] > methods["best_of_k"]["success"] + 0.2
    assert 1 < methods["policy"]["calls_per_question"] <= 2
    assert qm("export-policy", run, "--output", tmp_path / "p.qm") == 0
    about, tensors = parts_of(tmp_path / "p.qm")
    del tensors["confidence/calibration"]
    (tmp_path / "damaged.qm").write_bytes(packed(about, tensors))
    question = next(question for question in task.questions if question.accept)
    capsys.readouterr()
    assert qm("rewrite", "--checkpoint", tmp_path / "damaged.qm", "--recording", recording, question.text) == 2
    assert "not a policy file, or damaged" in capsys.readouterr().err
    argv = ["rewrite", "--checkpoint", tmp_path / "p.qm", "--recording", recording, "--json", "-", question.text]
    assert qm(*argv) == 0
    assert "P(right)" in capsys.readouterr().out


def steps_kept(run: Path) -> int:
    """Return the steps that a direct method is fitted to, 0 for another learner."""
    checkpoint = read_checkpoint(run)
    is_direct = checkpoint.flags["algo"] == "direct"
    return len(checkpoint.learner["optimizer"]["steps"]["actions"]) if is_direct else 0


@pytest.mark.parametrize("algo", ["direct", "ppo"])
def test_a_policy_asks_again_and_submits_what_is_likely_right(
    algo: str, two_forms: tuple[list[str], Task], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, task = two_forms
    # The direct method is fitted after a rollout, which takes a second; PPO needs many of them.
    num_steps = "128" if algo == "direct" else "32"
    small = ["--algo", algo, "--num-processes", "4", "--num-steps", num_steps, "--num-env-steps", "1024"]
    small += ["--eval-questions", "2"]
    assert train(*flags, *small, "--no-evaluate", "--answer-calls", "300", "--no-use-linear-lr-decay") == 0
    run = the_run(tmp_path)
    said = capsys.readouterr().err
    assert "P(right): learned from" in said
    known = steps_kept(run) - 1024
    assert known > 10 or algo == "ppo"  # of the answers that P(right) was learned from
    assert train("--resume", str(run), *flags[:4], "--num-env-steps", "2048") == 0
    assert steps_kept(run) - 2048 == known or algo == "ppo"
    said = capsys.readouterr().err
    assert "P(right): learned from" in said
    assert "answers to learn" not in said  # the model of the run's folder
    price = re.search(
        r"--budget 2: .+ price of ([0-9.e-]+) for each call, and takes [0-9.]+ calls on ([0-9]+) val", said
    )
    assert price is not None
    assert int(price[2]) > 2  # more than a periodic evaluation has
    assert read_policy(run).task.call_price == (float(price[1]),)
    assert qm("eval", "--checkpoint", run, *flags[:4], "--json", tmp_path / "eval.json") == 0
    report = json.loads((tmp_path / "eval.json").read_text())
    methods, plan = report["methods"], report["plan_search"]["best"]
    assert "(learned answer, stop at P(right)" in plan["plan"]
    assert plan == report["plan_search"]["front"]["2"]  # within the budget the most often right, whatever its calls
    assert methods["best_plan"]["success"] > methods["best_single"]["success"] + 0.2
    assert methods["policy"]["success"] > methods["best_single"]["success"] + 0.2
    assert 1 < methods["policy"]["calls_per_question"] <= (3 if algo == "direct" else 5)  # PPO saw one price
    question = next(question for question in task.questions if question.accept)
    assert qm("rewrite", "--checkpoint", run, "--recording", flags[1], question.text) == 0
    assert "P(right)" in capsys.readouterr().out


def test_the_plan_of_a_table_keeps_to_the_budget_of_the_run(two_forms: tuple[list[str], Task], tmp_path: Path) -> None:
    small = ["--num-processes", "4", "--num-steps", "16", "--num-env-steps", "64", "--no-evaluate"]
    flags, _ = two_forms
    assert train(*flags, *small, "--answer-calls", "300", "--budget", "1") == 0
    assert qm("eval", "--checkpoint", the_run(tmp_path), *flags[:4], "--json", tmp_path / "eval.json") == 0
    search = json.loads((tmp_path / "eval.json").read_text())["plan_search"]
    assert search["best"] == search["front"]["1"]
    assert search["front"]["2"]["success"] > search["best"]["success"]


def test_too_few_answers_are_voted_on_unless_the_flag_says_otherwise(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--forms", "few_words,restate", "--num-env-steps", "64", "--num-processes", "4", "--num-steps", "16"]
    asks = ["--ask", "form", "--max-asks", "2", "--no-evaluate"]
    assert train(*flags, *few, *asks) == 0  # all answers are wrong
    assert "--answer vote: 0 right and" in capsys.readouterr().err
    assert train(*flags, *few, *asks, "--answer", "learned") == 2
    assert "are too few to learn P(right) from" in capsys.readouterr().err


def test_recorded_calls_take_no_time_and_bound_nothing(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*flags, "--num-env-steps", "2048", "--dry-run") == 0
    assert "s a call" not in capsys.readouterr().out
    assert train(*flags, "--num-env-steps", "64", "--num-processes", "4", "--num-steps", "16", "--no-evaluate") == 0
    assert "periodic evaluations:" not in capsys.readouterr().err


def test_a_run_that_asks_what_is_not_recorded_ends_with_one_line(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*flags, "--num-env-steps", "64", "--target-max-tokens", "31") == 2
    said = capsys.readouterr().err
    assert said.count("with 31 tokens at temperature 0 is recorded; use the settings of the recording") == 1
    assert "Traceback" not in said
    assert "failed" not in said


def test_a_run_may_choose_among_forms_alone(flags: list[str]) -> None:
    alone = ["--operators", "none", "--num-env-steps", "64", "--num-processes", "4", "--num-steps", "16"]
    assert train(*flags, *alone, "--no-evaluate") == 0


def test_the_example_run_asks_what_the_script_records() -> None:
    config = parse_config(["--config", str(ROOT / "examples" / "first_run.json")])
    assert config.target_max_tokens == MAX_TOKENS
    assert (config.ask, config.answer, config.algo) == ("form", "learned", "ppo")
    (backend,) = RecordedBackend.open(BUNDLED_RECORDINGS[:1])
    by_model = {one.name for one in operators.select(config.operators) if local_rewrite(one) is None}
    assert by_model == set(backend.recording.head.operators)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLED_RECORDINGS)
def test_a_bundled_recording_has_every_question_in_every_form_and_rewrites(name: str) -> None:
    (backend,) = RecordedBackend.open([name])
    model, _ = backend.default_models()
    calls = CallSettings(target_model=model, mutator_model=model, target_max_tokens=MAX_TOKENS)
    task = task_of(str(GENERAL), calls, encoder=DEFAULT_ENCODER)
    find = backend.recording.find
    every = requests_of(task, versions_of(str(GENERAL), task))
    assert [request for request in every if find(request) is None] == []
    named = backend.recording.head.operators
    assert len(named) >= 2
    assert [request for request in rewriting(task, named) if find(request) is None] == []
    assert [request for request in answers_to_rewrites(task, named, find) if find(request) is None] == []


@pytest.mark.slow
def test_recorded_replies_are_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tests run side by side
    (source,), (server,) = (
        RecordedBackend.open([]),
        LlamaBackend.open(["smollm2"], pool_size=8, runner_options={"num_ctx": 1024}),
    )
    rows = map(json.loads, (FOLDER / "general.jsonl").read_text(encoding="utf-8").splitlines()[:40])
    model = source.recording.head.model
    asked = [ChatRequest.user(row["query"], model=model, max_tokens=32) for row in rows]
    known = [(request, reply) for request in asked if (reply := source.recording.find(request)) is not None][:12]
    with closing(server), ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(server.complete, [request for request, _ in known]))
    same = [reply.text == recorded.text for reply, (_, recorded) in zip(replies, known, strict=True)]
    assert len(same) == 12
    assert sum(same) >= 9
