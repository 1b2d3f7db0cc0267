"""The order of rows in GGUF files, and files that are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from query_mutator.batching.training.model import read_model
from query_mutator.errors import UsageError
from query_mutator.files.gguf_weights import _interleaved, base_of, source_of


def test_halves_of_each_head_alternate() -> None:
    matrix = np.arange(2 * 6).repeat(2).reshape(12, 2)  # two heads of six rows
    assert _interleaved(matrix, heads=2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_a_model_is_a_folder_or_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "w.gguf").write_bytes(b"GGUF")
    assert base_of(str(tmp_path)) == base_of(str(tmp_path / "w.gguf")) == tmp_path / "w.gguf"
    assert source_of("some/name") == ("some/name", {})
    assert base_of("some/name") is None
    folder, of_gguf = source_of("smollm2")
    assert (Path(folder) / of_gguf["gguf_file"]).is_file()


@pytest.mark.parametrize(("content", "said"), [(b"", "not a GGUF file"), (b"GGUF", "no chat template")])
def test_what_is_no_model_is_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "w.gguf").write_bytes(content)
    with pytest.raises(UsageError, match=said):
        read_model(str(tmp_path / "w.gguf"))
