"""Rewrite operators, registered by name; `prompts.toml` has those that a mutator model carries out.

Offers `OPERATORS`, the registry to add your own to; `PromptOperator`, an operator made of a prompt;
`LocalOperator`, one that is a function; the `Operator` Protocol and its `OperatorContext`; `GUARDS`, the checks of a
rewrite, and `rejecting_guard`, which makes them; and `select`, which reads `--operators`. The order of registration is
the order of the policy's actions.
"""

from __future__ import annotations

import tomllib
from importlib import resources

from query_mutator.operators.base import (
    CLEAN,
    LocalOperator,
    Operator,
    OperatorContext,
    PromptOperator,
    english_words,
    has_unknown_word,
    local_rewrite,
    rejecting_guard,
    would_change,
)
from query_mutator.operators.guards import GUARDS
from query_mutator.registry import Registry

__all__ = [
    "GUARDS", "OPERATORS", "LocalOperator", "Operator", "OperatorContext", "PromptOperator",
    "english_words", "local_rewrite", "rejecting_guard", "select", "would_change",
]  # fmt: skip

#: Must be named in `--operators`: they may lose a part of the meaning, or read English only.
_NOT_DEFAULT = ("imperative", "keywords", "first_part", "merge", CLEAN.name)

NONE = "none"

_TESTS = {"spelling": has_unknown_word}

OPERATORS: Registry[Operator] = Registry("operator", group="query_mutator.operators")


_prompts = resources.files("query_mutator.operators").joinpath("prompts.toml").read_text(encoding="utf-8")
for _name, _parts in tomllib.loads(_prompts).items():
    OPERATORS.add(_name, PromptOperator.of(_name, test=_TESTS.get(_name), **_parts))
OPERATORS.add(CLEAN.name, CLEAN)


def select(spec: str = "") -> tuple[Operator, ...]:
    """Return the operators of `a,b,c` in that order, each once.

    An empty text stands for those of plugins and the rewrites by a mutator model that keep the meaning, `none` for
    none. Operators of installed distributions must be named: installing one must not change the actions of a run.
    """
    wanted = [name.strip() for name in spec.split(",") if name.strip()]
    if wanted == [NONE]:
        return ()
    default = [name for name in OPERATORS.registered() if name not in _NOT_DEFAULT]
    return tuple(OPERATORS.get(name) for name in (dict.fromkeys(wanted) or default))
