"""Spelling of ordinary English: candidates of symspellpy, ranked by how likely the slip is and by the words around.

The score of a candidate is the logarithm of its frequency, plus what its neighbors make of it, minus the cost of the
slip (Kernighan, Church and Gale, 1990). A word of its dictionary or of the encoder's vocabulary is known: it is
replaced only where a far likelier one fits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import resources

from query_mutator.errors import UsageError
from query_mutator.operators.english import english_ranks, like, pieces, split_word, words_of
from query_mutator.operators.guards import LANGUAGES

MIN_LETTERS = 3
#: The dictionary words that are candidates have this count at least: about half of them.
MIN_COUNT = 120_000
SLIP_WEIGHT = 3.0
NEIGHBOR_WEIGHT = 0.5
#: What the likeliest candidate must have over a known word.
KNOWN_MARGIN = 2.5
UNSEEN = -10.0  # logarithm of the frequency of a word that no list has
SPLIT_COST = 1.2
#: The score that the correction of an unknown word must have; a shorter one may be a word that no list has.
MIN_SCORE, MIN_SCORE_SHORT, LONG = -10.0, -8.0, 5
#: Words of the vocabulary are this much rarer than 1 / rank.
VOCABULARY_SHARE = 50
_MAX_COST = {3: 1.15, 4: 1.6, 5: 1.75, 6: 2.0}
MAX_COST = 2.4  # of longer words: short ones have too many neighbors
MAX_CANDIDATES = 100  # those with the fewest slips, and of these the most frequent
_SENTENCE_ENDS = (".", "?", "!")
#: What a capitalized word may be corrected to at the beginning of a sentence; others are names.
_BEGINNINGS = """
    what which who whom whose where when why how is are was were do does did can could would should will has have the
    in on at from to of for with name give state list convert add subtract multiply divide translate spell write
    calculate compute find complete choose solve define describe explain identify simplify evaluate count sort compare
    tell show please there these this
