"""Docstring phrasing: "How do I turn bytes into text?" -> "Turn bytes into text."; "Is there a …" -> "Return …"."""

from __future__ import annotations

import re
from collections.abc import Callable

from query_mutator.embedded.rules.inflect import forms, stems
from query_mutator.embedded.rules.lexicon import Lexicon
from query_mutator.embedded.rules.text import capitalise, sentences, tidy

_THING = (
    r"(?:\w+ )?(?:function|method|call|class|module|command|tool|type|object|thing|something|anything|one|routine|helper|"
    r"operator|iterator|container|kind of \w+|sort of \w+|dict|dictionary|container|decorator)"
)
_WHO = r"(?:i|we|you|one|somebody|someone|people|python|my (?:program|script|code)|a (?:program|script))"
_MODAL = r"(?:do|does|can|could|would|should|might|must|may|shall|did)"
_FIND = r"(?:know|tell|see|find out|check|test|determine|learn|make sure|figure out|work out|look)"
_GET = r"(?:get|find|obtain|see|know|learn|fetch|find out|look up|figure out|receive|read off)"
#: Openings of a question and what the docstring has instead, the first that matches; {} stands for the rest.
_OPENINGS: tuple[tuple[str, str], ...] = (
    (rf"how (?:{_MODAL} {_WHO}|to|i can|we can|i could)(?: to)? {_FIND} (?:whether|if|that) (.+)", "Return True if {}"),
    (rf"(?:can|could|may) {_WHO} {_FIND} (?:whether|if|that) (.+)", "Return True if {}"),
    (rf"(?:to )?(?:{_FIND}) (?:whether|if) (.+)", "Return True if {}"),
    (rf"(?:what|which)(?: {_THING})? (?:tells|shows)(?: me)? (?:whether|if) (.+)", "Return True if {}"),
    (rf"how {_MODAL} {_WHO}(?: to)? {_GET} (.+)", "Return {}"),
    (rf"how to {_GET} (.+)", "Return {}"),
    (rf"how (?:{_MODAL} {_WHO}|to|i can|we can|i could|can)(?: to)? (.+)", "{}"),
    (r"how many (.+?)(?: (?:are|is|do|does|did|have|has|will|can)\b(.*))?", "Return the number of {}{}"),
    (r"how (?:long|big|large|wide|much) (?:is|are|does|do|was) (.+)", "Return the size of {}"),
    (r"how much (.+)", "Return the amount of {}"),
    (
        rf"(?:is|are|exists?) there (?:a|an|any|some)?(?: \w+)? ?(?:way|trick|means|possibility)(?: to| of| for) (.+)",
        "{}",
    ),
    (
        rf"(?:is|are) there (?:a |an |any |some )?{_THING} (?:that|which|to|for)(?: can| will| would| lets me)? (.+)",
        "{}",
    ),
    (rf"(?:is|are) there (?:a |an |any |some )(.+)", "Return a {}"),
    (rf"(?:is it|would it be) possible (?:to|that) (.+)", "{}"),
    (rf"(?:what|which)(?: {_THING})? (?:lets|allows|helps)(?: me| us)?(?: to)? (.+)", "{}"),
    (rf"(?:what|which)(?: {_THING})? (?:gives|tells|shows|returns|holds)(?: me| us)? (.+)", "Return {}"),
    (
        rf"(?:what|which)(?: {_THING})? (?:can|could|will|would|should|do|must)(?: {_WHO})?(?: call| use)?(?: to| for)? (.+)",
        "{}",
    ),
    (r"what(?:'s| is) (?:the|a|an) (?:\w+ )?(?:way|trick|method|manner) (?:to|of|for) (.+)", "{}"),
    (rf"(?:what|which) is the {_THING} (?:to|that|which|for)(?: to)? (.+)", "{}"),
    (r"what(?:'s| is| are)(?: the)? (.+)", "Return the {}"),
    (rf"(?:what|which) {_THING} (.+)", "{}"),
    (r"(?:what|who) (\w+s) (.+)", "{} {}"),
    (rf"(?:can|could|may|should) {_WHO} (.+)", "{}"),
    (rf"where (?:do|can|could|would|does) {_WHO} {_GET} (.+)", "Return {}"),
    (rf"where (?:do|can|could|would|does) {_WHO} (.+)", "{}"),
    (r"where (?:is|are) (.+)", "Return the location of {}"),
    (r"when (?:was|is|were) (.+)", "Return the time when {}"),
    (r"who (.+)", "Return the user who {}"),
    (r"(?:does|do|is|are|was|were|has|have|did) (.+)", "Return True if {}"),
    (
        rf"(?:i|we) (?:want|need|have|like|wish|must|am trying|would like|would love|'d like|'d love)(?: to) {_GET} (.+)",
        "Return {}",
    ),
    (r"(?:i|we)(?:'d| would)? (?:want|need|like|love|wish|have|must|am trying)(?: to) (.+)", "{}"),
    (r"(?:i|we)(?:'d| would)? (?:want|need|like) (.+)", "Return {}"),
    (r"(?:give|show|tell) me (.+)", "Return {}"),
)
_COMPILED = tuple((re.compile(rf"{pattern}\Z", re.IGNORECASE), shape) for pattern, shape in _OPENINGS)
_LEAD_IN = re.compile(
    r"^(?:so|and|but|ok|okay|well|now|also|then|please|hi|hello|hey|in python|with python|python|quick question)\b[,:]?\s+",
    re.IGNORECASE,
)
_TAIL = re.compile(
    r"[,]?\s*(?:please|in python|with python|any ideas?|thanks|thank you|how)?\s*[?.!]*\s*$", re.IGNORECASE
)


class Imperative:
    """Rephrases the request as the first line of a docstring."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon

    def __call__(self, text: str) -> str:
        """Return the text with its request in docstring phrasing; other sentences stay as they are."""
        found = sentences(text)
        rephrased = [self.rephrase(sentence) for sentence in found]
        return " ".join(new or old for old, new in zip(found, rephrased, strict=True))

    def rephrase(self, sentence: str) -> str | None:
        """Return one sentence in docstring phrasing, or None where it asks for nothing."""
        core = _TAIL.sub("", sentence)
        while _LEAD_IN.match(core):
            core = _LEAD_IN.sub("", core, count=1)
        # "my list is long, how do I cut it" asks in its last clause
        pieces = re.split(
            r",\s+(?=(?:how|what|which|is there|can|could|where|who)\b)", core, maxsplit=1, flags=re.IGNORECASE
        )
        for pattern, shape in _COMPILED:
            match = pattern.match(pieces[-1])
            if match:
                filled = shape.format(*(part or "" for part in match.groups()))
                said = f"{self._base_verb(_impersonal(filled))}."
                context = f" {capitalise(pieces[0])}." if len(pieces) > 1 else ""
                return tidy(said) + context
        return None

    def _base_verb(self, text: str) -> str:
        first, space, rest = text.strip().partition(" ")
        low = first.lower()
        for stem in stems(low):
            if stem != low and low in forms(stem)[1:3] and self._lexicon.lists(stem):
                return f"{stem}{space}{rest}"
        return text.strip()


_IMPERSONAL: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\b(?:my|our|your)\b", "the"),
    (r"\b(?:for|to) (?:me|us|you)\b", ""),
    (r"\b(?:i|we) (?:have|own|got)\b", "given"),
    (r"\bthe (?:own)\b", "own"),
)


def _impersonal(text: str) -> str:
    for pattern, new in _IMPERSONAL:
        text = re.sub(pattern, new, text, flags=re.IGNORECASE)
    return text
