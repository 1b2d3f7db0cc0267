"""Which words are known: the corpus vocabulary, an English word list, and the field's own words."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import lru_cache

from query_mutator.embedded.rules.inflect import forms, plural, stems
from query_mutator.embedded.rules.phrases import load_words

#: The place given to words that the English list does not rank.
UNRANKED = 30_000


class Lexicon:
    """The words of the corpus and of English; `words` may carry ranks (0 is the most frequent)."""

    def __init__(self, vocabulary: Set[str], words: Set[str] | Mapping[str, int]) -> None:
        self.vocabulary = frozenset(word.lower() for word in vocabulary)
        self.ranks = dict(words) if isinstance(words, Mapping) else dict.fromkeys(words, UNRANKED)
        self.field = load_words("computing.txt")
        self.knows = lru_cache(maxsize=16_384)(self._knows)

    def _knows(self, word: str) -> bool:
        """Return True when the word is in one of the lists, or a regular form of a word of the field."""
        return self.lists(word) or any(
            word in {*forms(stem), plural(stem)} for stem in stems(word) if self._is_common(stem)
        )

    def _is_common(self, word: str) -> bool:
        """Return True for a word whose inflections count as known; names of peoples ("finnish") have none."""
        if word.endswith("ish"):
            return False
        return word in self.vocabulary or word in self.field or self.ranks.get(word, UNRANKED) < 12_000

    def lists(self, word: str) -> bool:
        """Return True when the word itself is in one of the lists."""
        return word in self.vocabulary or word in self.ranks or word in self.field

    def core(self) -> frozenset[str]:
        """Return the words a misspelt word is most likely to mean: the corpus with its inflections, frequent English."""
        frequent = {word for word, rank in self.ranks.items() if rank < 5_000}
        corpus = {word for word in self.vocabulary if len(word) > 3 and word in self.ranks}
        inflected = {form for word in corpus for form in (*forms(word)[:4], plural(word))}
        return frozenset(self.vocabulary | self.field | frequent | inflected)
