"""Hooks reach every callback in order; the states of plugins' callbacks go into a checkpoint and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from query_mutator.errors import UsageError
from query_mutator.learners.learner import Steps
from query_mutator.registry import Registry
from query_mutator.training.callbacks import CALLBACKS, Callback, CallbackList, RunView
from query_mutator.training.config import TrainConfig

HOOKS = ("on_training_start", "on_step", "on_rollout_end", "on_log", "on_update_end", "on_training_end", "close")


class Recorder(Callback):
    """Records which hooks are called on which callback."""

    def __init__(self, name: str, calls: list[tuple[str, str]]) -> None:
        for hook in HOOKS:
            setattr(self, hook, lambda *args, hook=hook: calls.append((name, hook)))


class Counter(Callback):
    """Has a state."""

    def __init__(self) -> None:
        self.rollouts = 0

    def on_rollout_end(self, run: RunView) -> None:
        self.rollouts += 1

    def state_dict(self) -> dict[str, Any]:
        return {"rollouts": self.rollouts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rollouts = state["rollouts"]


def no_steps() -> Steps:
    return Steps(*(np.zeros(0, kind) for kind in "ififf???ii"))


def test_every_hook_reaches_ours_then_those_of_plugins(tmp_path: Path) -> None:
    calls: list[tuple[str, str]] = []
    CALLBACKS.add("theirs", lambda: Recorder("theirs", calls))
    callbacks, run = CallbackList([Recorder("ours", calls)]), RunView(config=TrainConfig(), folder=tmp_path)
    for hook, args in zip(HOOKS, [(run,), (run, no_steps(), []), (run,), (run,), (run,), (run,), (None,)], strict=True):
        getattr(callbacks, hook)(*args)
    assert calls == [(name, hook) for hook in HOOKS for name in ("ours", "theirs")]


def test_states_are_restored_by_name(tmp_path: Path) -> None:
    CALLBACKS.add("counter", Counter)
    before, run = CallbackList([]), RunView(config=TrainConfig(), folder=tmp_path)
    before.on_rollout_end(run)
    before.on_rollout_end(run)
    state = before.state_dict()
    assert state == {"counter": {"rollouts": 2}}
    after = CallbackList([])
    after.load_state_dict({**state, "of a plugin that is not loaded": {}})
    after.on_rollout_end(run)
    assert after.state_dict() == {"counter": {"rollouts": 3}}


class Noted(Callback):
    """Notes the hooks that are called."""

    def __init__(self) -> None:
        self.hooks: list[str] = []

    def on_training_start(self, run: RunView) -> None:
        self.hooks.append("start")

    def on_update_end(self, run: RunView) -> None:
        run.row["custom/figure"] = 1.0

    def close(self, error: BaseException | None) -> None:
        self.hooks.append(f"close {error}")


class Unready(Callback):
    """Cannot start."""

    def on_training_start(self, run: RunView) -> None:
        raise UsageError("the server is gone")


@pytest.fixture
def run(tmp_path: Path) -> RunView:
    return RunView(config=TrainConfig(), folder=tmp_path)


def test_a_callback_of_an_installed_distribution_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: RunView
) -> None:
    info = tmp_path / "notes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: notes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[query_mutator.callbacks]\nnotes = notes:Notes\n")
    (tmp_path / "notes.py").write_text(
        "from query_mutator.training.callbacks import Callback\n"
        "class Notes(Callback):\n"
        "    def on_log(self, run):\n"
        "        run.row['custom/notes'] = 2.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[Any] = Registry("callback", group="query_mutator.callbacks")  # which has read no entry points
    monkeypatch.setattr("query_mutator.training.callbacks.CALLBACKS", registry)
    CallbackList([]).on_log(run)
    assert run.row == {"custom/notes": 2.0}


def test_figures_may_be_added_after_every_update(run: RunView) -> None:
    CALLBACKS.add("noted", Noted)
    CallbackList([]).on_update_end(run)
    assert run.row == {"custom/figure": 1.0}


def test_a_started_callback_is_closed(run: RunView) -> None:
    noted = Noted()
    CALLBACKS.add("noted", lambda: noted)
    callbacks = CallbackList([])
    callbacks.on_training_start(run)
    callbacks.close(None)
    assert noted.hooks == ["start", "close None"]


def test_a_callback_is_not_closed_if_the_run_failed_before_it_started(run: RunView) -> None:
    noted = Noted()
    CALLBACKS.add("noted", lambda: noted)
    callbacks = CallbackList([Unready()])
    with pytest.raises(UsageError, match="the server is gone"):
        callbacks.on_training_start(run)
    callbacks.close(None)
    assert noted.hooks == []
