"""The folder of one run: `<save_dir>/<time>-<name>/`, always a new one; the list of such folders; what config.json has.

`<save_dir>/latest` links to the newest run that holds something: a finished step, or a plan.

config.json          flags, versions, commit, hardware, command line, who answered, which encoder, plugins
metrics.jsonl        {"step", "wall_s", "<key>": number} a row
tensorboard/         the same numbers
transcripts.jsonl    one StepRecord a row
resume.pt            the newest state of the training, the one before as resume.previous.pt (training/run_folder.py)
policy.qm            its policy with all that acting needs (session/policy_file.py)
best.qm              what the verdict of the evaluation says to deploy, in the same form
replies.sqlite       every reply and action of the run (llm/store.py)
summary.json         the evaluation and the cost of the run
evaluation.jsonl     a row per method and question of the evaluation
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import logging
import math
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from query_mutator.errors import CheckpointError, UsageError, hide_credentials
from query_mutator.files import LOCK, JsonLines, decode_object, disk_errors, read_checked_json, write_checked_json
from query_mutator.types import StepRecord
from query_mutator.version import __version__

logger = logging.getLogger(__name__)

LATEST = "latest"
CONFIG = "config.json"
METRICS_FILE = "metrics.jsonl"
SUMMARY = "summary.json"
STORE = "replies.sqlite"
T = TypeVar("T")
CONFIDENCE = "confidence.npz"  # of qm plan --from-logs, which may leave no policy

RunState = Literal["running", "finished", "interrupted", "killed"]

_TAIL_BYTES = 1 << 20  # of metrics.jsonl: about 500 rows
_RUN_FILES = (CONFIG, METRICS_FILE, SUMMARY, LOCK)
_FIGURES = ("step", "validation/success", "llm/calls")
PACKAGES = ("torch", "numpy", "gymnasium", "sentence-transformers", "transformers", "tokenizers")


class RunDir:
    """A run folder that is being written."""

    def __init__(
        self,
        path: Path,
        *,
        first_step: int = 0,
        transcripts_bytes: int | None = None,
        metrics_bytes: int | None = None,
    ) -> None:
        """Open the files of a folder. On resume, truncate the row files to these lengths."""
        self.path = path
        self.config_path, self.summary_path = path / CONFIG, path / SUMMARY
        self.store_path, self.evaluation_path = path / STORE, path / "evaluation.jsonl"
        self.transcripts = JsonLines(path / "transcripts.jsonl", cut_at=transcripts_bytes)
        self._records: list[StepRecord] = []
        self._is_latest = first_step > 0
        self.metrics = MetricsWriter(path, cut_at=metrics_bytes, first_step=first_step)

    @classmethod
    def create(cls, save_dir: str | Path, name: str) -> Self:
        """Create a new folder; DiskError when it cannot be created."""
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
        with disk_errors(save_dir):
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            path = _make_new(Path(save_dir), stem)
        return cls(path)

    def take_latest(self) -> None:
        """Point `latest` to this run; idempotent."""
        if not self._is_latest:
            self._is_latest = True
            _point_latest_to(self.path)

    def add_record(self, record: StepRecord) -> None:
        """Buffer one step of the transcript until `write_records`."""
        self._records.append(record)

    def write_records(self) -> list[StepRecord]:
        """Append the buffered steps to the transcript, flush them and return them; `latest` is this run then."""
        records, self._records = self._records, []
        self.transcripts.append(*(record.to_json() for record in records))
        if records:
            self.take_latest()
        return records

    def write_config(self, config: Mapping[str, Any], *, resumed_at: int = 0) -> None:
        """Write config.json; a resumed run adds an entry under `resumed`."""
        before: dict[str, Any] = {}
        if self.config_path.exists():
            before = read_checked_json(self.config_path)
        started, resumed = before.get("started", _now()), before.get("resumed", [])
        if resumed_at:
            resumed.append({"at_step": resumed_at, "command_line": config.get("command_line"), "time": _now()})
        write_checked_json(self.config_path, {**config, "started": started, "resumed": resumed})

    def sync(self) -> None:
        """Sync all rows to disk."""
        self.transcripts.sync()
        self.metrics.rows.sync()

    def close(self) -> None:
        """Close the files; idempotent."""
        self.transcripts.close()
        self.metrics.close()


def first_readable(checkpoints: Sequence[Path], read: Callable[[Path], T]) -> T:
    """Return what `read` makes of the first checkpoint that it can read; warn of those before it."""
    for checkpoint in checkpoints[:-1]:
        try:
            return read(checkpoint)
        except CheckpointError as error:
            logger.warning("%s; using the previous one", error)
    return read(checkpoints[-1])


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _make_new(folder: Path, stem: str) -> Path:
    """Create `stem`, or `stem-2`, `stem-3`, ... when runs start within the same second."""
    number = 1
    while True:
        path = folder / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def _point_latest_to(path: Path) -> None:
    """Replace the link atomically; without one (no links, or something else has the name) only warn."""
    link = path.parent / LATEST
    partial = path.parent / f".{LATEST}.{os.getpid()}"
    try:
        partial.symlink_to(path.name)
        partial.replace(link)
    except OSError as error:
        partial.unlink(missing_ok=True)
        logger.warning("%s does not point to %s (%s)", link, path.name, error.strerror)


def run_state(folder: Path) -> RunState:
    """Return the state of a run: its lock names the process that writes it, its summary is written last.

    A summary of fewer steps than the metrics have is that of an earlier part of the run. A process on another host
    cannot be checked and counts as running.
    """
    locked, done = _mtime(folder / LOCK), _mtime(folder / SUMMARY)
    if locked is not None:
        if done is not None and done >= locked:
            return "finished"
        return "running" if _may_be_alive(folder / LOCK) else "killed"
    taken, summed = last_values(folder / METRICS_FILE, ["step"]), _number(_read(folder / SUMMARY), "env_steps")
    return "interrupted" if done is None or taken.get("step", 0) > (summed or math.inf) else "finished"


def last_values(path: Path, keys: Collection[str]) -> dict[str, float]:
    """Return the last number under each key in a metrics.jsonl; only the end of a long file is read."""
    found: dict[str, float] = {}
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError):  # a line that was cut off
            row = decode_object(line)
            found = {key: row[key] for key in keys if isinstance(row.get(key), (int, float))} | found
        if len(found) == len(keys):
            break
    return found


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _may_be_alive(lock: Path) -> bool:
    """Return whether the process that a lock names may be alive."""
    try:
        pid, host, *_ = [*lock.read_text(encoding="utf-8", errors="replace").splitlines(), "", ""]
        if host != socket.gethostname():
            return True
        os.kill(int(pid), 0)
    except (ProcessLookupError, FileNotFoundError):
        return False
    except (OSError, ValueError):  # another user's process, a lock that is just being written
        return True
    return True


# --- metrics ----------------------------------------------------------------------------------------------------------

#: By key: unit, `better` (the direction of improvement, "-" for neither), meaning, what to watch for.
METRICS: Mapping[str, Mapping[str, str]] = {
    row["key"]: row
    for row in csv.DictReader(
        Path(__file__).with_name("metrics.tsv").read_text(encoding="utf-8").splitlines(), delimiter="\t"
    )
}


class MetricsWriter:
    """Append rows `{"step", "wall_s", "<key>": number}` to `metrics.jsonl`, and their numbers to `tensorboard/`.

    A key that is neither in METRICS nor `custom/...` is a UsageError; numbers that are not finite are dropped.
    """

    def __init__(self, folder: Path, *, cut_at: int | None = None, first_step: int = 0) -> None:
        self.rows = JsonLines(folder / METRICS_FILE, cut_at=cut_at)
        installed = importlib.util.find_spec("tensorboard") is not None  # a plain install writes the rows alone
        self._events = EventWriter(folder / "tensorboard", first_step=first_step) if installed else None

    def write(self, values: Mapping[str, float], *, step: int, wall_s: float) -> None:
        """Write one row; DiskError when it cannot be written."""
        for key in values:
            if key not in METRICS and not key.startswith("custom/"):
                raise UsageError(f"no metric {key}; call it custom/{key.rpartition('/')[2]}")
        numbers = {key: float(value) for key, value in values.items() if math.isfinite(value)}
        self.rows.append({"step": step, "wall_s": round(wall_s, 3), **numbers})
        if self._events is not None:
            self._events.write(numbers, step=step)

    def close(self) -> None:
        """Close the files; idempotent."""
        self.rows.close()
        if self._events is not None:
            self._events.close()


class EventWriter:
    """Write scalars to a TensorBoard event file, in the calling thread so that a full disk is reported at once."""

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        with disk_errors(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("xb")
        self._records = RecordWriter(self._file)
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        if first_step:  # on resume, TensorBoard drops the points of earlier files from this step on
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(self._event(wall_time=time.time(), step=first_step + 1, session_log=start))

    def write(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Write the scalars of one step."""
        values = [self._summary.Value(tag=key, simple_value=number) for key, number in numbers.items()]
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Close the file; idempotent."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, event: Any) -> None:
        with disk_errors(self._path):
            self._records.write(event.SerializeToString())
            self._file.flush()


