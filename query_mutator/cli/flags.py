"""Command-line flags from a dataclass, read by cyclopts; invalid input prints one line and exits with code 2.

    a field       its flag            other spellings
    batch_size    --batch-size        Parameter(alias=[...]) in its annotation; `_` may stand for `-`
    JsonTo        --json [FILE]       standard output without FILE
    Positional    no flag             takes what no flag takes; a tuple also everything after a bare --

The help text is the docstring under a field. With `FIRST` --help shows these fields alone, --help-all the others too;
fields in `IN_FILE` are set in files alone. With `STORED` shared fields have that default in the help: the command
replaces what is not given.

What the command line does not set comes from files, first the file of --config, then the run that --resume names, then
qm.toml of the current folder, then from the preset, else from the dataclass; `given` has the fields that were not left
to the dataclass:

    target-model = "llama3.2:3b"     above the tables: settings that several commands share (SHARED_GROUPS)
    [train]                          flags of one command; [train.sft] is `qm train sft`
    num-env-steps = 2000
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from cyclopts import App, CycloptsError, MissingArgumentError
from cyclopts.argument import Argument, ArgumentCollection
from cyclopts.config import Dict
from rich.console import Console

from ppo.fields import DEFAULTS, docs_of, function_of, metadata_of, whole_numbers
from query_mutator import settings
from query_mutator.bounds import check_values
from query_mutator.cli.console import note
from query_mutator.cli.outputs import check_outputs, outputs_of, with_dash
from query_mutator.cli.registry import COMMANDS, HELP
from query_mutator.errors import UsageError
from query_mutator.files import file_sha256, parse_json, verified
from query_mutator.registry import nearest
from query_mutator.version import __version__

C = TypeVar("C")
_KIND = type(inspect.Parameter.POSITIONAL_ONLY)

#: Type of a field without a flag, and of one that is an argument and a flag.
Positional = Annotated[C, inspect.Parameter.POSITIONAL_ONLY]
AlsoPositional = Annotated[C, inspect.Parameter.POSITIONAL_OR_KEYWORD]


def parse_flags(cls: type[C], argv: Sequence[str], *, prog: str, base: Base | None = None, table: str = "") -> C:
    """Return `cls` made of `argv` over the file of --config, over what `base` returns for --resume, over ./qm.toml.

    `table` is the command's name in qm.toml; with "" the file is not read, with --resume it names places alone.
    Raises UsageError for invalid input and for outputs that may not be written, SystemExit(0) after --help.
    """
    known = set(itertools.takewhile(lambda word: word != "--", argv))
    if known & HELP:
        own = Console(file=getattr(sys.stdout, "stream", sys.stdout))  # whose text may have colors
        app_of(cls, prog, help="all" if "--help-all" in known else "first").help_print([], console=own)
        raise SystemExit(0)
    if "--version" in known:
        print(__version__)
        raise SystemExit(0)

    def fill(app: App, _commands: Sequence[str], arguments: ArgumentCollection) -> None:
        for argument in arguments:
            if argument.tokens and argument.field_info.name not in flags:
                where = f"under [{table}] in {PROJECT}" if table else "in the file of --config"
                raise UsageError(f"{argument.name} is not a flag of {prog}: set {argument.name[2:]} {where}")
        fill_from_files(cls, app, arguments, base=base, table=table)
        whole_numbers(app, (), arguments)

    flags = flags_of(cls)  # type: ignore[arg-type]  # mypy: a class is hashable
    try:
        words = with_dash(cls, argv)
        values = app_of(cls, prog, fill)(words, exit_on_error=False, print_error=False, result_action="return_value")
        unset = dict.fromkeys(one.name for one in fields(cls))  # type: ignore[arg-type]  # mypy: a class
        check_values(cls, unset | values, {name: flag.name for name, flag in flags.items() if flag.index is None})
        parsed = cls(**values)
    except UsageError:
        raise
    except CycloptsError as error:
        stray = error.unused_tokens if isinstance(error, MissingArgumentError) else None
        raise UsageError(str(error).rstrip(".") + (f"; {stray[0]!r} is not its value" if stray else "")) from None
    except ValueError as error:  # what the dataclass says of its values
        raise UsageError(str(error)) from None
    object.__setattr__(parsed, "_given", frozenset(values))
    check_outputs(parsed, {name: (flags[name].name, output) for name, output in outputs_of(cls).items()})
    return parsed


@functools.cache
def flags_of(cls: Any) -> Mapping[str, Argument]:
    """Return the flags of a dataclass by field, without those that are set in files alone."""
    found = {one.field_info.name: one for one in app_of(cls).assemble_argument_collection()}
    return {name: one for name, one in found.items() if name not in getattr(cls, "IN_FILE", ())}


def app_of(cls: type[Any], prog: str = "", fill: Callable[..., None] | None = None, *, help: str = "") -> App:
    """Return the parser of a dataclass; `help` is "first", "all", or "" for one without texts."""
    first, paragraphs = getattr(cls, "FIRST", ()), (inspect.getdoc(cls) or "").split("\n\n")
    about = "\n\n".join(" ".join(one.split()) for one in paragraphs)
    if help == "first" and first:
        about += f"\n\n--help-all shows all {len(flags_of(cls))} flags."  # type: ignore[arg-type]  # as above
    docs, stored = docs_of(cls) if help else {}, shared_fields(cls).values() if hasattr(cls, "STORED") else ()
    shown: dict[str, dict[str, Any]] = {}
    for field in sorted(fields(cls), key=lambda one: [*first, one.name].index(one.name)):
        text, owner = docs.get(field.name, ("", cls))
        is_first, in_file = not first or field.name in first, field.name in getattr(cls, "IN_FILE", ())
        one = shown[field.name] = {"help": text, "show": not in_file and (is_first or help == "all")}
        if field.name in stored:
            one["show_default"] = lambda _: cls.STORED
        elif field.default in ("", (), None):
            one["show_default"] = False
        if not is_first:
            title = owner.__name__.removesuffix("Flags").removesuffix("Config") or owner.__name__
            one["group"] = f"{title} options"
    hints = get_type_hints(cls, include_extras=True)
    kinds = {name: one for name, hint in hints.items() for one in metadata_of(hint) if isinstance(one, _KIND)}
    app = App(
        prog,
        help=about,
        help_format="plaintext",
        help_flags=(),
        version_flags=(),
        config=fill or (),
        default_parameter=DEFAULTS,
    )
    app.default(function_of(cls, shown, kinds))
    return app


# --- files of flags --------------------------------------------------------------------------------------------------

PROJECT = "qm.toml"

#: Command lines that read qm.toml: those of `qm`, and benchmark_batching.py.
TABLES = (*COMMANDS, "benchmark")
SHARED_GROUPS = (*settings.MODEL_GROUPS, *settings.QUESTION_GROUPS)

#: Returns the flags of the run that --resume names, and the file that they are from.
Base = Callable[[str], tuple[Mapping[str, Any], str]]

_read: dict[str, str] = {}  # path -> SHA-256 of the files of flags that this process used


def files_read() -> dict[str, str]:
    """Return the files of flags that this process used, with their SHA-256."""
    return dict(_read)


def fill_from_files(
    cls: type[Any], app: App, arguments: ArgumentCollection, *, base: Base | None = None, table: str = ""
) -> None:
    """Give the arguments that the command line leaves out their values in files; what is set first, stays."""

    def known() -> dict[str, str]:
        return {one.field_info.name: one.tokens[-1].value for one in arguments if one.tokens}

    def fill(values: Mapping[str, Any], source: str) -> None:
        names = {_key(name) for one in arguments for name in one.names}
        for key in (key for key in values if _key(key) not in names):
            near = nearest(_key(key), names)
            raise UsageError(f"{source}: unknown key {key!r}; " + (f"did you mean {near!r}?" if near else "see --help"))
        given = {key: value for key, value in values.items() if value is not None}  # null: as if it were left out
        Dict(given, source=source, use_commands_as_keys=False)(app, (), arguments)

    if path := known().get("config"):
        fill(_read_config(path, table), path)
        _remember(path)
    resume = known().get("resume")
    if base is not None and resume:
        fill(*base(resume))
    if table:
        project = _read_project(table, cls, known())
        fill({key: value for key, value in project.items() if not resume or _key(key) in settings.PLACES}, PROJECT)
        used = dict.fromkeys(token.keyword for one in arguments for token in one.tokens if token.source == PROJECT)
        if used and _remember(PROJECT):
            note(f"settings: {PROJECT} ({', '.join(str(key).strip('[]') for key in used)})")
    if preset := settings.PRESETS.get(known().get("preset", "")):
        fill(preset, "--preset")


def _remember(path: str | Path) -> bool:
    """Keep a file of flags for `files_read`; return whether it is new."""
    name, digest = str(Path(path).absolute()), file_sha256(path)
    is_new = _read.get(name) != digest
    _read[name] = digest
    return is_new


def _key(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def shared_fields(*classes: type[Any]) -> Mapping[str, str]:
    """Return the fields of classes that qm.toml may set above its tables, by each of their names in a file."""
    found: dict[str, str] = {}
    for cls in classes:
        is_group = cls in SHARED_GROUPS
        groups: tuple[type[Any], ...] = settings.MODEL_GROUPS if is_group or issubclass(cls, settings.Address) else ()
        groups += settings.QUESTION_GROUPS if is_group or issubclass(cls, settings.Questions) else ()
        names = {one.name for group in groups for one in fields(group)}
        for name, hint in get_type_hints(cls, include_extras=True).items():
            if name in names:
                aliases = (getattr(item, "alias", ()) or () for item in getattr(hint, "__metadata__", ()))
                found |= {_key(key): name for key in (name, *itertools.chain(*aliases))}
    return found


def _read_project(table: str, cls: type[Any], elsewhere: Mapping[str, str]) -> dict[str, Any]:
    """Return what ./qm.toml sets for a command, {} without the file.

    `elsewhere` has the fields that the command line or --config sets: a server named there replaces that of the file,
    whatever its kind.
    """
    if not os.path.lexists(PROJECT):
        return {}
    data, usable, known = _parse(Path(PROJECT)), shared_fields(cls), shared_fields(*SHARED_GROUPS)
    for key in (key for key, value in data.items() if not isinstance(value, dict) and _key(key) not in known):
        near = None if key == table else nearest(_key(key), known)
        hint = "above the tables are only keys that commands share; write it under the command's name, as in [train]"
        hint = f"did you mean {near.replace('_', '-')!r}?" if near else hint
        raise UsageError(f"{PROJECT}: unknown key {key!r}; {hint}")
    values = {key: value for key, value in data.items() if _key(key) in usable} | _of_table(data, table, PROJECT)
    replaced: set[str] = set()
    if any(elsewhere.get(field) for field in settings.ADDRESS_FLAGS):
        has_models = elsewhere.get("gguf") or elsewhere.get("recording")
        replaced = {"backend", *settings.ADDRESS_FLAGS, *(("target_model", "mutator_model") if has_models else ())}
    elif elsewhere.get("backend") == "recorded":
        replaced = {*settings.ADDRESS_FLAGS}
    return {key: value for key, value in values.items() if usable.get(_key(key)) not in replaced}


def _of_table(data: Mapping[str, Any], table: str, source: str) -> dict[str, Any]:
    """Return the values of a command's table, and raise a UsageError for a table that no command has."""
    start, names = table.split(), [name.split() for name in TABLES]
    tops = {name[0] for name in names}
    for key in (key for key, value in data.items() if isinstance(value, dict) and key not in tops):
        near = nearest(key, tops)
        hint = f"did you mean [{near}]?" if near else "tables are named after commands, as [train]"
        raise UsageError(f"{source}: unknown table [{key}]; {hint}")
    node: Any = data
    for word in start:
        node = node.get(word, {})
        if not isinstance(node, dict):
            raise UsageError(f"{source}: {word} must be a table; write its flags under a line [{'.'.join(start)}]")
    deeper = {name[len(start)] for name in names if name[: len(start)] == start and len(name) > len(start)}
    return {key: value for key, value in node.items() if not (isinstance(value, dict) and key in deeper)}


def _read_config(path: str, table: str) -> dict[str, Any]:
    """Return what the file of --config sets: flags, or those of a command in a file like qm.toml."""
    data = read_base(path)
    if not table or not any(isinstance(value, dict) for value in data.values()):
        return data
    return {key: value for key, value in data.items() if not isinstance(value, dict)} | _of_table(data, table, path)


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
    kind, read = ("TOML", tomllib.loads) if path.suffix == ".toml" else ("JSON", parse_json)
    try:
        return read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not {kind} ({error})"
        raise UsageError(f"{path}: {reason}; a file of flags is a JSON object, or TOML with the ending .toml") from None
