"""Filler: remove greetings, thanks, hedges and back-story; keep the clauses that ask something."""

from __future__ import annotations

import re
from functools import cache

from query_mutator.embedded.rules.inflect import stems
from query_mutator.embedded.rules.lexicon import Lexicon
from query_mutator.embedded.rules.tables import load_rows, load_words
from query_mutator.embedded.rules.text import sentences, tidy, words

__all__ = ["Filler"]

#: A clause with fewer points is back-story: a noun of computing counts 1, another corpus word less.
MIN_POINTS = 0.8
#: Shorter texts keep all their clauses, because a word outside the corpus may be important.
LONG_FROM_WORDS = 25
CORPUS_WORD_POINTS = 0.4
_ASIDE = re.compile(r"\s*\([^()]*\)|\s+[-–—]\s[^.!?]*\s[-–—](?=\s)")
#: Where a clause can be removed without breaking the sentence.
_CLAUSE = re.compile(r"(?<=[,;:])\s+|\s+(?=(?:because|but|so that|although|while|whereas|which)\b)")


@cache
def _fillers() -> re.Pattern[str]:
    phrases = [row[0] for row in load_rows("fillers.txt")]
    return re.compile(rf"(?<![\w-])(?:{'|'.join(phrases)})(?![\w-])\s*[,!]?", re.IGNORECASE)


class Filler:
    """Keeps the words that describe the request, in their order."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        self._stopwords = load_words("stopwords.txt")
        self._nouns = frozenset(word for row in load_rows("nouns.tsv") for word in row[1].split())

    def __call__(self, text: str) -> str:
        """Return the text without filler; if nothing is about computing, remove greetings and hedges only."""
        cleaned = [sentence for sentence in map(self.clean, sentences(text)) if words(sentence)]
        if sum(len(words(sentence)) for sentence in cleaned) < LONG_FROM_WORDS:
            return " ".join(cleaned) or text
        shortened = [short for short in map(self._shorten, cleaned) if short]
        return " ".join(shortened or cleaned) or text

    def _shorten(self, sentence: str) -> str:
        """Return a sentence without its clauses of back-story, or an empty text if nothing is left."""
        kept = " ".join(clause for clause in _CLAUSE.split(sentence) if self.points(clause) >= MIN_POINTS)
        end = sentence[-1] if sentence[-1] in ".?!" else ""
        return tidy(kept.rstrip(" ,;:.?!")) + end if kept else ""

    def clean(self, sentence: str) -> str:
        """Return one sentence without asides and filler phrases."""
        cleaned = tidy(_fillers().sub("", _ASIDE.sub("", sentence)))
        return tidy(re.sub(r"^(?:but|so|and|or|well)\b,?\s+", "", cleaned, flags=re.IGNORECASE))

    def points(self, sentence: str) -> float:
        """Return the points of a sentence for words of computing."""
        return sum(self._worth(word) for word in words(sentence) if word not in self._stopwords)

    def _worth(self, word: str) -> float:
        if word in self._lexicon.field or any(stem in self._nouns for stem in stems(word)):
            return 1.0
        return CORPUS_WORD_POINTS if word in self._lexicon.vocabulary else 0.0
