"""Which words are known: the corpus vocabulary, an English word list, and computing terms."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import cached_property, lru_cache

from query_mutator.embedded.rules.inflect import forms, plural, stems
from query_mutator.embedded.rules.tables import load_words

__all__ = ["UNRANKED", "Lexicon"]

#: The rank of words that the English list does not have.
UNRANKED = 30_000
#: Ranks up to which a word is common enough to be a correction, to be inflected, to be part of a compound.
_MEANT, _INFLECTED, _COMPOUNDED = 5_000, 16_000, 6_000
_PREFIXES = ("un", "re", "pre", "non", "over", "sub", "multi")
_ENDINGS = (
    ("ly", ""),
    ("ly", "le"),
    ("bly", "ble"),
    ("ness", ""),
    ("iness", "y"),
    ("able", ""),
    ("less", ""),
    ("ful", ""),
    ("est", ""),
)


class Lexicon:
    """The words of the corpus and of English; `words` may carry ranks (0 is the most frequent)."""

    def __init__(self, vocabulary: Set[str], words: Set[str] | Mapping[str, int]) -> None:
        self.vocabulary = frozenset(word.lower() for word in vocabulary)
        self.ranks = dict(words) if isinstance(words, Mapping) else dict.fromkeys(words, UNRANKED)
        self.field = load_words("computing.txt")
        self.knows = lru_cache(maxsize=16_384)(self._knows)

    @cached_property
    def inflected(self) -> frozenset[str]:
        """Return the regular forms of the corpus words that are English words."""
        corpus = {word for word in self.vocabulary if len(word) > 3 and word in self.ranks}
        return frozenset(form for word in corpus for form in (*forms(word)[:4], plural(word)))

    def core(self) -> frozenset[str]:
        """Return the most likely corrections of a misspelled word: the corpus, its inflections, frequent English."""
        frequent = {word for word, rank in self.ranks.items() if rank < _MEANT}
        return frozenset(self.vocabulary | self.field | frequent | self.inflected)

    def lists(self, word: str) -> bool:
        """Return whether the word itself is in one of the lists."""
        return word in self.vocabulary or word in self.ranks or word in self.field

    def _knows(self, word: str) -> bool:
        """Return whether the word is listed, or derived by rule from a common word."""
        return self.lists(word) or self._is_inflected(word) or self._is_derived(word) or self._is_compound(word)

    def _is_inflected(self, word: str) -> bool:
        # names of peoples have no verb forms: "finnishes" is a slip for "finishes"
        common = (stem for stem in stems(word) if self._ranks_below(stem, _INFLECTED) and not stem.endswith("ish"))
        return any(word in {*forms(stem), plural(stem)} for stem in common)

    def _is_derived(self, word: str) -> bool:
        ended = (word.removesuffix(ending) + stem for ending, stem in _ENDINGS if word.endswith(ending))
        if any(len(stem) > 3 and self._ranks_below(stem, _INFLECTED) for stem in ended):
            return True
        # the stem must be longer here: "untill" is a slip, not un- and till
        prefixed = (word.removeprefix(prefix) for prefix in _PREFIXES if word.startswith(prefix))
        return any(len(stem) > 4 and self._ranks_below(stem, _INFLECTED) for stem in prefixed)

    def _is_compound(self, word: str) -> bool:
        cuts = ((word[:at], word[at:]) for at in range(4, len(word) - 3))
        return any(self._ranks_below(one, _COMPOUNDED) and self._ranks_below(two, _COMPOUNDED) for one, two in cuts)

    def _ranks_below(self, word: str, limit: int) -> bool:
        return word in self.vocabulary or word in self.field or self.ranks.get(word, UNRANKED) < limit
