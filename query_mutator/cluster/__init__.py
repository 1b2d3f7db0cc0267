"""Several machines: sweeps, evaluations and rollouts over Ray (https://docs.ray.io), with the extra `[ray]`.

`connection` connects to a cluster or starts a local one, `jobs` runs a sweep's trials as Ray tasks, `rollouts` collects
rollouts in Ray actors. Imports training, evaluation, sweep and what lies below them. Nothing imports Ray until a
command asks for `--engine ray`.
"""

from __future__ import annotations

__all__: list[str] = []
