"""A rewrite operator: a name, and a prompt that asks a mutator model for the rewrite."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

MARKER = "[operator: {name}]"
_MARKER_LINE = re.compile(r"^\[operator: ([\w-]+)\]$", re.MULTILINE)
_SLOT = re.compile(r"\{(question|neighbou?r|domain)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorContext:
    """What an operator may use in addition to the question; fixed for each question of a run."""

    domain: str = "Python's standard library"
    neighbor: str | None = None  # the nearest other training question


class Operator(Protocol):
    """One way to rewrite a question."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str: ...

    def render(self, question: str, *, context: OperatorContext) -> str:
        """Return the prompt that asks a mutator model to rewrite `question`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOperator:
    """An operator that is a prompt file: its first line is the marker, its second the summary after `#`."""

    name: str
    summary: str
    template: str  # with {question}, and {neighbor} or {domain} where it needs them

    @classmethod
    def of(cls, name: str, summary: str, prompt: str) -> PromptOperator:
        """Return the operator of a prompt with {question} in it; ValueError without one."""
        return cls.parse(f"{MARKER.format(name=name)}\n# {summary}\n{prompt}", source=f"operator {name!r}")

    @classmethod
    def parse(cls, text: str, *, source: str) -> PromptOperator:
        """Return the operator of a prompt file; ValueError names what is missing in `source`."""
        marker, _, rest = text.partition("\n")
        match = _MARKER_LINE.fullmatch(marker.strip())
        if match is None:
            raise ValueError(f"{source}: the first line must be {MARKER.format(name='NAME')}")
        summary, _, body = rest.partition("\n")
        if not summary.startswith("# ") or "{question}" not in body:
            raise ValueError(f"{source}: the second line must be `# summary`, and the prompt must hold {{question}}")
        template = f"{marker.strip()}\n{body.strip()}\n"
        return cls(name=match.group(1), summary=summary.removeprefix("# ").strip(), template=template)

    def render(self, question: str, *, context: OperatorContext) -> str:
        """Return the prompt with question and context filled in; braces in a question are kept."""
        values = {"question": question, "neighbor": context.neighbor or "", "domain": context.domain}
        return _SLOT.sub(lambda match: values[match.group(1).replace("neighbour", "neighbor")], self.template)
