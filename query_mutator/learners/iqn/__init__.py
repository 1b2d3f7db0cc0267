"""Implicit quantile networks: an off-policy learner that replays every transition many times.

    network.py     QuantileNetwork: the network that trains, with torch, and quantile_huber_loss per sample
    frozen.py      FrozenQuantiles: a snapshot of it for inference, with numpy
    replay.py      NStep: steps of each environment -> n-step transitions; Replay: prioritized replay of them
    learner.py     IQN, which holds network, target, replay, optimizer, schedules and random streams

Importing this package or `iqn.frozen` loads no torch.
"""

__all__ = ["frozen", "learner", "network", "replay"]
