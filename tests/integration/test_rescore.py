"""`qm rescore`: the same scores as a run or an evaluation with those parts; calls to the judge only."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from query_mutator.embedded.server import EmbeddedServer, start_server
from query_mutator.files import read_checked_json
from query_mutator.files.json_lines import JsonLines, read_json_lines
from query_mutator.session.policy_file import read_policy, write_policy_file
from tests.integration.conftest import ROWS, flags_of, write_dataset
from tests.integration.training_runs import rows, the_run, train
from tests.qm_command import qm
from tests.rule_judge import RuleJudge

QUIET = ("--eval-interval", "0", "--no-evaluate")
Trained = Callable[..., Path]
#: Rewards that do not move the weights, so that two runs take the same actions.
FROZEN = ("--lr", "1e-30", *QUIET)


def without_times(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows in the order of environments and steps, without what depends on the clock."""
    left = [{**row, "timing": None, "seconds": None} for row in found]
    return sorted(left, key=lambda row: (row.get("env", 0), row.get("step", 0), str(row.get("method"))))


@pytest.mark.parametrize("ask", ["every_step", "form"])
def test_steps_have_the_scores_of_a_run_with_that_reward(
    tiny_server: EmbeddedServer, dataset: Path, tmp_path: Path, ask: str
) -> None:
    found = {}
    for name, reward in (("one", "right=0.7,meaning=0.3"), ("other", "contains=1,meaning=0.5,answered=0.25")):
        flags = flags_of(tiny_server, dataset, tmp_path / name)
        asking = ("--ask", ask, "--forms", "steps,expert", "--call-price", "0.005", "0.05") if ask == "form" else ()
        assert train(*flags, *FROZEN, "--reward", reward, *asking) == 0
        found[name] = rows((tmp_path / name / "latest").resolve(), "transcripts")
    again = ("rescore", tmp_path / "one" / "latest", "--reward", "contains=1,meaning=0.5,answered=0.25")
    assert qm(*again, "--out", tmp_path / "again") == 0
    assert without_times(rows(tmp_path / "again", "transcripts")) == without_times(found["other"])
    assert {row["submitted"] for row in found["other"]} == ({0, 1} if ask == "every_step" else {None, 0})
    assert len({row["reward"] for row in found["other"]}) > 5


def test_questions_have_the_scores_of_an_evaluation_with_those_parts(tmp_path: Path) -> None:
    """On the embedded world: every part, exactly; refusals of the guard included."""
    sizes = ("--num-processes", "4", "--num-steps", "8", "--num-mini-batch", "2", "--num-env-steps", "32")
    world = ("--backend", "embedded", "--encoder", "hash", "--save-dir", str(tmp_path / "runs"))
    assert train(*world, *sizes, *QUIET) == 0
    run, other = the_run(tmp_path), tmp_path / "other.qm"
    saved, parts = (
        read_policy(run),
        "right=1,keyword=0.5,similarity=0.25,meaning=0.2,numeric=0.1,exact=0.1,contains=0.1",
    )
    assert saved.background is not None
    task = replace(saved.checkpoint.task, reward=parts)
    write_policy_file(other, replace(saved, checkpoint=replace(saved.checkpoint, task=task)))
    found = {}
    for name, policy in (("before", run), ("fresh", other)):
        asked = ("--checkpoint", policy, "--eval-calls", "400", "--plan-calls", "0")
        assert qm("eval", *asked, "--evaluation", tmp_path / f"{name}.jsonl") == 0
    assert qm("rescore", run, "--rows", tmp_path / "before.jsonl", "--reward", parts, "--out", tmp_path / "again") == 0
    for name, path in (("fresh", tmp_path / "fresh.jsonl"), ("again", tmp_path / "again" / "evaluation.jsonl")):
        found[name] = {(row["method"], row["question_id"]): row for row in read_json_lines(path)}
    # The other methods choose operators by the scores of training questions; the sample grows while calls are left.
    both = [key for key in found["again"] if key in found["fresh"] and key[0] in ("identity", "random", "policy")]
    again, fresh = (without_times([found[name][key] for key in both]) for name in ("again", "fresh"))
    assert again == fresh
    assert len(both) > 20
    assert {row["set"] for row in again} == {"test", "guard"}


