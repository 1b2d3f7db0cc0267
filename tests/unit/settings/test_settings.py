"""qm.toml and --config, groups of settings and their bounds: one declaration, one line for every mistake."""

from __future__ import annotations

import dataclasses
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

import ppo.config
import query_mutator.settings
from benchmark_batching import BenchmarkConfig
from ppo.fields import Bound, rules_of
from query_mutator.bounds import group_of
from query_mutator.cli.console import exit_code
from query_mutator.cli.flags import TABLES, files_read, flags_of, parse_flags
from query_mutator.commands import COMMANDS
from query_mutator.commands.analyze import ExtractFlags
from query_mutator.data import load_questions
from query_mutator.errors import UsageError
from query_mutator.settings import PRESETS, Calls, IQNConfig
from query_mutator.training.config import TrainConfig, parse_config
from tests.qm_command import qm

TOOLKITS = ("query_mutator.batching", "query_mutator.lab")
GROUPS: dict[str, type[Any]] = {
    name: cls
    for module in (ppo.config, query_mutator.settings)
    for name, cls in inspect.getmembers(module, inspect.isclass)
    if dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
}
CLASSES: dict[str, type[Any]] = {
    "train": TrainConfig,
    "benchmark": BenchmarkConfig,
    "extract": ExtractFlags,
    "iqn": IQNConfig,
    **{name: command.flags for name, command in COMMANDS.items()},
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return qm.toml of the current folder, still to be written."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "qm.toml"


def parse(name: str, *argv: str) -> Any:
    return parse_flags(COMMANDS[name].flags, argv, prog=f"qm {name}", table=name)


def test_tables_are_those_of_the_commands() -> None:
    assert set(TABLES) - {"benchmark"} == set(COMMANDS)


def test_command_line_wins_over_config_file_over_table_over_shared_keys(project: Path) -> None:
    project.write_text("batch-size = 2\ntimeout = 7\n[train]\nbatch_size = 3\nnum-envs = 4\nlr = 0.5\n")
    Path("more.toml").write_text("num-mini-batch = 2\n[train]\nlr = 0.25\nseed = 9\n[serve]\nport = 1\n")
    config = parse_config(["--config", "more.toml", "--num-processes", "6"])
    assert (config.batch_size, config.timeout_s, config.num_processes) == (3, 7.0, 6)
    assert (config.lr, config.seed) == (0.25, 9)
    assert {str(project), str(project.parent / "more.toml")} <= files_read().keys()


def test_a_preset_is_between_the_fields_and_the_files(project: Path) -> None:
    project.write_text("[train]\nbudget = 3\n")
    config = parse_config(["--preset", "frugal", "--plan-calls", "50"])
    assert (config.algo, config.max_asks, config.budget, config.plan_calls) == ("direct", 2, 3.0, 50)
    project.write_text('[train]\npreset = "frugal"\n')
    assert (parse_config([]).algo, parse_config(["--algo", "ppo"]).algo) == ("direct", "ppo")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_valid(name: str) -> None:
    assert parse_config(["--preset", name]).given == {"preset", *PRESETS[name]}


def test_the_file_is_named_once_and_a_resumed_run_keeps_its_settings(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write_text("[train]\nseed = 5\nlr = 0.5\n")
    assert [parse_config(["--lr", "0.1"]).seed for _ in range(2)] == [5, 5]
    assert capsys.readouterr().err == "settings: qm.toml (seed)\n"
    assert parse_config(["--resume", "run"]).seed == parse_config(["--resume", "run", "--seed", "1"]).seed == 1


def test_shared_keys_reach_the_commands_that_mean_the_same_by_them(project: Path) -> None:
    project.write_text('dataset = "mine.jsonl"\nbatch-size = 3\ntarget-model = "m"\n[eval]\nseed = 4\n')
    assert parse("plan").dataset == "mine.jsonl"
    assert (parse("eval").dataset, parse("eval").batch_size, parse("eval").seed) == (None, 3, 4)
    assert parse("doctor").target_model == ("m",)
    assert parse("train sft", "--model", "x", "--dataset", "d", "--out", "o").batch_size != 3  # samples, not calls
    assert parse("size workers", "--from-logs", "runs").dataset != "mine.jsonl"


def test_tables_of_commands_with_several_words(project: Path) -> None:
    project.write_text('[train]\nseed = 5\n[train.sft]\nseed = 6\n[data.export]\noutput = "o"\n[size.replay]\n')
    assert parse_config([]).seed == 5
    assert parse("train sft", "--model", "x", "--dataset", "d", "--out", "o").seed == 6


def test_a_server_that_is_named_elsewhere_replaces_that_of_the_file(project: Path) -> None:
    project.write_text('ollama-url = "http://box:1"\nbackend = "ollama"\n')
    assert parse_config([]).ollama_url == ("http://box:1",)
    other = parse_config(["--openai-url", "http://127.0.0.1:2/v1"])
    assert (other.ollama_url, other.backend, other.openai_url) == ((), "auto", "http://127.0.0.1:2/v1")
    assert parse_config(["--backend", "recorded"]).ollama_url == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('targt-model = "m"', "qm.toml: unknown key 'targt-model'; did you mean 'target-model'?"),
        ("num-env-steps = 5", "qm.toml: unknown key 'num-env-steps'; above the tables"),
        ("[train]\nbatchsize = 5", "qm.toml: unknown key 'batchsize'; did you mean 'batch_size'?"),
        ("[trian]\nseed = 5", "qm.toml: unknown table [trian]; did you mean [train]?"),
        ("[zzz]\nseed = 5", "qm.toml: unknown table [zzz]; tables are named after commands, as [train]"),
        ("[train]\nseed = 'x'", 'Invalid value for [seed] from qm.toml: unable to convert "x" into int'),
        ("[train]\nuse-batching = 'x'", "Invalid value for [use-batching] from qm.toml"),
        ("[train]\nseed = ", "qm.toml: not TOML (Invalid value (at end of document)); a file of flags is"),
        ("keep-alive = 'forever'", "keep_alive 'forever' is not a time; try 30m"),
        ("batch-size = 0", "batch_size=0 must be at least 1; the default is 8"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(project: Path, text: str, message: str) -> None:
    project.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_config([])


def test_help_needs_no_valid_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project.mkdir()
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    assert "--target-model" in capsys.readouterr().out
    with pytest.raises(UsageError, match=re.escape("qm.toml: Is a directory")):
        parse_config([])


# --- qm init ---------------------------------------------------------------------------------------------------------


def test_init_writes_valid_settings_and_ten_questions(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("init") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("next: qm train,")
    config = parse_config([])
    assert not config.given  # addresses, data and comments: no setting that the pages do not know of
    assert parse("eval").dataset is None  # the held-out questions of the run
    questions = load_questions("questions.jsonl")
    assert [bool(question.accept) for question in questions] == [True] * 10
    assert qm("init", "a/b") == 0
    assert sorted(path.name for path in Path("a/b").iterdir()) == ["qm.toml", "questions.jsonl"]
    assert "cd a/b && qm train" in capsys.readouterr().out
    assert qm("init", "questions.jsonl/x") == 2


def test_every_line_that_init_comments_out_is_valid(project: Path) -> None:
    assert qm("init") == 0
    text = re.sub(r"^# (?=[a-z-]+ = )", "", project.read_text(), flags=re.MULTILINE)
    assert text != project.read_text()
    project.write_text(text)
    config = parse_config([])
    named = (config.target_model, config.dataset, config.domain)
    assert named == (("llama3.2:3b",), "questions.jsonl", "our shop's handbook")
    assert parse("doctor").ollama_url == ("http://127.0.0.1:11434",)


@pytest.mark.parametrize("name", ["qm.toml", "questions.jsonl"])
def test_init_overwrites_nothing(project: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("there").mkdir()
    Path("there", name).symlink_to("nowhere")
    assert qm("init", "there") == 2
    assert f"there/{name} exists and is not replaced" in capsys.readouterr().err
    assert [path.name for path in Path("there").iterdir()] == [name]


def test_no_two_groups_declare_one_name() -> None:
    declared = [
        name
        for cls in GROUPS.values()
        for name in inspect.get_annotations(cls)
        if name not in vars(cls).get("CHANGED", ())
    ]
    assert len(declared) > 90
    assert {name for name in declared if declared.count(name) > 1} == set()


def test_of_two_configs_the_later_wins_and_values_over_both() -> None:
    first, second = Calls(timeout_s=1, batch_size=2), Calls(timeout_s=3, batch_size=4)
    found = group_of(Calls, first, second, batch_size=5)
    assert (found.timeout_s, found.batch_size) == (3, 5)


def is_upper(rule: object) -> bool:
    """Return whether what an annotation says is an upper bound."""
    return isinstance(rule, Bound) and rule.words == "at most"


@pytest.mark.parametrize("name", GROUPS)
def test_bounds_hold_from_flags_files_and_programs(name: str, project: Path) -> None:
    cls = GROUPS[name]
    upper = [(field, one.limit + 1) for field, rules in rules_of(cls).items() for one in rules if is_upper(one)]
    flags, in_file = flags_of(cls), ""
    for field, value in upper:
        number = value if float in kinds(flags[field].hint) else int(value)
        given = (number,) if get_origin(flags[field].hint) is tuple else number
        with pytest.raises(ValueError, match=field):
            cls(**{field: given})
        with pytest.raises(UsageError, match=field):
            parse_flags(cls, [flags[field].name, str(number)], prog="prog")
        if field in TrainConfig.__dataclass_fields__:
            in_file = field
            project.write_text(f"[train]\n{field} = {[*given] if isinstance(given, tuple) else given}\n")
    if in_file:  # the last one: a parser of all flags is slow
        with pytest.raises(UsageError, match=in_file):
            parse_flags(TrainConfig, [], prog="train", table="train")


def test_given_are_the_fields_of_flags_and_files(project: Path) -> None:
    project.write_text("timeout = 120\n[train]\nseed = 1\n")
    config = parse_flags(TrainConfig, ["--batch-size", "8"], prog="train", table="train")
    assert config.given == {"timeout_s", "seed", "batch_size"}
    assert TrainConfig(seed=7).given == {"seed"}


def test_commands_declare_few_settings_again() -> None:
    """Fields with the name of a setting that are another thing, or that hold for fewer values, are 26 at most."""
    flags = {command.flags for command in COMMANDS.values()} | {BenchmarkConfig, TrainConfig}
    classes = {one for cls in flags for one in cls.__mro__ if dataclasses.is_dataclass(one)} - {*GROUPS.values()}
    settings = {name for cls in GROUPS.values() for name in inspect.get_annotations(cls)}
    again = {
        (cls.__name__, name)
        for cls in classes
        if not cls.__module__.startswith(TOOLKITS)
        for name in settings & inspect.get_annotations(cls).keys() - {*vars(cls).get("CHANGED", ())}
    }
    assert len(again) <= 26, again


def kinds(hint: Any) -> set[Any]:
    """Return a type and the types in it."""
    return {hint}.union(*(kinds(part) for part in get_args(hint) if isinstance(part, type) or get_args(part)))


@pytest.mark.parametrize("name", CLASSES)
def test_every_number_flag_has_bounds(name: str) -> None:
    cls = CLASSES[name]
    numbers = {field for field, flag in flags_of(cls).items() if kinds(flag.hint) & {int, float}}
    assert {name for name in numbers if not any(map(is_upper, rules_of(cls)[name]))} == set()


@dataclass(frozen=True, kw_only=True)
class Sized:
    """A class that a plug-in might declare."""

    sizes: tuple[int, ...] = (1, 2)
    """Sizes."""
    share: float = 0.5
    """A number that the table does not know."""


def test_number_that_the_table_does_not_know_must_be_finite_and_some_texts_have_lines() -> None:
    assert parse_flags(Sized, ["--share", "-7e30"], prog="prog").share == -7e30
    with pytest.raises(UsageError, match="share=inf must be a finite number"):
        parse_flags(Sized, ["--share", "inf"], prog="prog")
    with pytest.raises(UsageError, match="--sizes needs at least one value"):
        parse_flags(Sized, ["--sizes"], prog="prog")
    assert parse_flags(TrainConfig, ["--domain", "one\ntwo"], prog="train").domain == "one\ntwo"


def test_too_little_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def take_too_much(argv: Any) -> int:
        return len(bytearray(1 << 62))

    assert exit_code(take_too_much, [], prog="prog") == 2
    assert "not enough memory" in capsys.readouterr().err
