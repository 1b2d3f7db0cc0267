"""Command-line flags from a dataclass: argparse reads the words, invalid input prints one line and exits with code 2.

    a field       its flag            other spellings
    batch_size    --batch-size        arg(aliases=[...]) in its annotation; `_` may stand for `-`
    a bool        --x and --no-x      takes no value
    a tuple       --x a b c           may be given several times
    JsonTo        --json [FILE]       standard output without FILE
    Positional    no flag             takes what no flag takes; a tuple also everything after a bare --

Values come from the command line, else from files (`cli/settings.py`), else from the dataclass; its `given` has the
fields that were not left to the dataclass. The help text is the docstring under a field. With
`FIRST: ClassVar[tuple[str, ...]]` --help shows those fields alone, and --help-all the others too, in one group for each
class that declares fields. Fields in `IN_FILE: ClassVar[tuple[str, ...]]` are set in files alone: no flag for what
hardly anybody changes. With `STORED: ClassVar[str]` the fields of the settings groups have that default in the help
("as in training"): the command replaces what is not given.

Annotations are tyro's words (`arg`, `Positional`), so `tyro.cli` reads a config as well. Why argparse reads them here:
docs/log.md.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from tyro.conf import Positional

from query_mutator.bounds import Group, check_values
from query_mutator.cli.console import note, styled_output
from query_mutator.cli.outputs import REPORT, Output, OutputFlags, check_outputs, write_report
from query_mutator.cli.settings import (
    PROJECT,
    Setting,
    merged,
    read_base,
    read_project,
    remember,
    shared_fields,
    spelled,
    table_values,
)
from query_mutator.errors import UsageError
from query_mutator.files import encode
from query_mutator.registry import nearest
from query_mutator.settings.models import PLACES
from query_mutator.version import __version__

C = TypeVar("C")

HELP = {"-h", "--help", "--help-all"}
_WANTED = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}

_POSITIONAL = get_args(Positional[str])[1:]

LONGEST_EDGE = 10**9  # tokens, as every other length on a command line


class TakesFile:
    """Annotation of a flag that takes a FILE or nothing."""


#: Type of `json: JsonTo = None`: the FILE to write the result to, `-` for standard output.
JsonTo = Annotated[str | None, TakesFile(), REPORT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One field of a dataclass as the command line sees it."""

    field: str
    type: Any  # the annotation without metadata
    names: tuple[str, ...]  # "--batch-size" and its aliases; none for a positional
    takes_file: bool  # whether it is a JsonTo
    is_required: bool
    output: Output | None  # how an output of it is recognized; None: no output
    in_file: bool = False  # whether it is set in a file alone

    @property
    def is_tuple(self) -> bool:
        """Return whether the flag takes several values."""
        return get_origin(self.type) is tuple

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return every way to write the flag."""
        negated = [f"--no-{name[2:]}" for name in self.names if name.startswith("--")] if self.type is bool else []
        return (*self.names, *negated)


def flags_of(cls: type[Any]) -> Mapping[str, Flag]:
    """Return the flags of a dataclass by field name."""
    return _flags_of(cls)  # type: ignore[arg-type]  # mypy: a class is hashable


@functools.cache
def _flags_of(cls: type[Any]) -> Mapping[str, Flag]:
    hints = get_type_hints(cls, include_extras=True)
    in_file = getattr(cls, "IN_FILE", ())
    return {
        one.name: replace(_flag(one, hints[one.name]), in_file=one.name in in_file) for one in dataclasses.fields(cls)
    }


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

    `table` is the command's name in qm.toml; with "" the file is not read, with --resume it names places alone.
    Raises UsageError for invalid input and for outputs that may not be written, SystemExit(0) after --help.
    """
    flags = flags_of(cls)
    given = {spelled(word) for word in _before_dashes(argv)}
    if given & HELP:
        _print_help(cls, flags, prog=prog, everything="--help-all" in given)
    if "--version" in given:
        print(__version__)
        raise SystemExit(0)
    for flag in flags.values():
        if flag.in_file and (typed := sorted(given & set(flag.spellings))):
            where = f"under [{table}] in {PROJECT}" if table else "in the file of --config"
            raise UsageError(f"{typed[0]} is not a flag of {prog}: set {flag.names[0][2:]} {where}")
    settings = _settings(cls, flags, argv, given, base=(base or {}, base_name), table=table)
    words = [*itertools.chain(*(_setting_words(*one, flags) for one in settings.items())), *argv]
    values = _values(flags, words, settings)
    try:
        names = {name: flag.names[0] for name, flag in flags.items() if flag.names}
        check_values(cls, {**dict.fromkeys(flags), **values}, names)  # defaults are checked by the dataclass
        parsed = cls(**values)
    except UsageError:
        raise
    except ValueError as error:  # what the dataclass says of its values
        raise UsageError(str(error)) from None
    object.__setattr__(parsed, "_given", frozenset(values))
    outputs = {flag.field: (flag.names[0], flag.output) for flag in flags.values() if flag.output is not None}
    check_outputs(parsed, outputs)
    return parsed


