"""Glossaries come from the corpus, general knowledge and the training questions: no key serves test questions alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

import pytest

from query_mutator.data import python_docs, split_questions
from query_mutator.embedded.corpus import load_corpus, split_identifier
from query_mutator.embedded.rules.neutral import load_verbs
from query_mutator.embedded.rules.phrases import GAP, NUMBER, match_key, spell_out
from query_mutator.embedded.rules.tables import load_rows
from query_mutator.embedded.rules.text import tokens

GLOSSARIES = ("slang.tsv", "terms.tsv", "synonyms.tsv", "neutral_phrases.tsv")
Key = tuple[str, ...]


def rows_of(name: str) -> Iterator[tuple[str, tuple[Key, ...]]]:
    """Yield each key of a glossary with the ways it can be written."""
    if name == "neutral_verbs.tsv":
        written = defaultdict(set)
        for verbs, _ in load_rows(name):
            for verb in verbs.split():
                written[verb] |= {phrase.key for phrase in spell_out(verb.replace("_", " "), "x", "v")}
        yield from ((verb, tuple(keys)) for verb, keys in written.items())
        return
    for row in load_rows(name):
        yield row[0], tuple(phrase.key for phrase in spell_out(*row))


def found_in(keys: Iterable[Key], texts: Iterable[str]) -> set[Key]:
    """Return the keys that match anywhere in the texts."""
    by_first = defaultdict(list)
    for key in keys:
        by_first[key[0]].append(key)
    found: set[Key] = set()
    for parts in map(tokens, texts):
        for at, part in enumerate(parts):
            starting = [*by_first.get(part.lower().replace("’", "'"), ()), *by_first.get(NUMBER, ())]
            found |= {key for key in starting if key not in found and match_key(parts, at, key)}
    return found


@cache
def texts() -> dict[str, tuple[str, ...]]:
    split = split_questions(python_docs())
    corpus = (f"{entry.summary} {' '.join(split_identifier(entry.name))}" for entry in load_corpus().entries)
    return {
        "train": tuple(question.text for question in split.train),
        "test": tuple(question.text for question in split.test),
        "corpus": tuple(corpus),
    }


@pytest.mark.parametrize("name", [*GLOSSARIES, "neutral_verbs.tsv"])
def test_no_glossary_key_is_needed_by_test_questions_only(name: str) -> None:
    rows = list(rows_of(name))
    keys = [key for _, written in rows for key in written]
    in_test = found_in(keys, texts()["test"])
    known = found_in(keys, texts()["train"]) | found_in(keys, texts()["corpus"])
    only_test = sorted(row for row, written in rows if set(written) & in_test and not set(written) & known)
    assert only_test == []


@pytest.mark.parametrize("name", GLOSSARIES)
def test_glossary_rows_are_complete_and_their_keys_differ(name: str) -> None:
    rows = load_rows(name)
    assert all(len(row) == 3 and row[2] in ("v", "n", "-") for row in rows)
    keys = [row[0] for row in rows]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", GLOSSARIES)
def test_a_gap_has_a_word_behind_it_where_the_match_can_end(name: str) -> None:
    gapped = [key for _, written in rows_of(name) for key in written if GAP in key]
    assert all(key[0] != GAP and key[-1] != GAP and key.count(GAP) == 1 for key in gapped)


@pytest.mark.parametrize("name", GLOSSARIES)
def test_no_glossary_brings_in_a_word_that_neutral_would_take_out(name: str) -> None:
    alarming = {verb.key[0] for verbs in load_verbs().values() for verb in verbs if len(verb.key) == 1}
    assert [row for row in load_rows(name) if alarming & set(row[1].lower().split())] == []
