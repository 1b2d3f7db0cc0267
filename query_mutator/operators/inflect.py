"""English inflection for glossaries: the forms of verbs and nouns, and the stems of an inflected word."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from query_mutator.operators.english import grammar, lines_of

__all__ = ["Forms", "forms", "plural", "stems"]

VOWELS = "aeiou"

#: Verbs of several syllables that double their last consonant ("cancelled").
_STRESSED_LAST = grammar("stressed-last")


_SUFFIXES = (
    ("ies", ("y",)),
    ("es", ("", "e")),
    ("s", ("",)),
    ("'s", ("",)),
    ("s'", ("",)),
    ("ing", ("", "e")),
    ("ied", ("y",)),
    ("ed", ("", "e")),
)


class Forms(NamedTuple):
    """The five forms of a verb."""

    base: str
    third: str  # kills
    gerund: str  # killing
    past: str  # killed
    participle: str  # killed


@cache
def _irregular() -> dict[str, Forms]:
    rows = (line.split("\t") for line in lines_of("irregular.tsv"))
    return {row[0]: Forms(*row) for row in rows}


@cache
def forms(verb: str) -> Forms:
    """Return the forms of a verb; of a phrase ("get rid of") the first word is inflected."""
    first, _, rest = verb.partition(" ")
    found = _irregular().get(first) or _regular(first)
    return Forms(*(f"{form} {rest}" for form in found)) if rest else found


def _regular(verb: str) -> Forms:
    if verb.endswith(("s", "x", "z", "ch", "sh", "o")):
        third = f"{verb}es"
    elif verb.endswith("y") and verb[-2:-1] not in VOWELS:
        third = f"{verb[:-1]}ies"
    else:
        third = f"{verb}s"
    stem = verb + verb[-1] if _doubles(verb) else verb
    gerund, past = f"{stem}ing", f"{stem}ed"
    if verb.endswith("e"):
        drops_e = not verb.endswith(("ee", "oe", "ye"))
        gerund, past = f"{verb[:-1]}ing" if drops_e else f"{verb}ing", f"{verb}d"
    elif verb.endswith("y") and verb[-2:-1] not in VOWELS:
        gerund, past = f"{verb}ing", f"{verb[:-1]}ied"
    return Forms(verb, third, gerund, past, past)


def _doubles(verb: str) -> bool:
    if len(verb) < 3 or verb[-1] in "aeiouwxyhc" or verb[-2] not in VOWELS or verb[-3] in VOWELS:
        return False
    syllables = sum(
        letter in "aeiouy" and before not in "aeiouy" for before, letter in zip(f" {verb}", verb, strict=False)
    )
    return syllables == 1 or verb in _STRESSED_LAST


@cache
def plural(noun: str) -> str:
    """Return the plural of a noun; of a phrase the last word is inflected."""
    head, _, last = noun.rpartition(" ")
    if last.endswith(("s", "x", "z", "ch", "sh")):
        found = f"{last}es"
    elif last.endswith("y") and last[-2:-1] not in VOWELS:
        found = f"{last[:-1]}ies"
    else:
        found = f"{last}s"
    return f"{head} {found}" if head else found


@cache
def stems(word: str) -> tuple[str, ...]:
    """Return the words that `word` may be an inflection of, most likely first, and `word` itself."""
    found = [word]
    for suffix, repairs in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 2:
            stem = word[: -len(suffix)]
            found += [stem + repair for repair in repairs]
            if len(stem) > 2 and stem[-1] == stem[-2] and suffix != "s":
                found.append(stem[:-1])
    return tuple(dict.fromkeys(found))
