"""A model made from nothing whose first weights copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.scratch_lm import new_llama, new_tokenizer
from tests.tiny_lm import TEXTS


def copied(*, copies: bool) -> float:
    """Return how often a new model continues a text that comes a second time as it went on the first."""
    tokenizer = new_tokenizer(TEXTS, vocab_size=320)
    model: Any = new_llama(tokenizer, width=64, layers=2, heads=2, positions=128, copies=copies)
    torch.manual_seed(0)
    text = torch.stack([torch.randperm(300)[:24] for _ in range(16)])  # [16, 24], no token twice
    with torch.no_grad():
        logits = model(input_ids=torch.cat([text, text], dim=1)).logits
    return float((logits[:, 24:-1].argmax(-1) == text[:, 1:]).float().mean())


def test_the_first_weights_copy() -> None:
    assert copied(copies=True) > 0.9
    assert copied(copies=False) < 0.1


def test_one_layer_cannot_copy() -> None:
    with pytest.raises(ValueError, match="needs two layers"):
        new_llama(new_tokenizer(TEXTS, vocab_size=320), width=64, layers=1, heads=2, positions=128, copies=True)