# --- the runs in a folder ---------------------------------------------------------------------------------------------


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the runs in a folder, the newest last, or the one run that it is; UsageError if it is not a folder.

    None is what the files of a run do not say; `started` is in seconds since 1970. A run that ended before
    its first step or plan is left out.
    """
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        raise UsageError(
            f"{folder}: {error.strerror}; give the folder of run folders (--save-dir of the runs)"
        ) from None
    if CONFIG in names:
        return [_listed(folder)]
    paths = [folder / name for name in names]
    runs = [_listed(path) for path in paths if not path.is_symlink() and _is_run(path)]
    return sorted(runs, key=lambda run: (run["started"], run["name"]))


def _is_run(path: Path) -> bool:
    """Return whether a folder is that of a run which has a row or a result, or still may."""
    if not any((path / name).exists() for name in _RUN_FILES):
        return False
    rows = [path / name for name in ("transcripts.jsonl", METRICS_FILE)]
    has_rows = any(row.exists() and row.stat().st_size for row in rows)
    is_empty = (path / "resume.pt").exists() and not has_rows and not (path / SUMMARY).exists()
    return not is_empty or run_state(path) == "running"


def _listed(path: Path) -> dict[str, Any]:
    config, summary = _read(path / CONFIG), _read(path / SUMMARY)
    flags, state = config.get("flags"), run_state(path)
    figures = last_values(path / METRICS_FILE, _FIGURES)
    report = summary if state == "finished" else {}  # that of an earlier part of a resumed run says nothing
    calls = _number(report, "llm_calls")
    calls = figures.get("llm/calls") if calls is None else calls + (_number(report, "eval_llm_calls") or 0)
    return {
        "name": path.resolve().name,
        "state": state,
        "started": _started(path, config),
        "steps": figures.get("step"),
        "steps_asked": steps_asked(flags if isinstance(flags, Mapping) else {}),
        "validation_success": figures.get("validation/success"),  # of the last periodic evaluation
        "held_out_success": _number(report, "eval", "methods", "policy", "success"),  # at the end
        "calls": calls if calls is None else int(calls),  # that of the end included
    }


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a file, {} if it is absent or damaged: a listing shows the other runs all the same."""
    with contextlib.suppress(OSError, ValueError):
        return decode_object(path.read_bytes())
    return {}


