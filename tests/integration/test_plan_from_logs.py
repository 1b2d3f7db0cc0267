"""`qm plan --from-logs`: a log becomes a policy that is evaluated and used, with no text of the log in it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from query_mutator import Rewriter
from query_mutator.confidence import Attempt, ConfidenceModel
from query_mutator.data import FOLDER, load_questions, split_questions
from query_mutator.data.readers import read_logged_replies
from query_mutator.env.task import CallSettings
from query_mutator.files.replies import RepliesHead, reply_key, write_replies
from query_mutator.report.run_reader import RunReader
from query_mutator.testing import StubServer
from query_mutator.types import ChatRequest, Completion, Question
from scripts.recorded_requests import MAX_TOKENS, requests_of, task_of
from tests.integration.proxied import SORT, chat
from tests.integration.training_runs import the_run
from tests.qm_command import qm, serving

GENERAL = FOLDER / "general.jsonl"
MODEL = "small"
FORMS = ("question_answer", "few_words")
UNSURE = "I cannot tell you."
CALLS = CallSettings(target_model=MODEL, mutator_model=MODEL, target_max_tokens=MAX_TOKENS)


def is_right(question: Question, form: str) -> bool:
    """Return whether a form's answer is right: each form has half of the questions."""
    return bool(zlib.crc32(question.text.encode()) % 2) == (form == FORMS[0])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "questions.jsonl"
    path.write_text("".join(GENERAL.read_text().splitlines(keepends=True)[:110]))
    return path


@pytest.fixture(scope="module")
def recording(dataset: Path) -> Path:
    """Return recorded replies of a model that answers each question in one of two forms."""
    path = dataset.with_name("own.jsonl.xz")
    task = task_of(str(dataset), CALLS, encoder="hash", forms_asked=",".join(FORMS))
    by_text = {question.text: question for question in task.questions}

    def reply(request: ChatRequest) -> Completion:
        said = request.messages[-1].content
        question = by_text[max((text for text in by_text if text in said), key=len)]
        form = FORMS[0] if said.startswith("Question: ") else FORMS[1] if said != question.text else ""
        right = form and question.accept and is_right(question, form)
        return Completion(text=question.accept[0] if right else UNSURE, model=MODEL, completion_tokens=3)

    head = RepliesHead(model=MODEL, model_sha256="ab" * 32, made_with="hand", command="x", date="2026-11-25")
    texts = {index: question.text for index, question in enumerate(task.questions)}
    write_replies(path, head, {reply_key(one): [reply(one)] for one in requests_of(task, [texts, texts])})
    return path


def rows_of(dataset: Path, *, forms: tuple[str, ...] = FORMS) -> list[dict[str, Any]]:
    """Return the log of all questions of a dataset, held-out ones too."""
    return [
        {"question": one.text, "form": name, "reply": one.accept[0] if is_right(one, form) else UNSURE}
        for one in load_questions(dataset)
        for form, name in zip(FORMS, forms, strict=True)
    ]


def sums(*, marks: bool = False) -> list[dict[str, Any]]:
    """Return a log of its own, with words that occur nowhere else."""
    word = "zanzibarium" if marks else "pens"
    rows = []
    for at in range(60):
        question = f"Ann has {at} {word} and buys {at + 2}. How many does she have?"
        for form in FORMS:
            right = bool(at % 2) == (form == FORMS[0])
            text = f"She has {2 * at + 2} {word}." if right else f"It is {at} or more, quibblewort"
            more = {"target": f"xylograph {at}", "context": "snollygoster"} if marks else {}
            rows.append({"question": question, "form": form, "reply": text, "gold": 2 * at + 2, **more})
    return rows


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def flags_for(tmp_path: Path) -> list[str]:
    return ["--encoder", "hash", "--save-dir", str(tmp_path / "runs"), "--target-max-tokens", str(MAX_TOKENS)]


