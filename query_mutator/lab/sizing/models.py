"""The models to size by name: an MLP, and language models with random weights (sizes.toml); nothing is downloaded.

B samples, T tokens
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from query_mutator.errors import UsageError
from query_mutator.lab.sizing.sizes import TABLES, Workload
from query_mutator.registry import check_known

__all__ = ["MODELS", "model"]

MODELS = ("mlp", *TABLES["language"])
_WIDTHS = (4096, 2048, 2048, 2048, 2048, 10)  # of the MLP


def model(name: str, **sizes: Any) -> Workload:
    """Return a model with the sizes given; UsageError for an unknown name or a size that it does not have."""
    check_known("preset", name, MODELS)
    for size in sizes:
        if name == "mlp" or size != "tokens":
            raise UsageError(f"--{size} is not for {name}")
    return _mlp() if name == "mlp" else language_model(name, **TABLES["language"][name] | sizes)


def _mlp() -> Workload:
    return Workload(
        name="mlp",
        build=lambda: nn.Sequential(
            *[part for pair in pairwise(_WIDTHS) for part in (nn.Linear(*pair), nn.ReLU())][:-1]
        ),
        batch=lambda size: (torch.randn(size, 4096), torch.randint(0, 10, (size,))),
        loss=lambda module, x, target: F.cross_entropy(module(x), target),
    )


def language_model(name: str, *, model: str, tokens: int, config: dict[str, Any]) -> Workload:
    """Return the fine-tuning of a model of transformers on rows of T tokens; an encoder gets a classifier on top."""
    is_encoder = model.endswith("Classification")

    def batch(size: int) -> tuple[Tensor, ...]:
        ids = torch.randint(0, config["vocab_size"], (size, tokens))
        return (ids, torch.randint(0, 2, (size,))) if is_encoder else (ids,)

    def loss(module: nn.Module, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        mask = {"attention_mask": torch.ones_like(ids)} if is_encoder else {}
        found: Tensor = module(input_ids=ids, labels=ids if labels is None else labels, **mask).loss
        return found

    return Workload(name=f"{name}, {tokens} tokens", build=lambda: _built(model, config), batch=batch, loss=loss)


def _built(name: str, config: dict[str, Any]) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise UsageError("language models are sized with transformers: pip install transformers") from None
    found = getattr(transformers, name)
    made: nn.Module = found(found.config_class(**config))
    return made
