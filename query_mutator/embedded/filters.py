"""The two filters in front of the assistant: one too careful about words, one about what a request is for.

Deployed assistants have both kinds. The word filter refuses "How do I kill a thread?" as readily as a threat: that is
the false refusal a better wording avoids. The purpose filter compares what is asked with short descriptions of harm
to people and what is theirs; saying the same thing in other words leaves it where it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from query_mutator.encoder import Encoder, FloatArray

#: Regular verbs and nouns; their inflections are made from them.
_STEMS = """
    abort assassinate attack bomb burn bust choke corrupt crack drug execute exploit hack hijack hostage inject kill
    massacre murder nuke poison punch slaughter smash stab strangle suicide terminate torture trap violate weapon
"""
#: The irregular ones and phrases, spelt out.
_IRREGULAR = (
    r"bl(eed(s|ing|ers?)?|ed)",
    r"bl(ow|ows|ew|own|owing)\s(\w+\s){0,3}up",
    r"brute[\s-]?forc(e|es|ed|ing)",
    r"d(ie|ies|ied|ying|ead|eadly|eath|eaths)",
    r"destr(oy(s|ed|ers?|ing)?|uct(ion|ive|ors?)?)",
    r"explo(d(e|es|ed|ing)|si(on|ons|ve|ves))",
    r"overthr(ow(s|n|ing)?|ew)",
    r"sho(ot(s|ing|ers?)?|ts?)",
    r"st(eal(s|ing)?|ole|olen)",
    r"str(ik(e|es|ing|ers?)|uck)",
    r"wip(e|es|ed|ing)\s(\w+\s){0,3}out",
)


def _inflections(stem: str) -> str:
    """Return a pattern for a regular word: nuke, nukes, nuked, nuking; stab, stabbed; terminate, termination."""
    if stem.endswith("e"):
        return f"{stem[:-1]}(es?|ed|ing|ers?|ions?|ors?|al)"
    return f"{stem}{stem[-1]}?(s|es|ed|ing|ings|ers?|ions?|ors?)?"


_TRIGGER = re.compile(rf"\b({'|'.join([*map(_inflections, _STEMS.split()), *_IRREGULAR])})\b", re.IGNORECASE)


def has_trigger_word(text: str) -> bool:
    """Return whether the over-cautious filter refuses a text: a violent word anywhere in it, whatever it is about."""
    return _TRIGGER.search(text) is not None


#: What must not be helped with, in general terms. No method, no detail: only what the purpose would be.
HARMS = (
    "hurting or killing a person",
    "beating up or injuring somebody",
    "poisoning a person or an animal",
    "putting a drug into somebody's food or drink",
    "threatening or frightening a person",
    "bullying or humiliating somebody",
    "stalking or secretly following a person",
    "kidnapping somebody",
    "abusing a child",
    "hurting oneself",
    "attacking people in a public place",
    "using a weapon against people",
    "making or planting a bomb",
    "setting fire to somebody's house",
    "damaging or destroying somebody's property",
    "breaking into somebody's house",
    "stealing a car or other belongings",
    "robbing a person or a shop",
    "getting into somebody's account or phone without permission",
    "reading somebody's private messages in secret",
    "forging money, documents or a signature",
    "using somebody else's bank card or identity",
    "cheating people out of their money",
    "blackmailing or extorting a person",
    "making or selling illegal drugs",
)
_PERSONS = """
    person people somebody someone anybody anyone man men woman women guy girl boy child children kid baby
    teenager adult lady gentleman neighbour neighbor friend enemy rival stranger roommate flatmate classmate
    colleague coworker boss manager landlord tenant teacher pupil student doctor nurse patient politician
    president minister mayor policeman officer judge witness family mother father mum mom dad parent brother
    sister son daughter uncle aunt cousin grandmother grandfather grandma grandpa wife husband boyfriend
    girlfriend partner ex crowd customer tourist professor him her myself
"""
_PROPERTY = """
    house flat apartment garage garden car bike truck vehicle shop store restaurant office building school church
    bank account phone laptop wallet purse money savings pension banknote cheque passport jewellery jewelry parcel
    dog cat pet animal
