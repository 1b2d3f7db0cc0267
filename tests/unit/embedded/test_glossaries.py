"""Glossaries come from the corpus, general knowledge and the training questions: no key serves test questions alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import resources

import numpy as np
import pytest

from query_mutator.data import python_docs, split_questions
from query_mutator.embedded.corpus import load_corpus, split_identifier
from query_mutator.embedded.filters import has_trigger_word
from query_mutator.embedded.rules.neutral import load_verbs
from query_mutator.embedded.rules.phrasebook import Phrasebook, row_vectors, texts_sha256
from query_mutator.embedded.rules.phrases import GAP, NUMBER, match_key, spell_out
from query_mutator.embedded.rules.tables import load_rows
from query_mutator.embedded.rules.text import tokens, words
from query_mutator.encoder import resolve_encoder

GLOSSARIES = ("slang.tsv", "terms.tsv", "neutral_phrases.tsv")
COPIED_WORDS = 6  # so many words in a row are not shared by chance
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


def runs(text: str) -> set[Key]:
    """Return all runs of COPIED_WORDS words."""
    said = words(text)
    return {tuple(said[at : at + COPIED_WORDS]) for at in range(len(said) - COPIED_WORDS + 1)}


def test_no_phrase_of_the_phrasebook_is_taken_from_a_question() -> None:
    asked = {run for name in ("train", "test") for text in texts()[name] for run in runs(text)}
    assert [phrase for row in load_rows("phrasebook.tsv") for phrase in row if runs(phrase) & asked] == []


def test_phrasebook_has_a_row_for_every_entry_and_no_docstring_in_it() -> None:
    rows = load_rows("phrasebook.tsv")
    summaries = {" ".join(words(entry.summary)) for entry in load_corpus().entries}
    assert all(len(row) == 5 and all(row) for row in rows)
    assert [row[0] for row in rows if "(" in row[0]] == []  # it is put in brackets
    assert len(rows) == len(load_corpus().entries)
    assert [row[0] for row in rows if " ".join(words(row[0])) in summaries] == []


def test_packaged_vectors_are_those_of_the_phrasebook() -> None:
    encoder = resolve_encoder()
    sample = [0, 700, 1499]
    rows = load_rows("phrasebook.tsv")
    packaged = row_vectors(encoder)
    for place in sample:
        term, *everyday = encoder.encode(rows[place])
        mean = 0.5 * term + np.mean(everyday, axis=0)
        assert packaged[place] == pytest.approx(mean / np.linalg.norm(mean), abs=2e-3)
    with np.load(resources.files("query_mutator.embedded.rules") / "phrasebook.npz") as saved:  # type: ignore[arg-type]
        assert str(saved["texts"]) == texts_sha256()


def test_phrasebook_without_an_encoder_goes_by_shared_words() -> None:
    assert Phrasebook().meaning("chop trailing whitespace off the end of a string") is not None
    assert Phrasebook().meaning("xyzzy") is None


@pytest.mark.parametrize(("file", "column"), [("phrasebook.tsv", 0), ("terms.tsv", 1)])
def test_what_is_put_into_a_question_has_no_word_that_the_assistant_refuses(file: str, column: int) -> None:
    assert [row[column] for row in load_rows(file) if has_trigger_word(row[column])] == []
