"""Files of flags: qm.toml of the current folder, the file of --config, and which of them this process has read.

    target-model = "llama3.2:3b"     above the tables: flags that several commands share (MODELS, QUESTIONS)
    [train]                          flags of one command; [train.sft] is `qm train sft`
    num-env-steps = 2000

Later ones win: qm.toml, the run that --resume names, the file of --config, the command line.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError
from query_mutator.files import parse_json, verified
from query_mutator.registry import nearest

__all__ = ["PROJECT", "Setting", "files_read", "merged", "read_base", "read_project", "remember", "spelled",
           "table_values"]  # fmt: skip

PROJECT = "qm.toml"

#: Flags of qm.toml above its tables: who answers, and how calls are made. For every command that has --target-model.
MODELS = frozenset({
    "backend", "ollama_url", "openai_url", "gguf", "allow_mixed", "target_model", "mutator_model", "mutator_max_tokens",
    "target_max_tokens", "temperature", "num_ctx", "keep_alive", "batch_size", "timeout_s", "max_reply_mb",
    "max_retries", "wait_for_server_s", "cache", "cache_path", "plugin",
})  # fmt: skip
#: The questions. For those of these commands that do not take them from a trained policy.
QUESTIONS = frozenset({
    "dataset", "question_column", "answer_column", "domain", "operators", "reward", "encoder", "save_dir",
})  # fmt: skip
#: Those of MODELS that say where a model is; the names of files of --gguf are those of its models.
_ADDRESSES = {"ollama_url", "openai_url", "gguf"}
_ALIASES = {"timeout": "timeout_s", "wait_for_server": "wait_for_server_s", "out": "save_dir"}

#: Command lines that read qm.toml: those of `qm`, and benchmark_batching.py.
TABLES = (
    "init", "plan", "eval", "report", "show", "rewrite", "watch", "serve", "batch", "export-policy", "doctor",
    "data lengths build", "data lengths stats", "data batchplan build", "data batchplan info", "data batchplan verify",
    "data batchplan shard", "data batching histogram", "data batching analyze", "data batching suggest",
    "data batch generate", "data export", "gym run", "gym info", "gym serve", "train", "train sft", "bench", "runs",
    "compare", "analyze", "sweep", "size", "size throughput", "size verify", "size calibrate", "size replay",
    "size workers", "size calls", "judge check", "benchmark",
)  # fmt: skip

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
    name, digest = str(Path(path).absolute()), hashlib.sha256(Path(path).read_bytes()).hexdigest()
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


def read_project(table: str, fields: Mapping[str, str], elsewhere: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ./qm.toml sets for a command, {} without the file.

    `elsewhere` has the values of fields that the command line or --config sets: a server named there replaces that of
    the file, whatever its kind.
    """
    path = Path(PROJECT)
    if not path.is_symlink() and not path.exists():
        return {}
    data = _parse(path)
    shared = {key: value for key, value in data.items() if not isinstance(value, dict)}
    for key in shared:
        _check_shared(key)
    own, names = table_values(data, table, str(path)), set(fields.values())
    usable = (MODELS if "target_model" in names else frozenset()) & names
    usable |= QUESTIONS & names if "target_model" in names and "checkpoint" not in names else frozenset()
    values = {key: value for key, value in shared.items() if _shared(key) in usable} | own
    if any(elsewhere.get(field) for field in _ADDRESSES):
        replaced = {"backend", *_ADDRESSES, *(("target_model", "mutator_model") if elsewhere.get("gguf") else ())}
    else:
        replaced = _ADDRESSES if elsewhere.get("backend") == "embedded" else set()
    return {key: value for key, value in values.items() if _shared(key) not in replaced}


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


def _shared(key: str) -> str:
    name = key.replace("-", "_")
    return _ALIASES.get(name, name)


def _check_shared(key: str) -> None:
    """Raise a UsageError for a key above the tables that commands do not share."""
    if _shared(key) in MODELS | QUESTIONS:
        return
    if key in {name.split()[0] for name in TABLES}:
        raise UsageError(f"{PROJECT}: {key} must be a table; write its flags under a line [{key}]")
    near = nearest(_shared(key), MODELS | QUESTIONS)
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
