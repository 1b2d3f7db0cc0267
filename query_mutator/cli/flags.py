"""Command-line flags from a dataclass: tyro reads the words, invalid input prints one line and exits with code 2.

    a field       its flag            other spellings
    batch_size    --batch-size        arg(aliases=[...]) in its annotation; `_` may stand for `-`
    a bool        --x and --no-x      takes no value
    a tuple       --x a b c           may be given several times
    JsonTo        --json [FILE]       standard output without FILE
    Positional    no flag             takes what no flag takes; a tuple also everything after a bare --

Values come from the command line, else from files (`cli/settings.py`), else from the dataclass. With
`FIRST: ClassVar[tuple[str, ...]]` --help shows those fields alone, and --help-all the others too, in one group for each
class that declares fields.

tyro lacks the following, so it is done here: errors on one line (through its private hook; requirements.txt pins the
version), groups without a prefix in the flag's name, `--x a --x b` for a tuple, and a base with keys that may be wrong.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro import _errors as events
from tyro._docstrings import get_field_docstring
from tyro.conf import OmitArgPrefixes, arg
from tyro.constructors import PrimitiveConstructorSpec

from query_mutator import __version__
from query_mutator.cli.bounds import check_bounds
from query_mutator.cli.console import note
from query_mutator.cli.outputs import REPORT, Output, check_outputs
from query_mutator.cli.plain import styled_output
from query_mutator.cli.settings import (
    PROJECT,
    Setting,
    merged,
    read_base,
    read_project,
    remember,
    spelled,
    table_values,
)
from query_mutator.errors import UsageError
from query_mutator.registry import nearest

__all__ = ["HELP", "Flag", "JsonTo", "flags_of", "parse_flags", "words_of", "written"]

C = TypeVar("C")

HELP = {"-h", "--help", "--help-all"}
_WANTED = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}

#: Type of `json: JsonTo = None`: the FILE to write the result to, `-` for standard output.
JsonTo = Annotated[
    str | None,
    PrimitiveConstructorSpec(
        nargs="*",  # no word or one; `_arrange` sees to it that there are not more
        metavar="[FILE]",
        instance_from_str=lambda words: words[0] if words else "-",
        is_instance=lambda value: value is None or isinstance(value, str),
        str_from_instance=lambda value: [str(value)],
    ),
    REPORT,
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One field of a dataclass as the command line sees it."""

    field: str
    type: Any  # the annotation without tyro's metadata
    names: tuple[str, ...]  # "--batch-size" and its aliases; none for a positional
    takes_file: bool  # whether it is a JsonTo
    output: Output | None  # how an output of it is recognized; None: no output

    @property
    def is_tuple(self) -> bool:
        """Return whether the flag takes several values."""
        return get_origin(self.type) is tuple

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return every way to write the flag."""
        negated = [f"--no-{name[2:]}" for name in self.names if name.startswith("--")] if self.type is bool else []
        return (*self.names, *negated)


def flags_of(cls: type[Any]) -> dict[str, Flag]:
    """Return the flags of a dataclass by field name."""
    hints = get_type_hints(cls, include_extras=True)
    return {one.name: _flag(one.name, hints[one.name]) for one in dataclasses.fields(cls)}


def parse_flags(
    cls: type[C],
    argv: Sequence[str],
    *,
    prog: str,
    base: Mapping[str, Any] | None = None,
    base_name: str = "",
    table: str = "",
) -> C:
    """Return `cls` made of `argv` over the file of its --config, if it has one, over `base`, over ./qm.toml.

    `table` is the command's name in qm.toml; with "" or --resume the file is not read.
    Raises UsageError for invalid input and for outputs that may not be written, SystemExit(0) after --help.
    """
    flags = flags_of(cls)
    given = {spelled(word) for word in _before_dashes(argv)}
    if given & HELP:
        _print_help(cls, flags, prog=prog, everything="--help-all" in given)
    if "--version" in given:
        print(__version__)
        raise SystemExit(0)
    settings = _settings(flags, argv, given, base=(base or {}, base_name), table=table)
    words = _arrange([*itertools.chain(*(_setting_words(*one, flags) for one in settings.items())), *argv], flags)

    def fail(event: events.ParseErrorEvent) -> None:  # called before tyro prints its box
        flag, message = _explain(event, flags, words)
        setting = settings.get(flag.field) if flag is not None else None
        raise UsageError(f"{setting.source}: {message}" if setting else message)

    with events.on_parse_error(fail):
        values = vars(tyro.cli(_unchecked(cls), args=words, prog=prog))
    try:
        check_bounds(cls, values, {name: flag.names[0] for name, flag in flags.items() if flag.names})
        parsed = cls(**values)
    except UsageError:
        raise
    except ValueError as error:  # what the dataclass says of its values
        raise UsageError(str(error)) from None
    outputs = {flag.field: (flag.names[0], flag.output) for flag in flags.values() if flag.output is not None}
    check_outputs(parsed, outputs)
    return parsed


def _unchecked(cls: type[Any]) -> type[Any]:
    """Return a dataclass with the fields of `cls` and without its `__post_init__`, so that bounds are checked first."""
    hints = get_type_hints(cls, include_extras=True)
    fields = [(one.name, hints[one.name], copy.copy(one)) for one in dataclasses.fields(cls)]
    return dataclasses.make_dataclass(cls.__name__, fields, kw_only=True)


def _flag(name: str, hint: Any) -> Flag:
    plain, *metadata = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    named = [item for item in metadata if getattr(item, "aliases", None) or getattr(item, "name", None)]
    own = next((item.name for item in named if item.name), name).replace("_", "-")
    aliases = [alias for item in named for alias in item.aliases or ()]
    is_positional = any("POSITIONAL" in repr(item).upper() for item in metadata)
    return Flag(
        field=name,
        type=plain,
        names=() if is_positional else (f"--{own}", *aliases),
        takes_file=any(isinstance(item, PrimitiveConstructorSpec) for item in metadata),
        output=next((item for item in reversed(metadata) if isinstance(item, Output)), None),
    )


def _before_dashes(argv: Sequence[str]) -> list[str]:
    """Return the words before a bare `--`."""
    return list(itertools.takewhile(lambda word: word != "--", argv))


def _arrange(argv: Sequence[str], flags: Mapping[str, Flag]) -> list[str]:
    """Return the words with all values of a tuple flag together, behind the others but before a bare `--`.

    tyro keeps only the last of `--x a --x b`, and would give `--json` a positional that follows its FILE.
    """
    by_name = {name: flag for flag in flags.values() for name in flag.spellings}
    others: list[str] = []
    gathered: dict[str, list[str]] = {}
    into, room = others, 0  # where the next values belong, and how many of them
    for word in (words := _before_dashes(argv)):
        flag, (_, equals, value) = by_name.get(spelled(word)), word.partition("=")
        if flag is None and room and not word.startswith("--"):
            into.append(word)
            room -= 1
        elif flag is not None and flag.type is bool and equals:
            raise UsageError(f"{spelled(word)} takes no value; write {spelled(word)} alone")
        elif flag is not None and (flag.is_tuple or flag.takes_file):
            # From here on words belong to this flag: all of them, or the one FILE.
            into = gathered.setdefault(flag.names[0], [])
            into[:] = [] if flag.takes_file else into  # the last FILE wins
            into += [value] if equals else []
            room = 0 if equals else 1 if flag.takes_file else len(words)
        else:  # a flag of one value, its value, a positional or an unknown flag: tyro's to read
            others.append(word)
            room = 0
    return [*others, *(word for name, values in gathered.items() for word in (name, *values)), *argv[len(words) :]]


def _settings(
    flags: Mapping[str, Flag], argv: Sequence[str], given: set[str], *, base: tuple[Mapping[str, Any], str], table: str
) -> dict[str, Setting]:
    """Return what files set, by field, but for flags that are given on the command line; say so of qm.toml."""
    fields = {spelled(name).lstrip("-"): field for field, flag in flags.items() for name in flag.names}
    typed = {field: " ".join(written(flag, argv)[1]) for field, flag in flags.items() if given & set(flag.spellings)}
    layers = [base]
    if path := typed.get("config"):
        data = read_base(path)
        is_project = table and any(isinstance(value, dict) for value in data.values())
        plain = {key: value for key, value in data.items() if not (is_project and isinstance(value, dict))}
        layers.append(({**plain, **table_values(data, table, path)} if is_project else data, path))
        remember(path)
    settings = merged(layers, fields)
    if table and "resume" not in typed:
        elsewhere = {field: setting.value for field, setting in settings.items()} | typed
        project = merged([(read_project(table, fields, elsewhere), PROJECT)], fields)
        settings = project | settings
    settings = {field: setting for field, setting in settings.items() if field not in typed}
    keys = [setting.key for setting in settings.values() if setting.source == PROJECT]
    if keys and remember(PROJECT):
        note(f"settings: {PROJECT} ({', '.join(keys)})")
    return settings


def _setting_words(field: str, setting: Setting, flags: Mapping[str, Flag]) -> Iterator[str]:
    """Yield the words that stand for a setting of a file."""
    flag, value = flags[field], setting.value
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if flag.takes_file and not item:  # False in files written before --json took a FILE
            continue
        if isinstance(item, dict) or (flag.type is bool and not isinstance(item, bool)):
            raise UsageError(f"{setting.source}: {setting.key} must be {_wanted(flag.type)}, not {item!r}")
        if flag.type is bool:
            yield flag.names[0] if item else f"--no-{flag.names[0][2:]}"
        elif item is not None or not flag.is_tuple:
            yield f"{flag.names[0]}={item}"


def words_of(flags: Any, *, without: Collection[str]) -> list[str]:
    """Return the words that make these flags again, but for fields that have their defaults or are in `without`."""
    known = flags_of(type(flags))
    values = {
        one.name: Setting(one.name, value, "")
        for one in dataclasses.fields(flags)
        if one.name not in without and (value := getattr(flags, one.name)) != one.default
    }
    return [word for name, setting in values.items() for word in _setting_words(name, setting, known)]


# --- errors ----------------------------------------------------------------------------------------------------------


def _explain(event: events.ParseErrorEvent, flags: Mapping[str, Flag], words: Sequence[str]) -> tuple[Flag | None, str]:
    """Return the flag that an error of tyro is about, if it is about one, and the error on one line."""
    unknown = getattr(event, "tokens", None) or getattr(event, "unrecognized_tokens", None)
    if unknown:
        return None, _unknown(unknown[0], [name for flag in flags.values() for name in flag.spellings])
    if isinstance(event, events.MissingArgs):
        flag = flags[event.missing_arguments[0].arg.field.intern_name]
        return None, f"{flag.names[0] if flag.names else flag.field} is missing; see --help"
    argument = getattr(event, "argument", None)
    if argument is None:
        return None, str(getattr(event, "message", event))
    flag = flags[argument.field.intern_name]
    name, values = written(flag, words)
    got = repr(" ".join(values)) if values else "nothing"
    return flag, f"{name} must be {_wanted(flag.type)}, not {got}"


def _unknown(word: str, known: Sequence[str]) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}; flags begin with --"
    near = nearest(spelled(word), known)
    return f"unknown flag {word.partition('=')[0]}; " + (f"did you mean {near}?" if near else "see --help")


def written(flag: Flag, words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the last spelling of a flag in `words`, and the values that follow it."""
    place = max((i for i, word in enumerate(words) if spelled(word) in flag.names), default=None)
    if place is None:
        return flag.field, []
    _, equals, value = words[place].partition("=")
    following = list(itertools.takewhile(lambda word: not word.startswith("--"), words[place + 1 :]))
    return spelled(words[place]), [value] if equals else following if flag.is_tuple else following[:1]


