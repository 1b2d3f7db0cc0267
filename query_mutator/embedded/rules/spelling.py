"""Spelling: replace words outside the corpus and English by the nearest known word.

Candidates come from an index of deletions (Garbe's SymSpell) and are ranked by how likely the slip is.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Set
from functools import cached_property, lru_cache

from query_mutator.embedded.rules.lexicon import UNRANKED, Lexicon
from query_mutator.embedded.rules.tables import grammar
from query_mutator.embedded.rules.text import is_word, like, tokens

__all__ = ["Spelling", "slip_cost"]

MIN_LETTERS = 3
MAX_COST = 2.4
#: Letters of a word that are indexed; slips in later letters only count in the cost.
PREFIX = 8
#: A correction with one slip at this cost or less is taken without a search for words two slips away.
SURE_COST = 1.2
#: Cost of splitting a word in two ("alot").
SPLIT_COST = 1.3
_SHORT_WORDS = grammar("short")
CONTRACTIONS = grammar("contraction")
_CLITICS = ("'s", "'d", "'ll", "'ve", "'re", "'m")

_KEY_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
#: Letters of similar sound: one for the other is a more likely slip than any two letters.
_SOUNDS = ("aeiouy", "ckqs", "sz", "dt", "gj", "fv", "mn", "bp", "vw", "cx", "cg")


def _pairs(groups: Iterable[str]) -> frozenset[tuple[str, str]]:
    return frozenset((one, two) for group in groups for one in group for two in group if one != two)


_ALIKE = _pairs(_SOUNDS)
_INDEX_LOCK = threading.Lock()
_NEIGHBOURS = _pairs(row[at : at + 2] for row in _KEY_ROWS for at in range(len(row) - 1))


def deletes(word: str, count: int) -> set[str]:
    """Return the word and every string left after deleting up to `count` letters."""
    found, edge = {word}, {word}
    for _ in range(count):
        edge = {left[:at] + left[at + 1 :] for left in edge for at in range(len(left))}
        found |= edge
    return found


class Spelling:
    """Corrects unknown words; the first use builds the index, which takes half a second."""

    def __init__(self, lexicon: Lexicon, *, keep: Set[str] = frozenset()) -> None:
        self._lexicon = lexicon
        self._keep = keep
        self.correct = lru_cache(maxsize=16_384)(self._correct)

    def __call__(self, text: str) -> str:
        """Return the text with its misspelled words corrected."""
        return "".join(
            like(token, self.correct(token.lower().replace("’", "'"))) if self._may_correct(token) else token
            for token in tokens(text)
        )

    def _may_correct(self, token: str) -> bool:
        """Return whether a token may be corrected; acronyms and camelCase are names."""
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
        """Return candidates with their costs: words that equal `word` after up to `depth` deletions, and splits."""
        index = self._index
        found = {whole for part in deletes(word[:PREFIX], depth) for whole in index.get(part, ())}
        near = (whole for whole in found if abs(len(whole) - len(word)) <= 2)
        return [(slip_cost(word, whole) + self._rarity(whole), whole) for whole in near] + self._cuts(word)

    def _rarity(self, word: str) -> float:
        """Return the extra cost of a rare candidate: little for the corpus, up to 1 for rare English."""
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

    @cached_property
    def _index(self) -> dict[str, list[str]]:
        with _INDEX_LOCK:
            return _deletes_index(self._lexicon.core() | CONTRACTIONS, frozenset(self._lexicon.ranks))


@lru_cache(maxsize=2)  # a rewriter and the local tests of its operators share theirs
def _deletes_index(core: frozenset[str], words: frozenset[str]) -> dict[str, list[str]]:
    """Return the words by what is left of them after deletions."""
    index: dict[str, list[str]] = defaultdict(list)
    for word in sorted(core | words):
        if len(word) > 1:
            for part in deletes(word[:PREFIX], _depth(word) if word in core else 1):
                index[part].append(word)
    return dict(index)


def _depth(word: str) -> int:
    """Return how many letters may differ; a short word with two slips is ambiguous."""
    return 2 if len(word) > 4 else 1


def _limit(word: str) -> float:
    """Return the highest cost of a correction of `word`; short words have too many neighbors."""
    return {3: 1.15, 4: 1.6, 5: 1.75, 6: 2.0}.get(len(word), MAX_COST)


def slip_cost(typed: str, meant: str) -> float:
    """Return the weighted Damerau-Levenshtein distance (Damerau 1964); likely slips cost less than 1."""
    # Rows of the dynamic program: `last` is the previous prefix of `typed`, `before` the one before it (for swaps).
    before, last = list[float](), _edge(meant)
    for i, here in enumerate(typed, start=1):
        row = [last[0] + _insert_cost(typed, i - 1)]
        for j, there in enumerate(meant, start=1):
            best = min(
                last[j - 1] + _swap_cost(here, there, first=i == j == 1),
                last[j] + _insert_cost(typed, i - 1),
                row[j - 1] + _insert_cost(meant, j - 1),
            )
            if i > 1 and j > 1 and here == meant[j - 2] and typed[i - 2] == there and here != there:
                best = min(best, before[j - 2] + (0.7 if i > 2 else 1.1))
            row.append(best)
        before, last = last, row
    # One displaced letter ("theard") counts as two slips above, but is one.
    displaced = typed[0] == meant[0] and sorted(typed) == sorted(meant)
    return min(last[-1], 1.2) if displaced else last[-1]


def _edge(meant: str) -> list[float]:
    """Return the costs of writing the prefixes of `meant` from nothing."""
    costs = [0.0]
    for at in range(len(meant)):
        costs.append(costs[-1] + _insert_cost(meant, at))
    return costs


def _insert_cost(word: str, at: int) -> float:
    """Return the cost of one letter too many or too few; doubled and silent letters are cheap."""
    if word[at] == "'":
        return 0.2
    if (at and word[at] == word[at - 1]) or (at + 1 < len(word) and word[at] == word[at + 1]):
        return 0.4
    if at == 0:
        return 1.4
    if at + 1 == len(word) and (word[at] == "e" or word.endswith("ing")):
        return 0.5
    return 0.75 if word[at] in "aeiouh" else 0.95


def _swap_cost(here: str, there: str, *, first: bool) -> float:
    if here == there:
        return 0.0
    cost = 0.8 if (here, there) in _ALIKE else 0.85 if (here, there) in _NEIGHBOURS else 1.1
    return cost + 0.4 if first else cost
