"""Specification of an analysis in TOML or YAML: metrics, the tags trainers log them under, axes and confounders."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from query_mutator.errors import UsageError
from query_mutator.lab.analysis.events import Reducer
from query_mutator.lab.analysis.runs import read_mapping
from query_mutator.registry import check_known, nearest
from query_mutator.stats import WHOLE_LINE, Interval

__all__ = [
    "DEFAULT_SPEC", "Direction", "FieldAlias", "MetricSpec", "Role", "Spec", "TagPattern", "WatchRule", "read_spec",
    "worked_out",
]  # fmt: skip

Direction = Literal["up", "down", "-"]
Role = Literal["performance", "throughput", "stability", "diagnostic"]

DEFAULT_SPEC = Path(__file__).with_name("metrics.yaml")

_STRICT = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


def _or_text(key: str) -> BeforeValidator:
    """Return a validator that reads a bare text as an object with this key."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


_LIST = BeforeValidator(lambda value: value if isinstance(value, (list, tuple)) else [value])
Names = Annotated[tuple[str, ...], _LIST]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TagPattern:
    """Tags of one trainer; a value is multiplied by `scale` and divided by the first setting of `normalise_by`."""

    tag: str
    normalise_by: Names = ()
    scale: float = 1.0

    @model_validator(mode="after")
    def _check(self) -> TagPattern:
        try:
            assert self.regex
        except re.error as error:
            raise ValueError(f"{self.tag!r} is not a regular expression ({error})") from None
        return self

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Return the pattern of a tag; the group `task` is the task."""
        if self.tag.startswith("re:"):
            return re.compile(self.tag.removeprefix("re:"))
        before, star, after = self.tag.partition("*")
        return re.compile(re.escape(before) + (r"(?P<task>.+)" + fnmatch.translate(after)[4:-3] if star else ""))

    def match(self, tags: Iterable[str]) -> dict[str, str]:
        """Return task -> tag for each tag that matches; "" for a tag without a task."""
        matches = ((tag, self.regex.fullmatch(tag)) for tag in tags)
        return {(found.groupdict().get("task") or ""): tag for tag, found in matches if found}


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class WatchRule:
    """A condition that is checked in every run."""

    rule: Literal["nan", "above", "below", "spike"]
    value: float = 0.0  # of above, below
    ratio: float = 100.0  # of spike: to the median of the points before
    says: str = ""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class MetricSpec:
    """One metric; docs/reference/analysis.md explains the fields."""

    name: str
    tags: Annotated[tuple[Annotated[TagPattern, _or_text("tag")], ...], _LIST, Field(min_length=1)]
    title: str = ""
    unit: str = ""
    direction: Direction = "-"
    reducer: Reducer = "last"
    k: int = 5
    threshold: FiniteFloat | None = None
    role: Role = "diagnostic"
    margin: str = ""
    limits: tuple[float, float] | None = None
    sample: Names = ()
    watch: Annotated[tuple[Annotated[WatchRule, _or_text("rule")], ...], _LIST] = ()

    @model_validator(mode="after")
    def _check(self) -> MetricSpec:
        if self.reducer == "time_to_threshold" and self.threshold is None:
            raise ValueError("time_to_threshold needs a threshold")
        if not re.fullmatch(r"|(\d+\.?\d*|\.\d+)(e-?\d+)?%?", self.margin):
            raise ValueError(f"margin must be a number, or a share such as 5%, not {self.margin!r}")
        if self.limits is not None and not self.limits[0] < self.limits[1]:
            raise ValueError(f"limits must be the least and the greatest possible value, not {list(self.limits)}")
        return self

    @property
    def bounds(self) -> Interval:
        """Return the least and greatest possible value of what the metric is reduced to."""
        if self.reducer in ("time_to_threshold", "rate"):
            return WHOLE_LINE
        return self.limits or ((0.0, 1.0) if self.unit == "share" else WHOLE_LINE)

    @property
    def maximize(self) -> bool:
        """Return whether higher values are better; True where neither direction is."""
        return self.direction != "down"

    @property
    def more_is_better(self) -> bool:
        """Return whether higher readings are better: a time until values are good enough is better short."""
        return self.maximize and self.reducer != "time_to_threshold"

    def tags_of(self, tags: Iterable[str]) -> dict[str, tuple[str, TagPattern]]:
        """Return task -> (tag, its pattern) for the first pattern that any of a run's tags matches."""
        known = list(tags)
        for pattern in self.tags:
            if found := pattern.match(known):
                return {task: (tag, pattern) for task, tag in found.items()}
        return {}

    def margin_at(self, baseline: float) -> float | None:
        """Return the margin of equivalence in the metric's unit, None when none is stated."""
        if not self.margin:
            return None
        if self.margin.endswith("%"):
            return abs(baseline) * float(self.margin[:-1]) / 100
        return float(self.margin)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class FieldAlias:
    """A setting under another name, or worked out from several (`worked_out`); not where `unless` holds."""

    field: str
    unless: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def value(self, config: Mapping[str, Any]) -> object | None:
        """Return what a run's settings say; None where a part is missing or `unless` holds."""
        if any(config.get(name) == value for name, value in self.unless.items()):
            return None
        return worked_out(self.field, config.get) if " " in self.field else config.get(self.field)


