"""Command-line flags from a dataclass: tyro makes the help and reads the values, every mistake is one line.

    a field       its flag            its other names
    batch_size    --batch-size        arg(aliases=[...]) in its annotation; `_` may stand for `-`
    a bool        --x and --no-x      takes no value
    a tuple       --x a b c           takes all values up to the next flag; given again, it takes more
    Positional    no flag             takes what no flag took; a tuple all of it, and what follows a bare --

Values come from the command line, else from a base (a JSON file, a checkpoint), else from the dataclass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from query_mutator.errors import UsageError
from query_mutator.registry import nearest

C = TypeVar("C")

#: What a wrong value should have been, by type.
_WANTED = {int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One field of a dataclass as the command line sees it."""

    field: str
    hint: Any  # the annotation, with what tyro keeps in it
    names: tuple[str, ...]  # "--batch-size" and aliases; none for a positional

    @property
    def is_tuple(self) -> bool:
        """Return whether it takes several values."""
        return get_origin(self.type) is tuple

    @property
    def type(self) -> Any:
        """Return the annotation without what tyro keeps in it."""
        return get_args(self.hint)[0] if hasattr(self.hint, "__metadata__") else self.hint

    @property
    def switches(self) -> dict[str, str]:
        """Return every way to write the flag -> the value it stands for; a value that follows is written ""."""
        if self.type is not bool:
            return dict.fromkeys(self.names, "")
        on = dict.fromkeys(self.names, "True")
        return on | {f"--no-{name.removeprefix('--')}": "False" for name in self.names}


Given = dict[str, tuple[Flag, list[str], str]]  # field -> flag, its values as text, how it was written


def flags_of(cls: type[Any]) -> dict[str, Flag]:
    """Return the flags of a dataclass by field name."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: _flag(field.name, hints[field.name]) for field in dataclasses.fields(cls)}


def parse_flags(
    cls: type[C],
    argv: Sequence[str],
    *,
    prog: str,
    base: Mapping[str, Any] | None = None,
    base_name: str = "",
) -> C:
    """Return `cls` made of `argv` over `base`; `--help` prints and raises SystemExit(0), a mistake is a UsageError."""
    if "--help" in argv or "-h" in argv:
        import tyro

        tyro.cli(cls, args=["--help"], prog=prog, description=inspect.getdoc(cls))
    flags = flags_of(cls)
    given = _from_base(base or {}, flags, base_name) | _from_argv(argv, flags)
    try:
        return cls(**{name: _value(*found) for name, found in given.items()})
    except TypeError as error:
        required = [f.name for f in dataclasses.fields(cls) if _is_required(f) and f.name not in given]  # type: ignore[arg-type]
        if not required:
            raise
        missing = flags[required[0]]
        raise UsageError(f"{missing.names[0] if missing.names else required[0]} is missing; see --help") from error
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from None


def read_base(path: str | Path) -> dict[str, Any]:
    """Return the flags in a JSON file: an object of them, or a run's config.json with them under `flags`."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; --config takes a JSON file of flags") from None
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error}); --config takes a JSON object of flags") from None
    if isinstance(data, dict) and isinstance(data.get("flags"), dict):
        data = data["flags"]
    if not isinstance(data, dict):
        raise UsageError(f"{path}: a JSON {type(data).__name__}; --config takes a JSON object of flags")
    return data


def _flag(field: str, hint: Any) -> Flag:
    metadata = getattr(hint, "__metadata__", ())
    aliases = [name for item in metadata for name in getattr(item, "aliases", None) or ()]
    positional = any("POSITIONAL" in repr(item).upper() for item in metadata)
    own = f"--{field.replace('_', '-')}"
    return Flag(field=field, hint=hint, names=() if positional else (own, *aliases))


def _from_argv(argv: Sequence[str], flags: Mapping[str, Flag]) -> Given:
    """Sort the words of a command line to their flags; the last of several wins, those of a tuple add up."""
    written = {word: (flag, value) for flag in flags.values() for word, value in flag.switches.items()}
    positional = [flag for flag in flags.values() if not flag.names]
    given: Given = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, attached = word.partition("=")
        name = name.replace("_", "-")
        if word == "--" and positional and positional[-1].is_tuple:
            _add(given, positional[-1], words, positional[-1].field)
            break
        if name not in written:
            if word.startswith("--") or not positional:
                raise UsageError(_unknown(word, name, written))
            _add(given, positional[0], [word], positional[0].field)
            positional = positional if positional[0].is_tuple else positional[1:]
            continue
        flag, value = written[name]
        if value and equals:
            raise UsageError(f"{name} takes no value; write {name} alone")
        _add(given, flag, [value] if value else [attached] if equals else list(_following(words, flag)), name)
    return given


def _add(given: Given, flag: Flag, values: list[str], written: str) -> None:
    """Note the values of a flag, behind those it had when it takes several."""
    before = given[flag.field][1] if flag.is_tuple and flag.field in given else []
    given[flag.field] = (flag, [*before, *values], written)


def _following(words: list[str], flag: Flag) -> Iterator[str]:
    while words and not words[0].startswith("--"):
        yield words.pop(0)
        if not flag.is_tuple:
            return


def _unknown(word: str, name: str, written: Mapping[str, Any]) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}; flags begin with --"
    near = nearest(name, written)
    return f"unknown flag {word.partition('=')[0]}; " + (f"did you mean {near}?" if near else "see --help")


def _from_base(base: Mapping[str, Any], flags: Mapping[str, Flag], base_name: str) -> Given:
    fields = {name.removeprefix("--").replace("-", "_"): flag for flag in flags.values() for name in flag.names}
    given: Given = {}
    for key, value in base.items():
        name = key.removeprefix("--").replace("-", "_")
        if name not in fields:
            near = nearest(name, fields)
            raise UsageError(
                f"{base_name}: unknown key {key!r}; " + (f"did you mean {near!r}?" if near else "see --help")
            )
        flag = fields[name]
        if value is None and flag.is_tuple:
            continue
        values = value if isinstance(value, (list, tuple)) else [value]
        given[flag.field] = (flag, [str(item) for item in values], f"{base_name}: {key}")
    return given


def _value(flag: Flag, values: list[str], written: str) -> Any:
    """Return the value of one flag, read by tyro from a dataclass that has this field alone."""
    import tyro

    if flag.type is bool and values[0] in ("True", "False"):
        return values[0] == "True"
    if flag.type == tuple[str, ...]:  # may hold what looks like flags, behind a bare --
        return tuple(values)
    one = dataclasses.make_dataclass("One", [("value", flag.type)], kw_only=True)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # tyro draws a box around what went wrong
            return tyro.cli(one, args=["--value", *values]).value
    except SystemExit:
        got = repr(" ".join(values)) if values else "nothing"
        raise UsageError(f"{written} must be {_wanted(flag.type)}, not {got}") from None


def _wanted(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(_wanted(part) for part in arguments if part is not type(None))
    if origin is tuple:
        return f"{_wanted(arguments[0])}, or several"
    return "true or false" if hint is bool else _WANTED.get(hint, "a value of another kind")


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