def test_a_log_becomes_a_policy_that_is_evaluated_and_used(
    dataset: Path, recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, split = written(tmp_path / "log.jsonl", rows_of(dataset)), split_questions(load_questions(dataset))
    named = ["--recording", recording]
    flags = [*flags_for(tmp_path), *named, "--dataset", dataset, "--reward", "right=1"]
    assert qm("plan", "--from-logs", log, *flags, "--budget", "2", "--json", tmp_path / "plan.json") == 0
    said = capsys.readouterr()
    train = len({question.text for question in split.train})
    assert f"{2 * train} graded by gold; left out: " in said.err
    assert "about held-out questions of --dataset" in said.err
    report, run = json.loads((tmp_path / "plan.json").read_text()), the_run(tmp_path)
    assert report["plan"]["success"] > 0.9
    assert report["p_right"]["auroc"] > 0.95
    assert [bool(point["fitted"]) for point in report["front"].values()] == [False, True, True, True, True, True]
    assert said.out.splitlines()[-1] == report["verdict"]

    assert qm("eval", "--checkpoint", run, *named, "--dataset", dataset, "--json", tmp_path / "eval.json") == 0
    methods = json.loads((tmp_path / "eval.json").read_text())["methods"]
    assert methods["policy"]["success"] > methods["best_single"]["success"] + 0.2
    assert 1 < methods["policy"]["calls_per_question"] <= 2
    question = split.train[0]
    assert qm("rewrite", "--checkpoint", run, *named, question.text) == 0
    assert "P(right)" in capsys.readouterr().out
    with Rewriter.load(run, recording=str(recording)) as rewriter:
        assert rewriter.rewrite(question.text).answer == question.accept[0]

    answer = RunReader(run).results
    assert answer["of"] == "logged question"
    assert [*answer["methods"]] == ["best_single", "best_plan"]
    names = {point["method"] for point in answer["front"]}
    assert names == {point["plan"] for point in report["front"].values()}
    quality = answer["p_right"]
    assert len(quality["reliability"]) == 10
    assert sum(each["n"] for each in quality["reliability"]) == 2 * train


def test_no_text_of_the_log_is_in_what_is_saved_and_served(
    tiny_server: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = written(tmp_path / "private.jsonl", sums(marks=True))
    answers = ["--ollama-url", tiny_server.url, "--target-model", "librarian", "--mutator-model", "softener"]
    assert qm("plan", "--from-logs", log, *flags_for(tmp_path), *answers) == 0
    run = the_run(tmp_path)
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "report.html"]
    contents = {path.name: path.read_bytes() for path in files}
    with np.load(run / "confidence.npz") as arrays:
        contents |= {name: arrays[name].tobytes() for name in arrays.files}
    for name, content in contents.items():
        for word in (b"zanzibarium", b"quibblewort", b"xylograph", b"snollygoster", b"Ann"):
            assert word not in content, (name, word)
    assert b"private.jsonl" not in contents["policy.qm"]
    assert b"question_answer" in contents["policy.qm"]
    capsys.readouterr()
    assert qm("eval", "--checkpoint", run, "--ollama-url", tiny_server.url) == 2
    assert "learned from a log without --dataset" in capsys.readouterr().err
    with serving(run, tmp_path, "--mode", "full", "--ollama-url", tiny_server.url) as (_, url):
        reply = chat(url, SORT)
    assert reply.ok, reply.text
    assert reply.headers["x-qm-decision"] == "rewritten"
    assert reply.headers["x-qm-form"] in FORMS


def test_prompts_that_are_no_forms_teach_p_right_and_an_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row, "form": f"my {row['form']}"} for row in sums()]
    assert qm("plan", "--from-logs", written(tmp_path / "log.jsonl", rows), *flags_for(tmp_path)) == 0
    said = capsys.readouterr().out
    assert "no policy is saved: my question_answer, my few_words are not known as forms; add them with --plugin" in said
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "policy.qm").exists()
    with np.load(run / "confidence.npz") as arrays:
        model = ConfidenceModel.from_arrays(arrays)
    attempts = [Attempt(text="It is 40 or more, perhaps", form="my few_words"), Attempt(text="She has 82 pens.")]
    assert model.submit("Ann has 40 pens and buys 42. How many does she have?", attempts).index == 1
    assert qm("rewrite", "How many?", "--checkpoint", run) == 2
    assert "a log taught it P(right)" in capsys.readouterr().err
    assert qm("runs", tmp_path / "runs") == 0


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        (sums()[:20], (), "20 graded answers to 10 questions in one prompt are too few to learn from"),
        ([*sums(), {"question": "What?", "reply": "x"}], (), "log.jsonl:121: neither `gold` nor `label`"),
        ([{"question": "What?"}], (), "log.jsonl:1: `reply` must be a text"),
        ([], (), "there are no graded answers to learn P(right) from"),
        (sums(), ("--forms", "steps"), "unknown prompt 'steps'; known: few_words, question_answer"),
        (sums(), ("--reward", "judge=1"), "--reward judge needs --judge-model"),
    ],
)
def test_what_cannot_be_learned_from_is_one_line(
    rows: list[dict[str, Any]], more: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = written(tmp_path / "log.jsonl", rows)
    assert qm("plan", "--from-logs", log, *flags_for(tmp_path), *more) == 2
    lines = capsys.readouterr().err.splitlines()
    assert said in lines[-1]
    assert "Traceback" not in "".join(lines)
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_says_what_is_in_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path / "log.jsonl", sums())
    assert qm("plan", "--from-logs", log, *flags_for(tmp_path), "--dry-run") == 0
    assert capsys.readouterr().out.splitlines() == ["question_answer  60 answers", "few_words        60 answers"]
    assert not (tmp_path / "runs").exists()


def test_the_replies_that_a_run_paid_for_become_a_log(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, log = trained("--eval-interval", "0", "--forms", "few_words,steps"), tmp_path / "log.jsonl"
    assert qm("export", "replies", run, "--out", log) == 0
    said = capsys.readouterr().out
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    split = split_questions(load_questions(tmp_path / "questions.jsonl"))
    assert {row["question"] for row in rows} <= {question.text for question in split.train}
    assert {row["form"] for row in rows} <= {"as_is", "few_words", "steps"}
    assert said == f"{log}: {len(rows)} replies to {len({row['question'] for row in rows})} questions, " + (
        f"{sum(row['label'] for row in rows)} right\n"
    )
    gold = {question.text: question.accept[0] for question in split.train}
    assert {row["label"] for row in rows} == {True, False}
    assert all((gold[row["question"]] in row["reply"]) == row["label"] for row in rows)
    assert len(list(read_logged_replies(log))) == len(rows)
    (tmp_path / "questions.jsonl").rename(tmp_path.parent / "elsewhere.jsonl")
    assert qm("export", "replies", run, "--out", tmp_path / "other.jsonl") == 2
    assert "no such file" in capsys.readouterr().err
