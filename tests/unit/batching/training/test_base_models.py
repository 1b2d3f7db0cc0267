"""The files of a model to train: a GGUF file, what is none, and a folder whose code is not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from query_mutator.batching.tokenizers import load_tokenizer
from query_mutator.batching.training.model import read_model
from query_mutator.errors import UsageError
from query_mutator.files.gguf_file import source_of
from tests.integration.llama_server import write_gguf
from tests.qm_command import qm
from tests.tiny_lm import pairs, save_model, write_rows


def test_a_gguf_file_is_a_base_and_the_finished_model_a_folder(tmp_path: Path) -> None:
    data, run = write_rows(tmp_path / "rows.jsonl", pairs(4)), tmp_path / "run"
    flags = ("--batch-size", "4", "--max-steps", "1", "--out", run)
    assert qm("train", "sft", "--model", write_gguf(tmp_path), "--dataset", data, *flags) == 0
    assert read_model(str(run / "model")).config.model_type == "llama"
    tokenizer, base = load_tokenizer(str(run / "model")), load_tokenizer(str(tmp_path / "tiny.gguf"))
    assert tokenizer.encode("sort the list") == base.encode("sort the list")


def test_a_model_is_a_folder_or_a_gguf_file() -> None:
    assert source_of("some/name") == ("some/name", {})
    folder, of_gguf = source_of("smollm2")
    assert (Path(folder) / of_gguf["gguf_file"]).is_file()


@pytest.mark.parametrize(("content", "said"), [(b"", "not a GGUF file"), (b"GGUF", "no chat template")])
def test_what_is_no_model_is_one_line(content: bytes, said: str, tmp_path: Path) -> None:
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
