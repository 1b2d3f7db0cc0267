"""Spelling: words outside the corpus and English become the nearest word inside; known words stay."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Set
from functools import lru_cache

from query_mutator.embedded.rules.lexicon import UNRANKED, Lexicon
from query_mutator.embedded.rules.slips import slip_cost
from query_mutator.embedded.rules.tables import grammar
from query_mutator.embedded.rules.text import is_word, like, tokens

MIN_LETTERS = 3
MAX_COST = 2.4
#: Letters looked at in the index (Garbe's SymSpell): slips beyond them are measured, not indexed.
PREFIX = 8
#: A correction with one slip that costs no more is taken without looking for words two slips away.
SURE_COST = 1.2
#: Cost of cutting a word in two ("alot"), and of the letters both parts need at least.
SPLIT_COST = 1.3
_SHORT_WORDS = grammar("short")
CONTRACTIONS = grammar("contraction")
_CLITICS = ("'s", "'d", "'ll", "'ve", "'re", "'m")


def deletes(word: str, count: int) -> set[str]:
    """Return the word and all it becomes when up to `count` letters are left out."""
    found, edge = {word}, {word}
    for _ in range(count):
        edge = {left[:at] + left[at + 1 :] for left in edge for at in range(len(left))}
        found |= edge
    return found


class Spelling:
    """Corrects unknown words; the index is built at the first use (half a second), then a look-up per word."""

    def __init__(self, lexicon: Lexicon, *, keep: Set[str] = frozenset()) -> None:
        self._lexicon = lexicon
        self._keep = keep
        self._lock = threading.Lock()
        self._index: dict[str, list[str]] | None = None
        self.correct = lru_cache(maxsize=16_384)(self._correct)

    def __call__(self, text: str) -> str:
        """Return the text with its misspelt words corrected."""
        return "".join(
            like(token, self.correct(token.lower().replace("’", "'"))) if self._is_open(token) else token
            for token in tokens(text)
        )

    def _is_open(self, token: str) -> bool:
        """Return True for a word to look at: acronyms and camelCase are names."""
        return is_word(token) and len(token) >= MIN_LETTERS and (token.islower() or token.istitle() or "'" in token)

    def _correct(self, word: str) -> str:
        if word in self._keep or word in CONTRACTIONS or self._lexicon.knows(word):
            return word
        stem, mark, clitic = word.partition("'")
        if mark and f"'{clitic}" in _CLITICS:
            return f"{self.correct(stem)}'{clitic}"
        cost, best = min(self._ranked(word, 1), default=(math.inf, word))
        if cost > SURE_COST and _depth(word) > 1:
            cost, best = min(self._ranked(word, 2), default=(cost, best))
        return best if cost <= _limit(word) else word

    def _ranked(self, word: str, depth: int) -> list[tuple[float, str]]:
        """Return the words that share a part of `word` with up to `depth` letters left out, with their costs."""
        index = self._deletes_index()
        found = {whole for part in deletes(word[:PREFIX], depth) for whole in index.get(part, ())}
        near = (whole for whole in found if abs(len(whole) - len(word)) <= 2)
        return [(slip_cost(word, whole) + self._rarity(whole), whole) for whole in near] + self._cuts(word)

    def _rarity(self, word: str) -> float:
        """Return what a candidate costs for being rare: nothing for the corpus, up to 1 for rare English."""
        if word in CONTRACTIONS:
            return 0.1
        rank = self._lexicon.ranks.get(word)
        if rank is None and word in self._lexicon.inflected:
            return 0.35
        if word in self._lexicon.vocabulary:
            return 0.1 if rank is not None and rank < UNRANKED else 0.3 if len(word) > 4 else 0.5
        if word in self._lexicon.field:
            return 0.25
        return 0.25 + 0.25 * math.log10(1 + (UNRANKED if rank is None else rank) / 200)

    def _cuts(self, word: str) -> list[tuple[float, str]]:
        return [
            (SPLIT_COST, f"{word[:at]} {word[at:]}")
            for at in range(1, len(word))
            if self._stands_alone(word[:at]) and self._stands_alone(word[at:])
        ]

    def _stands_alone(self, part: str) -> bool:
        return part in _SHORT_WORDS or (len(part) > 2 and self._lexicon.ranks.get(part, UNRANKED) < 2_500)

    def _deletes_index(self) -> dict[str, list[str]]:
        with self._lock:
            if self._index is None:
                self._index = self._build()
        return self._index

    def _build(self) -> dict[str, list[str]]:
        index: dict[str, list[str]] = defaultdict(list)
        core = self._lexicon.core() | CONTRACTIONS
        for word in sorted(core | self._lexicon.ranks.keys()):
            if len(word) > 1:
                for part in deletes(word[:PREFIX], _depth(word) if word in core else 1):
                    index[part].append(word)
        return dict(index)


def _depth(word: str) -> int:
    """Return how many letters may differ: a second slip in a short word leaves too little to go by."""
    return 2 if len(word) > 4 else 1


def _limit(word: str) -> float:
    """Return the highest cost a correction of `word` may have: short words have too many neighbours."""
    return {3: 1.15, 4: 1.6, 5: 1.75, 6: 2.0}.get(len(word), MAX_COST)
