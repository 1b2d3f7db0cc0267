"""Kill a trainer at random moments and resume it: `python -m benchmarks.attack.kills --kills 40`.

After each kill, calls that the server received and that neither the checkpoint nor the journal nor the cache has are
lost: they are repeated. No kill may lose more than were in flight. PPO must end with the weights of a run that was
never killed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from query_mutator.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, CheckpointError
from query_mutator.files.run_dir import SUMMARY
from query_mutator.session.checkpoint import read_checkpoint
from query_mutator.session.journal import Journal
from query_mutator.testing import StubServer, start_server
from tests.conftest import Librarian, Softener
from tests.integration.conftest import ROWS, write_dataset
from tests.integration.killing import kill_when, start, train, transcript, weights

EXIT_CODES = {
    signal.SIGKILL: -signal.SIGKILL,
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
}
ALGOS: dict[str, list[str]] = {
    "ppo": ["--deterministic"],
    "asking": ["--deterministic", "--ask", "form", "--answer", "best", "--call-price", "0", "0.01"],
    "iqn": ["--algo", "iqn", "--train-batch-size", "16", "--learning-starts", "16", "--replay-ratio", "4"],
    "direct": ["--algo", "direct"],
}


@dataclass(frozen=True, kw_only=True)
class Killed:
    """What the kills of one run did."""

    kills: int
    lost: tuple[int, ...]  # calls to pay again, by kill
    same_transcript: bool
    same_weights: bool
    complaints: tuple[str, ...] = ()  # what was wrong with an exit code or the output


def killed_run(
    algo: str,
    *,
    batch_size: int,
    kills: int,
    folder: Path,
    rng: random.Random,
    env_steps: int = 256,
    signals: Sequence[str] = ("SIGKILL",),
) -> Killed:
    """Return what `kills` at random moments did to a run, which they interrupt in training and in evaluations.

    The kills take turns through `signals`. Where a run ends before its next moment, another one takes the rest.
    """
    latency_ms = 2.0 * batch_size  # slow enough for a kill to be near its moment on a busy machine
    with start_server([Librarian(), Softener()], num_parallel=32, latency_ms=latency_ms, latency_sigma=1.0) as server:
        argv = _flags(algo, server, folder, batch_size=batch_size, env_steps=env_steps)
        whole = _started(folder / "whole")
        train([*argv, *_places(whole)], whole)
        total, lost, complaints, killed = _received(server), list[int](), list[str](), list[Path]()
        while len(lost) < kills:
            killed.append(_started(folder / f"killed {len(killed)}"))
            left = [signal.Signals[signals[number % len(signals)]] for number in range(len(lost), kills)]
            lost += _kill_one(server, argv, killed[-1], total=total, rng=rng, numbers=left, complaints=complaints)
        return Killed(
            kills=len(lost),
            lost=tuple(lost),
            same_transcript=all(_transcript_of(whole) == _transcript_of(one) for one in killed),
            same_weights=all(_same_weights(whole, one) for one in killed),
            complaints=tuple(complaints),
        )


def _kill_one(
    server: StubServer,
    argv: list[str],
    folder: Path,
    *,
    total: int,
    rng: random.Random,
    numbers: Sequence[signal.Signals],
    complaints: list[str],
) -> list[int]:
    """Send a run these signals until it ends, resuming it after each; return the calls that each one lost."""
    begin, lost, given = _received(server), list[int](), [*argv, *_places(folder)]
    for kills_left, number in zip(range(len(numbers), 0, -1), numbers, strict=True):
        before = _received(server)
        left = begin + total - before  # calls until the end at most: those at the same time share one
        moment = before + rng.randrange(1, max(2, left // kills_left))
        trainer = start(given, folder)
        was_alive = kill_when(trainer, lambda: _received(server) >= moment, number=number)  # noqa: B023
        if not was_alive or (folder / "latest" / SUMMARY).exists():
            break  # it had ended
        if trainer.exitcode != EXIT_CODES[number]:
            complaints.append(f"exit code {trainer.exitcode} after {number.name}")
        lost.append(_received(server) - begin - known_calls(folder) - sum(lost))
        if (folder / "latest").exists():
            given = ["--resume", str(folder / "latest"), *_places(folder)[2:]]
    else:
        train(given, folder)
    complaints += _tracebacks(folder / "output.txt")
    return lost


def _transcript_of(folder: Path) -> list[dict[str, Any]]:
    return transcript((folder / "latest").resolve())


def _same_weights(one: Path, other: Path) -> bool:
    first, second = (weights((folder / "latest").resolve()) for folder in (one, other))
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def known_calls(folder: Path) -> int:
    """Return the calls that the newest run in a folder need not make again: checkpoint, journal, cache of replies."""
    known, replies, run = 0, folder / "replies.sqlite", folder / "latest"
    if replies.exists():
        with closing(sqlite3.connect(replies)) as connection:
            known += connection.execute("SELECT count(*) FROM replies_v2").fetchone()[0]
    try:
        done = read_checkpoint(run).progress
    except CheckpointError:
        return known
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(run / "journal", copy, dirs_exist_ok=True)  # reading truncates a torn line
        journal = Journal(Path(copy), since=done.env_steps)
        paid = sum(outcome.completion.attempts > 0 for _, outcome in journal._outcomes.values())
        journal.close()
    return known + done.llm_calls + paid


def _tracebacks(output: Path) -> list[str]:
    text = output.read_text(encoding="utf-8")
    return [] if "Traceback" not in text else [text[text.index("Traceback") :][:2000]]


def _flags(algo: str, server: StubServer, folder: Path, *, batch_size: int, env_steps: int) -> list[str]:
    processes = max(4, batch_size)
    return [
        *("--ollama-url", server.url, "--target-model", "librarian", "--mutator-model", "softener"),
        *("--encoder", "hash", "--dataset", str(write_dataset(folder / "questions.jsonl", ROWS))),
        *("--embedding-dims", "4", "--operators", "spelling,neutral,filler", "--eval-questions", "3"),
        *("--forms", "none", "--ask", "every_step", "--max-episode-steps", "5", "--cache", "eval"),
        *("--num-processes", str(processes), "--batch-size", str(batch_size), "--num-steps", "8"),
        *("--num-mini-batch", "2", "--num-env-steps", str(env_steps), "--save-interval", "3", "--seed", "7"),
        *ALGOS[algo],
    ]


def _places(folder: Path) -> list[str]:
    return ["--save-dir", str(folder), "--cache-path", str(folder / "replies.sqlite")]


def _started(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _received(server: StubServer) -> int:
    received: int = server.stats()["routes"].get("/api/chat", 0)
    return received


def main(argv: Sequence[str]) -> int:
    """Kill runs of each kind; return 1 where a kill lost more calls than were in flight, or weights differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40, help="of each run")
    parser.add_argument("--algo", nargs="+", choices=ALGOS, default=list(ALGOS))
    parser.add_argument("--batch-size", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--env-steps", type=int, default=2048)
    parser.add_argument("--signals", nargs="+", default=["SIGKILL"], help="which the kills use in turns")
    parser.add_argument("--seed", type=int, default=1)
    flags: Any = parser.parse_args(argv)
    bad = 0
    print("algo    batch  kills  lost by a kill: most, mean  transcript  weights", flush=True)
    for algo in flags.algo:
        for batch_size in flags.batch_size:
            with tempfile.TemporaryDirectory() as folder:
                result = killed_run(
                    algo,
                    batch_size=batch_size,
                    kills=flags.kills,
                    folder=Path(folder),
                    rng=random.Random(f"{flags.seed}:{algo}:{batch_size}"),
                    env_steps=flags.env_steps,
                    signals=flags.signals,
                )
            most, mean = max(result.lost, default=0), sum(result.lost) / max(1, len(result.lost))
            same = ["same" if equal else "other" for equal in (result.same_transcript, result.same_weights)]
            print(f"{algo:8}{batch_size:5}{result.kills:7}{most:22}{mean:7.1f}  {same[0]:10}  {same[1]}", flush=True)
            print(*result.complaints, sep="\n", end="", flush=True)
            bad += (
                most > batch_size
                or bool(result.complaints)
                or ("--deterministic" in ALGOS[algo] and not result.same_weights)
            )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
