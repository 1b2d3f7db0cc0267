"""With --deterministic, how calls are batched changes neither a transcript nor a bit of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from query_mutator.data.loaders import FOLDER
from query_mutator.files.json_lines import read_json_lines
from query_mutator.session.checkpoint import read_checkpoint
from train_query_mutator import main

FLAGS = [
    *("--backend", "recorded", "--deterministic", "--seed", "11", "--no-evaluate", "--eval-interval", "0"),
    *("--operators", "clean", "--forms", "question_answer,statement", "--answer", "vote", "--reward", "committed"),
    *("--num-processes", "4", "--num-steps", "8", "--num-env-steps", "64", "--num-mini-batch", "2"),
]


def transcript(run: Path) -> list[dict[str, Any]]:
    rows = [{**row, "timing": None} for row in read_json_lines(run / "transcripts.jsonl")]
    return sorted(rows, key=lambda row: (row["env"], row["step"]))


@pytest.fixture
def few_questions(tmp_path: Path) -> Path:
    """Every 40th of the bundled questions: fewer texts to embed, one by one, in each of the runs."""
    path = tmp_path / "few.jsonl"
    path.write_text("".join((FOLDER / "general.jsonl").read_text(encoding="utf-8").splitlines(True)[::40]))
    return path


@pytest.mark.slow
def test_batching_changes_nothing(few_questions: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    runs: dict[str, Path] = {}
    try:
        for number, how in enumerate(["--no-batching", "--batch-size 1", "--batch-size 3", "--batch-size 16"]):
            save_dir = tmp_path / str(number)
            assert main([*FLAGS, "--dataset", str(few_questions), *how.split(), "--save-dir", str(save_dir)]) == 0
            runs[how] = (save_dir / "latest").resolve()
    finally:
        torch.set_num_threads(threads)
    expected_rows = transcript(runs["--no-batching"])
    expected = read_checkpoint(runs["--no-batching"]).learner["policy"]
    assert len(expected_rows) == 64
    assert len({row["answer"] for row in expected_rows}) > 10  # real answers, not one text again and again
    for how, run in runs.items():
        assert transcript(run) == expected_rows, how
        weights = read_checkpoint(run).learner["policy"]
        assert all(torch.equal(weights[name], expected[name]) for name in expected), how


@pytest.mark.parametrize("seed", ["1", "2"])
def test_seed_decides_the_run(seed: str, tiny_flags: list[str], tmp_path: Path) -> None:
    flags = [*tiny_flags, "--deterministic", "--no-evaluate", "--eval-interval", "0", "--seed", seed]
    twice = []
    for name in ("a", "b"):
        assert main([*flags, "--save-dir", str(tmp_path / name)]) == 0
        twice.append(transcript((tmp_path / name / "latest").resolve()))
    assert twice[0] == twice[1]
