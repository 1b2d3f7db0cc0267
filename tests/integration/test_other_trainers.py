"""`benchmarks/other_trainers.py`: every learner trains on the embedded default while calls fail, and has its row."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.other_trainers import LEARNERS, main

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torchrl announces its next version
def test_every_learner_trains_with_failing_calls_and_has_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "table.json"
    sizes = ["--encoder", "hash", "--seeds", "1", "--shares", "0.2", "--steps", "512"]
    main([*sizes, "--store", str(tmp_path / "store"), "--json", str(found)])
    rows = [
        line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if re.search(r"\| 20% \|", line)
    ]
    assert rows == list(LEARNERS)
    results = json.loads(found.read_text())["results"]
    assert all(0 < one["success"] < 100 for by_share in results.values() for one in by_share["0.2"])
