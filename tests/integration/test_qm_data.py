"""`qm data`, `qm bench`: from a JSONL file to lengths, plans, shards, batches and figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from query_mutator.batching import BatchReader, LengthCache, load_batch_plan
from tests.qm_command import qm
from tests.tiny_lm import pairs, save_tokenizer, write_rows


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "train.jsonl", pairs(60))


@pytest.fixture
def cache(rows: Path, tiny_tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "lengths.jsonl"
    assert qm("data", "lengths", "build", "-d", rows, "-t", tiny_tokenizer, "-o", path) == 0
    capsys.readouterr()
    return path


def build(cache: Path, folder: Path, *flags: str | Path) -> Path:
    assert qm("data", "batchplan", "build", "-l", cache, "-o", folder, "-b", "256", *flags) == 0
    return folder


@pytest.fixture
def plan(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = build(cache, tmp_path / "plan", "-e", "2", "-d", tmp_path / "train.jsonl")
    capsys.readouterr()
    return folder


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize("suffix", ["jsonl", "bin"])
def test_lengths_are_built_and_described(
    rows: Path, tiny_tokenizer: str, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = rows.with_name(f"lengths.{suffix}")
    assert qm("data", "lengths", "build", "-d", rows, "-t", tiny_tokenizer, "-o", out, "--json") == 0
    built = told(capsys)
    assert (built["samples"], built["bad_rows"]) == (60, 0)
    assert qm("data", "lengths", "stats", "-c", out, "--json") == 0
    stats = told(capsys)
    assert (stats["samples"], stats["total"]) == (60, built["tokens"])
    assert stats["min"] <= stats["p10"] <= stats["median"] <= stats["p99"] <= stats["max"]
    assert LengthCache.load_sync(out).lengths.sum() == built["tokens"]


def test_rows_of_every_shape_have_lengths(tmp_path: Path, tiny_tokenizer: str) -> None:
    shapes: list[dict[str, Any]] = [
        {"id": 0, "text": "sort my list"},
        {"id": 1, "messages": [{"role": "user", "content": "sort"}, {"role": "assistant", "content": "sorted"}]},
        {"id": 2, "instruction": "sort", "input": "a list", "response": "sorted"},
        {"id": 3, "input_ids": [5, 6, 7]},
        {"id": 4, "prompt": "sort", "completion": "sorted"},
        {"id": 5, "content": "join"},
    ]
    data = write_rows(tmp_path / "shapes.jsonl", shapes)
    assert qm("data", "lengths", "build", "-d", data, "-t", tiny_tokenizer, "-o", tmp_path / "l.bin") == 0
    lengths = LengthCache.load_sync(tmp_path / "l.bin").get_all()
    assert list(lengths) == [str(number) for number in range(6)]
    assert lengths["3"] == 3


def test_a_row_that_gives_nothing_is_named_or_counted(
    tmp_path: Path, tiny_tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "bad.jsonl", [{"text": "sort"}, {"titel": "x"}, {"instruction": "a", "response": ""}])
    build = ("data", "lengths", "build", "-d", data, "-t", tiny_tokenizer, "-o", tmp_path / "l.bin")
    assert qm(*build) == 2
    assert capsys.readouterr().err.startswith(f"qm: {data}:2: no text in the row")
    assert not (tmp_path / "l.bin").exists()
    assert qm(*build, "--skip-bad", "--json") == 0
    report = told(capsys)
    assert (report["samples"], report["bad_rows"]) == (1, 2)
    assert ":2:" in report["first_errors"][0]


def test_a_plan_is_built_shown_and_verified(plan: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("data", "batchplan", "info", "-p", plan, "-n", "2", "--json") == 0
    report = told(capsys)
    assert [one["samples"] for one in report["epochs"]] == [60, 60]
    assert report["fingerprint"] == load_batch_plan(plan).fingerprint
    assert len(report["batches"]["0"]) == 2
    assert qm("data", "batchplan", "info", "-p", plan, "-n", "1") == 0
    assert "microbatch 0:" in capsys.readouterr().out
    rows = plan.with_name("train.jsonl")
    assert qm("data", "batchplan", "verify", "-p", plan, "-l", cache, "-d", rows) == 0


def test_verify_says_what_differs_with_exit_code_1(
    plan: Path, tmp_path: Path, tiny_tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_rows(tmp_path / "other.jsonl", pairs(59))
    assert qm("data", "lengths", "build", "-d", other, "-t", tiny_tokenizer, "-o", tmp_path / "o.bin") == 0
    capsys.readouterr()
    assert qm("data", "batchplan", "verify", "-p", plan, "-l", tmp_path / "o.bin") == 1
    assert "num_samples differs" in capsys.readouterr().out
    lengths = tmp_path / "lengths.jsonl"
    assert qm("data", "batchplan", "verify", "-p", plan, "-l", lengths, "-d", other, "--json") == 1
    assert told(capsys)["match"] is False


def test_info_of_a_rank_and_shards_agree(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("data", "batchplan", "shard", "-p", plan, "-w", "2", "-o", tmp_path / "shards", "--json") == 0
    assert told(capsys)["epochs"]["0"]["world_size"] == 2
    samples = 0
    for rank in range(2):
        assert qm("data", "batchplan", "info", "-p", plan, "-r", str(rank), "-w", "2", "--json") == 0
        asked = told(capsys)
        assert qm("data", "batchplan", "info", "-p", tmp_path / "shards" / f"rank_{rank}", "--json") == 0
        stored = told(capsys)
        assert stored["epochs"] == asked["epochs"]
        samples += stored["epochs"][0]["samples"]
    assert samples == 60
    assert qm("data", "batchplan", "shard", "-p", plan, "-w", "500", "-o", tmp_path / "many") == 2
    assert "500 ranks cannot share" in capsys.readouterr().err


def test_packs_are_part_of_a_plan(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = build(cache, tmp_path / "packed", "--pack", "--pack-max-len", "128", "--pack-mode", "greedy")
    assert "greedy, rows of 128" in capsys.readouterr().out
    assert load_batch_plan(packed).get_epoch(0)[0].packs


def test_batches_are_generated_from_the_right_data_alone(
    plan: Path, tmp_path: Path, tiny_tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, out = tmp_path / "train.jsonl", tmp_path / "batches"
    command = ("data", "batch", "generate", "-p", plan, "-t", tiny_tokenizer, "-o", out)
    assert qm(*command, "-d", rows, "--json") == 0
    assert told(capsys)["batches"] == load_batch_plan(plan).total_microbatches
    assert sum(batch.batch_size for batch in BatchReader(out).iter_epoch(1)) == 60
    edited = write_rows(tmp_path / "edited.jsonl", [*pairs(59), {"id": "r59", "text": "something else"}])
    assert qm(*command, "-d", edited) == 2
    assert "made for data set" in capsys.readouterr().err
    other = save_tokenizer(tmp_path / "other", ["quite different words"], vocab_size=270)
    assert qm("data", "batch", "generate", "-p", plan, "-t", other, "-d", rows, "-o", out) == 2
    assert "made for tokenizer" in capsys.readouterr().err


def test_lengths_are_analysed(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("data", "batching", "histogram", "-c", cache, "--bins", "5", "--width", "20") == 0
    assert "60 samples" in capsys.readouterr().out
    report = tmp_path / "report.json"
    analyze = ("data", "batching", "analyze", "-c", cache, "--bucket-edges", "32,64", "--overflow-max", "128")
    assert qm(*analyze, "-o", report) == 0
    assert "overall efficiency" in capsys.readouterr().out
    assert json.loads(report.read_text())["total_samples"] == 60
    for goal in ("waste", "balance", "memory"):
        assert qm("data", "batching", "suggest", "-c", cache, "-n", "3", "-g", goal, "--json") == 0
        assert len(told(capsys)["edges"]) == 3


def test_bench_compares_the_ways(rows: Path, tiny_tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--bucket-edges", "32,64", "--max-length", "128", "--token-budget", "512")
    assert qm("bench", "-d", rows, "-t", tiny_tokenizer, "--max-samples", "50", *shape, "--json") == 0
    found = told(capsys)
    assert found["samples"] == 50
    ways = {one["name"]: one["efficiency"] for one in found["ways"]}
    assert ways["sorted windows"] >= ways["buckets"]
    assert qm("bench", "--num-samples", "200") == 0
    assert "packed, greedy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["data"], "data needs a command: export, lengths, batchplan, batching, batch"),
        (["data", "batchplan"], "data batchplan needs a command: build, info, verify, shard"),
        (["data", "lengths", "bild"], "unknown command 'data lengths bild'; did you mean data lengths build?"),
        (["data", "lengths", "build", "-d", "x"], "--tokenizer is missing; see --help"),
        (["data", "lengths", "stats", "-c", "none.bin"], "cannot read none.bin"),
        (["data", "batchplan", "info", "-p", "none"], "cannot read none/meta.json"),
        (["data", "batchplan", "info", "-p", "x", "-r", "0"], "--rank and --world-size go together"),
        (["data", "batching", "suggest", "-c", "x", "-g", "best"], "-g must be one of waste, balance, memory"),
        (["data", "batchplan", "build", "-l", "x", "-o", "y", "--bucket-edges", "9,4"], "--bucket-edges '9,4' must be"),
        (
            ["data", "batchplan", "build", "-l", "x", "-o", "y", "--bucket-edges", "9,10000000000"],
            "--bucket-edges '9,1",
        ),
        (["bench", "--token-budget", "10"], "--token-budget 10 is below --max-length 2048"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"qm: {said}")
    assert err.count("\n") == 1


def test_a_tokenizer_that_is_not_there_is_one_line(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert qm("data", "lengths", "build", "-d", rows, "-t", tmp_path / "empty", "-o", tmp_path / "l.bin") == 2
    assert "the folder has no loadable tokenizer" in capsys.readouterr().err


def test_help_of_a_group_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("data", "batching", "--help") == 0
    out = capsys.readouterr().out
    assert "data batching suggest" in out
    assert "data lengths" not in out


def test_help_loads_neither_torch_nor_numpy() -> None:
    heavy = "('torch', 'numpy', 'pydantic')"
    code = f"import query_mutator.commands.main, sys; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
