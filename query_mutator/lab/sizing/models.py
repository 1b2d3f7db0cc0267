"""The models to size by name: small classics, and language models with random weights; nothing is downloaded.

B samples, T tokens
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from query_mutator.errors import UsageError
from query_mutator.lab.sizing.workload import Workload
from query_mutator.registry import check_known

__all__ = ["MODELS", "gpt", "model"]

#: Shapes of causal models: layers, width, heads, key heads, feed-forward width, vocabulary, class in transformers
CAUSAL = {
    "smollm2-135m": (30, 576, 9, 3, 1536, 49152, "LlamaForCausalLM"),
    "smollm2-360m": (32, 960, 15, 5, 2560, 49152, "LlamaForCausalLM"),
    "qwen2.5-0.5b": (24, 896, 14, 2, 4864, 151936, "Qwen2ForCausalLM"),
    "llama-3.2-1b": (16, 2048, 32, 8, 8192, 128256, "LlamaForCausalLM"),
    "qwen2.5-1.5b": (28, 1536, 12, 2, 8960, 151936, "Qwen2ForCausalLM"),
}
#: Shapes of encoders (all-MiniLM-L6-v2, bert-large-uncased): layers, width, heads, tokens of a row unless given
BERTS = {"bert-large": (24, 1024, 16, 512), "minilm": (6, 384, 12, 128)}
_BERT_VOCABULARY = 30522


def model(name: str, **sizes: Any) -> Workload:
    """Return a model with the sizes given; UsageError for an unknown name or a size that it does not have."""
    check_known("preset", name, MODELS)
    for size in sizes:
        takers = [other for other, make in MODELS.items() if size in inspect.signature(make).parameters]
        if name not in takers:
            raise UsageError(f"--{size} is not for {name}" + (f"; it is for {', '.join(takers)}" if takers else ""))
    return MODELS[name](**sizes)


def _cross_entropy(module: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(module(x).flatten(0, -2), target.flatten())


def mlp() -> Workload:
    """Return the training of an MLP 4096-2048-2048-2048-2048-10."""
    widths = (4096, 2048, 2048, 2048, 2048, 10)
    return Workload(
        name="mlp",
        build=lambda: nn.Sequential(
            *[part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())][:-1]
        ),
        batch=lambda size: (torch.randn(size, 4096), torch.randint(0, 10, (size,))),
        loss=_cross_entropy,
    )


# --- a GPT ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, width]."""
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, width)
        x = x + self.out(seen)
        more: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + more


class GPT(nn.Module):
    """A decoder-only language model."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, vocabulary]."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def gpt(*, tokens: int = 256, layers: int = 6, width: int = 384, heads: int = 6, vocabulary: int = 256) -> Workload:
    """Return the training of a small GPT."""
    return Workload(
        name="gpt",
        build=lambda: GPT(layers=layers, width=width, heads=heads, vocabulary=vocabulary, tokens=tokens),
        batch=lambda size: tuple(torch.randint(0, vocabulary, (size, tokens)) for _ in range(2)),
        loss=_cross_entropy,
    )


# --- language models --------------------------------------------------------------------------------------------------


def causal(name: str, *, tokens: int = 512) -> Workload:
    """Return the fine-tuning of a causal language model on rows of `tokens` tokens."""
    layers, width, heads, key_heads, feed_forward, vocabulary, kind = CAUSAL[name]
    sizes = {
        "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "vocab_size": vocabulary,
        "num_key_value_heads": key_heads, "intermediate_size": feed_forward, "tie_word_embeddings": True,
        "use_cache": False, "attn_implementation": "sdpa",
    }  # fmt: skip
    return Workload(
        name=f"{name}, {tokens} tokens",
        build=lambda: _built(kind, sizes),
        batch=lambda size: (torch.randint(0, vocabulary, (size, tokens)),),
        loss=lambda module, ids: module(input_ids=ids, labels=ids).loss,
    )


def bert(name: str, *, tokens: int | None = None) -> Workload:
    """Return the fine-tuning of an encoder with a classifier of two classes on top."""
    layers, width, heads, usual_tokens = BERTS[name]
    length = tokens or usual_tokens
    sizes = {
        "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width,
        "attn_implementation": "eager",
    }  # fmt: skip
    return Workload(
        name=f"{name}, {length} tokens",
        build=lambda: _built("BertForSequenceClassification", sizes),
        batch=lambda size: (torch.randint(0, _BERT_VOCABULARY, (size, length)), torch.randint(0, 2, (size,))),
        loss=lambda module, ids, labels: module(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss,
    )


def _built(kind: str, sizes: dict[str, object]) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise UsageError("language models are sized with transformers: pip install transformers") from None
    found = getattr(transformers, kind)
    made: nn.Module = found(found.config_class(**sizes))
    return made


MODELS: dict[str, Callable[..., Workload]] = {
    "mlp": mlp,
    "gpt": gpt,
    **{name: partial(causal, name) for name in CAUSAL},
    **{name: partial(bert, name) for name in BERTS},
}
