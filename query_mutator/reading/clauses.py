"""What a reply asserts: its clauses by weight, without what it negates, quotes from others or takes back.

A conclusion ("so …"), a correction ("no, …") and a contrast ("people say …, but …") weigh more than a plain clause, one
that repeats the question's words more than one that does not; asides and reasons weigh less, and a question nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from query_mutator.reading.patterns import Patterns, word_list
from query_mutator.reading.text import words

P = Patterns("clauses")


REJECTED = -99.0
_LONG = 800  # characters of a sentence: of a longer one its beginning and its end are read
_MOST_SENTENCES = 30  # of the end of a reply, and four of its beginning

_INITIAL = re.compile(r"(?:\b[A-Z][\w'-]{1,20}\s|\A|\b[A-Z]\.\s?)[A-Z]\.\Z")
_STOP = re.compile(r"[.!?][\"')\]*_`]{0,4}(?=\s|$)|[。！？।]+|[.!?](?=\*\*)|[؛؟](?=\s|$)|(?:\.\.\.|…)(?=\s|[A-Z])")
_BULLET = re.compile(r"^\s{0,8}(?:[-*•>+]\s|#{1,6}\s|(?:step\s)?\d{1,2}[.)]\s)", re.IGNORECASE)
_BECAUSE = re.compile(r"^\W{0,3}(?:because|since|as|due\sto)\b", re.IGNORECASE)
_RELATIVE = re.compile(r"(?:which|who|whose|where|as|when|like|with|unlike)\b", re.IGNORECASE)
_EQUATED = re.compile(r"=\s?[$€£]?\d")
_CONTENT_STOP = frozenset(word_list("clauses", "CONTENT_STOP"))


_READABLE = re.compile("[^\\s.,;:!?\U0001f000-\U0001faff\u2600-\u2712]|[!?;:.,]`")
_SUBSTANCE = re.compile(r"[^\s.,;:!?_'\"-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """A part of a reply: what it asserts, with blanks for what it negates, and how much it counts as its answer."""

    text: str
    weight: float
    at: int  # its place among the clauses
    sentence: int = 0
    raw: str = ""  # with what it negates
    is_negated: bool = False

    @property
    def is_rejected(self) -> bool:
        """Return whether the reply does not hold what the clause says."""
        return self.weight <= REJECTED


@lru_cache(maxsize=4096)
def content(text: str) -> frozenset[str]:
    """Return the stems of the words of a text that carry meaning."""
    stems = (stem(word.removesuffix("'s")) for word in words(text) if word not in _CONTENT_STOP)
    plain = (
        re.sub("(?<=[a-z]{4})(?:ed|ing|e)$", "", word)
        for word in stems
        if len(word) > 2 or not word.isascii() or word.isdigit()
    )
    return frozenset(word[:5] if _INFLECTED.match(word) else word for word in plain)


_INFLECTED = re.compile("[\u0370-\u05ff\u0900-\u097f]")  # Greek, Cyrillic, Devanagari: the stem alone is compared


_IRREGULAR = dict(pair.split("=") for pair in word_list("clauses", "IRREGULAR"))


@lru_cache(maxsize=20_000)
def stem(word: str) -> str:
    """Return a folded word without a plural's s and the differences of British and American spelling."""
    word = _IRREGULAR.get(word, word)
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-2] if word.endswith(("ches", "shes", "sses", "xes")) else word[:-1]
    return word