class Muttering(RuleJudge):
    """A judge that gives no verdict on answers that name a function of `os`."""

    name = "muttering"

    def reply(self, prompt: str) -> str:
        """Return a verdict or a remark."""
        return "Let me think about it." if "`os." in prompt else super().reply(prompt)


def test_a_judge_is_asked_about_each_answer_once_and_the_target_never(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("--plan-calls", "0")
    with start_server([RuleJudge()], num_parallel=4) as server:  # it has no other model
        asked = ("--reward", "judge", "--judge-model", "rule-judge", "--ollama-url", server.url)
        assert qm("rescore", run, *asked) == 0
        calls = server.stats()["calls"]
        assert qm("rescore", run, *asked, "--force") == 0
        assert server.stats()["calls"] == calls + 1  # how it says yes; every verdict is in the cache
    found = rows(run.with_name(f"{run.name}-rescored"), "transcripts")
    assert {row["parts"]["judge"] for row in found if row["parts"]} == {0.0, 1.0}
    assert all(row["parts"]["judge"] == row["parts"]["right"] for row in found if row["parts"])
    answers = {(row["question"], row["answer"]) for row in rows(run, "transcripts") if row["answer"]}
    assert 10 < calls < len(answers) + 100
    assert "scored again by judge=1,right=0" in capsys.readouterr().out


def test_an_answer_without_a_verdict_stays_unscored(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained("--plan-calls", "0")
    out = run.with_name(f"{run.name}-rescored")
    with start_server([Muttering()], num_parallel=4) as server:
        asked = ("--reward", "judge", "--judge-model", "muttering", "--ollama-url", server.url, "--judge-form", "words")
        assert qm("rescore", run, *asked, "--max-failure-rate", "0.01") == 3
        assert "answers have no new score, most often 'unscored'" in capsys.readouterr().err
        assert qm("rescore", run, *asked, "--max-failure-rate", "0.9", "--force") == 0
    assert "not scored again: " in (said := capsys.readouterr().out)
    assert "muttering gave no verdict" in said
    steps, outcomes = rows(out, "transcripts"), rows(out, "evaluation")
    invalid = [row for row in steps if not row["valid"]]
    assert invalid
    assert {row["reward"] for row in invalid} == {0.0}
    assert not [row for row in steps if row["valid"] and "`os." in row["answer"]]
    unscored = [row for row in outcomes if row["error"]]
    assert unscored
    assert all(row["success"] is row["score"] is None and not row["parts"] for row in unscored)
    assert read_checked_json(out / "rescore.json")["judge"]["model"] == "muttering"
    assert qm("compare", run, out) == 0


def test_the_scores_of_the_same_reward_are_those_of_the_run(trained: Trained) -> None:
    run = trained("--plan-calls", "0")
    for encoder in ((), ("--encoder", "hash")):  # parts that compare embeddings are known, or computed
        assert qm("rescore", run, *encoder, "--force") == 0
        for name in ("transcripts", "evaluation"):
            assert rows(run.with_name(f"{run.name}-rescored"), name) == rows(run, name)


@pytest.mark.parametrize("name", ["transcripts", "evaluation"])
def test_a_row_with_another_entry_is_one_line(trained: Trained, capsys: pytest.CaptureFixture[str], name: str) -> None:
    run = trained("--plan-calls", "0")
    found = rows(run, name)
    for key, value in itertools.product(("error", "submitted", "calls", "cut", "answer"), (True, "\ud800", 10**30, {})):
        changed = [{**found[0], key: value}, {other: found[1][other] for other in found[1] if other != key}]
        with closing(JsonLines(run / f"{name}.jsonl", cut_at=0)) as file:
            file.append(*changed, *found[2:])
        capsys.readouterr()
        code = qm("rescore", run, "--reward", "similarity=1,contains=1", "--max-failure-rate", "1", "--force")
        assert code in (0, 2)
        assert code == 0 or len(capsys.readouterr().err.splitlines()) == 1


def test_steps_whose_call_failed_in_the_run_are_counted(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained("--plan-calls", "0")
    found = rows(run, "transcripts")
    failed = {"valid": False, "error": {"kind": "timeout", "message": "no reply"}, "reward": 0.0}
    cut = next(place for place, row in enumerate(found) if row["first_answer"] and row["rewrite"] != row["question"])
    lost = 0 if cut else 1
    found[lost] |= failed
    found[cut] |= {"answer": "x" * 20, "cut": {"answer": 30_000}}
    del found[-1]["submitted"]
    with closing(JsonLines(run / "transcripts.jsonl", cut_at=0)) as file:
        file.append(*found)
    before = (run / "transcripts.jsonl").read_bytes()
    assert qm("rescore", run, "--reward", "contains") == 0
    assert (run / "transcripts.jsonl").read_bytes() == before
    said = capsys.readouterr().out
    assert "unscored before and after: 1 rows whose call failed in the run" in said
    assert "not scored again: " in said
    new = rows(run.with_name(f"{run.name}-rescored"), "transcripts")
    assert {name: new[lost][name] for name in failed} == failed
    assert "first 20,000 characters only" in new[cut]["error"]["message"]
    assert "earlier version" in new[-1]["error"]["message"]
    assert new[-1]["parts"] or not new[-1]["answer"]


def test_only_an_earlier_output_is_replaced(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("--plan-calls", "0")
    out = run.with_name(f"{run.name}-rescored")
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    again = ("rescore", run, "--reward", "contains")
    assert qm(*again) == 0
    for words, said in {
        again: f"{out} exists; choose another, or replace it with --force",
        (*again, "--out", run, "--force"): "is the input",
        (*again, "--out", run / "more"): "lies in the input",
        (*again, "--out", tmp_path, "--force"): "holds the input",
        (*again, "--target-model", "librarian"): "librarian is not asked again; --judge-model",
        ("rescore", run, "--force", "--reward", "contanis"): "did you mean",
        ("rescore", run, "--force", "--reward", "judge"): "--reward judge needs --judge-model",
        (*again, "--rows", tmp_path / "no.jsonl", "--force"): "no such file; give one of `qm eval --evaluation`",
        (*again, "--rows", run / "metrics.jsonl", "--force"): "not a file of a run",
        (*again, "--dataset", tmp_path / "no.jsonl", "--force"): "no such file",
    }.items():
        capsys.readouterr()
        assert qm(*words) == 2, words
        assert said in capsys.readouterr().err
    assert qm(*again, "--force") == 0
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_gold_of_another_file_counts(trained: Trained, tmp_path: Path) -> None:
    run = trained("--plan-calls", "0")
    other = write_dataset(tmp_path / "other.jsonl", [(text, "nothing.at.all") for text, _ in ROWS])
    assert qm("rescore", run, "--dataset", other, "--out", tmp_path / "none") == 0
    assert not any(row["parts"]["right"] for row in rows(tmp_path / "none", "transcripts") if row["parts"])
    shutil.rmtree(tmp_path / "none")
    short = write_dataset(tmp_path / "short.jsonl", ROWS[:1])
    assert qm("rescore", run, "--dataset", short, "--out", tmp_path / "none", "--max-failure-rate", "1") == 0
    left = [row for row in rows(tmp_path / "none", "transcripts") if row["valid"]]
    assert {row["question_id"] for row in left} <= {"q0"}
    assert [row["success"] for row in rows(tmp_path / "none", "evaluation")] == [
        row["success"] for row in rows(run, "evaluation")
    ]  # whose rows have what is accepted
