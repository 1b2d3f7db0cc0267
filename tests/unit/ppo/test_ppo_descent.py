"""FlatAdam: the same steps as torch's Adam on separate parameters with torch's clipping."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from ppo.descent import FlatAdam
from ppo.policy import Policy


def a_loss(policy: Policy, step: int) -> torch.Tensor:
    obs = torch.randn(32, 5, generator=torch.Generator().manual_seed(step))
    logits, values = policy(obs)
    return (logits[:, 0] - obs[:, 0]).square().mean() + (values - 3).square().mean()


@pytest.mark.parametrize("max_grad_norm", [0.1, 1e6])
def test_it_takes_torchs_steps(max_grad_norm: float) -> None:
    ours, torchs = Policy(5, 3, (8, 8), seed=1), Policy(5, 3, (8, 8), seed=1)
    flat = FlatAdam(ours, lr=1e-2, max_grad_norm=max_grad_norm)
    adam = torch.optim.Adam(torchs.parameters(), lr=1e-2, eps=1e-5)
    for step in range(20):
        norms = flat.gradient_step(a_loss(ours, step))
        adam.zero_grad()
        a_loss(torchs, step).backward()
        wanted = torch.nn.utils.clip_grad_norm_(torchs.parameters(), max_grad_norm)
        adam.step()
        torch.testing.assert_close(norms.before, wanted, rtol=1e-4, atol=0)
        torch.testing.assert_close(norms.after, wanted.clamp(max=max_grad_norm), rtol=1e-4, atol=0)
    for one, other in zip(ours.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_making_it_changes_no_weight() -> None:
    policy, twin = Policy(5, 3, seed=1), Policy(5, 3, seed=1)
    FlatAdam(policy, lr=1e-2, max_grad_norm=1.0)
    assert all(torch.equal(one, other) for one, other in zip(policy.parameters(), twin.parameters(), strict=True))


def test_loaded_weights_and_state_go_on_alike() -> None:
    first = Policy(5, 3, seed=1)
    ahead = FlatAdam(first, lr=1e-2, max_grad_norm=1.0)
    for step in range(3):
        ahead.gradient_step(a_loss(first, step))
    second = Policy(5, 3, seed=2)
    behind = FlatAdam(second, lr=1e-3, max_grad_norm=1.0)
    second.load_state_dict(first.state_dict())
    behind.load_state_dict(deepcopy(ahead.state_dict()))
    for policy, optimizer in ((first, ahead), (second, behind)):
        optimizer.gradient_step(a_loss(policy, 3))
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))


def test_a_smaller_step_size_takes_a_smaller_step() -> None:
    moved = []
    for lr in (1e-2, 1e-3):
        policy = Policy(5, 3, seed=1)
        optimizer = FlatAdam(policy, lr=1.0, max_grad_norm=1.0)
        optimizer.set_lr(lr)
        before = policy.critic_head.bias.detach().clone()
        optimizer.gradient_step(a_loss(policy, 0))
        moved.append((policy.critic_head.bias - before).abs().item())
    assert moved == pytest.approx([1e-2, 1e-3], rel=1e-2)
