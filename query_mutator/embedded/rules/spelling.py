"""Spelling: words outside the corpus and English become the nearest word inside; known words stay."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Set
from functools import lru_cache

from query_mutator.embedded.rules.lexicon import UNRANKED, Lexicon
from query_mutator.embedded.rules.tables import grammar
from query_mutator.embedded.rules.text import is_word, like, tokens

MIN_LETTERS = 3
MAX_COST = 2.4
#: Letters looked at in the index (Garbe's SymSpell): slips beyond them are measured, not indexed.
PREFIX = 8
#: Cost of cutting a word in two ("alot"), and of the letters both parts need at least.
SPLIT_COST = 1.3
_SHORT_WORDS = grammar("short")
CONTRACTIONS = grammar("contraction")
_CLITICS = ("'s", "'d", "'ll", "'ve", "'re", "'m")
_KEY_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
#: Letters that sound alike: writing one for the other is a likelier slip than any two letters.
_SOUNDS = ("aeiouy", "ckqs", "sz", "dt", "gj", "fv", "mn", "bp", "vw", "cx", "cg")


def _pairs(groups: Iterable[str]) -> frozenset[tuple[str, str]]:
    return frozenset((one, two) for group in groups for one in group for two in group if one != two)


_ALIKE = _pairs(_SOUNDS)
_NEIGHBOURS = _pairs(row[at : at + 2] for row in _KEY_ROWS for at in range(len(row) - 1))


def slip_cost(typed: str, meant: str) -> float:
    """Return the weighted Damerau-Levenshtein distance; likely slips cost less than 1 (Damerau 1964)."""
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
    # One letter that jumped ("theard") counts as two slips above, but is one.
    jumped = typed[0] == meant[0] and sorted(typed) == sorted(meant)
    return min(last[-1], 1.2) if jumped else last[-1]


def _edge(meant: str) -> list[float]:
    costs = [0.0]
    for at in range(len(meant)):
        costs.append(costs[-1] + _insert_cost(meant, at))
    return costs


def _insert_cost(word: str, at: int) -> float:
    """Return the cost of one letter too many or too few: doubled and silent letters are the usual ones."""
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


def deletes(word: str, count: int) -> set[str]:
    """Return the word and all it becomes when up to `count` letters are left out."""
    found, edge = {word}, {word}
    for _ in range(count):
        edge = {left[:at] + left[at + 1 :] for left in edge for at in range(len(left))}
        found |= edge
    return found


class Spelling:
    """Corrects unknown words; built once for a lexicon (0.3 s at the first use), then a look-up per word."""

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
        ranked = [(slip_cost(word, found) + self._rarity(found), found) for found in self._candidates(word)]
        ranked += self._cuts(word)
        cost, best = min(ranked, default=(math.inf, word))
        return best if cost <= _limit(word) else word

    def _candidates(self, word: str) -> set[str]:
        index = self._deletes_index()
        found = {whole for part in deletes(word[:PREFIX], _depth(word)) for whole in index.get(part, ())}
        return {whole for whole in found if abs(len(whole) - len(word)) <= 2}

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
