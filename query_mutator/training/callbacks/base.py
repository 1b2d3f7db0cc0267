"""The hooks of a training run, and the registry of callbacks that `--plugin` adds.

    from query_mutator.training.callbacks import CALLBACKS, Callback

    @CALLBACKS.register("progress")
    class Progress(Callback):
        def on_rollout_end(self, run):
            print(run.env_steps, "steps")

Every callback that a plugin registers, or an installed distribution (entry points `query_mutator.callbacks`), is used
in the run, built without arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from query_mutator.env.steps import Steps
from query_mutator.errors import QueryMutatorError, UsageError
from query_mutator.files.metrics import is_metric
from query_mutator.registry import Registry
from query_mutator.training.config import TrainConfig
from query_mutator.types import StepRecord

__all__ = ["CALLBACKS", "Callback", "CallbackList", "RunView"]


@dataclass(slots=True, kw_only=True)
class RunView:
    """A run as its callbacks see it."""

    config: TrainConfig
    folder: Path
    env_steps: int = 0  # of the run so far, in all environments
    updates_done: int = 0
    invalid_steps: int = 0  # masked out of learning, up to the last update
    best_success: float = 0.0  # of the periodic evaluations
    row: dict[str, float] = field(default_factory=dict)  # in `on_log`: the metrics about to be written; add `custom/x`

    @property
    def is_last(self) -> bool:
        """Return whether the run has made its last update."""
        return self.updates_done >= self.config.num_updates


class Callback:
    """Base of a callback: override the hooks you need."""

    def on_training_start(self, run: RunView) -> None:
        """Prepare for a new or resumed run, whose folder and first checkpoint exist; `run.row` is that of step 0."""

    def on_step(self, run: RunView, steps: Steps, records: Sequence[StepRecord]) -> None:
        """Take finished steps, and the rows of transcripts.jsonl that were written since the previous call."""

    def on_rollout_end(self, run: RunView) -> None:
        """Act between a rollout and the update that learns from it."""

    def on_log(self, run: RunView) -> None:
        """Add figures to `run.row`, which is written after this."""

    def on_update_end(self, run: RunView) -> None:
        """Act after an update and `on_log`; `run.row` is empty when no row was due, and written if it is not."""

    def on_training_end(self, run: RunView) -> None:
        """Act after the last update and the comparison; not called for a run that ends early."""

    def close(self, error: BaseException | None) -> None:
        """Release resources; called once however a run ends that was started, with what ended it early."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of a plugin's callback: plain types and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, before `on_training_start`."""


CALLBACKS: Registry[Callable[[], Callback]] = Registry("callback", group="query_mutator.callbacks")


class CallbackList(Callback):
    """Call the hooks of all callbacks in order: ours, then those of plugins by name.

    An error in a plugin's callback is a UsageError that names it. One that was not started is not closed.
    """

    def __init__(self, own: Sequence[Callback]) -> None:
        self._own = list(own)
        self._named: dict[str, Callback] = {}
        self._is_started = False
        for name in CALLBACKS:
            with _named_errors(name, "__init__"):
                self._named[name] = CALLBACKS.get(name)()

    def on_training_start(self, run: RunView) -> None:
        """Start every callback."""
        for callback in self._own:
            callback.on_training_start(run)
        self._is_started = True
        self._call_plugins("on_training_start", run)

    def on_step(self, run: RunView, steps: Steps, records: Sequence[StepRecord]) -> None:
        """Pass finished steps on."""
        self._call("on_step", run, steps, records)

    def on_rollout_end(self, run: RunView) -> None:
        """Report the end of a rollout."""
        self._call("on_rollout_end", run)

    def on_log(self, run: RunView) -> None:
        """Have figures added to `run.row`; UsageError for a key that is neither known nor `custom/...`."""
        self._call("on_log", run)
        _check_keys(run.row)

    def on_update_end(self, run: RunView) -> None:
        """Report the end of an update; UsageError as in `on_log`."""
        self._call("on_update_end", run)
        _check_keys(run.row)

    def on_training_end(self, run: RunView) -> None:
        """Report the end of the training."""
        self._call("on_training_end", run)

    def close(self, error: BaseException | None) -> None:
        """Close every callback that was started."""
        for callback in self._own:
            callback.close(error)
        if self._is_started:
            self._call_plugins("close", error)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the plugins' callbacks by name."""
        states = {}
        for name, callback in self._named.items():
            with _named_errors(name, "state_dict"):
                states[name] = callback.state_dict()
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states of callbacks that are registered again."""
        for name in state.keys() & self._named.keys():
            with _named_errors(name, "load_state_dict"):
                self._named[name].load_state_dict(state[name])

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self._own:
            getattr(callback, hook)(*args)
        self._call_plugins(hook, *args)

    def _call_plugins(self, hook: str, *args: Any) -> None:
        for name, callback in self._named.items():
            with _named_errors(name, hook):
                getattr(callback, hook)(*args)


def _check_keys(row: Mapping[str, float]) -> None:
    if unknown := [key for key in row if not is_metric(key)]:
        raise UsageError(f"a callback added the metric {unknown[0]!r}; call it custom/{unknown[0].rpartition('/')[2]}")


@contextmanager
def _named_errors(name: str, hook: str) -> Iterator[None]:
    try:
        yield
    except QueryMutatorError:
        raise
    except Exception as error:  # user code fails in every way there is
        raise UsageError(f"callback {name!r} failed in {hook}: {type(error).__name__}: {error}") from error
