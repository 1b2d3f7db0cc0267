"""The flags that name servers are the trainer's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmark_batching import BenchmarkConfig
from query_mutator.cli.flags import flags_of, parse_flags
from query_mutator.commands.doctor import DoctorConfig
from query_mutator.errors import UsageError
from query_mutator.llm.backends import ServerFlags
from query_mutator.training.config import TrainConfig


def test_server_flags_have_the_names_types_and_defaults_of_the_trainer() -> None:
    ours, trainer = flags_of(ServerFlags), flags_of(TrainConfig)
    assert {name: (flag.names, flag.type) for name, flag in ours.items()} == {
        name: (trainer[name].names, trainer[name].type) for name in ours
    }
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    assert all(field.default == defaults[field.name] for field in dataclasses.fields(ServerFlags))


@pytest.mark.parametrize("flag", ["--num-ctx", "--timeout-s", "--max-reply-mb"])
@pytest.mark.parametrize(("flags", "prog"), [(BenchmarkConfig, "benchmark_batching"), (DoctorConfig, "qm doctor")])
def test_a_bound_must_be_above_zero(flag: str, flags: type[Any], prog: str) -> None:
    with pytest.raises(UsageError, match=flag.strip("-").replace("-", ".")):
        parse_flags(flags, [flag, "0"], prog=prog)
