"""Grammar: the word order and the articles that English has where other languages have not."""

from __future__ import annotations

import re

from query_mutator.embedded.rules.text import tidy

#: What is written, and what English has; applied in this order.
_REPAIRS: tuple[tuple[str, str], ...] = (
    (r"\bhow (i|we|you|one) (can|could|should|must|may|would)\b", r"how \2 \1"),
    (r"\bhow (can|could|should|must|do) (i|we|you) to\b", r"how \1 \2"),
    (r"\b(can|could|must|should|may|might|would) to\b", r"\1"),
    (r"\b(can|could|must|should|may|might) (?:i|we) doing that (\w+) becomes (\w+)", r"\1 I have \2 \3"),
    (r"\bhow is possible\b", "how is it possible"),
    (r"\bis possible (to|that)\b", r"is it possible \1"),
    (r"^it exists\b", "is there"),
    (r"\b(?:it )?exists (a|an|some)\b", r"is there \1"),
    (r"\bin python exists\b", "in Python is there"),
    (r"\bexists (?:some thing|something) (?:what|that|which)\b", "is there something that"),
    (r"\bfor to\b", "to"),
    (r"\bi am searching\b", "I am looking for"),
    (r"\bi have need (?:to|of)\b", "I need to"),
    (r"\bi want that (my|the|a|an)( \w+) (\w+?)s\b", r"I want \1\2 to \3"),
    (r"\b(am|is|are) needing\b", "need"),
    (r"\bthe most little\b", "the smallest"),
    (r"\bmost (big|small|high|low|long|short)\b", r"\1est"),
    (r"\bmore (big|small|high|low|long|short)\b", r"\1er"),
    (r"\b(thing|things|all|rows|text|something|everything|function) what\b", r"\1 that"),
    (r"\bsince how many\b", "for how many"),
    (r"\b(before|after|inside|outside) of\b", r"\1"),
    (r"\bexplain me\b", "explain to me"),
    (r"(?<!does )\bnot (exist|work|run|stop|end|open|close|start)s\b", r"does not \1"),
    (r"\bmake that (?:the |a )?(\w+) (\w+?)s\b", r"make the \1 \2"),
    (r"\binformations\b", "information"),
    (r"\bdatas\b", "data"),
    (r"\bsoftwares\b", "software"),
    (r"\bsome thing\b", "something"),
    (r"\ball have equal\b", "all have in common"),
    (r"\bwhich are living\b", "that are alive"),
    (r"\bthe (\w+) has answered\b", r"the \1 returned"),
    (r"\bmanner\b", "way"),
    (r"\bhow in\b", "as in"),
    (r"\bthe point\b", "the dot"),
)
_COMPILED = tuple((re.compile(pattern, re.IGNORECASE), new) for pattern, new in _REPAIRS)


def repair(text: str) -> str:
    """Return the text with second-language constructions put into English."""
    for pattern, new in _COMPILED:
        text = pattern.sub(new, text)
    return tidy(text)
