"""Scripted faults: which calls fail, and how, as a function of the request and its attempt.

Kinds, by when they happen:

    before the model works   500         an error reply
                             503         "server busy"
                             reset       the connection is reset
    while it holds its slot  stall       no reply until the client gives up
    in the reply             cut         JSON that stops in the middle
                             empty       a reply without text
                             incomplete  `done: false`
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from query_mutator.errors import UsageError
from query_mutator.registry import check_known

__all__ = ["KINDS", "FaultPlan"]

KINDS = ("500", "503", "reset", "stall", "cut", "empty", "incomplete")


class FaultPlan:
    """Makes a seeded `share` of all calls fail, each of the `kinds` equally often.

    The draw depends only on the seed, the request's bytes and the attempt: the order of calls does not matter, and a
    retried request may succeed. The attempt is the header X-Stainless-Retry-Count, so that a client that restarts gets
    the same faults; without the header it is the number of times the same bytes came before.
    """

    def __init__(self, share: float, *, kinds: Sequence[str] = KINDS, seed: int = 0) -> None:
        if not 0 <= share <= 1:
            raise UsageError(f"faults={share} is out of range; the share of failing calls must be between 0 and 1")
        for kind in kinds:
            check_known("fault", kind, KINDS)
        if not kinds:
            raise UsageError(f"name at least one kind of fault: {', '.join(KINDS)}")
        self.share = share
        self.kinds = tuple(kinds)
        self.seed = seed
        self._attempts: Counter[bytes] = Counter()

    def pick(self, body: bytes, *, attempt: int | None = None) -> str | None:
        """Return the kind of fault for a request, or None; without `attempt`, count the request's attempts here."""
        key = hashlib.blake2b(body, digest_size=16).digest()
        if attempt is None:
            attempt = self._attempts[key]
            self._attempts[key] += 1
        draw = hashlib.blake2b(b"%d:%d:" % (self.seed, attempt) + key, digest_size=16).digest()
        if int.from_bytes(draw[:8], "big") >= self.share * 2**64:
            return None
        return self.kinds[int.from_bytes(draw[8:], "big") % len(self.kinds)]
