"""Stop a run when too many calls fail for good."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from query_mutator.errors import TooManyFailuresError

WINDOW_STEPS = 100


class FailureWindow:
    """Counts invalid steps among the last `size`; raises TooManyFailuresError above `max_rate`.

    `why` returns the most common failure for the message.
    """

    def __init__(
        self, max_rate: float, *, size: int = WINDOW_STEPS, why: Callable[[], str] = str, unit: str = "steps"
    ) -> None:
        self._max_rate = max_rate
        self._failed: deque[bool] = deque(maxlen=size)
        self._why = why
        self._unit = unit

    def add(self, valid: NDArray[np.bool_]) -> None:
        """Count steps; `valid` [n] is False for those whose calls failed."""
        self._failed.extend((~valid).tolist())
        failed, size = sum(self._failed), self._failed.maxlen or 0
        if len(self._failed) == size and failed > self._max_rate * size:
            raise TooManyFailuresError(
                f"calls failed for good in {failed} of the last {size} {self._unit}{self._why()}; check the server, "
                f"or allow more with --max-failure-rate"
            )
