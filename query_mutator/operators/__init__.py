"""Rewrite operators, one prompt file each in `prompts/`, registered by name.

Add your own: put a file into `prompts/` and its name into `_ORDER`, or register an object with `name`, `summary` and
`render` under OPERATORS from your own code.
"""

from __future__ import annotations

from importlib import resources

from query_mutator.operators.base import Operator, OperatorContext, PromptOperator
from query_mutator.registry import Registry

__all__ = ["OPERATORS", "Operator", "OperatorContext", "PromptOperator", "get", "names", "select"]

#: The order of the policy's actions; a checkpoint names its operators, so new ones go to the end.
_ORDER = (
    "spelling",
    "slang",
    "terms",
    "neutral",
    "filler",
    "imperative",
    "keywords",
    "context",
    "first_part",
    "merge",
    "grammar",
    "expand",
)

OPERATORS: Registry[Operator] = Registry("operator")


def _load(name: str) -> PromptOperator:
    file = resources.files("query_mutator.operators") / "prompts" / f"{name}.md"
    operator = PromptOperator.parse(file.read_text(encoding="utf-8"), source=f"prompts/{name}.md")
    if operator.name != name:
        raise ValueError(f"prompts/{name}.md: its marker names {operator.name!r}")
    return operator


for _name in _ORDER:
    OPERATORS.add(_name, _load(_name))


def names() -> list[str]:
    """Return the names of all operators, in the order of the policy's actions."""
    return OPERATORS.names()


def get(name: str) -> Operator:
    """Return an operator; an unknown name is a UsageError that lists the known ones."""
    return OPERATORS.get(name)


def select(spec: str = "") -> tuple[Operator, ...]:
    """Return the operators of `a,b,c` in that order, each once; all of them for an empty text."""
    wanted = [name.strip() for name in spec.split(",") if name.strip()]
    return tuple(get(name) for name in (dict.fromkeys(wanted) or names()))
