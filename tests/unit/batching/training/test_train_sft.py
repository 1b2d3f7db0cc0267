"""`qm train sft` from end to end: plans, packs, streams, a gym, resume, ranks, adapters, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.attack.harness import unchanged
from query_mutator.files.json_lines import read_json_lines
from tests.qm_command import qm
from tests.tiny_lm import pairs, save_tokenizer, write_rows


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "train.jsonl", pairs(24))


@pytest.fixture
def sft(tiny_lm: str, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `qm train sft` into tmp_path/NAME and return its report."""

    def run(name: str, *flags: str | Path, data: Path | None = rows) -> dict[str, Any]:
        source = [] if data is None else ["--data", data]
        command = ["train", "sft", "--model", tiny_lm, *source, "--output", tmp_path / name]
        assert qm(*command, "--learning-rate", "1e-2", "--json", *flags) == 0, capsys.readouterr().err
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    return run


def curve(folder: Path) -> list[float]:
    state = torch.load(sorted((folder / "checkpoints").glob("*.pt"))[-1], weights_only=True)
    return list(state["losses"])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_learns_and_leaves_model_metrics_and_checkpoint(sft: Any, rows: Path, tmp_path: Path) -> None:
    report = sft("out", "--epochs", "3", "--batch-size", "8", "--eval-data", rows, "--log-interval", "2")
    assert report["steps"] == 9
    assert report["last_loss"] < report["first_loss"] - 1
    assert report["eval_loss"] < report["first_loss"]
    metrics = list(read_json_lines(tmp_path / "out" / "metrics.jsonl"))
    assert {"sft/loss", "sft/eval_loss", "charts/learning_rate"} <= {key for row in metrics for key in row}
    assert list((tmp_path / "out" / "tensorboard").iterdir())
    assert (tmp_path / "out" / "model" / "tokenizer.json").exists()
    assert (tmp_path / "out" / "checkpoints" / "step_9.pt").exists()


def test_resuming_gives_the_same_weights_to_the_bit(sft: Any, tmp_path: Path) -> None:
    flags = ("--epochs", "2", "--batch-size", "4", "--save-interval", "5", "--gradient-accumulation", "2")
    sft("whole", *flags)
    resumed = tmp_path / "whole" / "checkpoints" / "step_5.pt"
    assert resumed.exists()
    report = sft("again", "--resume", resumed)
    assert report["steps"] == 6
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "again"))
    assert curve(tmp_path / "whole") == curve(tmp_path / "again")


def test_a_damaged_checkpoint_falls_back_and_damaged_metrics_are_named(
    sft: Any, tiny_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    sft("out", "--epochs", "1", "--batch-size", "4", "--save-interval", "3", "--log-interval", "1")
    before, newest = weights(out), out / "checkpoints" / "step_6.pt"
    newest.write_bytes(newest.read_bytes()[:-300] + b"?" + newest.read_bytes()[-299:])
    assert sft("out", "--resume", out)["steps"] == 6
    assert f"cannot read the checkpoint {newest}" in caplog.text
    assert "using the previous one" in caplog.text
    assert same(weights(out), before)
    metrics = out / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().replace(b'"step":2', b'"step":7', 1))
    with unchanged(out) as files:
        assert qm("train", "sft", "--model", tiny_lm, "--output", out, "--resume", out) == 2
    assert f"{metrics}:2: damaged" in capsys.readouterr().err
    assert files.changed() == []


