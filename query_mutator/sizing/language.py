"""Language models to size: those that `qm train sft` fine-tunes, a sentence encoder, BERT.

Built from their published shapes with transformers, weights drawn at random: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from query_mutator.errors import UsageError
from query_mutator.sizing.memory import Workload

#: Shapes of causal models: layers, width, heads, key heads, feed-forward width, vocabulary, family
CAUSAL = {
    "smollm2-135m": (30, 576, 9, 3, 1536, 49152, "llama"),
    "smollm2-360m": (32, 960, 15, 5, 2560, 49152, "llama"),
    "qwen2.5-0.5b": (24, 896, 14, 2, 4864, 151936, "qwen2"),
    "llama-3.2-1b": (16, 2048, 32, 8, 8192, 128256, "llama"),
    "qwen2.5-1.5b": (28, 1536, 12, 2, 8960, 151936, "qwen2"),
}


def causal(name: str, *, tokens: int = 512) -> Workload:
    """Return the fine-tuning of a causal language model on rows of so many tokens."""
    layers, width, heads, key_heads, wide, vocabulary, family = CAUSAL[name]
    sizes = {
        "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "vocab_size": vocabulary,
        "num_key_value_heads": key_heads, "intermediate_size": wide, "tie_word_embeddings": True, "use_cache": False,
        "attn_implementation": "sdpa",
    }  # fmt: skip

    def build() -> nn.Module:
        transformers = _transformers()
        kind = {"llama": "Llama", "qwen2": "Qwen2"}[family]
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
        return model

    def loss(module: nn.Module, ids: Tensor) -> Tensor:
        found: Tensor = module(input_ids=ids, labels=ids).loss
        return found

    return Workload(
        name=f"{name}, {tokens} tokens",
        build=build,
        batch=lambda size: (torch.randint(0, vocabulary, (size, tokens)),),
        loss=loss,
    )


def bert_large(*, tokens: int = 512) -> Workload:
    """Return the fine-tuning of bert-large-uncased as a classifier of two classes."""
    return _bert("bert-large", tokens, layers=24, width=1024, heads=16)


def minilm(*, tokens: int = 128) -> Workload:
    """Return the fine-tuning of the sentence encoder all-MiniLM-L6-v2 with a classifier on top."""
    return _bert("minilm", tokens, layers=6, width=384, heads=12)


def _bert(name: str, tokens: int, *, layers: int, width: int, heads: int) -> Workload:
    def build() -> nn.Module:
        transformers = _transformers()
        config = transformers.BertConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            attn_implementation="eager",
        )
        model: nn.Module = transformers.BertForSequenceClassification(config)
        return model

    def loss(module: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = module(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        return found

    return Workload(
        name=f"{name}, {tokens} tokens",
        build=build,
        batch=lambda size: (torch.randint(0, 30522, (size, tokens)), torch.randint(0, 2, (size,))),
        loss=loss,
    )


def by_name() -> dict[str, Callable[..., Workload]]:
    """Return all of them by name; each takes `tokens`."""
    made: dict[str, Callable[..., Workload]] = {name: partial(causal, name) for name in CAUSAL}
    return {**made, "bert-large": bert_large, "minilm": minilm}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UsageError("language models are sized with transformers: pip install transformers") from None
    return transformers