def _values(flags: Mapping[str, Flag], words: Sequence[str], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the values of the fields that words set; UsageError for a word that nothing takes, and for a bad value."""
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False
    )
    for flag in flags.values():
        if flag.names:
            parser.add_argument(*flag.names, dest=flag.field, **_reading(flag))
    before = _before_dashes(words)
    try:
        found, others = parser.parse_known_args(_joined(before, flags))
    except argparse.ArgumentError as error:
        by_name = {name: flag for flag in flags.values() for name in flag.spellings}
        flag = by_name[str(error.argument_name).partition("/")[0]]
        name, got = written(flag, words)
        message = f"{name} must be {_wanted(flag.type)}, not {repr(' '.join(got)) if got else 'nothing'}"
        setting = settings.get(flag.field)
        raise UsageError(f"{setting.source}: {message}" if setting else message) from None
    if (word := next((word for word in others if word.startswith("-") and word != "-"), None)) is not None:
        raise UsageError(
            _unknown(word, [name for flag in flags.values() if not flag.in_file for name in flag.spellings])
        )
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(found).items()}
    return values | _positionals(flags, [*others, *words[len(before) + 1 :]], values)


def _reading(flag: Flag) -> dict[str, Any]:
    """Return how argparse reads the words of a flag."""
    if flag.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    if flag.takes_file:
        return {"nargs": "?", "const": "-"}
    if flag.is_tuple:
        return {"type": _reader(get_args(flag.type)[0]), "nargs": "*", "action": "extend"}
    return {"type": _reader(flag.type)}


def _reader(hint: Any) -> Callable[[str], Any]:
    """Return what makes a value of a type from a word; ValueError for another word."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return lambda word: {str(value): value for value in arguments}[word] if word in map(str, arguments) else int("")
    if origin in (Union, types.UnionType):
        (reader,) = (_reader(part) for part in arguments if part is not type(None))
        return lambda word: None if word == "None" else reader(word)
    return hint if callable(hint) else str


def _joined(words: Sequence[str], flags: Mapping[str, Flag]) -> list[str]:
    """Return the words with flags spelled with `-`, and `--x=-7e30` for what argparse would take for a flag."""
    by_name = {name: flag for flag in flags.values() for name in flag.spellings}
    joined: list[str] = []
    for word in words:
        flag, (_, equals, value) = by_name.get(spelled(word)), word.partition("=")
        if flag is not None and flag.type is bool and equals:
            raise UsageError(f"{spelled(word)} takes no value; write {spelled(word)} alone")
        last = by_name.get(joined[-1]) if joined else None
        if flag is not None:
            joined.append(f"{spelled(word)}{equals}{value}")
        elif last is not None and last.type is not bool and word.startswith("-") and not word.startswith("--"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _positionals(flags: Mapping[str, Flag], words: list[str], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the arguments without a flag; a FILE that leaves too few of them is one of them."""
    positional = [flag for flag in flags.values() if not flag.names]
    file = next((flag.field for flag in flags.values() if flag.takes_file and values.get(flag.field)), None)
    if not words and file is not None and any(flag.is_required for flag in positional):
        words, values[file] = [values[file]], "-"
    found: dict[str, Any] = {}
    for flag in positional:
        if flag.is_tuple:
            found[flag.field], words = tuple(words), []
        elif words:
            found[flag.field], *words = words
    if words:
        raise UsageError(_unknown(words[0], ()))
    missing = next(
        (flag for flag in flags.values() if flag.is_required and flag.field not in {**values, **found}), None
    )
    if missing is not None:
        raise UsageError(f"{missing.names[0] if missing.names else missing.field} is missing; see --help")
    return found


def _flag(field: dataclasses.Field[Any], hint: Any) -> Flag:
    metadata = list(getattr(hint, "__metadata__", ()))
    named = [item for item in metadata if getattr(item, "aliases", None) or getattr(item, "name", None)]
    own = next((item.name for item in named if item.name), field.name).replace("_", "-")
    aliases = [alias for item in named for alias in item.aliases or ()]
    return Flag(
        field=field.name,
        type=_plain(hint),
        names=() if any(item in _POSITIONAL for item in metadata) else (f"--{own}", *aliases),
        takes_file=any(isinstance(item, TakesFile) for item in metadata),
        is_required=field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        output=next((item for item in reversed(metadata) if isinstance(item, Output)), None),
    )


def _plain(hint: Any) -> Any:
    """Return a type without what annotates it and its parts."""
    if hasattr(hint, "__metadata__"):
        return _plain(hint.__origin__)
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return Union[tuple(map(_plain, parts))]  # noqa: UP007  # of types that are only known here
    if origin is tuple:
        return tuple[tuple(map(_plain, parts))]  # type: ignore[misc]
    return hint


def _before_dashes(argv: Sequence[str]) -> list[str]:
    """Return the words before a bare `--`."""
    return list(itertools.takewhile(lambda word: word != "--", argv))


def _settings(
    cls: type[Any],
    flags: Mapping[str, Flag],
    argv: Sequence[str],
    given: set[str],
    *,
    base: tuple[Mapping[str, Any], str],
    table: str,
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
    if table:
        elsewhere = {field: setting.value for field, setting in settings.items()} | typed
        project = merged([(read_project(table, shared_fields(cls), elsewhere), PROJECT)], fields)
        if "resume" in typed:  # the run has the others
            project = {field: setting for field, setting in project.items() if field in PLACES}
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


def words_of(flags: Group, *, without: Collection[str]) -> list[str]:
    """Return the words that make these flags again: those given, but for fields in `without`."""
    known = flags_of(type(flags))
    values = {
        one.name: Setting(one.name, value, "")
        for one in dataclasses.fields(flags)
        if one.name not in without and one.name in flags.given and (value := getattr(flags, one.name)) is not None
    }
    return [word for name, setting in values.items() for word in _setting_words(name, setting, known)]


# --- errors ----------------------------------------------------------------------------------------------------------


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
    flags = {name: flag for name, flag in flags.items() if not flag.in_file}
    first: Collection[str] = getattr(cls, "FIRST", tuple(flags))
    description = inspect.getdoc(cls) or ""
    if not everything and hasattr(cls, "FIRST"):
        description += f"\n--help-all shows all {len(flags)} flags."
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
    )
    help_names = ["-h", "--help", *(["--help-all"] if hasattr(cls, "FIRST") else [])]
    parser.add_argument(*help_names, action="store_true", help="show this help message and exit")
    groups = {"options": [flags[name] for name in first]}
    for owner in cls.__mro__ if everything else ():
        title = owner.__name__.removesuffix("Flags").removesuffix("Config") or owner.__name__
        groups[f"{title} options"] = [flags[name] for name in flags if name not in first and _owner(cls, name) is owner]
    docs = docs_of(cls)
    stored = shared_fields(cls) if hasattr(cls, "STORED") else ()
    for title, shown in groups.items():
        if not shown:
            continue
        group: Any = parser if title == "options" else parser.add_argument_group(title)
        for flag in shown:
            text = _help_text(cls, flag.field, docs[flag.field], default=cls.STORED if flag.field in stored else None)
            reading: dict[str, Any] = {"help": text, **_reading(flag)}
            if flag.type is not bool:
                reading["metavar"] = (
                    flag.field if not flag.names else "FILE" if flag.takes_file else _metavar(flag.type)
                )
            if not flag.names:
                reading |= {"nargs": "*" if flag.is_tuple else None if flag.is_required else "?"}
            if flag.names:
                reading["dest"] = flag.field
            group.add_argument(*(flag.names or (flag.field,)), **reading)
    parser.usage = f"{prog} [flags]{''.join(f' {flag.field}' for flag in flags.values() if not flag.names)}"
    with styled_output():
        parser.print_help()
    raise SystemExit(0)


def _help_text(cls: type[Any], name: str, doc: str, *, default: str | None) -> str:
    """Return the help of a field with its default, None for that of the dataclass."""
    value = cls.__dataclass_fields__[name].default
    if default is None and value not in (None, "", (), dataclasses.MISSING):
        default = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    text = doc + (f" (default: {default})" if default else "")
    return text.replace("%", "%%")


def _metavar(hint: Any) -> str:
    """Return the word for a value in the help."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"{{{','.join(map(str, arguments))}}}"
    if arguments:
        return _metavar(next(part for part in arguments if part is not type(None)))
    return str(hint.__name__).upper()


def docs_of(cls: type[Any]) -> Mapping[str, str]:
    """Return the docstrings under the fields of a dataclass, by field."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        if not dataclasses.is_dataclass(owner):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in itertools.pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return found


def _owner(cls: type[Any], name: str) -> type[Any]:
    """Return the class that declares a field; a subclass that changes the default does not count."""
    return next(owner for owner in reversed(cls.__mro__) if name in inspect.get_annotations(owner))


@dataclass(frozen=True, kw_only=True)
class JsonFlags(OutputFlags):
    """Base of the flags of every command that reports something."""

    json: JsonTo = None
    """Write the result as JSON to FILE; without FILE, or with -, print it in place of text."""


def show(flags: JsonFlags, data: Mapping[str, Any], text: str) -> None:
    """Print a result as `text`, or with `--json -` as one JSON object; `--json FILE` also writes the object."""
    print(encode(data).decode() if flags.json == "-" else text)
    if flags.json not in (None, "-"):
        write_report(flags.json, data)


def rows_of(pairs: Mapping[str, object]) -> str:
    """Return names and values as lines in two columns."""
    width = max(map(len, pairs))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs.items())


def parse_edges(text: str) -> tuple[int, ...]:
    """Return the numbers of `128,256,512`; ValueError unless they are whole, above 0 and increasing."""
    try:
        edges = tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        edges = ()
    if not edges or edges[0] < 1 or any(left >= right for left, right in pairwise(edges)):
        raise ValueError(f"--bucket-edges {text!r} must be increasing whole numbers, as in 128,256,512")
    if edges[-1] > LONGEST_EDGE:
        raise ValueError(f"--bucket-edges {text!r}: the last number must be at most {LONGEST_EDGE}")
    return edges
