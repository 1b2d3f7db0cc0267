"""`qm train sft` from end to end: models, plans, packs, losses, resume, adapters, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from benchmarks.attack.harness import unchanged
from query_mutator.batching import (
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    PackingConfig,
    PackingMode,
    load_tokenizer,
)
from query_mutator.batching.training.sources import Microbatch, PlanSource, TokenData, read_tokens
from query_mutator.batching.training.trainer import Stepper, cosine_lr, read_model, to_tensors, token_losses
from query_mutator.errors import CheckpointError, UsageError
from query_mutator.files import read_json_lines
from query_mutator.files.gguf_file import source_of
from tests.integration.llama_server import write_gguf
from tests.qm_command import qm
from tests.tiny_lm import pairs, save_model, save_tokenizer, write_rows


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
    build = ("data", "batchplan", "build", "-l", cache, "-o", plan, "-e", "2", "-b", "512")
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
    assert qm("data", "batchplan", "build", "-l", cache, "-o", plan) == 0
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


def test_frozen_layers_stay_and_bfloat16_learns_too(sft: Any, tiny_lm: str, tmp_path: Path) -> None:
    report = sft("frozen", "--freeze-layers", "1", "--epochs", "1", "--dtype", "bfloat16")
    assert report["last_loss"] < report["first_loss"]
    before, after = load_file(Path(tiny_lm) / "model.safetensors"), weights(tmp_path / "frozen")
    stayed = {name for name in after if torch.equal(before[name], after[name])}
    assert {name for name in after if ".layers.0." in name} < stayed
    assert not any(".layers.1." in name for name in stayed)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data", ""], "--dataset '' is empty"),
        (["--pack", "--bucket-edges", "64"], "packed rows have no buckets"),
        (["--bucket-edges", "64,1024"], "--bucket-edges end at 1024, above --max-length 512; raise --max-length"),
        (["--batchplan", "x", "--pack"], "--batchplan fixes the batches"),
        (["--config", "nowhere"], "nowhere: No such file or directory; a file of flags"),
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
    run = ("train", "sft", "--model", tiny_lm, "--data", rows, "--output", tmp_path / "out", "--max-steps", "1")
    code = qm(*run, *flags)
    err = capsys.readouterr().err
    if said is None:
        assert code == 0
        return
    assert code == 2
    assert said in err
    assert err.startswith("qm: ")
    assert err.strip().count("\n") == 0


def test_ids_beyond_the_vocabulary_are_refused(
    rows: Path, tiny_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "ids.jsonl", [{"id": 1, "input_ids": [5, 4000, 6]}])
    assert qm("train", "sft", "--model", tiny_lm, "--data", data, "--output", tmp_path / "out") == 2
    assert "the data have token id 4000, the model knows 320" in capsys.readouterr().err


def test_a_gguf_file_is_a_base_and_the_finished_model_a_folder(tmp_path: Path) -> None:
    data, run = write_rows(tmp_path / "rows.jsonl", pairs(4)), tmp_path / "run"
    flags = ("--batch-size", "4", "--max-steps", "1", "--out", run)
    assert qm("train", "sft", "--model", write_gguf(tmp_path), "--dataset", data, *flags) == 0
    assert read_model(str(run / "model")).config.model_type == "llama"
    tokenizer, base = load_tokenizer(str(run / "model")), load_tokenizer(str(tmp_path / "tiny.gguf"))
    assert tokenizer.encode("sort the list") == base.encode("sort the list")


def test_a_gguf_file_that_does_not_fit_into_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path)
    monkeypatch.setattr("os.sysconf", lambda name: 1)
    with pytest.raises(UsageError, match=r"--model .* GB; give a smaller model"):
        read_model(str(path))
    monkeypatch.undo()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match="no model can be read from it"):
        read_model(str(path))


def test_a_model_is_a_folder_or_a_gguf_file(tmp_path: Path) -> None:
    assert source_of("some/name") == ("some/name", {})
    folder, of_gguf = source_of("smollm2")
    assert (Path(folder) / of_gguf["gguf_file"]).is_file()
    for content, said in ((b"", "not a GGUF file"), (b"GGUF", "no chat template")):
        (tmp_path / "w.gguf").write_bytes(content)
        with pytest.raises(UsageError, match=said):
            read_model(str(tmp_path / "w.gguf"))


def test_code_in_a_folder_is_not_run_and_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("asked on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    folder, ran = save_model(tmp_path / "model"), tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": classes}))
    with pytest.raises(UsageError, match="no model can be read"):
        read_model(str(folder))
    load_tokenizer(str(folder))
    assert not ran.exists()


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_lm: str) -> TokenData:
    path = write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", pairs(24))
    return read_tokens(str(path), load_tokenizer(tiny_lm), mask_prompt=True)


def plan_of(data: TokenData, packing: PackingConfig | None = None, **settings: Any) -> BatchPlan:
    config = BatchingConfig.throughput(
        **{"token_budget": 512, "bucket_edges": (128,), "overflow_max": 128, "seed": 3} | settings
    )
    return BatchPlanBuilder(data.lengths, config, pack_config=packing).build_sync(1)


def microbatches(plan: BatchPlan, data: TokenData) -> list[Microbatch]:
    return [one for step in PlanSource(plan, data.rows).steps() for one in step]


def losses_by_sample(model: Any, batches: list[Microbatch]) -> dict[str, list[float]]:
    """Return the losses of each sample's learned tokens, in their order."""
    found: dict[str, list[float]] = {}
    for one in batches:
        batch = one.collated(0)
        with torch.no_grad():
            losses = token_losses(model, to_tensors(batch, CPU)).numpy()
        learned = batch.labels[:, 1:] != -100
        rows = one.spec.packs or [(name,) for name in one.spec.samples]
        for row, names in enumerate(rows):
            segments = np.zeros(batch.input_ids.shape[1], int) if batch.segment_ids is None else batch.segment_ids[row]
            for number, name in enumerate(names):
                found[name] = losses[row][learned[row] & (segments[1:] == number)].tolist()
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_packed_and_padded_rows_give_the_same_losses(data: TokenData, kind: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path, kind=kind)).eval()
    padded = losses_by_sample(model, microbatches(plan_of(data), data))
    packing = PackingConfig(mode=PackingMode.GREEDY, max_length=200)
    packed = losses_by_sample(model, microbatches(plan_of(data, packing, overflow_max=200), data))
    assert padded.keys() == packed.keys() == data.rows.keys()
    for name, losses in padded.items():
        assert len(losses) == np.count_nonzero(data.rows[name].loss_mask[1:])
        assert packed[name] == pytest.approx(losses, abs=1e-5)


