"""First weights that copy: an induction head (Olsson et al. 2022, arXiv:2209.11895) given to a Llama, not found by it.

The first half of the state holds the token being read. In layer 0 a head looks one token back and writes what it sees
into the second half. In layer 1 a head looks for the place whose second half is this first half, which is the place
after the same token, and passes on what stands there. Small models find this in thousands of steps.

d width, h dimensions of a head (h >= d / 2), h/2 rotary frequencies.
"""

from __future__ import annotations

from typing import Any

import torch

LOOK_BACK = 120.0  # logits by which the first head prefers the token before, were all its frequencies the fastest
MATCH = 20.0  # logits by which the second prefers the place after the same token
PASS_ON = 4.0  # how much what is copied weighs beside what is being read
FAST, SLOW = 0.15, 0.02  # radians a token: above these a frequency tells neighbours apart, below it ignores distance


def start_copying(model: Any) -> None:
    """Give a new Llama of at least two layers, with attention biases, weights that copy; others are a ValueError."""
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
    """Make head 0 look one token back, whatever stands there: biases that rotary positions bring together."""
    fast = (speeds > FAST).float()
    strength = (LOOK_BACK * size**0.5 / fast.sum()).sqrt() * fast
    attention.q_proj.weight[:size] = attention.k_proj.weight[:size] = 0.0
    attention.k_proj.bias[:size] = torch.cat([strength, torch.zeros_like(strength)])
    attention.q_proj.bias[:size] = torch.cat([strength * speeds.cos(), -strength * speeds.sin()])


def _match(attention: Any, size: int, speeds: torch.Tensor) -> None:
    """Make head 0 look where the second half is what the first is here, in dimensions that distance leaves alone."""
    half = attention.q_proj.in_features // 2
    slow = torch.where(torch.cat([speeds, speeds]) < SLOW)[0]
    pick = torch.nn.init.orthogonal_(torch.empty(len(slow), half))
    pick *= (MATCH * size**0.5 / min(len(slow), half)) ** 0.5  # each half of a normalised state has length d/2
    for projection, part in ((attention.q_proj, slice(0, half)), (attention.k_proj, slice(half, 2 * half))):
        projection.weight[:size] = 0.0
        projection.weight[slow, part] = pick


def _pass(attention: Any, size: int, *, scale: float, into: slice) -> None:
    """Make head 0 write the first half of the state it looks at into a half of its own."""
    half = attention.q_proj.in_features // 2
    carry = torch.eye(size, half)
    attention.v_proj.weight[:size] = 0.0
    attention.v_proj.weight[:size, :half] = carry * scale
    attention.o_proj.weight[:, :size] = 0.0
    attention.o_proj.weight[into, :size] = carry.T
