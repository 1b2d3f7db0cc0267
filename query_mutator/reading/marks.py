r"""Explicit marks of a final answer (\boxed{}, "answer is", ####, a field of JSON), and the options of a question."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from query_mutator.reading.clauses import Span
from query_mutator.reading.text import Patterns, clean, places_of, spelled, stems, without_tex, word_list

P = Patterns("marks")

_CUES = tuple(word_list("marks", "CUES"))
_FIELDS = tuple(word_list("marks", "FIELDS"))
_TAG = re.compile(r"<(answer|final_answer|final|result)>|\[(ANSWER|PYTHON|FINAL)\]", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)[ \t]{0,9}(?:\{|([\w.+-]{1,30}))")
_CODE_FENCE = re.compile(r"```\w{0,12}")
_OBJECT_CHARS = 8000
_LINE_CHARS = 2000
_MOST_MARKS = 8  # of a kind, from the end
_MOST_LINES = 30  # with a word of a label, from the end
_MOST_OBJECTS = 20


@lru_cache(maxsize=256)
def marked(text: str, question: str) -> tuple[Span, ...]:
    """Return what the marks of a text hold, the last one first."""
    closed = [*_fields(text, question), *_lined(text, question), *_boxed(text), *_ticked(text), *_tagged(text)]
    objects = [span for span in closed if span.value is not None]
    labels = [span for span in _labels(text, question) if not any(one.start <= span.start < one.end for one in objects)]
    return tuple(sorted([*closed, *labels], key=lambda span: (span.end, span.start), reverse=True))


def _closed(text: str, start: int, end: int, value: Any = None) -> Span:
    return Span(text, text, is_marked=True, is_final=True, value=value, start=start, end=end)


def _boxed(text: str) -> Iterator[Span]:
    r"""Yield the contents of \boxed{}, braces balanced; each character is read twice at most."""
    end = 0
    for match in _BOX.finditer(text):
        if match.start() < end or _is_denied(text, match.start()):
            continue
        depth, end = (0 if match[1] else 1), match.end()
        while end < len(text) and depth:
            depth += (text[end] == "{") - (text[end] == "}")
            end += 1
        yield _closed(match[1] or text[match.end() : end - (depth == 0)], match.start(), end)


def _ticked(text: str) -> Iterator[Span]:
    """Yield the letter of the only ticked line of a form or table."""
    found = list(P.TICKED.finditer(text)) if "[" in text or "|" in text else []
    if len(found) == 1:
        yield _closed(found[0][1] or found[0][2], found[0].start(), found[0].end())


def _tagged(text: str) -> Iterator[Span]:
    for match in list(_TAG.finditer(text))[-_MOST_MARKS:]:
        end = text.find(f"</{match[1]}>" if match[1] else f"[/{match[2]}]", match.end())
        end = len(text) if end < 0 else end
        yield _closed(_CODE_FENCE.sub("", text[match.end() : end]).strip(), match.start(), end)


def _labels(text: str, question: str) -> Iterator[Span]:
    """Yield what the last labels of an answer announce ("The answer is", "####"), unless these deny or ask it."""
    lowered, end = text.lower(), len(text)
    for _ in range(_MOST_LINES):
        at = max(lowered.rfind(cue, 0, end) for cue in _CUES)
        if at < 0:
            return
        end, stop = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        for match in P.LABEL.finditer(text, max(0, end - 1), len(text) if stop < 0 else stop + 1):
            rest = text[match.end() :].lstrip().removeprefix(question.strip())
            line = rest.lstrip().partition("\n")[0][:_LINE_CHARS]
            if line and not _is_denied(text, match.start()) and not P.ASKS.match(line):
                yield Span(line, rest, is_marked=True, start=match.start(), end=match.end())


def _is_denied(text: str, start: int) -> bool:
    """Return whether the words before a mark say that it is somebody else's, or denied."""
    before = re.split(r"[.!?:;\n]\s|\n|,\s(?=(?:but|so|and)\b)", text[max(0, start - 100) : start])[-1]
    return P.REJECTS_LABEL.search(before) is not None