def test_a_checkpoint_of_another_plan_is_refused(data: TokenData) -> None:
    state = PlanSource(plan_of(data), data.rows).state_dict()
    with pytest.raises(CheckpointError, match="the same data and flags"):
        PlanSource(plan_of(data, seed=7), data.rows).load_state_dict(state)


class SmallMemory(LlamaForCausalLM):
    """A Llama on a card that holds 8 tokens."""

    limit = 8

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:  # type: ignore[override]
        output = super().forward(input_ids, **inputs)
        if input_ids.numel() > self.limit:
            output.logits.register_hook(self._run_out)  # it is the backward pass that fails
        return output

    @staticmethod
    def _run_out(gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def stepper_of(model: Any) -> tuple[Stepper, torch.optim.Optimizer]:
    stepper = Stepper(model, pad_id=0, device=CPU, bf16=False, max_grad_norm=1.0)
    return stepper, torch.optim.SGD(stepper.parameters, lr=0.5)


def test_a_batch_that_does_not_fit_is_an_error_that_says_what_to_try(data: TokenData, tiny_lm: str) -> None:
    stepper, optimizer = stepper_of(SmallMemory.from_pretrained(tiny_lm))
    with pytest.raises(UsageError, match=r"rows of \d+ tokens does not fit into memory; .*--gradient-accumulation"):
        stepper.step(microbatches(plan_of(data), data)[:1], optimizer)


def test_gradients_weigh_every_token_alike(data: TokenData, tiny_lm: str) -> None:
    """Two batches of unlike size in one step give the gradient of their tokens in one batch."""
    gradients = []
    for budget in (4096, 256):
        plan = plan_of(data, token_budget=budget)
        stepper, optimizer = stepper_of(LlamaForCausalLM.from_pretrained(tiny_lm))
        before = [one.detach().clone() for one in stepper.parameters]
        stepper.step(microbatches(plan, data), optimizer)
        gradients.append([old - new for old, new in zip(before, stepper.parameters, strict=True)])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*gradients, strict=True))


def test_the_step_size_rises_and_falls() -> None:
    sizes = [cosine_lr(step, 10, peak=1.0, warmup_ratio=0.2) for step in range(11)]
    assert sizes[:3] == [0.5, 1.0, 1.0]
    assert sizes[6] == pytest.approx(0.5)
    assert sizes[10] == pytest.approx(0.0)
    assert sizes[2:] == sorted(sizes[2:], reverse=True)
    assert cosine_lr(0, 1, peak=2.0, warmup_ratio=0.0) == 2.0
