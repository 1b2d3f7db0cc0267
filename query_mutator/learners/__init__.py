"""Learners: one base class, of PPO, IQN, the direct method, a plan, and a plugin's.

learner.py     the base classes `Learner` and, for your own, `BaseLearner`
named.py       learners by name
ppo.py         PPO (the algorithm is in the top-level `ppo`)
iqn/           implicit quantile networks, off-policy, with a replay buffer
direct.py      fitted Q iteration with boosted trees (trees.py)
plan.py        a fixed order of operators
"""

__all__ = ["iqn", "learner", "named", "plan", "ppo"]
