"""Episodes whose actions are chosen uniformly, played by the rules alone: no question is read, no model is asked.

Each call brings another rewrite or answer; an operator without one changes a question once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from query_mutator.env.rules import EpisodeRules
from query_mutator.types import ASK, SUBMIT, UNDO

__all__ = ["Play", "random_play"]

EPISODES = 1000

_Action = int | str  # the number of an operator or form, or a control
_Asked = tuple[tuple[_Action, ...], _Action | None]  # the operators applied to the question, and its form
_ORIGINAL: _Asked = ((), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """Means of an episode."""

    steps: float
    calls: float  # of mutator and target
    answers: float


@lru_cache
def random_play(rules: EpisodeRules, *, asked: int, local: int, forms: int) -> Play:
    """Return what an episode costs with `asked` operators that a model carries out, `local` ones without, and forms."""
    rng, operators = random.Random(0), asked + local
    world = _World(rules, range(asked), range(asked, operators), range(operators, operators + forms))
    played = [world.play(rng) for _ in range(EPISODES)]
    steps, calls, answers = (sum(column) / EPISODES for column in zip(*played, strict=True))
    return Play(steps=steps, calls=calls, answers=answers)


@dataclass(frozen=True, slots=True)
class _World:
    """The rules of an episode, and the numbers of its operators and forms."""

    rules: EpisodeRules
    asked: range
    local: range
    forms: range

    def play(self, rng: random.Random) -> tuple[int, int, int]:
        """Return steps, calls and answers of one episode."""
        rules = self.rules
        now, known, tried = _ORIGINAL, set[_Asked](), set[tuple[object, _Action]]()
        steps = rewrites = 0
        if not rules.policy_asks:
            known.add(now)
        while True:
            action = rng.choice(self.allowed(now, known, tried))
            steps += 1
            if action == UNDO:
                now = _ORIGINAL
            elif action not in (ASK, SUBMIT):
                tried.add((now[0], action))
                is_form = action in self.forms
                rewrites += action in self.asked
                now = (now[0], action) if is_form else ((*now[0], action), now[1])
                if is_form or not rules.policy_asks:
                    known.add(now)
            ends = rules.ends(str(action), steps=steps)
            if action == ASK or (ends and not known):
                known.add(now)
            if ends:
                return steps, rewrites + len(known), len(known)

    def allowed(self, now: _Asked, known: set[_Asked], tried: set[tuple[object, _Action]]) -> list[_Action]:
        """Return the actions that `EpisodeEngine.allows`."""
        rules, (text, form) = self.rules, now
        if rules.max_asks is not None and len(known) >= rules.max_asks:
            return [SUBMIT]
        choices = [*self.asked, *(one for one in self.local if one not in text)]
        choices += [one for one in self.forms if one != form]
        found: list[_Action] = [SUBMIT, *(one for one in choices if (text, one) not in tried)]
        if rules.max_asks != 1:
            found += [UNDO] if now != _ORIGINAL else []
            found += [ASK] if rules.policy_asks and now not in known else []
        return found
