"""Local tests of the bundled operators: a rewrite that would change nothing costs no call.

With the embedded rewriter the rules themselves decide, so nothing is missed. A language model may change a question
that a rule keeps; for it only the two tests are made that are facts about a text: no unknown word, no known slang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import cache, lru_cache

from query_mutator.embedded.rules import Lexicon, Phrasebook, Task, make_rules
from query_mutator.embedded.rules.text import words
from query_mutator.encoder import english_ranks
from query_mutator.operators import Operator, PromptOperator, names

__all__ = ["RULES", "with_local_tests"]

TESTED_TEXTS = 16_384  # remembered for each operator
#: Operators whose rule reads the question alone and takes well under a millisecond.
RULES = ("spelling", "slang", "terms", "neutral", "filler", "imperative", "keywords", "first_part", "grammar")


def with_local_tests(operators: Sequence[Operator], *, vocabulary: Set[str], by_rules: bool) -> tuple[Operator, ...]:
    """Return the operators, those of the package with a local test; `by_rules`: the mutator is the embedded rewriter.

    Operators of plugins keep what they declare.
    """
    tests = _rule_tests(vocabulary) if by_rules else _text_tests(vocabulary)
    bundled = set(names())
    return tuple(
        replace(operator, test=lru_cache(TESTED_TEXTS)(tests[operator.name]))
        if isinstance(operator, PromptOperator) and operator.name in tests.keys() & bundled and operator.test is None
        else operator
        for operator in operators
    )


@cache
def _phrasebook() -> Phrasebook:
    """Return the phrasebook without an encoder, once: reading it takes a third of a second."""
    return Phrasebook()


def _rule_tests(vocabulary: Set[str]) -> dict[str, Callable[[str], bool]]:
    rules = make_rules(Lexicon(vocabulary, english_ranks()), _phrasebook())

    def test_of(name: str) -> Callable[[str], bool]:
        def changes(text: str) -> bool:
            rewritten = rules[name](Task(question=text)).strip()
            return bool(rewritten) and rewritten.lower() != text.lower()

        return changes

    return {name: test_of(name) for name in RULES}


def _text_tests(vocabulary: Set[str]) -> dict[str, Callable[[str], bool]]:
    slang = _rule_tests(vocabulary)["slang"]
    known = vocabulary | english_ranks().keys()

    def has_unknown_word(text: str) -> bool:
        return any(word not in known for word in words(text))

    return {"spelling": has_unknown_word, "slang": slang}
