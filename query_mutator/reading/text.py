"""The text of a reply without thoughts, in one spelling of quotes, digits, spaces and TeX; the patterns of readers."""

from __future__ import annotations

import re
import tomllib
import unicodedata
import zlib
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from query_mutator.types import read_part


class Patterns:
    """The compiled patterns of a file, by name; `@LIST@` in one stands for any word of that list."""

    def __init__(self, file: str) -> None:
        self._file = file

    def __getattr__(self, name: str) -> re.Pattern[str]:
        try:
            text = re.sub(r"@(\w+)@", lambda found: any_of(word_list("words", found[1])), tables()[self._file][name])
        except KeyError as error:
            raise AttributeError(f"patterns.toml has no {error} for {self._file}.{name}") from None
        self.__dict__[name] = re.compile(text, re.VERBOSE | re.IGNORECASE)
        return self.__dict__[name]  # type: ignore[no-any-return]


def any_of(words: list[str]) -> str:
    """Return a pattern of any of the words, the longest first."""
    return f"(?:{'|'.join(sorted(words, key=len, reverse=True))})"


def word_list(file: str, name: str) -> list[str]:
    """Return words that the file has separated by blanks."""
    return tables()[file][name].split()


@cache
def tables() -> Mapping[str, Mapping[str, str]]:
    """Return the texts of patterns.toml by file and name."""
    text = (resources.files("query_mutator") / "reading" / "patterns.toml").read_text(encoding="utf8")
    return tomllib.loads(text)


P = Patterns("text")

_SUPERSCRIPT = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,20}|ⁿ")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_VULGAR = re.compile("(?<=\\d)(?=[¼½¾⅐-⅞])")
_FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")
_SPELLINGS = str.maketrans(
    {
        **dict.fromkeys("“”„«»「」『』", '"'),
        **dict.fromkeys("‘’‚ʼ′´", "'"),
        **dict.fromkeys("−‐‑﹣－", "-"),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff", ""),
        **dict.fromkeys("⟶➝➔➜", "→"),
        "\u20e3": ".", "º": "°", "⁄": "/", "∕": "/", "∗": "*", "٫": ".", "٬": ",",
    }
)  # fmt: skip
_FRACTION = re.compile(r"\\[dtc]?frac\s?(?:\{([^{}\n]{0,80})\}|(\d))\s?(?:\{([^{}\n]{0,80})\}|(\d))")
_TEX_TEXT = re.compile(
    r"\\(?:ce|text|textbf|textit|mathrm|mathbf|mathit|texttt|operatorname|mathbb|mathcal)\s?\{([^{}\n]{0,200})\}"
)
_TEX_WORDS = {name: sign for name, _, sign in (pair.partition("=") for pair in word_list("text", "TEX_WORDS"))}
_TEX_SPACE = re.compile(r"\\[,;: ]")
_TEX_WORD = re.compile(r"\\([A-Za-z]{1,15})(?![A-Za-z])")
_PLAIN_GROUP = re.compile(r"(?<!\w)\{([-+])\}(?=\d)|(?<=\^)\{\s?([-+\w.°]{1,20})\s?\}|(?<=\d)\{,\}(?=\d)")
_PLAIN_FRACTION = re.compile(r"\((-?\d{1,15})\)/\((\d{1,15})\)")
_SPACED_SIGNS = re.compile(r"\s|(?<=\w)[·*×](?=\w)")
_SPECIAL = str.maketrans({"æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i"})
_COMBINING = re.compile("[\u0300-\u036f\u0591-\u05c7\u064b-\u065f]")
_WORD = re.compile(r"[^\W_]+(?:'[^\W\d_]+)?[♯♭]?|[+\-−]?\d+")
_UNSPACED_SCRIPTS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # Thai to Hangul
_AT_DIGIT = re.compile(f"(?<=[{_UNSPACED_SCRIPTS}])(?=\\d)|(?<=\\d)(?=[{_UNSPACED_SCRIPTS}])")
BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*(?!\w)")
EMPHASIS = re.compile(r"(?<![\d\s])\*{1,3}|\*{1,3}(?![\d\s])|\*\*(?=\s|$)|(?<!\w)_{1,2}|_{1,2}(?!\w)|`")
UNSPACED = re.compile(f"[{_UNSPACED_SCRIPTS}]")
_IRREGULAR = dict(pair.split("=") for pair in word_list("text", "IRREGULAR"))


