"""Registries: map names to operators, forms, reward parts, backends and learners; a typo lists the known names.

A name comes from the package itself, from an installed distribution's entry point, or from a `--plugin` module that
calls `register` when it is imported: an importable module's name, or the path of a `.py` file.

    from query_mutator.operators import OPERATORS, PromptOperator
    OPERATORS.add("polite", PromptOperator(name="polite", ...))

A run stores the plugins and their sha256 in config.json and policy.qm. `--resume`, `qm eval` and `qm rewrite` load
those that `--plugin` or qm.toml name again.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from query_mutator.errors import UsageError

__all__ = [
    "Registry", "absolute", "check_known", "fault_of", "load_plugins", "nearest", "plugin_hashes", "use_plugins",
]  # fmt: skip

logger = logging.getLogger(__name__)

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


# --- plugins ---------------------------------------------------------------------------------------------------------

_SHOWN_CHARS = 200

_loaded: dict[str, ModuleType] = {}  # by absolute path or module name, in the order of loading


def absolute(spec: str) -> str:
    """Return a plugin's file as an absolute path, so that it is found from any folder; a module's name stays."""
    return str(Path(spec).resolve()) if spec.endswith(".py") else spec


def load_plugins(specs: Iterable[str]) -> None:
    """Import each plugin once; raise UsageError for one that cannot be found or fails."""
    for spec in specs:
        key = absolute(spec)
        if key not in _loaded:
            _loaded[key] = _import(spec, key)


def fault_of(error: BaseException) -> str:
    """Return where a plugin raised an error, and the error, in one line; "" for one that other code raised."""
    files = {module.__file__ for module in _loaded.values()}
    lines = [one for one in traceback.extract_tb(error.__traceback__) if one.filename in files]
    return f"plugin {lines[-1].filename}:{lines[-1].lineno}: {type(error).__name__}: {error}" if lines else ""


def use_plugins(recorded: Mapping[str, str], named: Sequence[str], *, source: object) -> dict[str, str]:
    """Load the plugins that a command names; return the recorded ones, each at the named place of its file name.

    No code is taken from `source`: UsageError for a recorded plugin that is not named, before one is loaded. Logs a
    warning for a plugin whose file has changed.
    """
    places = {Path(spec).name: spec for spec in named}
    found = {places.get(Path(spec).name, spec): sha256 for spec, sha256 in recorded.items()}
    for spec in found:
        if absolute(spec) not in map(absolute, named):
            raise UsageError(
                f"{source} was made with the plugin {spec[:_SHOWN_CHARS]}, and no code is taken from it: give --plugin "
                f"{spec[:_SHOWN_CHARS]} to run it"
            )
    load_plugins(named)
    for spec, sha256 in plugin_hashes(found).items():
        if sha256 != found[spec]:
            logger.warning("plugin %s has changed since this run was started; results may differ", spec)
    return found


def plugin_hashes(specs: Iterable[str]) -> dict[str, str]:
    """Return the sha256 of each plugin's source file; loads nothing that is not loaded."""
    hashes = {}
    for spec in specs:
        file = _loaded[absolute(spec)].__file__
        hashes[spec] = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    return hashes


def _import(spec: str, key: str) -> ModuleType:
    if spec.endswith(".py") and not Path(spec).is_file():
        raise UsageError(f"--plugin {spec}: no such file; give the path of a .py file or the name of a module")
    try:
        return _import_file(Path(key)) if spec.endswith(".py") else importlib.import_module(spec)
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        if error.name == spec:
            raise UsageError(f"--plugin {spec}: no such module; install it, or give the path of a .py file") from None
        raise UsageError(f"--plugin {spec}: {error}") from error
    except Exception as error:  # user code fails in every way there is
        raise UsageError(f"--plugin {spec}: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> ModuleType:
    name = f"query_mutator_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
