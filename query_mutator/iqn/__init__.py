"""Implicit quantile networks: an off-policy learner that uses every transition many times.

    config.py      IQNFlags, CollectorFlags, BanditFlags: the flags; IQNConfig: settings of a learner
    network.py     QuantileNetwork (torch, learns) and FrozenQuantiles (numpy, acts)
    loss.py        quantile_huber_loss, one figure a sample
    nstep.py       NStep: steps of each environment -> n-step transitions
    replay.py      Replay: prioritised replay with importance weights
    steps.py       Steps: what environments hand to a learner
    learner.py     IQN, which holds network, target, replay, optimizer, schedules and random streams

`python -m query_mutator.iqn --env CartPole-v1` trains and evaluates. Importing this package or `iqn.config` loads no
torch.
"""
