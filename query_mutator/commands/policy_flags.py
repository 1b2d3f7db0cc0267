"""Flags of the commands that use a trained policy, and the models they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from query_mutator.apply import Rewriter
from query_mutator.bounds import Device, Prose
from query_mutator.cli.console import note
from query_mutator.cli.flags import AlsoPositional, Positional
from query_mutator.plugins import absolute
from query_mutator.session.loading import acting_settings, load_saved
from query_mutator.session.models import ResolvedModels, open_models
from query_mutator.session.policy_file import SavedPolicy
from query_mutator.settings import ADDRESS_FLAGS, AUTO, Calls, FailureRate, Models, Plugins

LATEST = "runs/latest"


@dataclass(frozen=True, kw_only=True)
class PolicyFlags(Models, Calls, FailureRate, Plugins):
    """Flags of every command that uses a trained policy; by default all settings are those of its training."""

    STORED: ClassVar[str] = "as in training"
    FIXED: ClassVar[Mapping[str, Any]] = {}  # settings that replace those of the training

    checkpoint: str = LATEST
    """A run folder, or a .qm file of `qm export-policy`."""
    device: Device = "cpu"
    """Torch device of the sentence encoder."""
    encoder: str | None = None
    """Sentence encoder; it must give the vectors of the training's. By default as in training."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plugin", tuple(map(absolute, self.plugin)))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class RunAndFlags(PolicyFlags):
    """Flags of the commands whose last argument is another one, before which the policy may stand."""

    words: Positional[tuple[Prose, ...]] = ()

    def __post_init__(self) -> None:
        *run, last = self.words or ("",)
        if len(run) > 1:
            raise ValueError(f"{len(self.words)} arguments; put quotes around {' '.join(self.words[1:])[:200]!r}")
        if run and self.checkpoint != type(self).checkpoint:
            raise ValueError(f"--checkpoint {self.checkpoint} and {run[0]} both name a policy; leave one of them out")
        object.__setattr__(self, "words", (last,))
        object.__setattr__(self, "checkpoint", next(iter(run), self.checkpoint))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class RunFlags(PolicyFlags):
    """Flags of the commands that take the policy as their argument too."""

    checkpoint: AlsoPositional[str] = LATEST
    """A run folder, or a .qm file of `qm export-policy`."""


@contextmanager
def open_policy(flags: PolicyFlags) -> Iterator[Rewriter]:
    """Yield the policy of --checkpoint with the models of its training, or those that flags name."""
    saved = load_saved(flags.checkpoint, flags.plugin, best=True)
    settings = system_settings(flags, replace(saved.system, **flags.FIXED), saved)
    with open_models(settings) as models:
        if settings.backend == AUTO:  # no model is known from training, as after --from-logs
            note(models.choice.reason)
        with Rewriter(saved, models) as rewriter:
            yield rewriter


def system_settings(
    flags: PolicyFlags, base: ResolvedModels, saved: SavedPolicy | None = None, **others: Any
) -> ResolvedModels:
    """Return the settings of models with the given flags, and `others`, in place of those in training."""
    names = {field.name for field in fields(ResolvedModels)} & {*flags.given, *ADDRESS_FLAGS}
    given = {name: getattr(flags, name) for name in names} | others
    given = {name: value for name, value in given.items() if value not in (None, ())}
    if "batch_size" in given:
        given.setdefault("use_batching", True)
    return acting_settings(base, given, saved=saved)


def max_failure_rate(flags: PolicyFlags, saved: SavedPolicy) -> float:
    """Return the flag, by default that of the training."""
    return (flags if "max_failure_rate" in flags.given else saved.flags).max_failure_rate
