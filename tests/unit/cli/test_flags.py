"""Flags from a dataclass and the help; the bar that fits the terminal."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pytest
from tyro.conf import Positional, arg

from query_mutator import __version__
from query_mutator.cli.bar import FiguresBar
from query_mutator.cli.flags import JsonTo, flags_of, parse_flags
from query_mutator.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ReplayFlags:
    """Inherited flags."""

    size: int = 10
    """Transitions kept."""


@dataclass(frozen=True, kw_only=True)
class Flags(ReplayFlags):
    """A command."""

    FIRST: ClassVar[tuple[str, ...]] = ("question", "names")

    question: Positional[str]
    """The question."""
    names: Annotated[tuple[str, ...], arg(name="name", aliases=["-n"])] = ()
    """Names."""
    fast: bool = False
    """Hurry."""
    json: JsonTo = None
    """FILE of the result."""


@dataclass(frozen=True, kw_only=True)
class CommandFlags:
    """A command that runs another."""

    command: Positional[tuple[str, ...]] = ()
    """The other command."""
    grid: tuple[str, ...] = ()
    """Values."""


def parse(*argv: str, base: dict[str, Any] | None = None) -> Flags:
    return parse_flags(Flags, argv, prog="prog", base=base, base_name="base.json")


@pytest.mark.parametrize(
    ("argv", "file", "question"),
    [
        (["q"], None, "q"),
        (["q", "--json"], "-", "q"),
        (["--json", "q"], "-", "q"),
        (["--json", "q", "--fast"], "-", "q"),
        (["--json", "-", "q"], "-", "q"),
        (["--json", "-"], "-", "-"),
        (["q", "--json", "out.json"], "out.json", "q"),
        (["--json", "out.json", "q"], "out.json", "q"),
        (["--json=out.json", "q", "--json", "last.json"], "last.json", "q"),
    ],
)
def test_json_takes_a_file_or_none_and_leaves_the_question(argv: list[str], file: str | None, question: str) -> None:
    flags = parse(*argv)
    assert (flags.json, flags.question) == (file, question)


@pytest.mark.parametrize(
    "argv",
    [["--name", "a", "b"], ["--name", "a", "--fast", "-n", "b", "--size", "1"], ["-n=a", "-n=b"]],
)
def test_values_of_a_tuple_add_up(argv: list[str]) -> None:
    assert parse("q", *argv).names == ("a", "b")


def test_everything_after_the_dashes_is_the_positional_even_if_it_looks_like_flags() -> None:
    flags = parse_flags(CommandFlags, ["--grid", "a=1", "--", "python", "--grid", "--", "--help"], prog="prog")
    assert flags == CommandFlags(command=("python", "--grid", "--", "--help"), grid=("a=1",))


def test_command_line_replaces_values_of_the_base() -> None:
    base = {"name": ["x", "y"], "fast": True, "size": 3, "json": False}
    assert parse("q", base=base) == Flags(question="q", names=("x", "y"), fast=True, size=3)
    assert parse("q", "-n", "z", "--no-fast", base=base) == Flags(question="q", names=("z",), size=3)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ({"sise": 1}, "base.json: unknown key 'sise'; did you mean 'size'?"),
        ({"size": "many"}, "base.json: --size must be a whole number, not 'many'"),
        ({"fast": "yes"}, "base.json: fast must be true or false, not 'yes'"),
    ],
)
def test_an_error_in_the_base_names_it(base: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse("q", base=base)
    assert str(caught.value) == message


def test_help_shows_the_first_flags_and_help_all_the_others_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    for option, groups in (("--help", set()), ("--help-all", {"Replay options", "Flags options"})):
        with pytest.raises(SystemExit, match="0"):
            parse(option)
        out = capsys.readouterr().out
        assert "--name" in out
        assert {title for title in ("Replay options", "Flags options") if title in out} == groups
        assert ("--size" in out) == bool(groups)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse("--version")
    assert capsys.readouterr().out.strip() == __version__


def test_spellings_name_the_negation_of_every_alias() -> None:
    assert flags_of(Flags)["fast"].spellings == ("--fast", "--no-fast")
    assert flags_of(Flags)["names"].spellings == ("--name", "-n")
    assert flags_of(Flags)["question"].spellings == ()


def test_a_bar_shows_its_figures_or_what_it_waits_for() -> None:
    out = io.StringIO()
    with FiguresBar(total=10, initial=4, desc="training", file=out, ncols=60, mininterval=0) as bar:
        bar.figures = lambda: ["valid 63%"]
        bar.update(2)
        assert str(bar).startswith("training 60%|")
        assert str(bar).endswith("left, valid 63%")
        bar.figures = lambda: ["valid 63%", "x" * 100]
        assert len(str(bar)) == 60
        bar.set_postfix_str("waiting for the server")
        assert "waiting for the server" in str(bar)
        assert "valid" not in str(bar)
