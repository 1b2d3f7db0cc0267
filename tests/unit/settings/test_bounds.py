"""Values beyond reason: every number flag of every command has bounds, and texts, addresses and devices are checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import pytest

from benchmark_batching import BenchmarkConfig
from ppo.fields import Bounds, bounds_of
from query_mutator.cli.console import exit_code
from query_mutator.cli.flags import flags_of, parse_flags
from query_mutator.commands import COMMANDS
from query_mutator.commands.iqn import Args as IQNArgs
from query_mutator.commands.main import main as qm_main
from query_mutator.errors import UsageError
from query_mutator.lab.analysis.config import ExtractFlags
from query_mutator.settings.learner import IQNConfig
from query_mutator.training.config import TrainConfig
from train_query_mutator import main

CLASSES: dict[str, type[Any]] = {
    "train": TrainConfig,
    "benchmark": BenchmarkConfig,
    "extract": ExtractFlags,
    "iqn": IQNArgs,
    **{name: command.flags for name, command in COMMANDS.items()},
}


def kinds(hint: Any) -> set[Any]:
    """Return a type and the types in it."""
    return {hint}.union(*(kinds(part) for part in get_args(hint) if isinstance(part, type) or get_args(part)))


@pytest.mark.parametrize("name", CLASSES)
def test_every_number_flag_has_bounds(name: str) -> None:
    cls = CLASSES[name]
    numbers = {field for field, flag in flags_of(cls).items() if kinds(flag.type) & {int, float}}
    assert {field for field in numbers if bounds_of(cls)[field] == Bounds()} == set()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-env-steps", "1" + "0" * 20], "num_env_steps=100000000000000000000 must be at most 1000000000000"),
        (["--num-processes", "1" + "0" * 20], "num_processes=100000000000000000000 must be at most 100000"),
        (["--num-processes", "100000", "--num-steps", "100000"], "transitions of a rollout must be at most 10^8"),
        (["--lr", "1e308"], "lr=1e+308 must be at most 10"),
        (["--lr", "nan"], "lr=nan must be above 0"),
        (["--temperature", "inf"], "temperature=inf must be at most 100"),
        (["--seed", "-1"], "seed=-1 must be at least 0"),
        (["--hidden-sizes", "64", "1000000000"], "hidden_sizes=1000000000 must be at most 16384"),
        (["--ollama-url", "nonsense"], "--ollama-url nonsense has no scheme; try http://nonsense"),
        (["--ollama-url", "ftp://there"], "--ollama-url: 'ftp://there' is not an address of a server"),
        (["--openai-url", "localhost:8000/v1"], "--openai-url localhost:8000/v1 has no scheme"),
        (["--device", "."], "--device '.' is not a device of torch"),
        (["--device", "toaster"], "--device toaster cannot be used"),
        (["--question-column", "nope"], "--question-column is for a file; general has its own columns"),
        (["--keep-alive", "forever"], "--keep-alive 'forever' is not a time; try 30m"),
        (["--target-model", ""], "--target-model '' is empty; give a value, or leave the flag out"),
        (["--name", "a\x1bb"], r"--name 'a\x1bb' has a control character"),
        (["--dataset", "x" * 5000], "is longer than 4096 characters"),
        (["--domain", "a\ud800"], "is not valid UTF-8"),
    ],
)
def test_values_beyond_reason_are_refused_by_a_dry_run(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(main, ["--dry-run", *argv], prog="train") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize("command", ["eval", "rewrite", "doctor", "size calls"])
def test_every_command_names_the_flag_of_a_wrong_address(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*command.split(), *(["how?"] if command == "rewrite" else [])]
    for url in ("http://h?key=1", "ftp://h", "nonsense"):
        assert exit_code(qm_main, [*words, "--ollama-url", url], prog="qm") == 2
        assert "--ollama-url" in capsys.readouterr().err


def test_column_that_a_file_has_not_is_refused_by_a_dry_run(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "q.csv").write_text("query,accept\nhow do I sort,sorted\n")
    argv = ["--dry-run", "--dataset", str(tmp_path / "q.csv"), "--question-column", "nope"]
    assert exit_code(main, argv, prog="train") == 2
    assert "nope" in capsys.readouterr().err


def test_several_lines_are_allowed_where_a_person_writes_them() -> None:
    assert parse_flags(TrainConfig, ["--domain", "one\ntwo"], prog="train").domain == "one\ntwo"


def test_a_config_made_by_a_program_is_checked_as_well() -> None:
    with pytest.raises(ValueError, match="replay_size=1000000000000 must be at most 100000000"):
        IQNConfig(replay_size=10**12)


@dataclass(frozen=True, kw_only=True)
class Sized:
    """A class that a plug-in might declare."""

    sizes: tuple[int, ...] = (1, 2)
    """Sizes."""
    share: float = 0.5
    """A number that the table does not know."""


def test_number_that_the_table_does_not_know_must_be_finite() -> None:
    assert parse_flags(Sized, ["--share", "-7e30"], prog="prog").share == -7e30
    with pytest.raises(UsageError, match="share=inf must be a finite number"):
        parse_flags(Sized, ["--share", "inf"], prog="prog")
    with pytest.raises(UsageError, match="--sizes needs at least one value"):
        parse_flags(Sized, ["--sizes"], prog="prog")


def test_too_little_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def take_too_much(argv: Any) -> int:
        return len(bytearray(1 << 62))

    assert exit_code(take_too_much, [], prog="prog") == 2
    assert "not enough memory" in capsys.readouterr().err