@lru_cache(maxsize=256)
def clean(reply: str) -> str:
    """Return the end of a reply without its thought, in one spelling; "" where a thought never ended."""
    text = P.DAY_DOT.sub(r"\1", spelled(P.CONTROL.sub(" ", read_part(reply))))
    following = P.NEXT_QUESTION.search(text)
    return text[: following.start()] if following and text[: following.start()].strip() else text


@lru_cache(maxsize=1024)
def spelled(text: str) -> str:
    """Return a text in NFKC with plain quotes, hyphens, spaces and digits; x² is x^2 and 1½ is 1 1/2."""
    if text.isascii():
        return P.STRUCK.sub(" ", text) if "~~" in text else text
    text = text.replace("\ufe0f\u20e3", "\u20e3")
    text = _SUPERSCRIPT.sub(lambda found: "^" + found[0].translate(_SUPERSCRIPTS), text.translate(_SPELLINGS))
    text = unicodedata.normalize("NFKC", _VULGAR.sub(" ", text)).translate(_SPELLINGS)
    text = _FOREIGN_DIGIT.sub(lambda found: str(unicodedata.decimal(found[0])), text)
    text = P.STRUCK.sub(" ", P.LEADING_DASH.sub("-", text))
    return _AT_DIGIT.sub(" ", text)


def without_tex(text: str) -> str:
    r"""Return a text whose TeX is written plainly: \frac{1}{2} is (1)/(2)."""
    if "\\" not in text and "$" not in text and "{" not in text:
        return text
    text = P.MIXED.sub(" ", P.SUBSCRIPT.sub("", text))
    for _ in range(3):  # from inside out
        text = _PLAIN_GROUP.sub(lambda found: found[1] or found[2] or ",", text)
        text = _TEX_TEXT.sub(r"\1", text)
        text = P.ROOT.sub(r"√\1", text)
        text = _FRACTION.sub(lambda found: f"({found[1] or found[2]})/({found[3] or found[4]})", text)
    text = P.TEX_MARK.sub("", _TEX_SPACE.sub(" ", text))
    text = _TEX_WORD.sub(lambda found: _TEX_WORDS.get(found[1], found[0]), text)
    text = _PLAIN_GROUP.sub(lambda found: found[1] or found[2] or ",", text).replace("^°", "°")
    return _PLAIN_FRACTION.sub(r"\1/\2", text)


def plain(text: str) -> str:
    """Return a text without emphasis and TeX."""
    return EMPHASIS.sub("", without_tex(BOLD.sub(r"\1", text)))


def unspaced(text: str) -> str:
    """Return a text without spaces and signs of multiplication, as formulas are compared."""
    return _SPACED_SIGNS.sub("", text)


@lru_cache(maxsize=4096)
def fold(text: str) -> str:
    """Return a text in lower case without accents."""
    lowered = text.casefold()
    if lowered.isascii():
        return lowered
    lowered = _COMBINING.sub("", unicodedata.normalize("NFKD", lowered))
    return unicodedata.normalize("NFC", lowered).translate(_SPECIAL)


@lru_cache(maxsize=4096)
def words(text: str) -> tuple[str, ...]:
    """Return the words and numbers of a text, folded; pairs of characters where a script has no spaces."""
    found: list[str] = []
    for word in _WORD.findall(fold(text)):
        pairs = len(word) > 2 and UNSPACED.match(word)
        found += [word[at : at + 2] for at in range(len(word) - 1)] if pairs else [word]
    return tuple(found)


@lru_cache(maxsize=4096)
def stems(text: str) -> tuple[str, ...]:
    """Return the words of a text, each in the form that its inflections share."""
    return tuple(map(stem, words(text)))


@lru_cache(maxsize=20_000)
def stem(word: str) -> str:
    """Return a folded word without a plural's s, and an irregular past as its present."""
    word = _IRREGULAR.get(word, word)
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-2] if word.endswith(("ches", "shes", "sses", "xes")) else word[:-1]
    return word


def places_of(wanted: tuple[str, ...], tokens: tuple[str, ...]) -> list[int]:
    """Return where words stand among others, in their order."""
    starts = [at for at, token in enumerate(tokens) if wanted and token == wanted[0]]
    return [at for at in starts if tokens[at : at + len(wanted)] == wanted]


def hashed(names: Iterable[str], buckets: int) -> list[int]:
    """Return the buckets of names, each once; names share them by a hash."""
    return sorted({zlib.crc32(name.encode("utf-8", "surrogatepass")) % buckets for name in names})


@cache
def stored(path: Path) -> tuple[list[Any], float]:
    """Return the fitted weights in a file and their intercept."""
    import numpy as np

    with np.load(path) as arrays:
        return (arrays["weights"] * float(arrays["scale"])).tolist(), float(arrays["intercept"])
