"""Command-line flags from a dataclass, read by cyclopts; invalid input prints one line and exits with code 2.

    a field       its flag            other spellings
    batch_size    --batch-size        Parameter(alias=[...]) in its annotation; `_` may stand for `-`
    JsonTo        --json [FILE]       standard output without FILE
    Positional    no flag             takes what no flag takes; a tuple also everything after a bare --

A value comes from the command line, else from files (`cli/settings.py`), else from the dataclass; `given` has the
fields that were not left to the dataclass. The help text is the docstring under a field. With `FIRST` --help shows
these fields alone, --help-all the others too; fields in `IN_FILE` are set in files alone. With `STORED` shared fields
have that default in the help: the command replaces what is not given.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_type_hints

from cyclopts import App, CycloptsError, MissingArgumentError
from cyclopts.argument import Argument, ArgumentCollection
from rich.console import Console

from ppo.fields import DEFAULTS, docs_of, function_of, metadata_of, whole_numbers
from query_mutator.bounds import check_values
from query_mutator.cli.outputs import check_outputs, outputs_of, with_dash
from query_mutator.cli.registry import HELP
from query_mutator.cli.settings import PROJECT, Base, fill_from_files, shared_fields
from query_mutator.errors import UsageError
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
        unset = dict.fromkeys(one.name for one in dataclasses.fields(cls))  # type: ignore[arg-type]  # mypy: a class
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
    for field in sorted(dataclasses.fields(cls), key=lambda one: [*first, one.name].index(one.name)):
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