def _started(path: Path, config: Mapping[str, Any]) -> float:
    with contextlib.suppress(TypeError, ValueError):
        return datetime.fromisoformat(config.get("started", "")).timestamp()
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def steps_asked(flags: Mapping[str, Any]) -> int | None:
    """Return the steps of the run that was asked for: whole rollouts, as PPOConfig.total_steps has them."""
    steps, rollout = _number(flags, "num_env_steps"), 1.0
    for name in ("num_processes", "num_steps"):
        rollout *= _number(flags, name) or 1.0
    return None if steps is None else int(max(1, -(-steps // rollout)) * rollout)


def _number(data: Any, *keys: str) -> float | None:
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data if isinstance(data, (int, float)) else None


# --- what made a run --------------------------------------------------------------------------------------------------


def describe_run(flags: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    """Return the content of config.json: all that is needed to understand and repeat a run; `parts` are added."""
    return {
        "flags": dict(flags),
        "command_line": command_line(),
        **parts,
        "versions": versions(),
        "commit": commit(),
        "hardware": hardware(),
    }


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Return the versions of the product, Python and the packages that can move a result."""
    found = {"query-mutator": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Return processor, cores this process may use, and GPUs if torch is loaded and sees any."""
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": _gpus(),
    }


def command_line() -> str:
    """Return how this process was started, ready to be pasted into a shell, without credentials in URLs."""
    words = [Path(sys.executable).name, *sys.orig_argv[1:]]
    return shlex.join(map(hide_credentials, words))


def commit() -> str | None:
    """Return the commit of the checkout the package runs from ("-dirty" when changed), None outside one."""
    file = Path(__file__).resolve()
    is_ours = _git(file.parent, "ls-files", "--error-unmatch", file.name)
    return _git(file.parent, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty") if is_ours else None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
