"""What is measured: metrics with the tags that trainers log them under, read from YAML and checked as it is read."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from query_mutator.analysis.tables import read_mapping
from query_mutator.errors import UsageError
from query_mutator.registry import nearest

Reducer = Literal[
    "last", "best_so_far", "mean_last_k", "auc", "time_to_threshold", "rate", "mean", "median", "max", "min"
]
Direction = Literal["up", "down", "-"]
Role = Literal["performance", "throughput", "stability", "diagnostic"]
Rule = Literal["nan", "above", "below", "spike", "plateau"]

DEFAULT_SPEC = Path(__file__).with_name("metrics.yaml")
C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class TagPattern:
    """Tags of one trainer; a value is multiplied by `scale` and divided by the first setting of `normalise_by`."""

    tag: str
    normalise_by: tuple[str, ...] = ()
    scale: float = 1.0

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Return what a tag must match; the group `task` is the task."""
        if self.tag.startswith("re:"):
            return re.compile(self.tag.removeprefix("re:"))
        before, star, after = self.tag.partition("*")
        return re.compile(re.escape(before) + (r"(?P<task>.+)" + fnmatch.translate(after)[4:-3] if star else ""))

    def match(self, tags: Iterable[str]) -> dict[str, str]:
        """Return task -> tag for each tag that matches; "" for a tag without a task."""
        matches = ((tag, self.regex.fullmatch(tag)) for tag in tags)
        return {(found.groupdict().get("task") or ""): tag for tag, found in matches if found}


