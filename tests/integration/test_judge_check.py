"""`qm judge check`: kappa with known numbers, judges good and useless, files that are not as they should be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from query_mutator.cli.console import exit_code
from query_mutator.commands.main import main
from query_mutator.stats.agreement import agreement, cohen_kappa
from query_mutator.testing import Echo, start_server
from tests.rule_judge import RuleJudge


class Generous:
    """A judge that always says yes."""

    name = "generous"

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        return ["yes"] * len(prompts)


def labelled(path: Path, count: int = 30) -> Path:
    rows = [
        {"question": f"question {n}", "accepted": f"answer {n}", "answer": f"It is answer {n + n % 2}.", "label": label}
        for n, label in zip(range(count), ["yes", "no"] * count, strict=False)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_kappa_of_tables_worked_by_hand() -> None:
    assert cohen_kappa(np.array([[20, 5], [10, 15]])) == pytest.approx(0.4)  # Cohen's (0.7 - 0.5) / (1 - 0.5)
    assert cohen_kappa(np.array([[30, 20], [0, 0]])) == 0.0  # a constant verdict
    assert cohen_kappa(np.array([[5, 0], [0, 5]])) == 1.0
    assert cohen_kappa(np.array([[0, 5], [5, 0]])) == -1.0
    found = agreement([True] * 25 + [False] * 25, [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15)
    assert (found.accuracy, found.true_positive_rate, found.true_negative_rate) == (0.7, 20 / 30, 15 / 20)
    low, high = found.kappa_ci
    assert 0.13 < low < 0.17  # the large-sample interval is 0.4 +- 1.96 x 0.127
    assert 0.61 < high < 0.66


def test_kappas_interval_covers_as_it_says() -> None:
    rng = np.random.default_rng(1)
    cells = np.array([0.4, 0.1, 0.1, 0.4])
    truth = cohen_kappa(1000 * cells.reshape(2, 2))
    hits = 0
    for _ in range(200):
        both_yes, false_yes, false_no, both_no = rng.multinomial(60, cells).tolist()
        said = [True] * (both_yes + false_yes) + [False] * (false_no + both_no)
        labels = [True] * both_yes + [False] * false_yes + [True] * false_no + [False] * both_no
        low, high = agreement(said, labels).kappa_ci
        hits += low <= truth <= high
    assert 180 <= hits <= 199


def test_a_good_judge_a_generous_one_and_one_without_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, report = labelled(tmp_path / "l.jsonl"), tmp_path / "report.json"
    with start_server({"rule-judge": RuleJudge(), "generous": Generous(), "echo": Echo("The same words.")}) as server:
        flags = ["judge", "check", str(file), "--ollama-url", server.url, "--judge-model"]
        assert main([*flags, "rule-judge", "--json", str(report)]) == 0
        good: dict[str, Any] = json.loads(report.read_text())
        said = capsys.readouterr().out
        assert main([*flags, "generous", "--json", str(report), "--force"]) == 0
        generous: dict[str, Any] = json.loads(report.read_text())
        assert exit_code(main, [*flags, "echo", "--judge-form", "words"], prog="qm") == 3
    assert good["agreement"]["kappa"] == 1.0
    assert good["verdict"].startswith("rule-judge agrees with the labels (kappa 1.00 [0.")
    assert good["constant"]["kappa_ci"] == [0.0, 0.0]
    assert "30 labelled answers, 95 % intervals; without a verdict: none" in said
    assert (generous["agreement"]["true_positive_rate"], generous["agreement"]["true_negative_rate"]) == (1.0, 0.0)
    assert generous["verdict"].startswith(
        "Do not train on generous: it is not shown to be better than always answering"
    )
    assert "echo gave no verdict on any answer (30 no verdict)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"question": "q", "answer": "a", "label": "perhaps"}', "l.jsonl:1: `label` is 'perhaps'; write yes or no"),
        ('{"question": "q", "label": "yes"}', "`answer` must be a text; columns: question, label"),
        ('{"question": "q", "answer": "a", "label": "yes"}', "only the label yes; give answers of both labels"),
        ('{"question": "q", "answer": "a", "label": 1, "accepted": 7}', "`accepted` must be a text or a list"),
        ("", "no rows"),
    ],
)
def test_a_file_that_cannot_tell_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    (tmp_path / "l.jsonl").write_text(text)
    argv = ["judge", "check", str(tmp_path / "l.jsonl"), "--judge-model", "m"]
    assert exit_code(main, argv, prog="qm") == 2
    assert says in capsys.readouterr().err
