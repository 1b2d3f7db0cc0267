"""The settings groups: one declaration per name, and bounds that hold from a flag, a file and a program alike."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import pkgutil
from pathlib import Path
from typing import Any, get_args

import pytest

import ppo.config
import query_mutator.settings
from ppo.fields import bounds_of
from query_mutator.bounds import group_of
from query_mutator.cli.flags import flags_of, parse_flags
from query_mutator.commands import COMMANDS
from query_mutator.errors import UsageError
from query_mutator.report.benchmark import BenchmarkConfig
from query_mutator.settings.calls import Calls
from query_mutator.training.config import TrainConfig

MODULES = [
    ppo.config,
    *(importlib.import_module(f"query_mutator.settings.{one.name}")
      for one in pkgutil.iter_modules(query_mutator.settings.__path__)),
]  # fmt: skip
TOOLKITS = ("query_mutator.batching", "query_mutator.lab")
GROUPS: dict[str, type[Any]] = {
    name: cls
    for module in MODULES
    for name, cls in inspect.getmembers(module, inspect.isclass)
    if dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
}


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


def outside(cls: type[Any]) -> list[tuple[str, float]]:
    """Return the numbers of a group with a value that is out of bounds."""
    bounds = {name: one for name, one in bounds_of(cls).items() if math.isfinite(one.high)}
    return [(name, one.high + 1) for name, one in bounds.items()]


@pytest.mark.parametrize("name", GROUPS)
def test_bounds_hold_from_flags_files_and_programs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = GROUPS[name]
    monkeypatch.chdir(tmp_path)
    for field, value in outside(cls):
        flag = flags_of(cls)[field]
        number = value if float in get_args(flag.type) or flag.type is float else int(value)
        given = (number,) if flag.is_tuple else number
        with pytest.raises(ValueError, match=field):
            cls(**{field: given})
        with pytest.raises(UsageError, match=field):
            parse_flags(cls, [flag.names[0], str(number)], prog="prog")
        if field in TrainConfig.__dataclass_fields__:
            Path("qm.toml").write_text(f"[train]\n{field} = {[*given] if isinstance(given, tuple) else given}\n")
            with pytest.raises(UsageError, match=field):
                parse_flags(TrainConfig, [], prog="train", table="train")


def test_given_are_the_fields_of_flags_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qm.toml").write_text("timeout = 120\n[train]\nseed = 1\n")
    config = parse_flags(TrainConfig, ["--batch-size", "8"], prog="train", table="train")
    assert config.given == {"timeout_s", "seed", "batch_size"}
    assert TrainConfig(seed=7).given == {"seed"}


#: Fields of commands that have the name of a setting and are another thing, or hold for fewer values.
OTHER_MEANING: dict[str, set[str]] = {
    # questions, servers and models that a command takes from elsewhere unless they are named
    "BenchmarkConfig": {"latency_ms", "latency_sigma", "mutator_model"},
    "DoctorConfig": {"batch_size", "mutator_model", "target_model"},
    "EvalFlags": {"dataset", "local_server_url", "seed", "target_model"},
    "PlanFlags": {"answer"},
    "PolicyFlags": {"device", "encoder"},
    "SizeCallsFlags": {"target_model"},
    # the judge of labelled answers, which is required, and that of --shadow
    "JudgeCheckFlags": {"batch_size", "judge_model"},
    "ServeFlags": {"judge_model"},
    # the test server, and the gym that a client connects to
    "ServerSettings": {"num_ctx", "port", "seed"},
    "StubServerFlags": {"recording"},
    "GymRunFlags": {"host", "port", "seed"},
    "WatchFlags": {"port"},
    # files, caches and seeds of the batching toolkit
    "BenchFlags": {"cache", "dataset", "seed"},
    "BuildFlags": {"dataset", "seed"},
    "CacheFlags": {"cache"},
    "GenerateFlags": {"dataset"},
    "LengthsBuildFlags": {"dataset"},
    "VerifyFlags": {"dataset"},
    # what is sized
    "DeviceFlags": {"device"},
    "RealFlags": {"timeout_s"},
    "SizeFlags": {"device"},
    "SizeWorkersFlags": {"batch_size", "dataset", "num_workers"},
}


def classes_of_commands() -> set[type[Any]]:
    """Return the dataclasses of which the flags of the product's commands are made, settings groups apart."""
    flags = {command.flags for command in COMMANDS.values()} | {BenchmarkConfig, TrainConfig}
    found = {one for cls in flags for one in cls.__mro__ if dataclasses.is_dataclass(one)} - {*GROUPS.values()}
    return {cls for cls in found if not cls.__module__.startswith(TOOLKITS)}


def test_commands_declare_no_setting_again() -> None:
    settings = {name for cls in GROUPS.values() for name in inspect.get_annotations(cls)}
    again = {
        cls.__name__: {
            name for name in inspect.get_annotations(cls) if name in settings - {*vars(cls).get("CHANGED", ())}
        }
        for cls in classes_of_commands()
    }
    assert {name: names for name, names in again.items() if names} == OTHER_MEANING
