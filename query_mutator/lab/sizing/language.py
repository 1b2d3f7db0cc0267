"""Language models to size: those that `qm train sft` fine-tunes, a sentence encoder, BERT.

Built from their published shapes with transformers and random weights; nothing is downloaded.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from query_mutator.errors import UsageError
from query_mutator.lab.sizing.workload import Workload

__all__ = ["LANGUAGE_MODELS", "bert", "causal"]

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
        build=lambda: _model(kind, sizes),
        batch=lambda size: (torch.randint(0, vocabulary, (size, tokens)),),
        loss=lambda module, ids: module(input_ids=ids, labels=ids).loss,
    )


def bert(name: str, *, tokens: int | None = None) -> Workload:
    """Return the fine-tuning of an encoder with a classifier of two classes on top."""
    layers, width, heads, usual_tokens = BERTS[name]
    tokens = tokens or usual_tokens
    sizes = {
        "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width,
        "attn_implementation": "eager",
    }  # fmt: skip
    return Workload(
        name=f"{name}, {tokens} tokens",
        build=lambda: _model("BertForSequenceClassification", sizes),
        batch=lambda size: (torch.randint(0, _BERT_VOCABULARY, (size, tokens)), torch.randint(0, 2, (size,))),
        loss=lambda module, ids, labels: module(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss,
    )


def _model(kind: str, sizes: dict[str, object]) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise UsageError("language models are sized with transformers: pip install transformers") from None
    model = getattr(transformers, kind)
    made: nn.Module = model(model.config_class(**sizes))
    return made


#: Every language model by name; each takes `tokens`
LANGUAGE_MODELS = {name: partial(causal, name) for name in CAUSAL} | {name: partial(bert, name) for name in BERTS}
