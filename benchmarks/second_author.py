"""Ask the second author's general questions of trained policies; only this command opens them, and logs each reading.

    python -m benchmarks.second_author RUN_OR_CHECKPOINT... --eval-flags "--gguf model.gguf --eval-calls 2000"

Every reading appends a row to benchmarks/second_author_readings.jsonl before the first question is asked: date, commit,
sha256 of the questions, the policies, the flags. Commit that file with the result. Nothing is tuned on these questions.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from query_mutator.cli.console import exit_code
from query_mutator.commands.main import main as qm
from query_mutator.data import GENERAL_2
from query_mutator.files import file_sha256
from query_mutator.files.run_dir import commit
from query_mutator.session.policy_file import load_saved

LOG = Path(__file__).resolve().with_name("second_author_readings.jsonl")


def main(argv: Sequence[str]) -> int:
    """Log the reading, then evaluate each policy; return the highest exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoints", nargs="+", metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("--eval-flags", default="", help="more flags of `qm eval`, in one text")
    parser.add_argument("--log", type=Path, default=LOG, help="JSON-lines file to append the reading to")
    arguments = parser.parse_args(argv)
    flags = shlex.split(arguments.eval_flags)
    for checkpoint in arguments.checkpoints:
        load_saved(checkpoint)
    log_reading(arguments.log, arguments.checkpoints, flags)
    commands = [
        ["eval", "--checkpoint", checkpoint, "--dataset", str(GENERAL_2), *flags]
        for checkpoint in arguments.checkpoints
    ]
    return max(exit_code(qm, command, prog="qm") for command in commands)


def log_reading(path: Path, checkpoints: Sequence[str], flags: Sequence[str]) -> None:
    """Append one reading to the log; files of the repository are named by their place in it."""
    root = f"{Path(__file__).resolve().parents[1]}/"
    row = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "dataset_sha256": file_sha256(GENERAL_2),
        "checkpoints": list(checkpoints),
        "flags": [flag.removeprefix(root) for flag in flags],
    }
    with path.open("a", encoding="utf-8") as log:
        log.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:], prog="second_author"))
