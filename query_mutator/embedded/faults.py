"""Scripted faults: which calls fail, and how, as a function of the request and how often it came.

Kinds, by where they strike:

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
from query_mutator.registry import nearest

KINDS = ("500", "503", "reset", "stall", "cut", "empty", "incomplete")


class FaultPlan:
    """Lets a seeded `share` of all calls fail, with the `kinds` equally often.

    The draw depends on the seed, the request's bytes and which attempt it is, on nothing else: the order in which calls
    arrive does not matter, and a repeated request may succeed. A client that sends X-Stainless-Retry-Count says itself
    which attempt it makes, so that faults outlive its end; for another it is how often the bytes came before.
    """

    def __init__(self, share: float, *, kinds: Sequence[str] = KINDS, seed: int = 0) -> None:
        if not 0 <= share <= 1:
            raise UsageError(f"the share of faults must be between 0 and 1, not {share}")
        for kind in kinds:
            if kind not in KINDS:
                near = nearest(kind, KINDS)
                hint = f" (did you mean {near!r}?)" if near else ""
                raise UsageError(f"unknown fault {kind!r}{hint}; known: {', '.join(KINDS)}")
        if not kinds:
            raise UsageError(f"name at least one kind of fault: {', '.join(KINDS)}")
        self.share = share
        self.kinds = tuple(kinds)
        self.seed = seed
        self._attempts: Counter[bytes] = Counter()

    def pick(self, body: bytes, *, attempt: int | None = None) -> str | None:
        """Return the kind of fault for the request that just came, or None; counts attempts that are not told."""
        key = hashlib.blake2b(body, digest_size=16).digest()
        if attempt is None:
            attempt = self._attempts[key]
            self._attempts[key] += 1
        draw = hashlib.blake2b(b"%d:%d:" % (self.seed, attempt) + key, digest_size=16).digest()
        if int.from_bytes(draw[:8], "big") >= self.share * 2**64:
            return None
        return self.kinds[int.from_bytes(draw[8:], "big") % len(self.kinds)]
