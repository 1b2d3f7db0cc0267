"""The rewrite rules behind the operators, with their glossaries as data files.

`make_rules` returns the rule of every operator by name: a function from a `Task` to a rewritten question. It takes the
known words (`Lexicon`) and the technical phrases (`Phrasebook`). Only `embedded/rewriter.py` imports this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from query_mutator.embedded.rules.filler import Filler
from query_mutator.embedded.rules.imperative import Imperative
from query_mutator.embedded.rules.inflect import stems
from query_mutator.embedded.rules.lexicon import Lexicon
from query_mutator.embedded.rules.neutral import Neutral
from query_mutator.embedded.rules.phrasebook import Phrasebook
from query_mutator.embedded.rules.phrases import PhraseTable
from query_mutator.embedded.rules.simple import Merge, add_context, first_part, keywords, repair
from query_mutator.embedded.rules.slang import Slang
from query_mutator.embedded.rules.spelling import Spelling
from query_mutator.embedded.rules.tables import load_words
from query_mutator.embedded.rules.text import words

DOMAIN = "Python's standard library"

__all__ = ["DOMAIN", "Lexicon", "Phrasebook", "Rule", "Task", "make_rules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The input of a rule."""

    question: str
    neighbor: str | None = None
    domain: str = DOMAIN


Rule = Callable[[Task], str]

#: Rules that drop or add words, and could lose whom a question is about.
BLURRING = ("imperative", "keywords", "merge")


def make_rules(lexicon: Lexicon, phrasebook: Phrasebook) -> Mapping[str, Rule]:
    """Return the rule of every operator by name; add the rule of a new operator here."""
    slang, terms, neutral = Slang(lexicon), PhraseTable.load("terms.tsv"), Neutral(lexicon)
    # Glossary words are known words: "nuke" is not a slip for "nike".
    spelling = Spelling(lexicon, keep=slang.glossary | terms.words() | neutral.glossary() | load_words("crimes.txt"))
    of_question: dict[str, Callable[[str], str]] = {
        "spelling": spelling,
        "slang": slang,
        "terms": terms.apply,
        "neutral": neutral,
        "filler": Filler(lexicon),
        "imperative": Imperative(lexicon),
        "keywords": keywords,
        "first_part": first_part,
        "grammar": repair,
        "expand": phrasebook.expand,
        "phrase": phrasebook.alone,
    }
    rules: dict[str, Rule] = {name: _on_question(rule) for name, rule in of_question.items()}
    rules["context"] = lambda task: add_context(task.question, task.domain)
    merge = Merge(clean=lambda text: neutral(spelling(text)))
    rules["merge"] = lambda task: merge(task.question, task.neighbor)
    return rules | {name: _unless_about_people(rules[name]) for name in BLURRING}


def _unless_about_people(rule: Rule) -> Rule:
    """Return a rule that keeps questions which name a person, an animal or property."""
    living = load_words("living.txt")

    def carry_out(task: Task) -> str:
        is_about_people = any(stem in living for word in words(task.question) for stem in stems(word))
        return task.question if is_about_people else rule(task)

    return carry_out


def _on_question(rule: Callable[[str], str]) -> Rule:
    return lambda task: rule(task.question)
