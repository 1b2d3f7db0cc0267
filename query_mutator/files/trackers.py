"""What a tracker is given: the run's config, rows of metrics by step, its summary and its end.

wandb     a run by our id; repeated steps are ignored (older than its last) or merged (equal to it)
trackio   wandb's functions, without tags, summary and state: these are an entry of the config, and a last row
mlflow    a run of an experiment, found by the tag `query_mutator.id`; a repeated step is a second point
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from filelock import FileLock

from query_mutator.errors import hide_credentials
from query_mutator.files.tracking import Tracker

__all__ = ["Sink", "TrackedRun", "open_sink"]

_EXIT_CODES = {"finished": 0, "interrupted": 255}  # wandb: 255 is a run that was stopped, 1 one that failed
_MLFLOW_STATES = {"finished": "FINISHED", "interrupted": "KILLED"}
_MLFLOW_ID = "query_mutator.id"
_MLFLOW_BATCH = 100  # parameters in one request


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as its trackers see it."""

    id: str
    folder: Path
    project: str
    group: str | None
    config: Mapping[str, Any]
    tags: Mapping[str, str] = field(default_factory=dict)


class Sink(Protocol):
    """A tracker's run that is open."""

    view: str

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        """Add a row of metrics."""

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        """Add the summary, end the run in its state, and wait until all is stored."""


def open_sink(tracker: Tracker, run: TrackedRun) -> Sink:
    """Return a tracker's run, new or continued."""
    sinks: dict[Tracker, type[_Wandb] | type[_Trackio] | type[_Mlflow]]
    sinks = {"wandb": _Wandb, "trackio": _Trackio, "mlflow": _Mlflow}
    return sinks[tracker](run)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, their names joined by dots."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among nested values, by their joined names."""
    return {name: float(value) for name, value in flat(values) if isinstance(value, (int, float))}


class _Wandb:
    """A run of wandb, online or offline as wandb's own settings say; its files are in the run folder."""

    def __init__(self, run: TrackedRun) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=run.project,
            group=run.group,
            name=run.folder.name,
            id=run.id,
            resume="allow",
            config=dict(run.config),
            tags=[f"{name}:{value}"[:64] for name, value in run.tags.items()],
            dir=str(run.folder),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
        )
        is_offline = self._run.offline
        self.view = f"wandb sync {Path(self._run.dir).parent}" if is_offline else str(self._run.url)

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(row), step=step)

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({"state": state, **summary})
        self._run.finish(exit_code=_EXIT_CODES.get(state, 1))


class _Trackio:
    """A run of trackio, whose names need not be unique: the id is part of ours."""

    def __init__(self, run: TrackedRun) -> None:
        trackio = importlib.import_module("trackio")
        self._run = trackio.init(
            project=run.project,
            group=run.group,
            name=f"{run.folder.name}-{run.id}",
            resume="allow",
            config={**run.config, "tags": dict(run.tags)},
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._last_step = 0
        self.view = f"trackio show --project {run.project}"

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        self._last_step = step
        self._run.log(dict(row), step=step)

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        figures = {f"summary/{name}": value for name, value in numbers(summary).items()}
        self._run.log({"state": state, **figures}, step=self._last_step)
        self._run.finish()


class _Mlflow:
    """A run in the store of MLFLOW_TRACKING_URI, else in an SQLite file next to the run folder."""

    def __init__(self, run: TrackedRun) -> None:
        mlflow = importlib.import_module("mlflow")
        self._entities = mlflow.entities
        save_dir = run.folder.parent
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{save_dir / 'mlflow.db'}"
        is_ours = not os.environ.get("MLFLOW_TRACKING_URI")
        self.view = f"mlflow ui --backend-store-uri {hide_credentials(uri)}"
        with FileLock(save_dir / ".mlflow.lock") if is_ours else contextlib.nullcontext():  # the file is made once
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            experiment = self._experiment(run.project, f"file://{save_dir / 'mlartifacts'}" if is_ours else None)
        self._id = self._run_id(experiment, run)
        place = self._client.get_run(self._id).info.artifact_uri
        if is_ours and urlsplit(place).scheme not in ("", "file"):  # the store of a stranger
            raise ValueError(
                f"{save_dir / 'mlflow.db'} sends files to {place}; to use it, set MLFLOW_TRACKING_URI={uri}"
            )
        self._client.log_dict(self._id, dict(run.config), "config.json")

    def _experiment(self, name: str, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name, artifact_location=artifacts))

    def _run_id(self, experiment: str, run: TrackedRun) -> str:
        """Return the id of the run, continued if it is known; parameters stay as they were, MLflow refuses changes."""
        if known := self._client.search_runs([experiment], f"tags.`{_MLFLOW_ID}` = '{run.id}'"):
            self._client.update_run(known[0].info.run_id, status="RUNNING")
            return str(known[0].info.run_id)
        tags = {**run.tags, _MLFLOW_ID: run.id, **({"group": run.group} if run.group else {})}
        new = self._client.create_run(experiment, run_name=run.folder.name, tags=tags).info.run_id
        params = [self._entities.Param(name, str(value)[:6000]) for name, value in flat(run.config)]
        for some in _batches(params, _MLFLOW_BATCH):
            self._client.log_batch(new, params=some)
        return str(new)

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        self._log(row, step=step)

    def _log(self, row: Mapping[str, float], *, step: int) -> None:
        now_ms = int(time.time() * 1000)
        points = [self._entities.Metric(name, value, now_ms, step) for name, value in row.items()]
        for some in _batches(points, _MLFLOW_BATCH):
            self._client.log_batch(self._id, metrics=some)

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        self._log({f"summary/{name}": value for name, value in numbers(summary).items()}, step=0)
        self._client.log_dict(self._id, dict(summary), "summary.json")
        self._client.set_tag(self._id, "state", state)
        self._client.set_terminated(self._id, status=_MLFLOW_STATES.get(state, "FAILED"))


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[at : at + size] for at in range(0, len(items), size))
