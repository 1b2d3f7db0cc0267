"""Filler: greetings, thanks, hedges and back-story go; the sentences that say what is asked stay."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from query_mutator.embedded.rules.inflect import stems
from query_mutator.embedded.rules.lexicon import Lexicon
from query_mutator.embedded.rules.phrases import load_rows, load_words
from query_mutator.embedded.rules.text import sentences, tidy, words

#: A sentence with fewer points than this is back-story: a noun of computing counts 1, another corpus word less.
MIN_POINTS = 2.0
CORPUS_WORD_POINTS = 0.4
_ASIDE = re.compile(r"\s*\([^()]*\)|\s+[-–—]\s[^.!?]*\s[-–—](?=\s)")
_REASON = re.compile(r",?\s+(?:because|since|as my|so that i|which is why)\b[^,.!?]*(?=[,.!?]|$)", re.IGNORECASE)
_WISH = re.compile(
    r"\b(?:(?:i|we)(?:'d| would| should)? (?:really |very much )?(?:like|love|need|want|have|wish|prefer)(?: to)?"
    r"(?: be able to| know how to| know)?)\b",
    re.IGNORECASE,
)


@cache
def _fillers() -> re.Pattern[str]:
    text = resources.files(__package__).joinpath("fillers.txt").read_text(encoding="utf-8")
    phrases = [line for line in text.splitlines() if line and not line.startswith("#")]
    return re.compile(rf"(?<![\w-])(?:{'|'.join(phrases)})(?![\w-])\s*[,!]?", re.IGNORECASE)


class Filler:
    """Keeps what says something about the request, in the asker's own words and order."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        self._stopwords = load_words("stopwords.txt")
        self._nouns = frozenset(word for row in load_rows("nouns.tsv") for word in row[1].split())

    def __call__(self, text: str) -> str:
        """Return the text without filler; never less than its best sentence."""
        cleaned = [self.clean(sentence) for sentence in sentences(text)]
        spoken = [sentence for sentence in cleaned if words(sentence)]
        if not spoken:
            return text
        kept = [sentence for sentence in spoken if self.points(sentence) >= MIN_POINTS]
        return " ".join(kept or [max(spoken, key=self.points)])

    def clean(self, sentence: str) -> str:
        """Return one sentence without asides and filler phrases."""
        return tidy(_fillers().sub("", _ASIDE.sub("", sentence)))

    def points(self, sentence: str) -> float:
        """Return how much a sentence says about computing."""
        return sum(self._worth(word) for word in words(sentence) if word not in self._stopwords)

    def _worth(self, word: str) -> float:
        if word in self._lexicon.field or any(stem in self._nouns for stem in stems(word)):
            return 1.0
        return CORPUS_WORD_POINTS if word in self._lexicon.vocabulary else 0.0
