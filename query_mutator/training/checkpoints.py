"""Checkpoints of a run: its state after the last update, written when it is due and however the run ends."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from query_mutator.bounds import group_of
from query_mutator.files.run_dir import checkpoints_in, steps_of
from query_mutator.plugins import plugin_hashes
from query_mutator.runs.provenance import versions
from query_mutator.session.background import background_of
from query_mutator.session.checkpoint import Checkpoint, Progress, snapshot
from query_mutator.session.policy_file import SavedPolicy, write_own_policy
from query_mutator.settings.episode import TaskSettings
from query_mutator.training.callbacks.base import CallbackList, RunView
from query_mutator.training.parts import RunParts

__all__ = ["Checkpoints"]

_OF_ONE_COMMAND = ("resume", "break_lock", "config", "dry_run")  # flags that a checkpoint does not keep


class Checkpoints:
    """Keeps the state after the last update in memory, and writes it to the run folder."""

    def __init__(self, parts: RunParts, run: RunView, callbacks: CallbackList, *, resumed: Checkpoint | None) -> None:
        """Keep the state as it is; `resumed` is the checkpoint that it was restored from."""
        self._parts, self._run, self._callbacks = parts, run, callbacks
        self._background = background_of(parts.task, parts.split, dataset=parts.config.dataset)
        self._price: float | None = None
        self._latest = self._state()
        self.saved: Path | None = resumed.path if resumed else None

    def keep(self) -> None:
        """Keep the state after an update, once the row of metrics is written."""
        self._latest = self._state()

    def set_price(self, price: float) -> None:
        """Write the last state with the price of a call at which the policy acts."""
        self._price, self.saved = price, None
        self.keep()
        self.write()

    def write(self) -> None:
        """Write what is kept, with the policy file, unless it was written before; drop calls that it covers."""
        parts, latest = self._parts, self._latest
        path = parts.run_dir.checkpoint_path(latest.progress.env_steps)
        if path == self.saved:
            return
        parts.run_dir.sync()
        self.saved = latest.save(path)
        write_own_policy(parts.run_dir.path, SavedPolicy(checkpoint=latest, background=self._background))
        # The calls since the previous checkpoint are kept: it is the fallback if this one is damaged.
        parts.journal.drop_before(steps_of(checkpoints_in(parts.run_dir.path)[:2][-1]))

    def _state(self) -> Checkpoint:
        parts, config = self._parts, self._parts.config
        return Checkpoint(
            learner=snapshot(parts.learner.state_dict()),
            actions=parts.task.actions,
            task=group_of(TaskSettings, config, **({} if self._price is None else {"call_price": (self._price,)})),
            system=parts.models.resolved,
            projection=parts.task.observer.projection,
            flags={name: value for name, value in asdict(config).items() if name not in _OF_ONE_COMMAND},
            versions=versions(),
            plugins=plugin_hashes(config.plugin),
            confidence=None if parts.task.confidence is None else parts.task.confidence.to_arrays(),
            callbacks=snapshot(self._callbacks.state_dict()),
            progress=self._progress(),
            envs=parts.envs.state_dict(),
        )

    def _progress(self) -> Progress:
        parts, totals, rows = self._parts, self._parts.training_calls, self._parts.run_dir
        return Progress(
            env_steps=self._run.env_steps,
            wall_s=parts.runlog.wall_s,
            llm_calls=totals.calls,
            invalid_steps=self._run.invalid_steps,
            tokens=totals.tokens,
            cut_replies=totals.cut_replies,
            best_success=self._run.best_success,
            env_episodes=tuple(env.total_episodes for env in parts.env_list),
            env_total_steps=tuple(env.total_steps for env in parts.env_list),
            transcripts_bytes=rows.transcripts.size_bytes,
            transcripts_crc=rows.transcripts.crc,
            metrics_bytes=rows.metrics.rows.size_bytes,
            metrics_crc=rows.metrics.rows.crc,
        )
