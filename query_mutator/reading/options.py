"""The options of a question, and which of them a text shows, as a letter or by its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from query_mutator.reading.clauses import stem
from query_mutator.reading.patterns import Patterns
from query_mutator.reading.text import spelled, without_tex, words
from query_mutator.reading.values import close, numbers_in

P = Patterns("options")


@lru_cache(maxsize=1024)
def options_in(question: str) -> Mapping[str, str]:
    """Return the options of a question, from A on without a gap, {} unless there are two; texts by letter."""
    best: dict[str, tuple[int, int]] = {}
    run: dict[str, tuple[int, int]] = {}
    for marker in P.MARKER.finditer(question):
        letter = (marker[1] or marker[2] or marker[3]).upper()
        if letter == "A" and ("A" not in run or len(run) == 1):
            run = {"A": marker.span()}
        elif letter == chr(ord("A") + len(run)) and run:
            run[letter] = marker.span()
        elif letter == "A":
            run = {"A": marker.span()}
        if len(run) >= len(best):
            best = dict(run)
    if len(best) < 2:
        return {}
    ends = [start for start, _ in list(best.values())[1:]] + [len(question)]
    texts = [
        question[end:following].strip(" \t\n;,.|") for (_, end), following in zip(best.values(), ends, strict=True)
    ]
    texts[-1] = texts[-1].partition("\n")[0]
    return dict(zip(best, texts, strict=True))


def letters_in(text: str) -> list[str]:
    """Return the letters that a text shows as such, in their order: (C), "option C", **C**, "C." at its beginning."""
    return [next(filter(None, found.groups())) for found in P.SHOWN.finditer(text)]


def texts_in(text: str, options: Mapping[str, str]) -> list[str]:
    """Return the letters of the options whose text occurs in a text, in order, the longest first where they overlap."""
    said = without_tex(text)
    tokens = [stem(word) for word in words(said)]
    places: list[tuple[int, int, str]] = []
    for letter, option in options.items():
        places += [(start, start + length, letter) for start, length in _occurrences(tokens, said, option)]
    kept: list[tuple[int, int, str]] = []
    for place in sorted(places, key=lambda place: place[0] - place[1]):
        if all(place[1] <= other[0] or other[1] <= place[0] for other in kept):
            kept.append(place)
    found = [letter for _, _, letter in sorted(kept)]
    if found:
        return found
    return _by_number(said, options)


def _by_number(said: str, options: Mapping[str, str]) -> list[str]:
    golds = {letter: numbers_in(without_tex(spelled(option)), words=True) for letter, option in options.items()}
    if not all(len(numbers) == 1 for numbers in golds.values()):
        return []
    return [
        letter
        for number in numbers_in(said, words=True)
        for letter, (gold,) in golds.items()
        if close(number.value, gold.value)
    ]


def _occurrences(tokens: list[str], said: str, option: str) -> Iterator[tuple[int, int]]:
    plain = without_tex(spelled(option))
    wanted = [stem(word) for word in words(plain)]
    while len(wanted) > 1 and wanted[0] in ("a", "an", "the"):
        wanted = wanted[1:]
    for start in range(len(tokens) - len(wanted) + 1):
        if tokens[start] == wanted[0] and tokens[start : start + len(wanted)] == wanted:
            yield start, len(wanted)
