"""What the tokens of a run cost, at the prices that a user gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from query_mutator.report.page.questions import Evaluation

__all__ = ["Price", "Tokens", "cost_of"]

_MILLION = 1e6
_QUESTIONS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Prices per million tokens of prompts and of replies, in any currency."""

    prompt: float
    reply: float

    def of(self, tokens: Tokens) -> float | str:
        """Return the cost of tokens; its bounds, in words, where the replies' part of them is unknown."""
        if tokens.reply is not None:
            return ((tokens.total - tokens.reply) * self.prompt + tokens.reply * self.reply) / _MILLION
        low, high = sorted(tokens.total * price / _MILLION for price in (self.prompt, self.reply))
        return low if low == high else f"{low:.4g} to {high:.4g}; the replies' part of the tokens was not logged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of prompts and replies together, and those of the replies, None where they were not logged."""

    total: float
    reply: float | None


def cost_of(
    price: Price, *, training: Tokens, summary: Mapping[str, Any], evaluation: Evaluation
) -> dict[str, float | str]:
    """Return the costs by name: the training, its evaluations, and each method for 1,000 questions."""
    found: dict[str, float | str] = {
        "price of a million prompt tokens": price.prompt,
        "price of a million reply tokens": price.reply,
        "training": price.of(training),
    }
    if "eval_tokens" in summary:
        tokens = Tokens(total=summary["eval_tokens"], reply=summary["eval_reply_tokens"])
        found["evaluations"] = price.of(tokens)
    for method in evaluation.methods:
        each = evaluation.tokens(method)
        if each is not None:
            reply = None if each[1] is None else _QUESTIONS * each[1]
            found[f"{method}, 1,000 questions"] = price.of(Tokens(total=_QUESTIONS * each[0], reply=reply))
    return found
