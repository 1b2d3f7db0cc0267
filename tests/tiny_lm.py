"""A language model of a few thousand weights and its tokenizer, made from nothing, saved as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scratch_lm import new_llama, new_tokenizer, save_scratch

TEXTS = (
    "how do i sort my list",
    "how do i stop the process",
    "count how often a word occurs",
    "join path parts",
    "### Instruction: ### Response: ### User: ### Assistant:",
)


def save_tokenizer(folder: Path, texts: Iterable[str] = TEXTS, *, vocab_size: int = 320) -> Path:
    """Train a byte-level BPE tokenizer and save it for AutoTokenizer."""
    new_tokenizer(texts, vocab_size=vocab_size).save_pretrained(folder)
    return folder


def save_model(
    folder: Path, *, kind: str = "llama", seed: int = 0, positions: int = 256, endless: bool = False
) -> Path:
    """Save a Llama or GPT-2 with random weights and the tokenizer into one folder; an `endless` one never says END."""
    tokenizer = new_tokenizer(TEXTS, vocab_size=320)
    model = tiny_gpt2(len(tokenizer))
    if kind == "llama":
        model = new_llama(tokenizer, width=32, layers=2, heads=4, positions=positions, seed=seed)
    if endless:
        model.generation_config.suppress_tokens = [tokenizer.eos_token_id]
    return save_scratch(folder, tokenizer, model)


def tiny_gpt2(vocab_size: int) -> Any:
    """Return a GPT-2 of two layers with random weights."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, **shape))


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pairs(count: int, *, longest: int = 12) -> list[dict[str, Any]]:
    """Return instruction and response rows of many lengths, no two equal."""
    words = " ".join(TEXTS[:4]).split()
    rows = []
    for number in range(count):
        size = 1 + number * 7 % longest
        asked = " ".join(words[(number + place) % len(words)] for place in range(size))
        answer = " ".join(reversed(asked.split()))
        rows.append({"id": f"r{number}", "instruction": f"{asked} {number}", "response": answer})
    return rows
