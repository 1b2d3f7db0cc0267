"""Qualified names of Python's standard library: which object one means, and what its docstring says first."""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
import sys
from functools import lru_cache

#: Modules whose import does something visible (opens a browser, prints a poem, starts a window).
_NEVER_IMPORT = frozenset({"antigravity", "this", "idlelib", "turtledemo", "__main__", "turtle", "test"})
_NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`|\b([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)")
_SIGNATURE_LINE = re.compile(r"^[\w.]+\(.*\)(\s*->.*)?$")


@lru_cache(maxsize=8192)
def resolve(name: str) -> object | None:
    """Return the standard-library object called `name` (`os.kill`, `str.split`, `sorted`), or None."""
    parts = name.split(".")
    if parts[0] in sys.stdlib_module_names and parts[0] not in _NEVER_IMPORT:
        found = _from_module(parts)
        if found is not None:
            return found
    return _walk(builtins, parts)


def _from_module(parts: list[str]) -> object | None:
    for cut in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        return _walk(module, parts[cut:])
    return None


def _walk(start: object, parts: list[str]) -> object | None:
    thing: object | None = start
    for part in parts:
        thing = getattr(thing, part, None)
        if thing is None:
            return None
    return thing


@lru_cache(maxsize=65536)
def same_object(name: str, other: str) -> bool:
    """Return whether two qualified names mean the same object, so that aliases count as equal."""
    if name == other:
        return True
    one, two = resolve(name), resolve(other)
    if one is None or two is None:
        return False
    # A classmethod is a new bound object at each look-up: equal, never identical.
    return one is two or (type(one) is type(two) and inspect.isroutine(one) and bool(one == two))


def first_name(text: str) -> str | None:
    """Return the first qualified name in `text` that resolves: dotted anywhere, a bare builtin only in backticks."""
    for match in _NAME.finditer(text):
        name = (match.group(1) or match.group(2)).strip(".")
        if name and callable(resolve(name)):
            return name
    return None


def first_paragraph(name: str) -> str | None:
    """Return the first prose paragraph of the object's docstring on one line, or None."""
    thing = resolve(name)
    doc = inspect.getdoc(thing) if thing is not None else None
    if not doc:
        return None
    paragraphs = [" ".join(part.split()) for part in doc.split("\n\n") if part.strip()]
    prose = [part for part in paragraphs if not _SIGNATURE_LINE.match(part)]
    return (prose or paragraphs)[0]
