"""Names to things: operators, rewards, encoders register here, and a typo lists the known names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from query_mutator.errors import UsageError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None when none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


class Registry(Generic[T]):
    """An ordered mapping from names to things of one kind; names keep the order of registration."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._things: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that stores its argument under `name`; a name taken twice is a ValueError."""

        def store(thing: T) -> T:
            self.add(name, thing)
            return thing

        return store

    def add(self, name: str, thing: T) -> None:
        """Store `thing` under `name`; a name taken twice is a ValueError."""
        if name in self._things:
            raise ValueError(f"{self.kind} {name!r} is registered already")
        self._things[name] = thing

    def get(self, name: str) -> T:
        """Return the thing called `name`; an unknown name is a UsageError that lists the known ones."""
        if name not in self._things:
            near = nearest(name, self._things)
            hint = f" (did you mean {near!r}?)" if near else ""
            raise UsageError(f"unknown {self.kind} {name!r}{hint}; known: {', '.join(self._things)}")
        return self._things[name]

    def names(self) -> list[str]:
        """Return all names in the order of registration."""
        return list(self._things)

    def __contains__(self, name: str) -> bool:
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)