def _wanted(hint: Any) -> str:
    """Return what the value of a flag has to be, in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(_wanted(part) for part in arguments if part is not type(None))
    if origin is tuple:
        return f"{_wanted(arguments[0])}, or several"
    return _WANTED.get(hint, "a value of another kind")


# --- help ------------------------------------------------------------------------------------------------------------


def _print_help(cls: type[Any], flags: Mapping[str, Flag], *, prog: str, everything: bool) -> NoReturn:
    """Print the flags of FIRST, and with `everything` the others in groups; raise SystemExit(0)."""
    first: Sequence[str] = getattr(cls, "FIRST", tuple(flags))
    fields = _fields(cls, first)
    for owner in cls.__mro__ if everything else ():
        names = [name for name in flags if name not in first and _owner(cls, name) is owner]
        if names:
            title = owner.__name__.removesuffix("Flags").removesuffix("Config") or owner.__name__
            fields.append((title, dataclasses.make_dataclass(title, _fields(cls, names), kw_only=True)))
    description = inspect.getdoc(cls) or ""
    if not everything and hasattr(cls, "FIRST"):
        description += f"\n--help-all shows all {len(flags)} flags."
    view = dataclasses.make_dataclass("Help", fields, kw_only=True)
    with styled_output(), contextlib.suppress(SystemExit):
        tyro.cli(view, args=["--help"], prog=prog, description=description, config=(OmitArgPrefixes,))
    raise SystemExit(0)


def _fields(cls: type[Any], names: Sequence[str]) -> list[Any]:
    """Return fields of a dataclass for `make_dataclass`, each with its docstring."""
    hints, declared = get_type_hints(cls, include_extras=True), cls.__dataclass_fields__
    fields = []
    for name in names:
        text, is_empty = get_field_docstring(cls, name, ()), declared[name].default in (None, "", ())
        shown = arg(help=text, help_behavior_hint="") if is_empty else arg(help=text)
        fields.append((name, Annotated[hints[name], shown], copy.copy(declared[name])))
    return fields


def _owner(cls: type[Any], name: str) -> type[Any]:
    """Return the class that declares a field; a subclass that changes the default does not count."""
    return next(owner for owner in reversed(cls.__mro__) if name in inspect.get_annotations(owner))
