"""The mutator that needs no language model: it carries out each rewrite operator with the rules in `rules/`.

It gets the same prompt as a language model and recognizes the operator by its marker line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set

from query_mutator.embedded.digests import digest_of
from query_mutator.embedded.models import PromptError
from query_mutator.embedded.rules import DOMAIN, Lexicon, Phrasebook, Task, make_rules
from query_mutator.encoder import Encoder, english_ranks

__all__ = ["RuleRewriter"]

_MARKER = re.compile(r"^\[operator: ([\w-]+)\]\s*$", re.MULTILINE)
#: Reply to a prompt that is not a rewrite at all, such as a probe of the server's speed.
HELP = "I carry out the rewrite operators {known}; the first line of a prompt names one as [operator: NAME]."


class RuleRewriter:
    """Rewrites questions by rule; thread-safe, less than a millisecond for most questions."""

    name = "rule-rewriter"

    def __init__(
        self,
        vocabulary: Set[str],
        words: Set[str] | Mapping[str, int] | None = None,
        *,
        encoder: Encoder | None = None,
    ) -> None:
        """Take the corpus vocabulary, English words (with ranks, 0 the most frequent) and an encoder for similarity."""
        words = english_ranks() if words is None else words
        self._rules = make_rules(Lexicon(vocabulary, words), Phrasebook(encoder))
        #: Names of the operators that have a rule.
        self.operators: tuple[str, ...] = tuple(self._rules)
        ranked = words.items() if isinstance(words, Mapping) else words
        weights = encoder.fingerprint if encoder is not None else ""
        known = (repr(sorted(vocabulary)), repr(sorted(ranked)), weights)
        self.digest = digest_of(*known, sources=("rewriter.py", "word_index.py", "rules"))

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        """Return the rewritten question for each prompt, in order."""
        return [self.reply(prompt) for prompt in prompts]

    def reply(self, prompt: str) -> str:
        """Return the rewritten question, or the original question where the rule has nothing to change.

        Raise PromptError for an operator without a rule and for a prompt without a question.
        """
        marker = _MARKER.search(prompt)
        question = _between(prompt, "question") or _between(prompt, "answer")
        if marker is None and question is None:
            return HELP.format(known=", ".join(self.operators))
        operator = marker[1] if marker else ""
        if operator not in self._rules:
            raise PromptError(self._unknown(operator))
        if question is None:
            raise PromptError(f"the prompt of operator {operator!r} has no text between <question> and </question>")
        task = Task(
            question=question,
            neighbor=_between(prompt, "neighbour"),
            domain=_between(prompt, "domain") or DOMAIN,
        )
        rewritten = self._rules[operator](task).strip()
        return rewritten if rewritten and rewritten.lower() != question.lower() else question

    def _unknown(self, operator: str) -> str:
        prompt = f"operator {operator!r}" if operator else "a prompt without a line [operator: NAME]"
        return (
            f"{self.name} cannot carry out {prompt} (it has rules for {', '.join(self.operators)}); "
            "use a language model as --mutator-model, or leave the operator out of --operators"
        )


def _between(prompt: str, tag: str) -> str | None:
    """Return the text of the last <tag>…</tag> block, or None where it is missing or empty."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start, end = prompt.find(opening), prompt.rfind(closing)
    if start < 0 or end < start:
        return None
    return prompt[start + len(opening) : end].strip() or None
