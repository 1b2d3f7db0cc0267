"""Read the standard library's own docstrings and print them as JSON; `corpus.py` runs this in a clean interpreter.

    python -I -S corpus_dump.py  ->  [{"name", "signature", "summary"}, ...]

It imports nothing of this package, so the result does not depend on what its caller has imported. Each object is
included once, under its first public name: functions and classes of MODULES first, then methods of METHODS_OF up to
LIMIT. Rules on the object and its docstring decide what is left out, never a list of wanted names.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT = 1500


def _names(kind: str) -> list[str]:
    """Return the entries of one kind in `corpus_names.tsv`, in order."""
    text = Path(__file__).with_name("corpus_names.tsv").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines() if not line.startswith("# "))
    return [name for row_kind, names in rows if row_kind == kind for name in names.split()]


MODULES, METHODS_OF = _names("module"), _names("class")
PLUMBING = re.compile("|".join(_names("plumbing")))


def main() -> None:
    """Print the corpus as one JSON list."""
    warnings.simplefilter("ignore")
    modules = {name: importlib.import_module(name) for name in MODULES if _importable(name)}
    rows = [
        {"name": name, "signature": _signature(name, thing), "summary": summary}
        for name, thing, summary in _collect(modules)
    ]
    json.dump(rows, sys.stdout)


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:  # not built for this platform, or removed in this version
        return False
    return True


def _collect(modules: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """Return (name, object, summary), at most LIMIT, in the order of MODULES, then METHODS_OF."""
    things: list[tuple[str, Any, str]] = []
    seen: set[Any] = set()
    top_level = (found for name, module in modules.items() for found in _public(name, module))
    methods = (found for name in METHODS_OF for found in _methods(name, modules))
    for name, thing in (*top_level, *methods):
        # A second name of an object, or one with the same docstring in the same place, adds nothing.
        keys = {_identity(thing), (name.rpartition(".")[0], thing.__doc__)}
        if len(things) < LIMIT and not keys & seen and _wanted(name, thing):
            summary = _summary(thing, name.rpartition(".")[2])
            if summary:
                seen |= keys
                things.append((name, thing, summary))
    return things


def _public(module_name: str, module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes that belong to a module, not those it only imports."""
    tops = {name.partition(".")[0] for name in MODULES} - {module_name.partition(".")[0]}
    declared = getattr(module, "__all__", None)
    for name in sorted(declared or vars(module), key=lambda name: (len(name), name)):
        thing = getattr(module, name, None)
        if name.startswith("_") or not (inspect.isroutine(thing) or inspect.isclass(thing) or _acts_as_function(thing)):
            continue
        home = str(getattr(thing, "__module__", "")).lstrip("_").partition(".")[0]
        if declared or home not in tops or module_name == "builtins":
            yield (name if module_name == "builtins" else f"{module_name}.{name}"), thing


def _acts_as_function(thing: Any) -> bool:
    """Return whether an object is called like a function it replaces: shutil.rmtree, from Python 3.12 on."""
    return callable(thing) and type(thing).__name__.startswith("_") and "__call__" in vars(type(thing))


def _owner(name: str, modules: dict[str, Any]) -> Any:
    module_name, _, attribute = name.rpartition(".")
    return getattr(modules.get(module_name or "builtins"), attribute, None)


def _methods(class_name: str, modules: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    module = modules.get(class_name.rpartition(".")[0])
    owner = _owner(class_name, modules) or object
    package = owner.__module__.partition(".")[0]
    bases = [base for base in owner.__mro__ if base.__module__.partition(".")[0] == package]  # Path's own, not dict's
    members = {name: raw for base in reversed(bases) for name, raw in vars(base).items()}  # the last definition wins
    for name, raw in members.items():
        thing = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
        twin = inspect.isroutine(getattr(module, name, None))  # re.search documents re.Pattern.search
        if inspect.isroutine(thing) and not name.startswith("_") and not twin:
            yield f"{class_name}.{name}", thing


def _identity(thing: Any) -> Any:
    """Return a key of an object; bound methods are created at each access, so their `id` cannot be the key."""
    if inspect.ismethod(thing):
        owner = thing.__self__
        return id(thing.__func__) if inspect.isclass(owner) else (id(owner), id(thing.__func__))
    return id(thing.__func__ if isinstance(thing, (staticmethod, classmethod)) else thing)


def _wanted(name: str, thing: Any) -> bool:
    """Return whether people ask how to use an object: not an error, a constant, a plain record or deprecated."""
    if PLUMBING.match(name):
        return False
    opening = str(getattr(thing, "__doc__", None) or "").strip().partition("\n\n")[0]
    if "deprecated" in opening.lower() or opening.startswith("Same as"):
        return False
    if not inspect.isclass(thing):
        return True
    record = issubclass(thing, tuple) and thing is not tuple
    constants = issubclass(thing, enum.Enum) and not name.startswith("enum.")
    return not (record or constants or issubclass(thing, (BaseException, ast.AST)))


def _summary(thing: Any, short: str) -> str:
    """Return the docstring's first paragraph of prose on one line, without call forms such as `S.find(sub) -> int`."""
    doc = getattr(thing, "__doc__", None)
    if not isinstance(doc, str):
        return ""
    one_line_calls = re.sub(r"\([^()]*\)", lambda found: " ".join(found[0].split()), inspect.cleandoc(doc))
    for fewest_words in (
        4,
        1,
    ):  # a bare type after a call's arrow counts only as a last resort
        for paragraph in one_line_calls.split("\n\n"):
            kept = [_prose(line, short, fewest_words) for line in paragraph.splitlines()]
            prose = " ".join(" ".join(kept).split())
            if len(re.findall(r"\w+", prose)) >= 2:
                return prose[:600]
    return ""


def _prose(line: str, short: str, fewest_words: int) -> str:
    """Return a line, or of a line that begins with a call the text after it if that has enough words."""
    if not re.match(rf"\W*(\w+\.)?{re.escape(short)}\s?\(|[\w.]+\([^()]*\)\s-+>\s", line):
        return line
    says = re.search(r"\s(--|-+>)\s(?:\w+[.,]\s+)?(.+)", line)
    return says[2] if says and len(says[2].split()) >= fewest_words else ""


def _signature(name: str, thing: Any) -> str:
    """Return the call on one line; builtins without a text signature show the docstring's first line."""
    try:
        signature = inspect.signature(thing)
    except (ValueError, TypeError):
        first = inspect.cleandoc(getattr(thing, "__doc__", "") or "").partition("\n")[0]
        return first if re.match(r"[\w.]+\(", first) and len(first) < 160 else f"{name}(...)"
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    text = re.sub(r" at 0x[0-9a-f]+", "", str(signature.replace(parameters=parameters)))
    text = text.replace(repr(sys.executable), "sys.executable")  # a default of `platform`, and this machine's path
    if len(text) < 200:
        return f"{name}{text}"
    return f"{name}({textwrap.shorten(', '.join(p.name for p in parameters), 160, placeholder=' ...')})"


if __name__ == "__main__":
    main()