def sentences(text: str) -> list[str]:
    """Return the sentences of a text; a line ends one."""
    found: list[str] = []
    for line in text.splitlines():
        start = 0
        for stop in _STOP.finditer(line):
            before = line[max(0, stop.end() - 30) : stop.end()]
            following = line[stop.end() : stop.end() + 2].strip()[:1]
            if stop[0] == "." and (
                _is_abbreviation(before)
                or following.islower()
                or (following.isdigit() and before[-3:-1].strip().isalpha() and _SHORT.search(before))
            ):
                continue
            _ITEM_NUMBER.fullmatch(line[: stop.end()]) if start == 0 else None
            found.append(line[start : stop.end()])
            start = stop.end()
        found.append(line[start:])
    return [
        sentence if len(sentence) <= _LONG else sentence[: _LONG // 4] + sentence[-_LONG:]
        for sentence in found
        if sentence.strip()
    ]


_ITEM_NUMBER = re.compile(r"\W{0,8}(\d{1,2}|[A-Za-z])\.")
_SHORT = re.compile(r"\b(?:no|nr|vol|fig|ca|approx|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec)\.\Z", re.IGNORECASE)


def _is_abbreviation(before: str) -> bool:
    return P.ABBREVIATION.search(before) is not None and (
        not re.search(r"(?<!\w)[A-Z]\.\Z", before) or _INITIAL.search(before) is not None
    )


def without_asides(sentence: str) -> tuple[str, list[str]]:
    """Return a sentence without parentheses that hold words, and what these hold."""
    asides: list[str] = []

    def cut(found: re.Match[str]) -> str:
        if re.search(r"[^\W\d_]{3}", found[1]) or re.match(r"\W{0,2}(?:not|i\.e|e\.g|=|≈|or)\b", found[1]):
            asides.append(found[1])
            return " "
        return found[0]

    return re.sub(r"(?<![\w.])\(([^()\n]{1,300})\)", cut, sentence), asides


@lru_cache(maxsize=512)
def clauses(text: str, question: str, polarity: bool = False) -> tuple[Clause, ...]:
    """Return the clauses of a text in its order; with `polarity` what is called wrong counts, as a verdict."""
    asked = content(question)
    kept = [sentence for sentence in sentences(text) if not P.CHAT.search(sentence) and _READABLE.search(sentence)]
    kept = [*kept[:4], *kept[4:][-_MOST_SENTENCES:]]
    has_items = sum(_BULLET.match(sentence) is not None for sentence in kept) > 1
    set(text.splitlines())
    found: list[Clause] = []
    before_rejected = False
    asks_why = re.search(r"\bwhy\b|\breason\b|\bcause", question, re.IGNORECASE) is not None
    for number, sentence in enumerate(kept):
        body, asides = without_asides(sentence)
        is_aside = False
        is_question = body.rstrip(" *_\"').").endswith(("?", "？", "؟")) and len(kept) > 1
        recency = (1.0 if len(kept) < 5 else 2.0) if number == len(kept) - 1 else 0.0
        is_short = len(kept) <= 3 or _HEAD_END.search(body) is None
        first = (
            0.0
            if number or is_aside or (has_items and _BULLET.match(sentence))
            else (3.0 if is_short else 1.0)
            if is_fragment(body)
            else 1.5
            if _is_direct(body)
            else 0.0
        )
        pieces = _pieces(_BULLET.sub("", body))
        for _place, (connector, piece) in enumerate(pieces):
            weight = (
                recency
                + (first if piece is pieces[0][1] else 0.0)
                + _weight(
                    connector, piece, before_rejected=before_rejected, asks_why=asks_why, is_alone=len(pieces) == 1
                )
                - 3.0 * is_aside
            )
            if found and kept[number - 1].endswith("...") and number:
                weight += 1.5
            echo = asked & content(piece)
            weight += 2.0 * len(echo) / max(1, min(len(asked), 4)) if echo else 0.0
            asserted, is_negated = without_negated(piece)
            if P.RETRACTS.match(piece):
                found = [replace(clause, weight=max(REJECTED, clause.weight - 4.0)) for clause in found]
            if P.WITHDRAWS.search(piece):
                found = [replace(clause, weight=REJECTED) for clause in found]
                weight = REJECTED
            if re.match(r"\W{0,3}which\b", piece) and P.CONCLUDES.search(piece) and found and not found[-1].is_rejected:
                found[-1] = replace(found[-1], weight=found[-1].weight + 3.0)
                weight -= 3.0
            is_myth = polarity and P.CLAUSES_2.search(piece)
            is_negated and not content(asserted) and not re.search(r"\d|[^\w\s.,;:!?'\"-]", asserted)
            if (
                is_question
                or (not is_myth and P.ATTRIBUTED.search(piece))
                or (not polarity and (P.WRONG.search(piece) or not _SUBSTANCE.search(asserted)))
            ):
                weight = REJECTED
            before_rejected = (
                weight == REJECTED or (is_negated and not _SUBSTANCE.search(asserted)) or bool(P.CONCEDES.search(piece))
            )
            found.append(
                Clause(text=asserted, weight=weight, at=len(found), sentence=number, raw=piece, is_negated=is_negated)
            )
        for aside in asides:
            asserted, is_negated = without_negated(aside)
            rejected = P.ATTRIBUTED.search(aside) or is_question
            found.append(
                Clause(
                    text=asserted,
                    weight=REJECTED if rejected else -4.0,
                    at=len(found),
                    sentence=number,
                    raw=aside,
                    is_negated=is_negated,
                )
            )
    return tuple(found)


def _is_direct(sentence: str) -> bool:
    """Return whether a first sentence answers at once: a few words, or "It's …"."""
    return P.IS_DIRECT.match(sentence) is not None


_HEAD_END = re.compile(r"[^.!?:;,–—(][,;:–—(]|\.\s\S")
_HEAD = re.compile(r"[,;:–—(]|\s-\s|\.\s|$")


def is_fragment(sentence: str) -> bool:
    """Return whether a sentence begins with an answer alone: a few words without a verb, up to the first mark."""
    sentence = re.sub(r"`[^`\n]{1,60}`", "X", sentence)
    first = _pieces(sentence)[:1]
    if first and re.search(r",.{1,80}\s(?:is|are|was|were|do|does|did|have|has|would|will|can)\s", first[0][1]):
        return False
    head = sentence[: (_HEAD.search(sentence, 1) or re.compile("$").search(sentence)).start()]  # type: ignore[union-attr]
    following = sentence[len(head) :][:1]
    words_of = re.findall(r"[^\W_]+(?:'[^\W\d_]+)?", head)
    if following == ":" and (
        re.match(r":\W{0,5}[\d(]", sentence[len(head) :]) or not sentence[len(head) + 1 :].strip()
    ):
        return False
    if P.IS_FRAGMENT_2.match(head):
        return False
    verb = re.search(r"^[A-Z][a-z]+\s[a-z]{3,}s\s", head.strip()) or re.search(
        r"\b(?:they|he|she|we|you|i)\s", head, re.IGNORECASE
    )
    return len(words_of) <= 5 and not verb and not P.FINITE.search(head)


def _weight(connector: str, piece: str, *, before_rejected: bool, asks_why: bool, is_alone: bool) -> float:
    whole = f"{connector} {piece}"
    weight = 0.0
    if P.CONCEDES.search(whole):
        weight -= 4.0
    elif asks_why and _BECAUSE.search(whole):
        weight += 2.0
    elif (P.REASON.search(whole) and not is_alone) or P.ASIDE.search(whole):
        weight -= 3.0
    elif P.HYPOTHETIC.search(piece):
        weight -= 2.5
    if P.WEIGHT.match(piece):
        weight -= 5.0
    if re.search(r"[=→≈⇒]\s?\W{0,4}\d", piece):
        weight += 1.0
    if P.CONCLUDES.search(whole):
        weight += 3.0
    if P.CONTRAST.search(whole):
        weight += 2.5 if before_rejected else 1.0
    return weight


def _pieces(sentence: str) -> list[tuple[str, str]]:
    """Return the clauses of a sentence, each with the mark that separates it from the one before."""
    cuts = [(found.start(), found.end()) for found in P.SPLIT.finditer(sentence)]
    for start in [0, *(end for _, end in cuts)]:
        comma = sentence.find(", ", start, start + 200) if P.LEADING.match(sentence, start) else -1
        if comma > 0 and not any(start < begin < comma for begin, _ in cuts):
            cuts = sorted({*cuts, (comma, comma + 2)})
    for start, end in zip([end for _, end in cuts], [*(begin for begin, _ in cuts[1:]), len(sentence)], strict=False):
        comma = sentence.find(", ", start, end) if _RELATIVE.match(sentence, start) else -1
        if comma > 0 and len(sentence[comma:end].split()) > 1:
            cuts = sorted({*cuts, (comma, comma + 2)})
    pieces, start, mark = [], 0, ""
    for begin, end in cuts:
        if (joined := P.JOINED_LEADING.match(sentence, start, begin)) is not None:
            start = joined.start(1) + len(joined[1]) + 1
            pieces.append((mark, sentence[start:begin]))
            start, mark = end, joined[1]
            continue
        if re.search(r"\b(?:not|only|just|and|it's)\W*$", sentence[start:begin][-8:]):
            continue  # "not because …"
        if sentence[start:begin].strip():
            pieces.append((mark, sentence[start:begin]))
        start, mark = end, sentence[begin:end].strip()
    if sentence[start:].strip():
        pieces.append((mark, sentence[start:]))
    return pieces


def without_negated(piece: str) -> tuple[str, bool]:
    """Return a clause with blanks for what it negates, and whether it negates anything.

    "not 8 but 9" leaves 9, "it is 24, not 12" leaves 24, "C doesn't fit" nothing, "9 instead of 8" 9.
    """
    kept, at, is_negated = "", 0, False
    while found := P.NEGATOR.search(piece, at):
        kind = found.lastgroup
        is_negated = is_negated or kind in ("verb", "plain", "foreign", "pair")
        end = P.RESUMES.search(piece, found.end())
        stop = end.start() if end else len(piece)
        before = piece[at : found.start()]
        if kind == "after":
            kept += before[: max(before.rfind(", "), before.rfind(": "), before.rfind("、")) + 1]
            at = found.end()
            is_negated = True
            continue
        if kind == "verb":
            kept += (
                before
                if _EQUATED.search(before)
                else " "
                if not re.search(r",\s|:\s", before)
                else before[: max(before.rfind(", "), before.rfind(": ")) + 1]
            )
        else:
            kept += before
        while end and kind == "pair" and piece[end.start()] == ",":  # neither A, B nor C
            end = P.RESUMES.search(piece, end.end())
            stop = end.start() if end else len(piece)
        kept += " "
        at = max(stop, found.end())
    return kept + piece[at:], is_negated


def ranked(text: str, question: str, *, polarity: bool = False) -> list[Clause]:
    """Return the clauses that a text holds, the one that most likely is its answer first."""
    held = [clause for clause in clauses(text, question, polarity) if not clause.is_rejected]
    return sorted(held, key=lambda clause: (-clause.weight, -clause.at))


def after_label(text: str) -> list[Clause]:
    """Return the clauses after a mark, the first one first; its contrasts count, and its reasons do not."""
    found = clauses(text, "")
    held = [replace(clause, weight=10.0 - clause.at) for clause in found if not clause.is_rejected]
    return sorted(held, key=lambda clause: -clause.weight)
