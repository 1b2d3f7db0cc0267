"""Key words: the content words of the question, each once, in their order."""

from __future__ import annotations

from query_mutator.embedded.rules.tables import load_words
from query_mutator.embedded.rules.text import is_word, tokens

MIN_WORDS = 2


class Keywords:
    """Keeps the content words."""

    def __init__(self) -> None:
        self._stopwords = load_words("stopwords.txt")

    def __call__(self, text: str) -> str:
        """Return the content words, then what stands in brackets at the end; fewer than two words stay as they are."""
        question, bracket, aside = text.partition(" (") if text.endswith(")") else (text, "", "")
        kept = {
            token.lower(): token
            for token in tokens(question)
            if (token[0].isalnum() or token[0] in "`\"_'") and self._carries(token)
        }
        return " ".join(kept.values()) + bracket + aside if len(kept) >= MIN_WORDS else text

    def _carries(self, token: str) -> bool:
        return not is_word(token) or token.lower().replace("’", "'") not in self._stopwords
