"""Small runs of every learner to be damaged, what is read from them, and whether a difference was reported."""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.attack.harness import Finished, run_cli
from query_mutator.errors import DiskError, UsageError
from query_mutator.files.json_lines import read_json_lines
from query_mutator.lab.analysis.runs import load_run
from query_mutator.lab.analysis.tables import read_mapping
from query_mutator.session.checkpoint import Checkpoint, read_checkpoint
from query_mutator.session.journal import Journal
from query_mutator.session.policy_file import POLICY_FILE, SavedPolicy, read_policy_file
from query_mutator.testing import start_server
from query_mutator.training.export import read_steps, reward_of
from tests.conftest import Librarian, Softener
from tests.integration.conftest import ROWS
from train_query_mutator import main, parse

KINDS = ("ppo", "ppo killed", "iqn", "direct")
STEPS, MORE_STEPS = 32, 48
LEARNER = ["--train-batch-size", "8", "--learning-starts", "8"]

Reader = Callable[[Path], Any]


@cache
def server_url() -> str:
    """Return the address of a server in this process, which runs until the process ends."""
    server = start_server([Librarian(), Softener()], num_parallel=8)
    atexit.register(server.close)
    return server.url


@cache
def run_of(kind: str) -> Path:
    """Return a run of four updates with checkpoints after the second and the last, or one without the last."""
    algo, _, killed = kind.partition(" ")
    if killed:
        run = Path(tempfile.mkdtemp(prefix="run-killed-")) / "run"
        atexit.register(shutil.rmtree, run.parent, ignore_errors=True)
        shutil.copytree(run_of(algo), run)
        (run / "summary.json").unlink()
        (run / "checkpoints" / f"step_{STEPS}.pt").unlink()
        return run
    folder = Path(tempfile.mkdtemp(prefix=f"run-{algo}-"))
    os.environ.setdefault("QUERY_MUTATOR_TRUSTED", str(folder / "trusted.jsonl"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    rows = [json.dumps({"id": f"q{n}", "query": text, "accept": [name]}) for n, (text, name) in enumerate(ROWS)]
    (folder / "questions.jsonl").write_text("\n".join(rows))
    flags = ["--ollama-url", server_url(), "--target-model", "librarian", "--mutator-model", "softener"]
    flags += ["--forms", "none", "--ask", "every_step", "--max-episode-steps", "5"]
    flags += ["--encoder", "hash", "--dataset", str(folder / "questions.jsonl"), "--embedding-dims", "4"]
    flags += ["--operators", "spelling,neutral,filler", "--save-dir", str(folder), "--num-processes", "2"]
    flags += ["--num-steps", "4", "--num-mini-batch", "2", "--num-env-steps", str(STEPS), "--save-interval", "2"]
    flags += ["--hidden-sizes", "8", "--cache", "off", "--eval-interval", "0", "--no-use-linear-lr-decay"]
    flags += ["--algo", algo, *(["--deterministic"] if algo == "ppo" else LEARNER)]
    ended = run_cli(main, flags, folder)
    assert ended.code == 0, ended
    return (folder / "latest").resolve()


def files_of(run: Path) -> list[Path]:
    """Return the files of a run that commands read, so without pictures, the page and TensorBoard."""
    paths = (path for path in sorted(run.rglob("*")) if path.is_file() and path.suffix not in (".png", ".html"))
    return [path for path in paths if "tensorboard" not in path.parts]


# --- what is read from a run -----------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return tensors, arrays and records as values that compare."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes())
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _journal(run: Path) -> dict[str, Any]:
    """Return what a journal holds from the last checkpoint but one on; its files, which reading cuts, are put back."""
    folder = run / "journal"
    with tempfile.TemporaryDirectory() as copies:
        shutil.copytree(folder, Path(copies) / "journal")
        try:
            journal = Journal(folder, since=STEPS // 2)
            journal.close()
            return {"outcomes": plain(journal._outcomes), "actions": dict(journal._actions)}
        finally:
            shutil.rmtree(folder)
            shutil.copytree(Path(copies) / "journal", folder)


def _analysis(run: Path) -> dict[str, Any]:
    loaded = load_run(run)
    return {"config": dict(loaded.config), "series": {tag: plain(one) for tag, one in loaded.series.items()}}


def _resumption(run: Path) -> Any:
    with ExitStack() as stack:
        config, checkpoint = parse(["--resume", str(run), "--num-env-steps", str(MORE_STEPS)], stack)
        assert checkpoint is not None
        state = plain(dataclasses.replace(checkpoint, path=None))
        return [checkpoint.path and checkpoint.path.name, state, config.num_env_steps]


READERS: Mapping[str, Reader] = {
    "metrics": lambda run: list(read_json_lines(run / "metrics.jsonl")),
    "transcripts": lambda run: read_steps(str(run)),
    "config": lambda run: read_mapping(run / "config.json"),
    "summary": lambda run: read_mapping(run / "summary.json") if _has_ended(run) else None,
    "evaluation": lambda run: _rows_if_there(run / "evaluation.jsonl"),
    "reward": lambda run: plain(vars(reward_of(str(run)))),
    "policy": lambda run: plain(read_checkpoint(run).learner),
    "own policy": lambda run: plain(_own_policy(run)),
    "journal": _journal,
    "analysis": _analysis,
    "resume": _resumption,
}


def _rows_if_there(path: Path) -> list[dict[str, Any]] | None:
    return list(read_json_lines(path)) if path.exists() else None


def _has_ended(run: Path) -> bool:
    return (run / "summary.json").exists() or (run / "checkpoints" / f"step_{STEPS}.pt").exists()


@dataclass(frozen=True, kw_only=True)
class Read:
    """What a reader returned, or the error it ended with, and what was logged meanwhile."""

    value: Any = None
    error: str = ""
    logged: str = ""


def read(run: Path, reader: Reader) -> Read:
    """Return what a reader makes of a run. Errors that are not for the user come out."""
    with _logged() as lines:
        try:
            return Read(value=reader(run), logged="\n".join(lines))
        except (UsageError, DiskError) as error:
            return Read(error=str(error), logged="\n".join(lines))


def readers_of(run: Path) -> dict[str, Reader]:
    """Return the readers of a run, one of each checkpoint among them."""
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    single = {name: (lambda run, name=name: plain(_checkpoint(run, name))) for name in checkpoints}
    return {**READERS, **single}


def _own_policy(run: Path) -> SavedPolicy:
    saved = read_policy_file(run / POLICY_FILE)
    return dataclasses.replace(saved, checkpoint=dataclasses.replace(saved.checkpoint, path=None))


def _checkpoint(run: Path, name: str) -> Checkpoint:
    return dataclasses.replace(read_checkpoint(run / "checkpoints" / name), path=None)


@cache
def undamaged(kind: str) -> Mapping[str, Read]:
    """Return what every reader makes of the run as it was written."""
    run = run_of(kind)
    found = {name: read(run, reader) for name, reader in readers_of(run).items()}
    assert not [one for one in found.values() if one.error or one.logged], found
    return found


@contextmanager
def _logged() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield lines
    finally:
        root.removeHandler(handler)


# --- a resumption to its end -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A run after a resumption: how that ended, and what the run then holds."""

    ended: Finished
    weights: Any = None
    steps: Sequence[Any] = ()


def resumed(run: Path) -> Resumed:
    """Resume a run for a few more updates in this process."""
    argv = ["--resume", str(run), "--num-env-steps", str(MORE_STEPS), "--no-evaluate"]
    ended = run_cli(main, argv, run.parent)
    if ended.code != 0:
        return Resumed(ended=ended)
    rows = [{**row, "timing": None} for row in read_json_lines(run / "transcripts.jsonl")]
    steps = sorted(rows, key=lambda row: (row["env"], row["step"]))
    return Resumed(ended=ended, weights=plain(read_checkpoint(run).learner["policy"]), steps=steps)


@cache
def undamaged_resumed(kind: str) -> Resumed:
    """Return the resumption of the undamaged run; that of PPO has the same result to the bit each time."""
    with tempfile.TemporaryDirectory() as folder:
        found = resumed(Path(shutil.copytree(run_of(kind), Path(folder) / "run")))
    assert found.ended.code == 0, found.ended
    return found
