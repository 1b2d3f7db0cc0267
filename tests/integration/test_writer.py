"""A language model that learns to write the wording, from one GGUF file into another."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from query_mutator.llm.hf import local_models
from query_mutator.types import ChatRequest
from tests.integration.live_plans import plan_file
from tests.qm_command import qm
from tests.tiny_lm import write_rows

QUESTION, WORDING = "wat is teh captial of Portugl", "What is the capital of Portugal?"


@pytest.mark.slow
def test_smollm2_learns_a_wording_and_llama_cpp_serves_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": WORDING}]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": turns}] * 4)
    flags = ["--use-lora", "--lr", "5e-3", "--epochs", "6", "--batch-size", "4", "--warmup-ratio", "0"]
    assert qm("train", "sft", "--model", "smollm2", "--dataset", rows, "--out", tmp_path / "run", *flags) == 0
    model, gguf = tmp_path / "run" / "model", tmp_path / "run" / "model" / "run.gguf"
    assert f"--gguf TARGET {gguf}" in capsys.readouterr().out
    (local,) = local_models(f"hf:{model}")
    with closing(local):
        assert local.complete(ChatRequest.user(QUESTION, model=local.name, max_tokens=16)).text == WORDING
    models = ("smollm2", str(gguf))
    plan = plan_file(tmp_path, ("write",), gguf=models, operators="write", target_max_tokens=8)
    assert qm("rewrite", QUESTION, "--checkpoint", plan, "--gguf", *models, "--json", "-") == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["submitted"], row["calls"]) == (WORDING, 2)
