"""Which option of its question a reply without a mark chooses: a conditional logit on the words around it decides.

Candidates are the options wherever the reply mentions them, and none; the weights of their cues are fitted to labeled
replies (`scripts/fit_choice.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from query_mutator.reading.clauses import clauses, content
from query_mutator.reading.marks import P as MARKS
from query_mutator.reading.marks import options_in, texts_in
from query_mutator.reading.text import Patterns, fold, hashed, plain, stored, unspaced, words
from query_mutator.reading.values import numbers_in

P = Patterns("reply")

WEIGHTS = Path(__file__).with_name("choice.npz")
BUCKETS = 2**14  # that cues share by a hash
_NEAR = 60  # characters before and after a mention that are read
_TOKEN = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?|\d[\d.,]*|[^\w\s]")
_LONE = re.compile(r"(?<![\w'])[A-Za-z](?![\w'])")


def chosen(text: str, question: str) -> str | None:
    """Return the letter of the option that a text chooses, None for none or for several."""
    found = candidates(text, question)
    is_list = P.LETTERS_ALONE.fullmatch(text) is not None and len({letter for letter, _ in found}) > 2
    return None if is_list else max(found, key=lambda one: _score(one[1]))[0]


def _score(cues: Sequence[str]) -> float:
    weights, at = stored(WEIGHTS)[0], hashed(cues, BUCKETS)
    return float(sum(weights[bucket] for bucket in at) / len(at) ** 0.5)


def candidates(text: str, question: str) -> list[tuple[str | None, list[str]]]:
    """Return the letters of the options that a text may choose, with their cues; the last is None: no option."""
    options, held = options_in(question), clauses(text, question, polarity=False)
    best = max((one.weight for one in held), default=0.0)
    found: list[tuple[str | None, list[str]]] = []
    for one in held:
        raw = plain(one.raw or one.text)
        named = mentions(raw, options)
        for number, (start, end, letter, form) in enumerate(named):
            before, after = _tokens(raw[max(0, start - _NEAR) : start])[-1:], _tokens(raw[end : end + _NEAR])[:6]
            cues = [form, f"place:{min(5, number)}:{min(5, len(named))}", f"gap:{min(9, round(best - one.weight))}"]
            cues += [f"after:{min(5, held[-1].sentence - one.sentence)}", f"L:{before}", f"R:{after[:1]}"]
            found.append((letter, cues + [f"r:{word}" for word in after]))
    counts = Counter(letter for letter, _ in found)
    order = [*dict.fromkeys(letter for letter, _ in reversed(found))]
    for said, cues in found:
        cues += [f"last:{min(5, order.index(said))}", f"count:{min(5, counts[said])}:{min(5, len(counts))}"]
    is_open = any(P.UNDECIDED.search(one.raw) for one in held)
    return [*found, (None, [f"none:{min(5, len(counts))}", f"open:{is_open}"])]


def mentions(text: str, options: Mapping[str, str]) -> list[tuple[int, int, str, str]]:
    """Return the start, end, letter and form of options in a text: by letter, text, words of their own or number."""
    shown = {one.start(one.lastindex or 0) for one in MARKS.LETTER.finditer(text)}
    shown |= {one.start(1) for one in re.finditer(r"\A\W*([A-Za-z])\W*\Z", text)}
    lone = (one for one in _LONE.finditer(text) if one[0].upper() in options)
    found = [(*one.span(), one[0].upper(), f"{one[0].isupper()}:{one.start() in shown}") for one in lone]
    folded = fold(text)
    for letter in _whole(text, options) or dict.fromkeys(texts_in(text, options)):
        place = re.search(r"(?<!\w)" + r"\W+".join(map(re.escape, words(options[letter]))), folded)
        found.append((*(place.span() if place else (0, 0)), letter, "text"))
    known = {letter for _, _, letter, _ in found}
    for letter, own in _own_words(tuple(options.items())).items():
        if letter not in known and (place := own.search(folded)):
            found.append((*place.span(), letter, "part"))
    if not found and len(numbers := {one.value for one in numbers_in(text, words=True)}) == 1:  # two is option "2"
        same = (letter for letter, option in options.items() if {one.value for one in numbers_in(option)} == numbers)
        found = [(0, 0, letter, "number") for letter in same]
    return sorted(found)


def _whole(text: str, options: Mapping[str, str]) -> list[str]:
    """Return the letters of the options whose text is all that follows the last sign of a result."""
    results = [*P.RESULT.finditer(text)] or [*re.finditer(r":\s", text)]
    said = unspaced(text[results[-1].end() :] if results else text).rstrip(".")
    return [letter for letter, option in options.items() if unspaced(plain(option)) == said]


@lru_cache(maxsize=256)
def _own_words(options: tuple[tuple[str, str], ...]) -> Mapping[str, re.Pattern[str]]:
    """Return by letter what finds words of an option that no other has; long ones may be parts of other words."""
    counts = Counter(stem for _, option in options for stem in content(option))
    forms = {
        letter: [r"\b" * (len(stem) < 5) + re.escape(stem) for stem in sorted(content(option)) if counts[stem] == 1]
        for letter, option in options
    }
    return {letter: re.compile("|".join(own)) for letter, own in forms.items() if own}


def _tokens(text: str) -> list[str]:
    return ["0" if token[0].isdigit() else token.lower() for token in _TOKEN.findall(text)]