"""
#: Words that one may run together with others ("alot", "inthe").
_SHORT = "a i to of in is it as at or by on an my do if so no be we he me up"
_SUFFIXES = {"ies": ("y",), "ied": ("y",), "es": ("", "e"), "s": ("",), "ed": ("", "e"), "ing": ("", "e")}
_NO_PLAIN_S = re.compile(r"(?:[sxz]|[cs]h|[^aeiou]y)\Z")  # takes es, or ies
_CLITICS = ("s", "re", "ve", "ll", "d", "m")


class Speller:
    """Corrects the misspelt words of English text; loading takes about a second and 100 MB."""

    def __init__(self) -> None:
        try:
            from symspellpy import SymSpell, Verbosity
        except ImportError as error:
            raise UsageError("spelling needs symspellpy; run `pip install -r requirements.txt`") from error
        self._all = Verbosity.ALL
        self._index = SymSpell(max_dictionary_edit_distance=2, prefix_length=5, count_threshold=MIN_COUNT)
        folder = resources.files("symspellpy")
        self._index.load_dictionary(str(folder / "frequency_dictionary_en_82_765.txt"), 0, 1)
        self._index.load_bigram_dictionary(str(folder / "frequency_bigramdictionary_en_243_342.txt"), 0, 2)
        self._total = math.log10(sum(self._index.words.values()))
        self._add_american()
        self._names = words_of("computing.txt").union(english_ranks())
        self._short = LANGUAGES["en"].union(_SHORT.split())
        self._candidates = lru_cache(maxsize=16_384)(self._find)

    def _add_american(self) -> None:
        """Add the spellings that the dictionary lacks: "kilometer", and the vocabulary's longer words ("traveler")."""
        words = {**self._rare, **self._index.words}
        added = {word.replace("metre", "meter"): count for word, count in words.items() if "metre" in word}
        share = 10**self._total / VOCABULARY_SHARE
        added |= {word: int(share / (rank + 10)) for word, rank in english_ranks().items() if len(word) > LONG}
        for word, count in added.items():
            if word not in words:
                self._index.create_dictionary_entry(word, count)

    def __call__(self, text: str) -> str:
        """Return the text with its misspelt words corrected; a second call changes nothing."""
        while (corrected := self._pass(text)) != text:
            text = corrected
        return text

    def knows(self, word: str) -> bool:
        """Return whether a word in lower case, or what it is an inflection of, is listed."""
        return self._lists(word) or any(len(stem) > 3 and self._lists(stem) for stem in _stems(word))

    def _lists(self, word: str) -> bool:
        return word in self._index.words or word in self._rare or word in self._names

    @property
    def _rare(self) -> dict[str, int]:
        words: dict[str, int] = self._index.below_threshold_words
        return words

    def _pass(self, text: str) -> str:
        parts = pieces(text)
        places = [at for at, part in enumerate(parts) if not part.isspace()]
        for nth, at in enumerate(places):
            before = parts[places[nth - 1]] if nth else "."
            after = parts[places[nth + 1]] if nth + 1 < len(places) else ""
            found = split_word(parts[at])
            if found is not None:
                opening, word, marks = found
                parts[at] = f"{opening}{self._word(word, before, '' if marks else after)}{marks}"
        return "".join(parts)

    def _word(self, word: str, before: str, after: str) -> str:
        """Return a word corrected; capitalized words are names unless they begin a sentence."""
        starts = before.endswith(_SENTENCE_ENDS)
        stem, mark, clitic = re.fullmatch(r"(.+?)(?:(['’])(\w+))?", word).groups(default="")  # type: ignore[union-attr]
        is_beginning = starts and stem.istitle() and "-" not in stem
        if not (stem.islower() or is_beginning) or (mark and clitic not in _CLITICS):
            return word
        parts = stem.lower().split("-")
        alone = len(parts) == 1
        left, right = _plain(before) if alone and not starts else "", _plain(after) if alone and not mark else ""
        corrected = "-".join(self._correct(part, left, right) for part in parts)
        if is_beginning and corrected not in _BEGINNINGS.split():
            return word
        return like(word, corrected) + mark + clitic

    def _correct(self, word: str, left: str, right: str) -> str:
        if len(word) < MIN_LETTERS:
            return word
        known, scores = self.knows(word), dict[str, float]()
        if known and self._frequency(word) == UNSEEN:  # a name of the vocabulary
            return word
        own = self._score(word, left, right)
        for other, cost in self._candidates(word):
            scores[other] = self._score(other, left, right) - SLIP_WEIGHT * cost
        best = max(scores, key=lambda other: scores[other], default=word)
        if best == word:
            return word
        least = own + KNOWN_MARGIN if known else MIN_SCORE if len(word) > LONG else MIN_SCORE_SHORT
        return best if scores[best] >= least else word

    def _find(self, word: str) -> tuple[tuple[str, float], ...]:
        """Return the words that may be meant by `word`, with the costs of the slips.

        A known word may be a slip for a more frequent one only, so that corrections end; others may be two words.
        """
        limit = _MAX_COST.get(len(word), MAX_COST)
        short = re.sub(r"(.)\1{2,}", r"\1\1", word)
        nearest = self._index.lookup(short, self._all, 2)[:MAX_CANDIDATES]
        found = {item.term for item in nearest if item.term.isalpha()}
        known = self.knows(word)
        if known:
            found = {other for other in found if self._frequency(other) > self._frequency(word)}
        costs = {other: slip_cost(short, other) for other in found - {word}}
        if not known:
            halves = ((word[:cut], word[cut:]) for cut in range(1, len(word)))
            pairs = (f"{one} {two}" for one, two in halves if not self._short.isdisjoint((one, two)))
            costs |= {pair: SPLIT_COST for pair in pairs if pair in self._index.bigrams}
        return tuple((other, cost) for other, cost in sorted(costs.items()) if cost <= limit)

    def _score(self, word: str, left: str, right: str) -> float:
        """Return the logarithm of a word's frequency, more where it is often seen next to its neighbors."""
        score = self._frequency(word)
        for pair, neighbor in ((f"{left} {word}", left), (f"{word} {right}", right)):
            count = self._index.bigrams.get(pair) if neighbor else None
            if count:
                seen = math.log10(count) - self._total - self._frequency(word) - self._frequency(neighbor)
                score += NEIGHBOR_WEIGHT * max(0.0, seen)
        return score

    def _frequency(self, word: str) -> float:
        """Return the logarithm of the share of a word, or of two words, in the dictionary's text."""
        index = self._index
        count = index.words.get(word) or self._rare.get(word) or index.bigrams.get(word)
        return math.log10(count) - self._total if count else UNSEEN


def _stems(word: str) -> Iterator[str]:
    """Yield the words that `word` may be a regular inflection of."""
    for suffix, repairs in _SUFFIXES.items():
        stem = word.removesuffix(suffix)
        if stem == word or (suffix == "s" and _NO_PLAIN_S.search(stem)):
            continue
        yield from (stem + repair for repair in repairs)
        if suffix in ("ed", "ing") and stem[-1:] == stem[-2:-1]:  # "cancelled"
            yield stem[:-1]


def _plain(piece: str) -> str:
    found = split_word(piece)
    return found[1].lower() if found else ""


@lru_cache(maxsize=1)
def speller() -> Speller:
    """Return the one speller of this process, loaded at the first call."""
    return Speller()


# --- the cost of a slip -----------------------------------------------------------------------------------------------

_KEY_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
#: Letters of similar sound: one for the other is a more likely slip than any two letters.
_SOUNDS = ("aeiouy", "ckqs", "sz", "dt", "gj", "fv", "mn", "bp", "vw", "cx", "cg")


def _pairs(groups: Iterable[str]) -> frozenset[tuple[str, str]]:
    return frozenset((one, two) for group in groups for one in group for two in group if one != two)


_ALIKE = _pairs(_SOUNDS)
_NEIGHBORS = _pairs(row[at : at + 2] for row in _KEY_ROWS for at in range(len(row) - 1))


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
    cost = 0.8 if (here, there) in _ALIKE else 0.85 if (here, there) in _NEIGHBORS else 1.1
    return cost + 0.4 if first else cost
