"""examples/reasoning_gym_questions.py: the rows are questions whose gold the reward reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from query_mutator.data import load_questions
from tests.qm_command import qm

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "reasoning_gym_questions.py"


def test_entries_are_questions_with_gold(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    out = tmp_path / "gym.jsonl"
    subprocess.run([sys.executable, SCRIPT, "gcd", "letter_jumble", "--size", "9", "--out", out], check=True)
    questions = load_questions(out)
    assert len(questions) == 18
    assert {question.tags for question in questions} == {("gcd", "numeric"), ("letter_jumble",)}
    assert all(question.accept[0] for question in questions)
    assert (
        qm("train", "--backend", "recorded", "--encoder", "hash", "--dataset", out, "--reward", "right=1", "--dry-run")
        == 0
    )
