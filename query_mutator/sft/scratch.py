"""A small model from nothing, where no pretrained one is at hand: a tokenizer trained on texts, a Llama of any size."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAD, END = "<pad>", "</s>"


def new_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Any:
    """Return a byte-level BPE tokenizer trained on texts, as transformers uses it; it knows every text there is."""
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


def new_llama(
    tokenizer: Any, *, width: int, layers: int, heads: int, positions: int, seed: int = 0, copies: bool = False
) -> Any:
    """Return a Llama with random weights for a tokenizer; its MLP is four times as wide, embeddings are tied.

    With `copies` its heads are as wide as the model, its MLP twice, and it begins as one that repeats what it read.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from query_mutator.sft.induction import start_copying

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=(2 if copies else 4) * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        head_dim=width if copies else width // heads,
        attention_bias=copies,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    if copies:
        start_copying(model)
    return model


def save_scratch(folder: Path, tokenizer: Any, model: Any) -> Path:
    """Save both as transformers does and return the folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
