"""`qm compare`: our runs on the questions that they have in common, from files that an evaluation writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from query_mutator.errors import UsageError
from query_mutator.evaluation.outcomes import Outcome
from query_mutator.evaluation.summary import Results, summarize
from query_mutator.files import write_checked_json
from query_mutator.files.json_lines import JsonLines
from query_mutator.runs.pairs import pair_rows, read_held_out
from query_mutator.types import ErrorInfo, Question
from tests.qm_command import qm

RIGHT, WRONG, LOST = 1.0, 0.0, None


def outcome(name: str, success: float | None) -> Outcome:
    error = ErrorInfo(kind="timeout", message="no reply") if success is None else None
    return Outcome(question_id=name, success=float("nan") if success is None else success, score=0.5, error=error)


def results(methods: Mapping[str, Sequence[float | None]], *, targets: int = 10**6, text: str = "question") -> Results:
    """Return results on questions q0, q1, ... about `targets` things."""
    count = len(next(iter(methods.values())))
    questions = [Question(id=f"q{n}", text=f"{text} {n}", accept=(f"target {n % targets}",)) for n in range(count)]
    outcomes = {name: [outcome(f"q{n}", one) for n, one in enumerate(found)] for name, found in methods.items()}
    return Results(questions=questions, outcomes=outcomes, guard=(), guarded=dict.fromkeys(methods, ()))


def write_run(folder: Path, found: Results, *, seed: int = 1, model: str = "llama", dataset: str = "general") -> Path:
    folder.mkdir(parents=True)
    flags = {"seed": seed, "dataset": dataset}
    write_checked_json(folder / "config.json", {"flags": flags, "backend": {"target_model": model}})
    with closing(JsonLines(folder / "evaluation.jsonl", cut_at=0)) as file:
        file.append(*found.rows())
    return folder


def report_of(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> dict[str, Any]:
    assert qm("compare", *argv, "--json") == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_two_methods_of_one_run_have_the_interval_of_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = results(
        {"identity": [RIGHT, WRONG, WRONG, LOST] * 20, "policy": [RIGHT, RIGHT, WRONG, RIGHT] * 10 + [WRONG] * 40},
        targets=11,
    )
    known = summarize(found)["policy_minus"]["identity"]
    run = write_run(tmp_path / "a", found)
    [pair] = report_of(capsys, run, run, "--method", "identity", "policy")["pairs"]
    assert (pair["difference"], pair["ci"], pair["questions"]) == (known["success"], known["success_ci"], 60)
    assert (pair["gained"], pair["lost"], pair["same_right"], pair["same_wrong"]) == (10, 10, 10, 30)
    assert pair["left_out"]["unscored"] == 20


def test_runs_are_compared_on_the_same_questions_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", results({"policy": [WRONG] * 30 + [RIGHT] * 10}))
    b = write_run(tmp_path / "b", results({"policy": [RIGHT] * 25 + [WRONG] * 3}), seed=2)
    report = report_of(capsys, a, b)
    [pair] = report["pairs"]
    assert (pair["questions"], pair["gained"], pair["same_wrong"]) == (28, 25, 3)
    assert pair["left_out"] == {"only A has": 12, "only B has": 0, "changed": 0, "unscored": 0}
    assert pair["p"] == pytest.approx(2 * 0.5**25)
    assert [(run["seed"], run["scored"]) for run in report["runs"]] == [(1, 40), (2, 28)]
    assert qm("compare", a, b) == 0
    out = capsys.readouterr().out
    assert "B is better than A on such questions." in out
    assert "Left out of B and A, questions: 12 only A has." in out
    assert "One seed each: the intervals say nothing about other seeds" in out
    assert max(map(len, out.splitlines())) <= 80


def test_an_interval_around_0_is_no_clear_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, results({"policy": [RIGHT, WRONG] * 20})) for name in "abc"]
    assert qm("compare", *runs) == 0
    out = capsys.readouterr().out
    assert "C and B: no clear difference (the interval includes 0)." in out
    assert "p, Holm" in out
    assert max(map(len, out.splitlines())) <= 80


def test_another_model_another_dataset_and_other_wordings_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = results({"policy": [RIGHT] * 9})
    other = results({"policy": [RIGHT] * 9}, text="request")
    mixed = Results(
        questions=[*found.questions[:4], *other.questions[4:]], outcomes=found.outcomes, guard=(), guarded=found.guarded
    )
    a = write_run(tmp_path / "a", found)
    b = write_run(tmp_path / "b", mixed, model="qwen", dataset="mine.jsonl")
    [pair] = report_of(capsys, a, b)["pairs"]
    assert (pair["questions"], pair["left_out"]["changed"]) == (4, 5)
    assert qm("compare", a, b) == 0
    out = capsys.readouterr().out
    assert "Not the same target model (A llama, B qwen)" in out
    assert "Not the same questions (A general, B mine.jsonl)" in out


def test_the_wording_and_what_is_accepted_make_a_question() -> None:
    row = {"question_id": "q", "success": 1.0, "question": "How?", "accepted": ["len"], "target": "len"}
    assert pair_rows([row], [row]).result.questions == 1
    assert pair_rows([row], [{**row, "accepted": ["sum"]}]).changed == 1
    assert pair_rows([row], [{**row, "question": "What?"}]).changed == 1
    found = pair_rows([row], [{**row, "success": None}])
    assert (found.changed, found.result.unscored) == (0, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "runs named: 1; give 2 to 26"),
        (["a", "a"], "a run is compared with itself"),
        (["a", "none"], "none: no such run"),
        (["a", "b", "--method", "plocy"], "unknown method of a 'plocy' (did you mean 'policy'?)"),
        (["a", "b", "--method", "policy", "policy", "identity"], "--method has 3 names for 2 runs"),
        (["a", "empty"], "empty has no evaluation.jsonl: its evaluation did not finish"),
        (["a", "other.jsonl"], "other.jsonl has no rows of an evaluation"),
        (["a", "apart"], "no held-out question in common: a asked 2 of general, apart asked 1 of mine"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_run(Path(name), results({"policy": [RIGHT, WRONG]}))
    write_run(Path("apart"), results({"policy": [LOST]}), dataset="mine")
    Path("empty").mkdir()
    Path("other.jsonl").write_text('{"method": "policy", "question_id": 3, "success": "yes"}\n', encoding="utf-8")
    assert qm("compare", *words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_run_may_be_named_by_its_name_in_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        write_run(Path("runs") / name, results({"policy": [RIGHT, WRONG]}))
    assert [run["run"] for run in report_of(capsys, "first", "second")["runs"]] == ["runs/first", "runs/second"]


def test_a_file_of_guard_rows_alone_has_nothing_to_compare(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    found = results({"policy": [RIGHT]})
    rows = [json.dumps({**row, "set": "guard"}) for row in found.rows()]
    file.write_text("\n".join([*rows, ""]), encoding="utf-8")
    with pytest.raises(UsageError, match="no row of a held-out question"):
        read_held_out(file)