@dataclass(frozen=True, kw_only=True)
class WatchRule:
    """One thing to look out for in every run."""

    rule: Rule
    value: float = 0.0  # of above, below
    ratio: float = 100.0  # of spike: to the median of the points before
    share: float = 0.5  # of plateau: the last part of the run without a new best
    says: str = ""


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One metric; docs/comparing.md explains the fields."""

    name: str
    tags: tuple[TagPattern, ...]
    title: str = ""
    unit: str = ""
    direction: Direction = "-"
    reducer: Reducer = "last"
    k: int = 5
    threshold: float | None = None
    role: Role = "diagnostic"
    margin: str = ""
    watch: tuple[WatchRule, ...] = ()

    @property
    def maximize(self) -> bool:
        """Return whether higher values are better; True where neither direction is."""
        return self.direction != "down"

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


@dataclass(frozen=True, kw_only=True)
class Confounder:
    """A derived figure: a counter's growth over another's, a metric, or a setting (over another)."""

    name: str
    over: str = ""
    under: str = ""
    metric: str = ""
    field: str = ""
    per_field: str = ""


@dataclass(frozen=True, kw_only=True)
class FieldAlias:
    """A setting under another name, or made of several: their product, divided by `per`; not where `unless` holds."""

    field: str = ""
    product: tuple[str, ...] = ()
    per: str = ""
    unless: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def value(self, config: Mapping[str, Any]) -> object | None:
        """Return what a run's settings say; None where a part is missing or `unless` holds."""
        if any(config.get(name) == value for name, value in self.unless.items()):
            return None
        if self.field:
            return config.get(self.field)
        parts = [config.get(name) for name in self.product]
        over = config.get(self.per) if self.per else 1
        if not over or not all(isinstance(part, (int, float)) for part in [*parts, over]):
            return None
        return math.prod(map(float, filter(None, parts))) / float(over) if all(parts) else None


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A whole metric file."""

    metrics: tuple[MetricSpec, ...]
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fields: Mapping[str, tuple[FieldAlias, ...]] = field(default_factory=dict)
    field_tags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    confounders: tuple[Confounder, ...] = ()

    def metric(self, name: str) -> MetricSpec:
        """Return the metric of that name; UsageError with the nearest known one."""
        for metric in self.metrics:
            if metric.name == name:
                return metric
        raise UsageError(_unknown("metric", name, [metric.name for metric in self.metrics]))

    def adjusted(
        self, *, thresholds: Sequence[str] = (), margins: Sequence[str] = (), last_k: int | None = None
    ) -> Spec:
        """Return the metrics with the thresholds and margins written METRIC=VALUE, and with another k."""
        changes: dict[str, dict[str, Any]] = {m.name: {"k": last_k} if last_k else {} for m in self.metrics}
        for flag, items in (("threshold", thresholds), ("margin", margins)):
            for item in items:
                name, _, value = item.partition("=")
                self.metric(name)
                try:
                    number = float(value.removesuffix("%") if flag == "margin" else value)
                except ValueError:
                    raise UsageError(f"--{flag} {item}: write METRIC=NUMBER, as success=0.8") from None
                changes[name][flag] = value if flag == "margin" else number
        metrics = tuple(dataclasses.replace(metric, **changes[metric.name]) for metric in self.metrics)
        return dataclasses.replace(self, metrics=metrics)

    def field_names(self, name: str) -> tuple[str, ...]:
        """Return the names a setting goes by in different trainers."""
        return tuple(dict.fromkeys((name, *(alias.field for alias in self.aliases(name) if alias.field))))

    def aliases(self, name: str) -> tuple[FieldAlias, ...]:
        """Return the ways to learn a setting, its own name first."""
        return (FieldAlias(field=name), *self.fields.get(name, ()))


def read_spec(path: str | Path | None = None) -> Spec:
    """Return the metrics of a YAML file, by default the one that comes with the package; UsageError for a mistake."""
    path = Path(path) if path else DEFAULT_SPEC
    data = read_mapping(path)
    try:
        return _spec(data)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: {error}") from None


def _spec(data: Mapping[str, Any]) -> Spec:
    _only(data, ("metrics", "axes", "fields", "field_tags", "confounders"), "the file")
    metrics = tuple(_metric(entry) for entry in data.get("metrics") or ())
    names = [metric.name for metric in metrics]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"metric {min(twice)!r} is there twice; give each a name of its own")
    return Spec(
        metrics=metrics,
        axes=_lists(data.get("axes")),
        fields={str(name): tuple(map(_alias, _listed(ways))) for name, ways in (data.get("fields") or {}).items()},
        field_tags=_lists(data.get("field_tags")),
        confounders=tuple(_record(Confounder, entry, "a confounder") for entry in data.get("confounders") or ()),
    )


def _metric(entry: Any) -> MetricSpec:
    if not isinstance(entry, Mapping) or not entry.get("name") or not entry.get("tags"):
        raise ValueError(f"a metric needs a name and tags, not {entry!r}")
    where = f"metric {entry['name']!r}"
    values = dict(entry) | {
        "tags": tuple(_tag(tag, where) for tag in _listed(entry["tags"])),
        "watch": tuple(_watch(rule, where) for rule in _listed(entry.get("watch") or [])),
        "margin": str(entry.get("margin", "")),
    }
    metric = _record(MetricSpec, values, where)
    for name, allowed in (("direction", Direction), ("reducer", Reducer), ("role", Role)):
        _one_of(getattr(metric, name), get_args(allowed), f"{where}: {name}")
    if metric.reducer == "time_to_threshold" and metric.threshold is None:
        raise ValueError(f"{where}: time_to_threshold needs a threshold")
    if not re.fullmatch(r"|[0-9.]+(e-?\d+)?%?", metric.margin):
        raise ValueError(f"{where}: margin must be a number, or a share such as 5%, not {metric.margin!r}")
    return metric


def _tag(entry: Any, where: str) -> TagPattern:
    values = dict(entry) if isinstance(entry, Mapping) else {"tag": str(entry)}
    values["normalise_by"] = tuple(_listed(values.get("normalise_by") or []))
    pattern = _record(TagPattern, values, f"{where}: a tag")
    try:
        assert pattern.regex
    except re.error as error:
        raise ValueError(f"{where}: {pattern.tag!r} is no regular expression ({error})") from None
    return pattern


def _alias(entry: Any) -> FieldAlias:
    values = dict(entry) if isinstance(entry, Mapping) else {"field": str(entry)}
    values["product"] = tuple(map(str, _listed(values.get("product") or [])))
    alias = _record(FieldAlias, values, "fields")
    if bool(alias.field) == bool(alias.product):
        raise ValueError(f"fields: {entry!r} should have a field or a product")
    return alias


def _watch(entry: Any, where: str) -> WatchRule:
    rule = _record(WatchRule, dict(entry) if isinstance(entry, Mapping) else {"rule": str(entry)}, f"{where}: watch")
    _one_of(rule.rule, get_args(Rule), f"{where}: watch")
    return rule


def _record(cls: type[C], values: Mapping[str, Any], where: str) -> C:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: {values!r} should have names, as {{name: ...}}")
    _only(values, [item.name for item in fields(cls)], where)  # type: ignore[arg-type]
    return cls(**values)


def _only(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in values:
        if name not in known:
            raise ValueError(f"{where}: {_unknown('key', str(name), known)}")


def _one_of(value: str, known: Sequence[str], where: str) -> None:
    if value not in known:
        raise ValueError(f"{where}: {value!r} is none of {', '.join(known)}")


def _unknown(kind: str, name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    return f"unknown {kind} {name!r}; " + (f"did you mean {near!r}?" if near else f"known: {', '.join(known)}")


def _lists(data: Any) -> dict[str, tuple[str, ...]]:
    return {str(name): tuple(map(str, _listed(values))) for name, values in (data or {}).items()}


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else [values]
