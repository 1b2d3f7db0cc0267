"""The examples of plans, packs, ranks and analysis run, and say what their pages say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples" / "batching"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("01_basic_batching", "the same seed gives the same batches: True"),
        ("02_sequence_packing", "segments  [0, 0, 0, 1, 1, 2, 2, -1]"),
        ("03_batch_plan", "the same again: True"),
        ("04_distributed", "equal steps by pad: 75 on every rank"),
        ("06_analyze", "no other 4 edges pad less"),
    ],
)
def test_an_example_runs(name: str, line: str) -> None:
    run = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert line in run.stdout
