"""Files of flags: qm.toml of the current folder, the file of --config, and which of them this process has read.

    target-model = "llama3.2:3b"     above the tables: settings that several commands share (SHARED_GROUPS)
    [train]                          flags of one command; [train.sft] is `qm train sft`
    num-env-steps = 2000

Later ones win: qm.toml, the run that --resume names, the file of --config, the command line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

from query_mutator.cli.registry import COMMANDS
from query_mutator.errors import UsageError
from query_mutator.files import file_sha256, parse_json, verified
from query_mutator.registry import nearest
from query_mutator.settings.calls import Calls, Connection
from query_mutator.settings.episode import CallRules, Operators
from query_mutator.settings.models import ADDRESS_FLAGS, Address, Encoding, Models, Sampling
from query_mutator.settings.output import Plugins, RunFolder
from query_mutator.settings.questions import Questions, Reward

PROJECT = "qm.toml"

_ADDRESSES = set(ADDRESS_FLAGS)

#: Command lines that read qm.toml: those of `qm`, and benchmark_batching.py.
TABLES = (*COMMANDS, "benchmark")
#: Groups whose settings qm.toml may have above its tables: for every command that names a model, whichever it has.
MODEL_GROUPS = (Connection, Calls, Address, Models, Sampling, Plugins)
#: For every command that takes its questions from them, not from a trained policy.
QUESTION_GROUPS = (Questions, Operators, CallRules, Reward, Encoding, RunFolder)
SHARED_GROUPS = (*MODEL_GROUPS, *QUESTION_GROUPS)

_read: dict[str, str] = {}  # path -> SHA-256 of the files of flags that this process used


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag's value in a file: under which key, and in which file."""

    key: str
    value: Any
    source: str


def files_read() -> dict[str, str]:
    """Return the files of flags that this process used, with their SHA-256."""
    return dict(_read)


def remember(path: str | Path) -> bool:
    """Keep a file of flags for `files_read`; return whether it is new."""
    name, digest = str(Path(path).absolute()), file_sha256(path)
    is_new = _read.get(name) != digest
    _read[name] = digest
    return is_new


def spelled(word: str) -> str:
    """Return the flag that a word or a key of a file names, spelled with `-`."""
    return word.partition("=")[0].replace("_", "-")


def merged(layers: Iterable[tuple[Mapping[str, Any], str]], fields: Mapping[str, str]) -> dict[str, Setting]:
    """Return the settings by field; a later layer wins. UsageError for a key that is not a flag.

    `fields` has the field of each spelling, without dashes in front. A layer is a mapping and the name of its file.
    """
    found: dict[str, Setting] = {}
    for values, source in layers:
        for key, value in values.items():
            field = fields.get(spelled(key).lstrip("-"))
            if field is None:
                near = nearest(spelled(key), fields)
                hint = f"did you mean {near.replace('-', '_')!r}?" if near else "see --help"
                raise UsageError(f"{source}: unknown key {key!r}; {hint}")
            found[field] = Setting(key, value, source)
    return found


# --- qm.toml ---------------------------------------------------------------------------------------------------------