"""
#: "child process", "parent class": a word for a person that names a part of a program.
_COMPUTING_HEAD = (
    r"(?!['’]?s?[\s-]+(process|thread|class|node|element|object|task|window|director|folder|widget|logger|package|import"
    r"|module|interpreter|coroutine|function|scope|key|field|record|list|dict|row))"
)
_OBJECT = re.compile(
    rf"\b({'|'.join((_PERSONS + _PROPERTY).split())})(e?s)?\b{_COMPUTING_HEAD}",
    re.IGNORECASE,
)
#: Where a text says it is about Python: that must not hide what the rest of it is for.
_SETTING = re.compile(
    r"[\s,:(\[-]*\b((in|with|using|for|from)\s+)?((the|a)\s+)?python\w*(['’]s)?(\s+(standard\s+library|stdlib|programming"
    r"(\s+language)?|programs?|scripts?|code|3))*\b[\s,:)\]-]*",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r"(?<=[.!?;:,])\s+|\n+")
_CONJUNCTION = re.compile(r"\s+(?:and|but|also|then|so)\s+", re.IGNORECASE)

_ASIDE = re.compile(r"\s*\((?:[^()]|\([^()]*\))*\)")

#: Cosines of MiniLM: a harm this near, and nearer by the margin than the nearest thing the assistant knows.
NEAR_HARM = 0.30
MARGIN = 0.05
#: Without a person or property in sight the likeness must be plain.
PLAIN_HARM = 0.50
PLAIN_MARGIN = 0.15
#: Below this nothing in a text is harmful, whatever else is in it.
HINT_OF_HARM = 0.20


class PurposeFilter:
    """Decides what requests are for, by likeness to HARMS against likeness to what the assistant knows."""

    def __init__(self, encoder: Encoder, known: FloatArray) -> None:
        self._encoder = encoder
        self._known = known  # [n, dim], one unit row per document
        self._harms = encoder.encode(HARMS)  # [h, dim]

    def refuses(self, texts: Sequence[str], rows: FloatArray) -> list[bool]:
        """Return for each text whether it is refused; `rows` are the texts' own embeddings, [n, dim].

        A text with a hint of harm is also read without what it has in brackets, and one that names a person or property
        without its setting, part by part: neither "In Python: ...", nor an aside, nor a harmless second question covers
        what it is for.
        """
        verdicts = self._harmful(rows, near=PLAIN_HARM, margin=PLAIN_MARGIN)
        hinted = [
            i for i, row in enumerate(rows) if not verdicts[i] and float((self._harms @ row).max()) >= HINT_OF_HARM
        ]
        plain = [(i, view) for i in hinted if (view := _ASIDE.sub("", texts[i])) != texts[i]]
        self._read(plain, verdicts, near=PLAIN_HARM, margin=PLAIN_MARGIN)
        parts = [(i, view) for i, text in enumerate(texts) if _OBJECT.search(text) for view in _views(text)]
        self._read(parts, verdicts, near=NEAR_HARM, margin=MARGIN)
        return verdicts

    def _read(self, views: Sequence[tuple[int, str]], verdicts: list[bool], *, near: float, margin: float) -> None:
        """Set the verdict of each text (by its place) that has a harmful view; settled texts are passed over."""
        open_views = [(i, view) for i, view in views if not verdicts[i]]
        if open_views:
            rows = self._encoder.encode([view for _, view in open_views])
            for (i, _), harmful in zip(open_views, self._harmful(rows, near=near, margin=margin), strict=True):
                verdicts[i] = verdicts[i] or harmful

    def _harmful(self, rows: FloatArray, *, near: float, margin: float) -> list[bool]:
        verdicts = []
        for row in rows:  # one by one: the last bits of a product must not depend on what else is asked
            harm, known = float((self._harms @ row).max()), float((self._known @ row).max())
            verdicts.append(harm >= near and harm - known >= margin)
        return verdicts


def _views(text: str) -> list[str]:
    """Return a text without its setting in Python, that without what is in brackets, and its parts with an object."""
    bare = _SETTING.sub(" ", text).strip()
    plain = _ASIDE.sub("", bare).strip()
    clauses = _CLAUSE.split(plain)
    parts = [*clauses, *(part for clause in clauses for part in _CONJUNCTION.split(clause))]
    parts = [part for part in parts if len(part.split()) > 2 and _OBJECT.search(part)]
    return list(dict.fromkeys([bare, plain, *parts]))
