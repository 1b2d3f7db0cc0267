"""Registries: map names to operators, forms, reward parts, backends and learners; a typo lists the known names.

A name comes from the package itself, from an installed distribution's entry point, or from a `--plugin` module
(`query_mutator.plugins`) that calls `register` when it is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Generic, TypeVar

from query_mutator.errors import UsageError

__all__ = ["Registry", "check_known", "nearest"]

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None when none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def check_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise a UsageError with the nearest name and the known ones unless `name` is among them."""
    known = list(known)
    if name not in known:
        near = nearest(name, known)
        hint = f" (did you mean {near!r}?)" if near else ""
        raise UsageError(f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}")


class Registry(Generic[T]):
    """An ordered mapping from names to objects of one kind, in the order of registration.

    `group` is the entry-point group whose distributions add names; they are read at the first lookup of a name that
    the package does not register itself.
    """

    def __init__(self, kind: str, *, group: str | None = None) -> None:
        self.kind = kind
        self._group = group
        self._entries: dict[str, T] = {}
        self._installed: set[str] = set()  # names that come from entry points

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that stores its argument under `name`; a duplicate name is a ValueError."""
        if not isinstance(name, str):  # the decorator without its parentheses
            raise TypeError(f'register takes the name of the {self.kind}; write @….register("NAME")')

        def store(entry: T) -> T:
            self.add(name, entry)
            return entry

        return store

    def add(self, name: str, entry: T) -> None:
        """Store `entry` under `name`; a duplicate name is a ValueError."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
        self._entries[name] = entry

    def get(self, name: str) -> T:
        """Return the entry called `name`; an unknown name is a UsageError that lists the known ones."""
        if name not in self._entries:
            self._load_entry_points()
        check_known(self.kind, name, self._entries)
        return self._entries[name]

    def registered(self) -> list[str]:
        """Return the names that the package and plugins registered, without those of installed distributions."""
        return [name for name in self._entries if name not in self._installed]

    def names(self) -> list[str]:
        """Return all names in the order of registration; those of installed distributions come last."""
        self._load_entry_points()
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _load_entry_points(self) -> None:
        """Add the entry points of `group` once, under their own names; one that cannot be loaded is a UsageError."""
        group, self._group = self._group, None
        if group is None:
            return
        for point in metadata.entry_points(group=group):
            if point.name in self._entries:
                continue  # the package's own name wins
            try:
                entry = point.load()
            except Exception as error:
                package = point.dist.name if point.dist else point.value
                raise UsageError(f"{self.kind} {point.name!r} of {package} cannot be loaded: {error}") from error
            if point.name not in self._entries:  # loading the module may have registered it
                self.add(point.name, entry)
            self._installed.add(point.name)
