"""A language model of a few thousand weights and its tokenizer, made from nothing, saved as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PAD, END = "<pad>", "</s>"
TEXTS = (
    "how do i sort my list",
    "how do i stop the process",
    "count how often a word occurs",
    "join path parts",
    "### Instruction: ### Response: ### User: ### Assistant:",
)


def new_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Any:
    """Return a byte-level BPE tokenizer trained on texts, for transformers; it can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END
    )


def new_llama(tokenizer: Any, *, positions: int, seed: int = 0) -> Any:
    """Return a Llama of two layers with random weights for a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def save_scratch(folder: Path, tokenizer: Any, model: Any) -> Path:
    """Save both as transformers does and return the folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
        model = new_llama(tokenizer, positions=positions, seed=seed)
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
