"""Make a small Llama and its tokenizer from nothing, where no pretrained model is at hand; used here and by the tests.

With `copies` its first weights are an induction head (Olsson et al. 2022, arXiv:2209.11895), which repeats what it has
read; small models need thousands of steps to find this. The first half of the state holds the current token. In layer 0
a head attends to the previous token and writes it into the second half. In layer 1 a head attends to the position whose
second half equals this first half, the one after the same token, and copies the token there.

    d width, h dimensions of a head (h >= d / 2), h/2 rotary frequencies
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

PAD, END = "<pad>", "</s>"

LOOK_BACK = 120.0  # logits by which the first head prefers the token before, if all its frequencies were the fastest
MATCH = 20.0  # logits by which the second prefers the place after the same token
PASS_ON = 4.0  # weight of the copied token compared with the current one
FAST, SLOW = 0.15, 0.02  # radians a token: a frequency above FAST separates neighbors, one below SLOW ignores distance


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


def new_llama(
    tokenizer: Any, *, width: int, layers: int, heads: int, positions: int, seed: int = 0, copies: bool = False
) -> Any:
    """Return a Llama with random weights for a tokenizer; its MLP is four times as wide, embeddings are tied.

    With `copies` its heads are as wide as the model, its MLP twice as wide, and its first weights copy.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

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
        _start_copying(model)
    return model


def save_scratch(folder: Path, tokenizer: Any, model: Any) -> Path:
    """Save both as transformers does and return the folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _start_copying(model: Any) -> None:
    """Set weights that copy in a new Llama of two layers or more with attention biases; ValueError for another one."""
    config = model.config
    half, size = config.hidden_size // 2, config.head_dim
    if config.num_hidden_layers < 2 or size < half or not config.attention_bias:
        raise ValueError("a model that copies needs two layers, heads of at least half its width, attention biases")
    speeds = config.rope_parameters["rope_theta"] ** (-torch.arange(size // 2) / (size // 2))  # [h/2]
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    with torch.no_grad():
        tokens = model.get_input_embeddings().weight
        tokens[:, :half].normal_(0.0, half**-0.5)
        tokens[:, half:] = 0.0
        _look_back(first, size, speeds)
        _match(second, size, speeds)
        _pass(first, size, scale=(2 * half) ** -0.5, into=slice(half, 2 * half))
        _pass(second, size, scale=PASS_ON * half**-0.5, into=slice(0, half))


def _look_back(attention: Any, size: int, speeds: torch.Tensor) -> None:
    """Make head 0 attend to the previous token, whatever it is: with biases that rotary positions align."""
    fast = (speeds > FAST).float()
    strength = (LOOK_BACK * size**0.5 / fast.sum()).sqrt() * fast
    attention.q_proj.weight[:size] = attention.k_proj.weight[:size] = 0.0
    attention.k_proj.bias[:size] = torch.cat([strength, torch.zeros_like(strength)])
    attention.q_proj.bias[:size] = torch.cat([strength * speeds.cos(), -strength * speeds.sin()])


def _match(attention: Any, size: int, speeds: torch.Tensor) -> None:
    """Make head 0 attend where the second half equals the current first half, in dimensions that ignore distance."""
    half = attention.q_proj.in_features // 2
    slow = torch.where(torch.cat([speeds, speeds]) < SLOW)[0]
    pick = torch.nn.init.orthogonal_(torch.empty(len(slow), half))
    pick *= (MATCH * size**0.5 / min(len(slow), half)) ** 0.5  # each half of a normalised state has length d/2
    for projection, part in ((attention.q_proj, slice(0, half)), (attention.k_proj, slice(half, 2 * half))):
        projection.weight[:size] = 0.0
        projection.weight[slow, part] = pick


def _pass(attention: Any, size: int, *, scale: float, into: slice) -> None:
    """Make head 0 write the first half of the state it attends to into one half of its own state."""
    half = attention.q_proj.in_features // 2
    carry = torch.eye(size, half)
    attention.v_proj.weight[:size] = 0.0
    attention.v_proj.weight[:size, :half] = carry * scale
    attention.o_proj.weight[:, :size] = 0.0
    attention.o_proj.weight[into, :size] = carry.T