def read_project(table: str, usable: Mapping[str, str], elsewhere: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ./qm.toml sets for a command, {} without the file.

    `usable` are the `shared_fields` of the command, `elsewhere` has the values of fields that the command line or
    --config sets: a server named there replaces that of the file, whatever its kind.
    """
    path = Path(PROJECT)
    if not path.is_symlink() and not path.exists():
        return {}
    data = _parse(path)
    shared = {key: value for key, value in data.items() if not isinstance(value, dict)}
    for key in shared:
        _check_shared(key)
    values = {key: value for key, value in shared.items() if _key(key) in usable} | table_values(data, table, str(path))
    if any(elsewhere.get(field) for field in _ADDRESSES):
        replaced = {
            "backend",
            *_ADDRESSES,
            *(("target_model", "mutator_model") if elsewhere.get("gguf") or elsewhere.get("recording") else ()),
        }
    else:
        replaced = _ADDRESSES if elsewhere.get("backend") == "recorded" else set()
    return {key: value for key, value in values.items() if usable.get(_key(key)) not in replaced}


def shared_fields(*classes: type[Any]) -> Mapping[str, str]:
    """Return the fields of classes that qm.toml may set above its tables, by each of their names in a file."""
    found: dict[str, str] = {}
    for cls in classes:
        groups: tuple[type[Any], ...] = MODEL_GROUPS if issubclass(cls, Address) or cls in SHARED_GROUPS else ()
        groups += QUESTION_GROUPS if issubclass(cls, Questions) or cls in SHARED_GROUPS else ()
        names = {one.name for group in groups for one in fields(group)}
        for name, hint in get_type_hints(cls, include_extras=True).items():
            if name in names:
                aliases = (getattr(item, "aliases", ()) or () for item in getattr(hint, "__metadata__", ()))
                found |= {_key(key): name for key in (name, *chain(*aliases))}
    return found


def table_values(data: Mapping[str, Any], table: str, source: str) -> dict[str, Any]:
    """Return the values of a command's table, and raise a UsageError for a table that no command has."""
    words = {tuple(name.split()) for name in TABLES}
    tops = list(dict.fromkeys(name[0] for name in sorted(words)))
    for key, value in data.items():
        if isinstance(value, dict) and key not in tops:
            near = nearest(key, tops)
            raise UsageError(f"{source}: unknown table [{key}]; " + (f"did you mean [{near}]?" if near else _KNOWN))
    node: Any = data
    for word in table.split():
        node = node.get(word, {})
        if not isinstance(node, dict):
            raise UsageError(
                f"{source}: {word} must be a table; write its flags under a line [{table.replace(' ', '.')}]"
            )
    start = tuple(table.split())
    deeper = {name[len(start)] for name in words if name[: len(start)] == start and len(name) > len(start)}
    return {key: value for key, value in node.items() if not (isinstance(value, dict) and key in deeper)}


_KNOWN = "tables are named after commands, as [train]"


def _key(key: str) -> str:
    return spelled(key).lstrip("-").replace("-", "_")


def _check_shared(key: str) -> None:
    """Raise a UsageError for a key above the tables that commands do not share."""
    known = shared_fields(*SHARED_GROUPS)
    if _key(key) in known:
        return
    if key in {name.split()[0] for name in TABLES}:
        raise UsageError(f"{PROJECT}: {key} must be a table; write its flags under a line [{key}]")
    near = nearest(_key(key), known)
    if near:
        hint = f"did you mean {near.replace('_', '-')!r}?"
    else:
        hint = "above the tables are only keys that commands share; write it under the command's name, as in [train]"
    raise UsageError(f"{PROJECT}: unknown key {key!r}; {hint}")


# --- files -----------------------------------------------------------------------------------------------------------


def read_base(path: str | Path) -> dict[str, Any]:
    """Return the flags in a TOML or JSON file: an object of them, or a run's config.json with them under `flags`."""
    data = _parse(Path(path))
    if Path(path).name == "config.json":  # a copy under another name may have been edited
        data = verified(path, data)
    if isinstance(data, dict) and isinstance(data.get("flags"), dict):
        data = data["flags"]
    if not isinstance(data, dict):
        raise UsageError(f"{path}: a JSON {type(data).__name__}; --config takes a JSON object of flags")
    return data


def _parse(path: Path) -> Any:
    is_toml = path.suffix == ".toml"
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text) if is_toml else parse_json(text)
    except OSError as error:
        advice = (
            "make it readable, or remove it" if str(path) == PROJECT else "--config takes a JSON or TOML file of flags"
        )
        raise UsageError(f"{path}: {error.strerror}; {advice}") from None
    except (ValueError, RecursionError) as error:
        wanted = "TOML" if is_toml else "JSON"
        advice = "write `name = value` lines" if is_toml else "--config takes a JSON object of flags, or a .toml file"
        raise UsageError(f"{path}: not {wanted} ({error}); {advice}") from None