def worked_out(formula: str, value_of: Callable[[str], object | None]) -> float | None:
    """Return `a * b / c` of named numbers, from left to right; None where one is missing or a divisor is 0."""
    name, *rest = re.split(r" ([*/]) ", formula)
    found = as_number(value_of(name))
    for sign, name in zip(rest[::2], rest[1::2], strict=True):
        other = as_number(value_of(name))
        if found is None or other is None or (sign == "/" and not other):
            return None
        found = found * other if sign == "*" else found / other
    return found


def as_number(value: object | None) -> float | None:
    """Return the number that a setting is, None for anything else."""
    try:
        return float(str(value))
    except ValueError:
        return None


Aliases = Annotated[tuple[Annotated[FieldAlias, _or_text("field")], ...], _LIST]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Spec:
    """A whole metric file."""

    metrics: tuple[MetricSpec, ...]
    axes: Mapping[str, Names] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Aliases] = dataclasses.field(default_factory=dict)
    field_tags: Mapping[str, Names] = dataclasses.field(default_factory=dict)
    confounders: Mapping[str, Names] = dataclasses.field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Spec:
        names = [metric.name for metric in self.metrics]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"metric {min(twice)!r} is defined twice; rename one")
        return self

    def metric(self, name: str) -> MetricSpec:
        """Return the metric of that name; UsageError with the nearest known one."""
        by_name = {metric.name: metric for metric in self.metrics}
        check_known("metric", name, by_name)
        return by_name[name]

    def with_tags(self, names: Sequence[str], logged: Iterable[str]) -> tuple[Spec, list[str]]:
        """Return the spec with a metric for each name that is not one but a logged tag, and the names of all.

        Higher values of a tag are better, unless it is written TAG:down. UsageError for a name that is neither.
        """
        metrics = {metric.name: metric for metric in self.metrics}
        known, chosen = [*metrics, *logged], []
        for name in names:
            tag = name if name in known else name.removesuffix(":down")
            check_known("metric or tag", tag, known)
            chosen.append(tag)
            if tag not in metrics:
                direction: Direction = "up" if tag == name else "down"
                pattern = TagPattern(tag=f"re:{re.escape(tag)}")
                metrics[tag] = MetricSpec(name=tag, tags=(pattern,), direction=direction, role="performance")
        return dataclasses.replace(self, metrics=tuple(metrics.values())), chosen

    def adjusted(self, *, thresholds: Sequence[str] = (), margins: Sequence[str] = ()) -> Spec:
        """Return the metrics with margins, and thresholds whose first x is compared, written METRIC=VALUE."""
        metrics = {metric.name: metric for metric in self.metrics}
        for flag, items in (("threshold", thresholds), ("margin", margins)):
            for item in items:
                name, _, value = item.partition("=")
                self.metric(name)
                changed: dict[str, Any] = {flag: value or None}
                if flag == "threshold":
                    changed |= {"reducer": "time_to_threshold", "margin": ""}
                try:
                    metrics[name] = dataclasses.replace(metrics[name], **changed)
                except ValidationError:
                    raise UsageError(f"--{flag} {item}: write METRIC=NUMBER, as success=0.8") from None
        return dataclasses.replace(self, metrics=tuple(metrics.values()))

    def field_names(self, name: str) -> tuple[str, ...]:
        """Return the names a setting goes by in different trainers."""
        return tuple(dict.fromkeys((name, *(alias.field for alias in self.aliases(name) if alias.field))))

    def aliases(self, name: str) -> tuple[FieldAlias, ...]:
        """Return the ways to learn a setting, its own name first."""
        return (FieldAlias(field=name), *self.fields.get(name, ()))


def read_spec(path: str | Path | None = None) -> Spec:
    """Read the metrics of a TOML or YAML file, by default the one in the package; UsageError for an invalid file."""
    path = Path(path) if path else DEFAULT_SPEC
    data = read_mapping(path)
    try:
        return TypeAdapter(Spec).validate_python({key: value for key, value in data.items() if value is not None})
    except ValidationError as error:
        raise UsageError(f"{path}: {_explained(error.errors()[0], data)}") from None


def _explained(error: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """Return where in a metric file an error is, what is wrong, and the nearest known key for an unknown one."""
    where = list(map(str, error["loc"]))
    if where[:1] == ["metrics"] and len(where) > 1 and isinstance(metric := data["metrics"][int(where[1])], Mapping):
        where[:2] = [f"metric {metric.get('name')!r}"]
    if error["type"] == "unexpected_keyword_argument":
        classes = (Spec, MetricSpec, TagPattern, WatchRule, FieldAlias)
        known = [field.name for cls in classes for field in fields(cls)]
        near = nearest(where[-1], known)
        hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
        return ": ".join([*where[:-1], f"unknown key {where[-1]!r}", hint])
    problem = error["msg"].removeprefix("Value error, ")
    return ": ".join([*where, problem if error["type"] == "value_error" else f"{problem}, not {error['input']!r}"])
