"""Kill the server of a trainer and start it again: `python -m benchmarks.attack.outages --seconds 60`.

Twice in training and twice in the final comparison, with the trainer's default flags. The run must end with exit code 0
and without an invalid step, and repeat only calls that were in flight.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from query_mutator.files import decode
from query_mutator.files.json_lines import read_json_lines
from tests.integration.conftest import ROWS, write_dataset
from tests.integration.killing import ServerProcess, start

BATCH_SIZE = 8  # the default
ENV_STEPS = 256
MANY_ROWS = [(f"{text} {number}", f"{name}{number}") for number in range(6) for text, name in ROWS]


@dataclass(frozen=True, kw_only=True)
class Survived:
    """How a run ended whose server went away."""

    exit_code: int | None
    outages: int
    invalid_steps: int
    repeated_calls: int
    shown: int  # times that the wait was shown
    said: str


def survived(*, away_s: float, folder: Path, flags: Sequence[str] = ()) -> Survived:
    """Return how a run ends whose server is away for `away_s` four times."""
    server = ServerProcess(folder, num_parallel=8, latency_ms=8)
    trainer = start([*_flags(server, folder), *flags], folder)
    run = folder / "latest"
    after = 0

    def steps() -> int:
        rows = run / "transcripts.jsonl"
        return rows.read_bytes().count(b"\n") if rows.exists() else 0

    def in_comparison() -> bool:  # its calls are those after the last checkpoint
        nonlocal after
        if not (run / "checkpoints" / f"step_{ENV_STEPS}.pt").exists():
            after = server.answered
        return server.answered > after + 20

    moments: list[Callable[[], bool]] = [lambda: steps() >= 40, lambda: steps() >= 140, in_comparison, in_comparison]
    outages = 0
    for moment in moments:
        while not moment() and trainer.is_alive():
            time.sleep(0.002)
        if not trainer.is_alive():
            break
        server.kill()
        outages += 1
        time.sleep(away_s)
        after = server.answered
        server.start()
    trainer.join()
    server.kill()
    said = (folder / "output.txt").read_text(encoding="utf-8")
    summary = decode((run / "summary.json").read_bytes()) if (run / "summary.json").exists() else {}
    return Survived(
        exit_code=trainer.exitcode,
        outages=outages,
        invalid_steps=sum(not row["valid"] for row in read_json_lines(run / "transcripts.jsonl")),
        repeated_calls=server.answered - summary.get("llm_calls", 0) - summary.get("eval_llm_calls", 0),
        shown=said.count("server away since"),
        said=said,
    )


def _flags(server: ServerProcess, folder: Path) -> list[str]:
    return [
        *("--ollama-url", server.url, "--target-model", "librarian", "--mutator-model", "softener"),
        *("--encoder", "hash", "--dataset", str(write_dataset(folder / "questions.jsonl", MANY_ROWS))),
        *("--forms", "none", "--ask", "every_step", "--max-episode-steps", "5", "--cache", "eval"),
        *("--embedding-dims", "4", "--operators", "spelling,neutral,filler", "--eval-interval", "0"),
        *("--num-steps", "8", "--num-mini-batch", "2", "--num-env-steps", str(ENV_STEPS), "--save-dir", str(folder)),
        *("--cache-path", str(folder / "replies.sqlite")),
    ]


def main(argv: Sequence[str]) -> int:
    """Print how the run ended; return 1 unless the outages cost nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each outage")
    flags: Any = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        ended = survived(away_s=flags.seconds, folder=Path(folder))
    print(
        f"{ended.outages} outages of {flags.seconds:g} s: exit code {ended.exit_code}, {ended.invalid_steps} invalid "
        f"steps, {ended.repeated_calls} calls repeated, {ended.outages * BATCH_SIZE} were in flight at most"
    )
    is_good = ended.exit_code == ended.invalid_steps == 0 and ended.repeated_calls <= ended.outages * BATCH_SIZE
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
