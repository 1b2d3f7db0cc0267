"""A language model of a few thousand weights and its tokenizer, made from nothing, saved as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

TEXTS = (
    "how do i sort my list",
    "how do i stop the process",
    "count how often a word occurs",
    "join path parts",
    "### Instruction: ### Response: ### User: ### Assistant:",
)


def save_tokenizer(folder: Path, texts: Iterable[str] = TEXTS, *, vocab_size: int = 320) -> Path:
    """Train a byte-level BPE tokenizer and save it for AutoTokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    fast.save_pretrained(folder)
    return folder


def save_model(folder: Path, *, kind: str = "llama", seed: int = 0, **settings: Any) -> Path:
    """Save a Llama or GPT-2 with random weights and the tokenizer into one folder."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, set_seed

    save_tokenizer(folder)
    set_seed(seed)
    torch.manual_seed(seed)
    size = 384
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            **settings,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    else:
        small = GPT2Config(
            vocab_size=size, n_embd=32, n_layer=2, n_head=4, n_positions=256,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **settings,
        )  # fmt: skip
        GPT2LMHeadModel(small).save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pairs(count: int, *, longest: int = 12) -> list[dict[str, Any]]:
    """Return instruction and response rows of many lengths, no two alike."""
    words = " ".join(TEXTS[:4]).split()
    rows = []
    for number in range(count):
        size = 1 + number * 7 % longest
        asked = " ".join(words[(number + place) % len(words)] for place in range(size))
        rows.append(
            {"id": f"r{number}", "instruction": f"{asked} {number}", "response": " ".join(reversed(asked.split()))}
        )
    return rows
