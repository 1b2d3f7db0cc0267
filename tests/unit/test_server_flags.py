"""The flags that name servers are the trainer's."""

from __future__ import annotations

import dataclasses

import pytest

from query_mutator.cli.flags import flags_of
from query_mutator.llm.flags import ServerFlags
from query_mutator.training.config import TrainConfig


def test_server_flags_have_the_names_types_and_defaults_of_the_trainer() -> None:
    ours, trainer = flags_of(ServerFlags), flags_of(TrainConfig)
    assert {name: (flag.names, flag.type) for name, flag in ours.items()} == {
        name: (trainer[name].names, trainer[name].type) for name in ours
    }
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    assert all(field.default == defaults[field.name] for field in dataclasses.fields(ServerFlags))


@pytest.mark.parametrize("name", ["num_ctx", "timeout_s", "max_reply_mb"])
def test_a_bound_must_be_above_zero(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 must be above 0"):
        ServerFlags(**{name: 0})
