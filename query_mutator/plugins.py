"""User code: load the modules of `--plugin`, which register operators, forms, reward parts, backends or learners.

A plugin is an importable module's name or the path of a `.py` file. It registers when it is imported:

    from query_mutator.operators import OPERATORS, PromptOperator
    OPERATORS.add("polite", PromptOperator(name="polite", ...))

A run stores the plugins and their sha256 in config.json and policy.qm. `--resume`, `qm eval` and `qm rewrite` load
those that `--plugin` or qm.toml name again.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from query_mutator.errors import UsageError

__all__ = ["absolute", "fault_of", "load_plugins", "plugin_hashes", "use_plugins"]

logger = logging.getLogger(__name__)

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