def test_a_plan_of_ones_own_gives_what_its_settings_would(
    sft: Any, rows: Path, tiny_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, plan = tmp_path / "lengths.bin", tmp_path / "plan"
    assert qm("data", "lengths", "build", "-d", rows, "-t", tiny_lm, "-o", cache) == 0
    build = ("data", "batchplan", "build", "-l", cache, "-d", rows, "-o", plan, "-e", "2", "-b", "512")
    assert qm(*build, "--bucket-edges", "256", "--overflow-max", "256") == 0
    capsys.readouterr()
    planned = sft("planned", "--batchplan", plan)
    direct = sft("direct", "--epochs", "2", "--token-budget", "512", "--max-length", "256")
    assert planned["steps"] == direct["steps"]
    assert curve(tmp_path / "planned") == curve(tmp_path / "direct")
    assert same(weights(tmp_path / "planned"), weights(tmp_path / "direct"))


def test_a_plan_for_other_data_or_another_tokenizer_is_refused(
    rows: Path, tiny_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, plan = tmp_path / "lengths.bin", tmp_path / "plan"
    assert qm("data", "lengths", "build", "-d", rows, "-t", tiny_lm, "-o", cache) == 0
    assert qm("data", "batchplan", "build", "-l", cache, "-o", plan, "-d", rows) == 0
    train = ("train", "sft", "--model", tiny_lm, "--batchplan", plan, "--output", tmp_path / "out")
    edited = pairs(24)
    edited[3]["response"] = "other" + edited[3]["response"][5:]
    assert qm(*train, "--data", write_rows(tmp_path / "edited.jsonl", edited)) == 2
    assert "the plan was made for data set" in capsys.readouterr().err
    other = save_tokenizer(tmp_path / "other", ["quite different words"], vocab_size=270)
    assert qm(*train, "--data", rows, "--tokenizer", other) == 2
    assert "the plan was made for tokenizer" in capsys.readouterr().err
    assert qm(*train, "--data", rows, "--epochs", "5") == 2
    assert "the plan has 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_stream_resumes_within_its_window(sft: Any, tmp_path: Path) -> None:
    flags = ("--stream", "--stream-window", "10", "--max-steps", "9", "--save-interval", "4", "--max-length", "128")
    sft("stream", *flags)
    sft("again", "--resume", tmp_path / "stream" / "checkpoints" / "step_8.pt")
    assert same(weights(tmp_path / "stream"), weights(tmp_path / "again"))


def test_adapters_are_trained_alone_and_merged(sft: Any, tiny_lm: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    flags = ("--use-lora", "--lora-rank", "2", "--gradient-checkpointing", "--epochs", "1", "--save-interval", "3")
    report = sft("lora", *flags, "--lora-targets", "q_proj,v_proj")
    assert report["last_loss"] < report["first_loss"]
    before, after = load_file(Path(tiny_lm) / "model.safetensors"), weights(tmp_path / "lora")
    changed = {name.split(".")[-2] for name in after if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "v_proj"}
    state = torch.load(tmp_path / "lora" / "checkpoints" / "step_3.pt", weights_only=True)
    assert all("lora" in name for name in state["weights"])
    sft("again", "--resume", tmp_path / "lora" / "checkpoints" / "step_3.pt")
    assert same(after, weights(tmp_path / "again"))


def test_frozen_layers_stay(sft: Any, tiny_lm: str, tmp_path: Path) -> None:
    sft("frozen", "--freeze-layers", "1", "--epochs", "1")
    before, after = load_file(Path(tiny_lm) / "model.safetensors"), weights(tmp_path / "frozen")
    stayed = {name for name in after if torch.equal(before[name], after[name])}
    assert {name for name in after if ".layers.0." in name} < stayed
    assert not any(".layers.1." in name for name in stayed)


def test_bfloat16_learns_too(sft: Any) -> None:
    report = sft("bf16", "--dtype", "bfloat16", "--epochs", "1")
    assert report["last_loss"] < report["first_loss"]


RANKS = """
import sys
from query_mutator.commands.main import main
sys.exit(main(sys.argv[1:]))
"""


def run_ranks(world_size: int, port: int, argv: list[str]) -> None:
    root = str(Path(__file__).parents[4])
    processes = []
    for rank in range(world_size):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ = os.environ | {name: str(value) for name, value in place.items()} | {"PYTHONPATH": root}
        processes.append(subprocess.Popen([sys.executable, "-c", RANKS, *argv], env=environ))
    assert [process.wait(250) for process in processes] == [0] * world_size


@pytest.mark.slow
def test_two_ranks_have_the_loss_curve_of_one_process(
    sft: Any, rows: Path, tiny_lm: str, tmp_path: Path, free_port: int
) -> None:
    flags = ["--epochs", "2", "--batch-size", "3", "--learning-rate", "1e-2"]
    sft("one", *flags, "--gradient-accumulation", "2")
    argv = ["train", "sft", "--model", tiny_lm, "--data", str(rows), "--output", str(tmp_path / "two")]
    run_ranks(2, free_port, [*argv, *flags, "--gradient-accumulation", "1", "--eval-data", str(rows)])
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), abs=1e-5)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data", ""], "--dataset '' is empty"),
        (["--pack", "--bucket-edges", "64"], "packed rows have no buckets"),
        (["--bucket-edges", "64,1024"], "--bucket-edges end at 1024, above --max-length 512; raise --max-length"),
        (["--batchplan", "x", "--pack"], "--batchplan fixes the batches"),
        (["--config", "nowhere"], "nowhere: No such file or directory; --config takes"),
        (["--stream"], "the length of a stream is unknown; give the number of steps with --max-steps"),
        (["--online"], "--online learns from a gym: leave out --data"),
        (["--max-length", "16"], "samples are longer than 16 tokens"),
        (["--max-length", "9000", "--overlong", "drop", "--tokenizer", "bytes"], None),
        (["--freeze-layers", "9"], "--freeze-layers 9: the model has 2 layers"),
        (["--use-lora", "--lora-targets", "nothing"], "--lora-targets nothing: Target modules"),
        (["--model", "/nowhere"], "tokenizer '/nowhere'"),
        (["--model", "/nowhere", "--tokenizer", "bytes"], "--model '/nowhere'"),
        (["--device", "tpu9"], "--device tpu9 cannot be used"),
        (["--resume", "nowhere"], "--resume nowhere: no such file"),
        (["--learning-rate", "0"], "lr=0.0 must be above 0"),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str], said: str | None, rows: Path, tiny_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = () if "--stream" in flags else ("--max-steps", "1")
    code = qm("train", "sft", "--model", tiny_lm, "--data", rows, "--output", tmp_path / "out", *stop, *flags)
    err = capsys.readouterr().err
    if said is None:
        assert code == 0
        return
    assert code == 2
    assert said in err
    assert err.startswith("qm: ")
    assert err.strip().count("\n") == 0


def test_a_finished_run_is_not_overwritten(
    sft: Any, rows: Path, tiny_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sft("out", "--max-steps", "1")
    assert qm("train", "sft", "--model", tiny_lm, "--data", rows, "--output", tmp_path / "out") == 2
    assert "holds a run" in capsys.readouterr().err


def test_ids_beyond_the_vocabulary_are_refused(
    rows: Path, tiny_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "ids.jsonl", [{"id": 1, "input_ids": [5, 4000, 6]}])
    assert qm("train", "sft", "--model", tiny_lm, "--data", data, "--output", tmp_path / "out") == 2
    assert "the data have token id 4000, the model knows 320" in capsys.readouterr().err


def test_flags_from_a_file(sft: Any, tmp_path: Path) -> None:
    (tmp_path / "flags.json").write_text(json.dumps({"max_steps": 2, "batch_size": 3, "pack": True}))
    assert sft("out", "--config", tmp_path / "flags.json")["steps"] == 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["flags"]["pack"] is True
