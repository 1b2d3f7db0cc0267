"""Errors as people make them when they type: neighboring keys, swapped, missing and doubled letters, spelling by ear.

Shares follow what studies of typed text report: most words with an error have one, and four of five errors are one
letter too many, one missing, one wrong, or two swapped (Damerau, 1964, doi:10.1145/363958.363994).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
#: Spellings by ear and common slips.
BY_EAR = (
    ("ie", "ei"),
    ("ei", "ie"),
    ("ph", "f"),
    ("ould", "uld"),
    ("tion", "shun"),
    ("ght", "gth"),
    ("ea", "ee"),
    ("ck", "k"),
    ("mm", "m"),
    ("nn", "n"),
    ("ll", "l"),
    ("ss", "s"),
    ("tt", "t"),
    ("rr", "r"),
    ("wh", "w"),
    ("que", "k"),
    ("our", "or"),
    ("ence", "ance"),
    ("ial", "al"),
    ("ary", "ery"),
    ("al", "el"),
    ("er", "ar"),
    ("qu", "kw"),
)
WHOLE_WORDS = {
    "which": ("wich", "whitch"),
    "their": ("thier",),
    "capital": ("capitol", "captial"),
    "country": ("contry", "coutnry"),
    "language": ("langauge", "languege"),
    "currency": ("curency", "currancy"),
    "continent": ("contient", "continant"),
    "periodic": ("periodc", "perodic"),
    "abbreviation": ("abreviation",),
    "official": ("offical",),
    "many": ("meny",),
    "government": ("goverment",),
    "chemical": ("chemicle",),
    "people": ("peple",),
    "because": ("becuase",),
    "what": ("waht", "wat"),
}
ERROR_SHARE = 0.45  # of the words of four letters or more
NAME_SHARE = 0.15  # of the names of six letters or more; shorter ones are other names after an error
_WORD = re.compile(r"(?<![\w\"'])[A-Za-z]{4,}(?![\w\"'])")


def misspell(text: str, names: Iterable[str], rng: random.Random) -> str:
    """Return a text with two to six words misspelt; numbers, symbols, quoted words and short names stay."""
    named = {word for name in names for word in _WORD.findall(name) if word[0].isupper()}
    words = [word for word in _WORD.finditer(text) if word[0] not in named or len(word[0]) >= 6]
    is_name = {word.start(): word[0] in named for word in words}
    chosen = [word for word in words if rng.random() < (NAME_SHARE if is_name[word.start()] else ERROR_SHARE)][:6]
    common = [word for word in words if not is_name[word.start()]]
    while len(chosen) < 2 and len(chosen) < len(common):
        word = rng.choice(common)
        chosen += [word] if word not in chosen else []
    for word in sorted(chosen, key=lambda one: -one.start()):
        text = text[: word.start()] + _wrong(word[0], rng) + text[word.end() :]
    if rng.random() < 0.5:
        text = text.rstrip("?.")
    return text.lower() if rng.random() < 0.4 and not re.search(r"\b[A-Z][a-z]?\b", text[1:]) else text


def _wrong(word: str, rng: random.Random) -> str:
    if word.lower() in WHOLE_WORDS and rng.random() < 0.5:
        found = rng.choice(WHOLE_WORDS[word.lower()])
        return found.capitalize() if word[0].isupper() else found
    by_ear = [(old, new) for old, new in BY_EAR if old in word[1:]]
    if by_ear and rng.random() < 0.25:
        old, new = rng.choice(by_ear)
        return word[0] + word[1:].replace(old, new, 1)
    at = rng.randrange(1, len(word) - 1)
    kind = rng.choices(("swap", "miss", "double", "key"), (0.3, 0.3, 0.15, 0.25))[0]
    if kind == "swap" and word[at] != word[at + 1]:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind == "double":
        return word[: at + 1] + word[at:]
    if kind == "key":
        return word[:at] + _neighbor(word[at], rng) + word[at + 1 :]
    return word[:at] + word[at + 1 :]


def _neighbor(letter: str, rng: random.Random) -> str:
    row = next(row for row in ROWS if letter.lower() in row)
    at = row.index(letter.lower())
    return rng.choice([row[i] for i in (at - 1, at + 1) if 0 <= i < len(row)])
