"""What counts as named by this user."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from query_mutator.errors import UnnamedError
from query_mutator.session.trust import check_reach, remember, trusted_path, unnamed


@pytest.fixture(autouse=True)
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a user who has named nothing."""
    path = tmp_path / "config" / "trusted.jsonl"
    monkeypatch.setenv("QUERY_MUTATOR_TRUSTED", str(path))
    monkeypatch.delenv("OLLAMA_HOST", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    return path


@pytest.mark.parametrize(
    "stored",
    [
        {"ollama_url": ("http://127.0.0.1:11434",)},  # where Ollama is unless something else is said
        {"encoder": "all-MiniLM-L6-v2"},
        {"encoder": "ollama:nomic-embed-text"},
        {"mutator_model": "llama3.2"},
        {"dataset": "reference_tables"},
        {"dataset": "data/questions.jsonl"},
        {"judge_rubric": "Is it right?\n"},
        {"save_dir": "runs"},
        {"ollama_url": None, "gguf": (), "openai_url": "", "target_model": "anything"},
    ],
)
def test_a_setting_that_stays_here_needs_no_name(stored: Mapping[str, Any]) -> None:
    assert unnamed(stored, {}) == []


@pytest.mark.parametrize(
    "stored",
    [
        {"openai_url": "http://127.0.0.1:11434/v1"},  # Ollama's own place, but it would get the key
        {"ollama_url": ["http://127.0.0.1:11434", "http://example.com"]},
        {"dataset": "../questions.jsonl"},
        {"dataset": "~/questions.jsonl"},
        {"dataset": "hf:stranger/questions"},
        {"save_dir": "/srv/runs"},
    ],
)
def test_a_setting_that_reaches_out_is_named_with_its_flag(stored: Mapping[str, Any]) -> None:
    ((name, value),) = unnamed(stored, {})
    with pytest.raises(UnnamedError, match=f"stranger.qm names .* --{name.replace('_', '-')} ") as caught:
        check_reach(stored, source="stranger.qm")
    assert value in str(caught.value)
    assert str(trusted_path()) in str(caught.value)
    check_reach(stored, source="stranger.qm", named=stored)
    remember(stored)
    check_reach(stored, source="stranger.qm")


def test_an_address_is_the_same_however_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    remember({"openai_url": "https://example.com"})
    assert unnamed({"openai_url": "https://example.com:443/v1/"}, {}) == []
    assert unnamed({"openai_url": "https://example.com/other"}, {})
    assert unnamed({"openai_url": "http://example.com"}, {})
    monkeypatch.setenv("OLLAMA_HOST", "10.0.0.7")
    assert unnamed({"ollama_url": "http://10.0.0.7:11434"}, {}) == []


def test_a_damaged_file_of_trust_trusts_only_what_can_be_read(trusted: Path) -> None:
    remember({"gguf": "/models/m.gguf"}, plugins=["", "ab"])
    trusted.write_bytes(b'\xff\n[1]\n{"a": 1}\n[1, 2]\n' + trusted.read_bytes() + b'["gguf", "/oth')
    assert unnamed({"gguf": "/models/m.gguf"}, {}) == []
    assert unnamed({"gguf": "/oth"}, {})
    assert b'"plugin",""' not in trusted.read_bytes()


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUERY_MUTATOR_TRUSTED", str(tmp_path / "file" / "trusted.jsonl"))
    remember({"gguf": "/models/m.gguf"})
    assert "name servers and plugins again" in caplog.text
