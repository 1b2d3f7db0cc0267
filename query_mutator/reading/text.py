"""The text of a reply as readers see it: without thoughts, in one spelling of quotes, digits, spaces and TeX."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from query_mutator.reading.patterns import Patterns
from query_mutator.types import read_part

P = Patterns("text")

_FINAL_CHANNEL, _CHANNEL = "<|channel|>final<|message|>", "<|channel|>"
_CONTROL = re.compile(r"<\|[a-z_]{1,20}\|>")
_NEXT_QUESTION = re.compile(r"\n\s{0,3}(?:Q|Question|Human|User|Input)\s?\d{0,3}\s?:")
_SUPERSCRIPT = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,20}|ⁿ")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_VULGAR = re.compile("(?<=\\d)(?=[¼½¾⅐-⅞])")
_FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")
_SPELLINGS = str.maketrans(
    {
        **dict.fromkeys("“”„«»「」『』", '"'),
        **dict.fromkeys("‘’‚ʼ′´", "'"),
        **dict.fromkeys("−‐‑﹣－", "-"),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
        "º": "°", "⁄": "/", "∕": "/", "∗": "*", "٫": ".", "٬": ",",
    }
)  # fmt: skip
_STRUCK = re.compile(r"~~[^~\n]{1,200}~~")
_LEADING_DASH = re.compile(r"(?<![\w)\]}.,])[–—](?=\d)")
_FRACTION = re.compile(r"\\[dtc]?frac\s?(?:\{([^{}\n]{0,80})\}|(\d))\s?(?:\{([^{}\n]{0,80})\}|(\d))")
_MIXED = re.compile(r"(?<=\d)(?=\\[dtc]?frac)")
_SUBSCRIPT = re.compile(r"(?<=[A-Za-z])_(?=\{?\d\}?)")
_ROOT = re.compile(r"\\sqrt\s?\{([^{}\n]{0,80})\}")
_TEX_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|texttt|operatorname)\s?\{([^{}\n]{0,200})\}")
_TEX_WORDS = {
    "cdot": "·", "times": "×", "div": "/", "pi": " pi", "circ": "°", "pm": "±", "approx": "≈", "left": "", "right": "",
    "quad": " ", "qquad": " ", "rightarrow": "→", "to": "→", "implies": "⇒", "Rightarrow": "⇒", "neq": "≠",
    "leq": "≤", "geq": "≥", "le": "≤", "ge": "≥", "infty": "∞", "degree": "°", "displaystyle": "", "log": " log ",
}  # fmt: skip
_TEX_WORD = re.compile(r"\\([A-Za-z]{1,15})(?![A-Za-z])")
_PLAIN_GROUP = re.compile(r"(?<=\^)\{\s?([-+\w.°]{1,20})\s?\}|(?<=\d)\{,\}(?=\d)")
_PLAIN_FRACTION = re.compile(r"\((-?\d{1,15})\)/\((\d{1,15})\)")
_SPECIAL = str.maketrans({"æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i"})
_COMBINING = re.compile("[\u0300-\u036f\u0591-\u05c7\u064b-\u065f]")
_WORD = re.compile(r"[^\W_]+(?:'[^\W\d_]+)?|[+\-−]?\d+")
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # Thai to Hangul
_BESIDE_DIGIT = re.compile(f"(?<=[{UNSPACED}])(?=\\d)|(?<=\\d)(?=[{UNSPACED}])")
_UNSPACED = re.compile(f"[{UNSPACED}]")


@lru_cache(maxsize=256)
def clean(reply: str) -> str:
    """Return the end of a reply without its thought, in one spelling; "" where a thought never ended."""
    text = read_part(reply)
    channels, _, final = text.rpartition(_FINAL_CHANNEL)
    if channels or final != text:
        text = final
    elif _CHANNEL in text:
        return ""
    text = spelled(_CONTROL.sub(" ", text))
    following = _NEXT_QUESTION.search(text)
    return text[: following.start()] if following and text[: following.start()].strip() else text


def spelled(text: str) -> str:
    """Return a text in NFKC with plain quotes, hyphens, spaces and digits; x² is x^2 and 1½ is 1 1/2."""
    text = _SUPERSCRIPT.sub(lambda found: "^" + found[0].translate(_SUPERSCRIPTS), text.translate(_SPELLINGS))
    text = unicodedata.normalize("NFKC", _VULGAR.sub(" ", text)).translate(_SPELLINGS)
    text = _FOREIGN_DIGIT.sub(lambda found: str(unicodedata.decimal(found[0])), text)
    text = _STRUCK.sub(" ", _LEADING_DASH.sub("-", text))
    return _BESIDE_DIGIT.sub(" ", text)


def without_tex(text: str) -> str:
    r"""Return a text whose TeX is written plainly: \frac{1}{2} is (1)/(2)."""
    if "\\" not in text and "$" not in text and "{" not in text:
        return text
    text = _MIXED.sub(" ", _SUBSCRIPT.sub("", text))
    for _ in range(3):  # from inside out
        text = _TEX_TEXT.sub(r"\1", text)
        text = _ROOT.sub(r"sqrt(\1)", text)
        text = _FRACTION.sub(lambda found: f"({found[1] or found[2]})/({found[3] or found[4]})", text)
    text = _TEX_WORD.sub(lambda found: _TEX_WORDS.get(found[1], found[0]), text)
    text = _PLAIN_GROUP.sub(lambda found: found[1] or ",", P.TEX_MARK.sub("", text)).replace("^°", "°")
    return _PLAIN_FRACTION.sub(r"\1/\2", text)


@lru_cache(maxsize=4096)
def fold(text: str) -> str:
    """Return a text in lower case without accents."""
    lowered = unicodedata.normalize("NFKD", text.casefold())
    return unicodedata.normalize("NFC", _COMBINING.sub("", lowered)).translate(_SPECIAL)


@lru_cache(maxsize=4096)
def words(text: str) -> tuple[str, ...]:
    """Return the words and numbers of a text, folded; pairs of characters where a script has no spaces."""
    found: list[str] = []
    for word in _WORD.findall(fold(text)):
        pairs = len(word) > 2 and _UNSPACED.match(word)
        found += [word[at : at + 2] for at in range(len(word) - 1)] if pairs else [word]
    return tuple(found)


def is_unspaced(text: str) -> bool:
    """Return whether a text has a script that writes words without spaces, or with endings attached to them."""
    return _UNSPACED.search(text) is not None
