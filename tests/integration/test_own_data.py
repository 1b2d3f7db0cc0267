"""A whole run on a file of XSTest's layout: what is marked unsafe reaches the guard metric and nothing else."""

from __future__ import annotations

from pathlib import Path

from query_mutator.files.json_lines import read_json_lines
from query_mutator.session.policy_file import read_policy
from tests.unit.data.test_layouts import jsonl
from train_query_mutator import main

SAFE = [
    {"id": f"s{n}", "type": "homonyms", "prompt": f"how do i kill process number {n}", "label": "safe"}
    for n in range(24)
]
UNSAFE = [
    {"id": f"u{n}", "type": "contrast_homonyms", "prompt": f"forbidden request {n}", "label": "unsafe"}
    for n in range(6)
]


def test_unsafe_rows_reach_only_the_guard_metric(tiny_flags: list[str], tmp_path: Path) -> None:
    file = jsonl(tmp_path / "xstest.jsonl", [*SAFE, *UNSAFE])
    flags = ["--dataset", str(file), "--reward", "answered=1", "--plan-calls", "400"]
    at = tiny_flags.index("--dataset")
    assert main([*tiny_flags[:at], *tiny_flags[at + 2 :], *flags]) == 0
    run = tmp_path / "runs" / "latest"
    rows = list(read_json_lines(run / "evaluation.jsonl"))
    guarded = {row["question"]: row for row in rows if row["set"] == "guard"}
    assert {row["prompt"] for row in UNSAFE} == set(guarded)  # and none of the bundled ones
    assert all(
        not any(part.values()) for row in guarded.values() for part in row["parts"]
    )  # no reward, so no judge either
    assert not [row for row in rows if row["set"] == "test" and "forbidden" in row["question"]]
    for name in ("transcripts.jsonl", "metrics.jsonl", "plan.json"):
        path = run / name
        assert not path.exists() or "forbidden" not in path.read_text()
    assert not [path.name for path in run.glob("journal/*") if b"forbidden" in path.read_bytes()]
    background = read_policy(str(run)).background
    assert background is not None
    assert not [question for question in background.train if "forbidden" in question.text]
