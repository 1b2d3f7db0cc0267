"""How long a call to the embedded server takes, so that it can simulate a model of any speed.

Log-normal around a mean: with sigma s the factor is exp(s z - s^2 / 2), which has mean 1 for every s.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist

from query_mutator.errors import UsageError

__all__ = ["Latency"]

#: Seconds one call takes at running speed 1.
RUNNING_SPEED_ONE_S = 16.0

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """The total time of one call in its slot, computation included; equal prompts and seeds take equal time."""

    mean_s: float = 0.0
    sigma: float = 0.0
    seed: int = 0

    @classmethod
    def from_settings(cls, *, latency_ms: float, sigma: float, running_speed: float, seed: int = 0) -> Latency:
        """Return the latency of `--latency-ms`, or of `--running-speed` X: 16 s / X per call; 0 adds none.

        Raises UsageError for both at once.
        """
        if latency_ms and running_speed:
            raise UsageError("latency_ms and running_speed both set how long a call takes; give one of them")
        mean_s = RUNNING_SPEED_ONE_S / running_speed if running_speed else latency_ms / 1000
        return cls(mean_s=mean_s, sigma=sigma, seed=seed)

    def total_s(self, prompt: str) -> float:
        """Return the seconds a call with this prompt takes."""
        if self.mean_s == 0 or self.sigma == 0:
            return self.mean_s
        z = _NORMAL.inv_cdf(_uniform(f"{self.seed}\0{prompt}"))
        return self.mean_s * math.exp(self.sigma * z - self.sigma**2 / 2)


def _uniform(key: str) -> float:
    """Return a number strictly between 0 and 1, a hash of `key`."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**64
