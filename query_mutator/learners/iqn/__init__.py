"""Implicit quantile networks: an off-policy learner that replays every transition many times.

    learner.py     QuantileNetwork, its loss, and IQN, which holds network, target, replay, optimizer and random streams
    frozen.py      FrozenQuantiles: a snapshot of a network for inference, with numpy
    replay.py      NStep: steps of each environment -> n-step transitions; Replay: prioritized replay of them

Importing this package or `iqn.frozen` loads no torch.
"""

__all__ = ["frozen", "learner", "replay"]
