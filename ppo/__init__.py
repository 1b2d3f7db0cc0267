"""Proximal policy optimization for any discrete-action gymnasium vector environment.

    config.py      PPOConfig: every hyperparameter, checked; other libraries' names are aliases
    fields.py      bounds of a config's fields, defaults that a subclass changes, and their flags
    policy.py      Policy: the networks that train, with torch
    frozen.py      FrozenPolicy: a snapshot of them for inference, with numpy
    rollout.py     RolloutBuffer [T, N], filled in lock-step or in any order
    gae.py         compute_gae: advantages and returns
    loss.py        ppo_loss: clipped ratio, clipped value, entropy
    algorithm.py   FlatAdam, ppo_update and PPO, which holds policy, optimizer, schedule and random streams
    collect.py     RolloutCollector: steps a vector environment into a buffer
    checkpoint.py  save and load without pickled code

`python -m ppo --env CartPole-v1` trains and evaluates. Importing this package, `ppo.config` or `ppo.frozen` loads no
torch.
"""

__all__ = ["algorithm", "checkpoint", "collect", "config", "fields", "frozen", "gae", "loss", "policy",
    "rollout",
]  # fmt: skip
