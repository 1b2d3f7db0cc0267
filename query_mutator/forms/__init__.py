"""Forms of the request: how a question is put to the target, without a model's call.

Offers `FORMS`, the registry to add your own to; `Form`, its `FormContext` with `Example`s, and `Framed`, the messages
and options it returns; and `select`, which reads `--forms`. May be imported by `env` and what is above it.
"""

from __future__ import annotations

from collections.abc import Sequence

from query_mutator.forms.base import FORMS_OF_PACKAGE, Example, Form, FormContext, Framed
from query_mutator.registry import Registry
from query_mutator.types import AS_IS

__all__ = ["ALL", "FORMS", "Example", "Form", "FormContext", "Framed", "among", "get", "names", "select"]

ALL, NONE = "all", "none"

FORMS: Registry[Form] = Registry("form", group="query_mutator.forms")
for _form in FORMS_OF_PACKAGE:
    FORMS.add(_form.name, _form)


def names() -> list[str]:
    """Return the names of all forms, in the order of the policy's actions."""
    return FORMS.names()


def get(name: str) -> Form:
    """Return a form; an unknown name is a UsageError that lists the known ones."""
    return FORMS.get(name)


def among(actions: Sequence[str], spec: str) -> tuple[str, ...]:
    """Return the forms among the names of actions that were selected by `spec`."""
    named = [name.strip() for name in spec.split(",")]
    return tuple(name for name in actions if name in named or (named == [ALL] and name in FORMS))


def select(spec: str = "") -> tuple[Form, ...]:
    """Return the forms of `a,b,c` in that order, each once; an empty text and `none` stand for none.

    `all` stands for those of the package and of plugins but `as_is`, in which an episode begins.
    """
    wanted = [name.strip() for name in spec.split(",") if name.strip() and spec != NONE]
    if wanted == [ALL]:
        wanted = [name for name in FORMS.registered() if name != AS_IS]
    return tuple(get(name) for name in dict.fromkeys(wanted))
