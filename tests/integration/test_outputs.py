"""What every command has: outputs that are never an input or a foreign file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from query_mutator.batching import LengthCache, load_batch_plan
from query_mutator.cli import outputs
from query_mutator.cli.flags import flags_of, parse_flags
from query_mutator.cli.outputs import Output, OutputFlags, check_outputs
from query_mutator.commands import COMMANDS
from query_mutator.errors import UsageError
from tests.qm_command import qm

#: What flags without a default need beyond a path.
VALUES = {"world_size": ["2"], "command": ["--", "true"], "question": ["why?"]}
#: Values that make the other flags of a command agree with each other.
TOGETHER = {
    "train sft": ["--dataset", "DATA"],
    "size workers": ["--dataset", "DATA"],
    "analyze": ["DATA"],
    "compare": ["one-run", "another"],
    "report": ["DATA"],
    "sweep": ["--grid", "lr=1,2"],
}
OUTPUT_NAMES = {"output", "json", "csv", "markdown", "rst", "html", "figure", "picture", "out", "dir", "save"}
SUFFIXES = {"figure": ".png", "picture": ".png"}


class Flag(NamedTuple):
    """A flag of a command: its field, its type, how it is spelled, and the output that it names."""

    field: str
    type: Any
    names: tuple[str, ...]
    output: Output | None


def flags_by_field(name: str) -> dict[str, Flag]:
    declared = outputs.outputs_of(COMMANDS[name].flags)
    return {
        field: Flag(field, one.hint, one.names if one.index is None else (), declared.get(field))
        for field, one in flags_of(COMMANDS[name].flags).items()
    }


def outputs_of(name: str) -> list[Flag]:
    return [flag for flag in flags_by_field(name).values() if flag.output is not None]


def paths_of(name: str) -> list[Flag]:
    """Return the flags that may name an input: texts, and tuples of them."""
    text = {str, str | None, tuple[str, ...]}
    return [flag for flag in flags_by_field(name).values() if flag.output is None and flag.type in text]


def spelled(flag: Flag, value: str) -> list[str]:
    return [flag.names[0], value] if flag.names else [value]


def words(name: str, data: Path, /, **given: str) -> list[str]:
    """Return a command line with these values, and with what the command cannot do without."""
    declared = {field.name: field for field in dataclasses.fields(COMMANDS[name].flags)}
    flags = flags_by_field(name)
    found = {field: spelled(flag, given[field]) for field, flag in flags.items() if field in given}
    for field, flag in flags.items():
        if declared[field].default is dataclasses.MISSING and field not in given:
            value = VALUES.get(field, [str(data.with_name("out")) if flag.output else str(data)])
            found[field] = [*flag.names[:1], *value]
    extra = [str(data) if word == "DATA" else word for word in TOGETHER.get(name, [])]
    if (extra and extra[0].removeprefix("--") in given) or (extra == [str(data)] and "runs" in given):
        extra = []
    if name == "sweep":
        found["command"] = VALUES["command"]
    front = [
        word for field, some in found.items() if field not in ("file", "question", "command", "runs") for word in some
    ]
    back = [word for field in ("file", "question", "runs", "command") for word in found.get(field, [])]
    return [*extra, *back, *front] if "command" not in found else [*front, *extra, *back]


def declared_outputs(name: str) -> dict[str, tuple[str, Output]]:
    return {flag.field: (flag.names[0], flag.output) for flag in outputs_of(name) if flag.output is not None}


def parsed(name: str, argv: list[str]) -> Any:
    return parse_flags(COMMANDS[name].flags, argv, prog="qm")


WRITERS = [name for name in COMMANDS if outputs_of(name)]
PAIRS = [(name, out, given) for name in WRITERS for out in outputs_of(name) for given in paths_of(name)]


def aliases(path: Path) -> Iterator[Path]:
    """Yield other names of one file."""
    yield path
    yield Path(os.path.relpath(path))
    yield path.parent / "." / path.name
    yield path.parent / "sub" / ".." / path.name
    path.with_name(f"soft{path.suffix}").symlink_to(path)
    yield path.with_name(f"soft{path.suffix}")
    path.with_name(f"hard{path.suffix}").hardlink_to(path)
    yield path.with_name(f"hard{path.suffix}")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data.png"  # the suffix that --figure wants
    path.write_text('{"query": "why?"}\n')
    return path


@pytest.mark.parametrize(("name", "out", "given"), PAIRS, ids=lambda value: getattr(value, "field", value))
def test_an_output_is_never_an_input(name: str, out: Flag, given: Flag, data: Path) -> None:
    apart = str(data.with_name(f"apart{SUFFIXES.get(out.field, '')}"))
    try:
        flags = parsed(name, words(name, data, **{out.field: apart, given.field: str(data)}))
    except UsageError:
        pytest.skip("not a flag that takes any path")
    reason = r"is the input|not written by|did not write"
    with pytest.raises(UsageError, match=reason):
        parsed(name, words(name, data, **{out.field: str(data), given.field: str(data)}))
    for alias in aliases(data):
        for force in (False, True):
            with pytest.raises(UsageError, match=reason):
                check_outputs(replace(flags, force=force, **{out.field: str(alias)}), declared_outputs(name))


@dataclass(frozen=True, kw_only=True)
class Flags(OutputFlags):
    """Flags of a command whose input may be an earlier output of it."""

    source: str
    out: str


def test_an_earlier_output_that_is_the_input_is_refused_under_every_name(data: Path) -> None:
    own = {"out": ("--out", Output(lambda path: True))}
    for alias in aliases(data):
        with pytest.raises(UsageError, match="is the input"):
            check_outputs(Flags(source=str(data), out=str(alias), force=True), own)


@pytest.mark.parametrize(("source", "out", "says"), [("sub/a", "sub", "holds"), ("sub", "sub/new", "lies in")])
def test_an_earlier_output_around_or_within_the_input_is_refused(source: str, out: str, says: str, data: Path) -> None:
    (data.parent / "sub" / "a").write_text("rows")
    own = {"out": ("--out", Output(lambda path: True, is_folder=True))}
    with pytest.raises(UsageError, match=f"--out {out} {says} the input {source}"):
        check_outputs(Flags(source=source, out=out, force=True), own)


EACH = [(name, out) for name in WRITERS for out in outputs_of(name)]


@pytest.mark.parametrize(("name", "out"), EACH, ids=lambda value: getattr(value, "field", value))
def test_a_file_of_somebody_else_is_never_replaced(name: str, out: Flag, data: Path) -> None:
    assert out.output is not None
    suffix = SUFFIXES.get(out.field, ".txt")
    flags = parsed(name, words(name, data, **{out.field: str(data.with_name(f"new{suffix}"))}))
    for kind, make in FOREIGN.items():
        path = data.with_name(f"{kind}{suffix}")
        make(path)
        for force in (False, True):
            with pytest.raises(UsageError, match=out.names[0]):
                check_outputs(replace(flags, force=force, **{out.field: str(path)}), declared_outputs(name))


FOREIGN: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("notes\n"),
    "json": lambda path: path.write_text('{"a": 1}\n'),
    "empty": lambda path: path.write_bytes(b""),
    "folder": lambda path: (path.mkdir(), (path / "notes.txt").write_text("notes\n")),
    "dangling": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_that_names_an_output_is_declared(name: str) -> None:
    declared = {flag.field for flag in outputs_of(name)}
    assert OUTPUT_NAMES & {*flags_by_field(name)} - {"json"} <= declared
    if declared:
        assert issubclass(COMMANDS[name].flags, OutputFlags)


def test_two_outputs_are_two_files(data: Path) -> None:
    with pytest.raises(UsageError, match="both name"):
        parsed("analyze", [str(data), "--csv", "same", "--html", "sub/../same"])


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("x" * 300, "File name too long; choose another"),
        ("x" * 5000, "is longer than 4096 characters"),
        ("y\0z", "has a control character; leave it out"),
        ("data.png/inside", "is not a writable folder.*choose another place to write to"),
        ("sub/" + "d/" * 3000 + "x", "is longer than 4096 characters"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_the_work(path: str, says: str, data: Path) -> None:
    for flag in ("--json", "--html"):
        with pytest.raises(UsageError, match=says):
            parsed("analyze", [str(data), flag, path])


def test_a_device_is_written_to_as_it_is(data: Path) -> None:
    parsed("analyze", [str(data), "--csv", "/dev/null", "--html", "/dev/null"])


# --- with real files -------------------------------------------------------------------------------------------------


def rows(path: Path, count: int = 40) -> Path:
    path.write_text("".join(f'{{"text": "{"word " * (1 + number % 9)}"}}\n' for number in range(count)))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "t.jsonl")
    assert qm("data", "lengths", "build", "-d", "t.jsonl", "-t", "bytes", "-o", "lengths.bin") == 0
    build = ("data", "batchplan", "build", "-l", "lengths.bin", "-b", "64", "--bucket-edges", "16,64")
    assert qm(*build, "--overflow-max", "64", "-o", "plan") == 0
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "data lengths build -d t.jsonl -t bytes -o t.jsonl",
        "data batching analyze -c lengths.bin -o lengths.bin --force",
        "data batchplan build -l lengths.bin -o lengths.bin --force",
        "data batchplan shard -p plan -w 2 -o plan --force",
        "data batchplan shard -p plan -w 2 -o plan/parts",
        "data batchplan build -l plan/units.safetensors -o plan --force",
        "data batch generate -p plan -d t.jsonl -t bytes -o plan",
        "gym run --mock -t bytes -o t.jsonl",
        "gym run --mock -t bytes -o lengths.bin --force",
        "data lengths build -d t.jsonl -t bytes -o lengths.bin",
        "data batchplan build -l lengths.bin -o plan",
    ],
)
def test_nothing_is_lost(line: str, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(plan)
    assert qm(*line.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert contents(plan) == before


def test_ones_own_is_replaced_with_force(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(plan / "t.jsonl", 50)
    assert qm("data", "lengths", "build", "-d", "t.jsonl", "-t", "bytes", "-o", "lengths.bin", "--force") == 0
    assert len(LengthCache.load_sync("lengths.bin")) == 50
    build = ("data", "batchplan", "build", "-l", "lengths.bin", "-b", "64", "--bucket-edges", "16,64")
    assert qm(*build, "--overflow-max", "64", "-o", "plan", "--force", "--json", "plan.json") == 0
    assert load_batch_plan("plan").meta.num_samples == 50
    assert qm("data", "batchplan", "info", "-p", "plan", "--json", "plan.json", "--force") == 0
    assert json.loads((plan / "plan.json").read_text())["num_samples"] == 50
    for count in ("4", "2"):
        assert qm("data", "batchplan", "shard", "-p", "plan", "-w", count, "-o", "parts", "--force") == 0
        assert len(list((plan / "parts").iterdir())) == int(count)
    (plan / "plan" / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert qm(*build, "--overflow-max", "64", "-o", "plan", "--force") == 2
    assert "was not written by this command" in capsys.readouterr().err
    for _ in range(2):
        assert qm("gym", "run", "--mock", "-t", "bytes", "-o", "samples", "--force") == 0


# --- lengths and plans that do not belong together -------------------------------------------------------------------


@pytest.mark.parametrize("command", ["batchplan build -l", "batching analyze -c"])
def test_a_longest_length_below_the_last_edge_is_refused(
    command: str, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["data", *command.split(), "lengths.bin", "-o", "new", "--bucket-edges", "16,64"]
    assert qm(*argv, "--overflow-max", "32") == 2
    assert "--overflow-max 32 is below the last of --bucket-edges, 64; raise it" in capsys.readouterr().err
    assert not (plan / "new").exists()
    assert qm(*argv) == 0
