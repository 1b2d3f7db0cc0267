"""Adapters to the interfaces of other trainers' libraries.

    sb3   GymVecEnv, Stable-Baselines3's VecEnv over gymnasium's vector environments

It imports that library, which is not a requirement of this package. gymnasium, torchrl and CleanRL need no adapter
(docs/how-to/use-the-environment.md).
"""

from __future__ import annotations

__all__: list[str] = []