def _fields(text: str, question: str) -> Iterator[Span]:
    """Yield the values of answer fields in the outermost JSON objects of a text.

    Without such a field, that of a field which the question names or which is the only one besides explanations.
    """
    decoder = json.JSONDecoder()
    at = text.find("{")
    for _ in range(_MOST_OBJECTS):
        if at < 0:
            return
        end = at + 1
        found: tuple[Any] | None = None
        if text[end : end + 40].lstrip()[:1] == '"':
            try:
                value, length = decoder.raw_decode(text[at : at + _OBJECT_CHARS])
                end, found = (at + length, _answer_field(value) or _asked_field(value, question))
            except (ValueError, RecursionError):
                pass
        if found is not None:
            yield _closed(found[0] if isinstance(found[0], str) else json.dumps(found[0]), at, end, value=found[0])
        at = text.find("{", end)


def _lined(text: str, question: str) -> Iterator[Span]:
    """Yield the answer field of a text that is mostly lines of a name and a value, as in YAML, TOML or XML."""
    found = [*P.LINE_FIELD.finditer(text)]
    fields = {one[1] or one[3]: (one[2] or one[4]).split(" #")[0].strip(" \"',") for one in found}
    said = _answer_field(fields) or _asked_field(fields, question) if len(found) > 1 else None
    if said is not None and 2 * len(found) >= sum(re.search(r"\w", line) is not None for line in text.splitlines()):
        yield _closed(said[0], found[0].start(), len(text), value=said[0])


def _answer_field(value: dict[str, Any]) -> tuple[Any] | None:
    """Return the value of the most trusted field in an object or one inside it."""
    lowered = {str(name).lower().replace(" ", "_"): one for name, one in value.items()}
    for name in _FIELDS:
        if name in lowered:
            inner = lowered[name]
            return (_answer_field(inner) if isinstance(inner, dict) else None) or (inner,)
    inside = (_answer_field(inner) for inner in value.values() if isinstance(inner, dict))
    return next((found for found in inside if found is not None), None)


def _asked_field(value: dict[str, Any], question: str) -> tuple[Any] | None:
    named = [one for name, one in value.items() if re.search(rf"\b{re.escape(name)}\b", question, re.IGNORECASE)]
    others = [one for name, one in value.items() if not P.EXPLAINS.search(name)]
    found = named if len(named) == 1 else others
    return (found[0],) if len(found) == 1 and not isinstance(found[0], dict) else None


def after_mark(text: str) -> str:
    """Return what the last mark of a final answer holds; else the whole text."""
    return next((span.text for span in marked(clean(text), "") if span.text.strip()), text)


def last_answer(reply: str) -> str:
    """Return what the last mark of a reply holds, else its last line."""
    *_, last = ["", *filter(str.strip, after_mark(reply).splitlines())]
    return last.strip()


@lru_cache(maxsize=1024)
def options_in(question: str) -> Mapping[str, str]:
    """Return the options of a question, from A on without a gap, {} unless there are two; texts by letter."""
    best: list[tuple[int, int]] = []
    run: list[tuple[int, int]] = []
    for marker in P.OPTION.finditer(question):
        letter = (marker[marker.lastindex or 0]).upper()
        if letter == chr(ord("A") + len(run)):
            run.append(marker.span())
        elif letter == "A":
            run = [marker.span()]
        if len(run) >= len(best):
            best = list(run)
    if len(best) < 2:
        return {}
    stops = [start for start, _ in best[1:]] + [len(question)]
    texts = [question[end:stop].strip(" \t\n;,.|") for (_, end), stop in zip(best, stops, strict=True)]
    texts[-1] = texts[-1].partition("\n")[0]
    return {chr(ord("A") + at): text for at, text in enumerate(texts)}


def letters_in(text: str) -> list[str]:
    """Return the letters that a text shows as such, in their order: (C), "option C", **C**, "C." at its beginning."""
    return [next(filter(None, found.groups())) for found in P.LETTER.finditer(text)]


def texts_in(text: str, options: Mapping[str, str]) -> list[str]:
    """Return the letters of the options whose text occurs in a text, in order, the longest first where they overlap."""
    tokens = stems(without_tex(text))
    places = [
        (at, at + len(wanted), letter)
        for letter, wanted in ((letter, _bare(option)) for letter, option in options.items())
        for at in places_of(wanted, tokens)
    ]
    kept: list[tuple[int, int, str]] = []
    for place in sorted(places, key=lambda place: place[0] - place[1]):
        if all(place[1] <= other[0] or other[1] <= place[0] for other in kept):
            kept.append(place)
    return [letter for _, _, letter in sorted(kept)]


@lru_cache(maxsize=4096)
def _bare(option: str) -> tuple[str, ...]:
    wanted = stems(without_tex(spelled(option)))
    return wanted[1:] if len(wanted) > 1 and wanted[0] in ("a", "an", "the") else wanted
