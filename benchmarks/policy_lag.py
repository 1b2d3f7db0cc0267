"""What `--max-policy-lag` costs in return at equal environment steps, and what it saves in time.

    python benchmarks/policy_lag.py                        lag 0 and 1, five seeds, 4,096 steps each
    python benchmarks/policy_lag.py --lags 0,1,2 --seeds 3

Whole runs against the embedded assistant with hashed embeddings, in a process each. Calls take 10 ms on average,
log-normally with sigma 1, so that environments drift apart as they do with a real model. The return is the mean over
the last quarter of the updates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Print a line of JSON for every run, then a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", default="0,1", help="with commas")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--num-env-steps", type=int, default=4096)
    arguments = parser.parse_args()
    lags = [int(word) for word in arguments.lags.split(",")]
    rows: dict[int, list[dict[str, float]]] = {lag: [] for lag in lags}
    for seed in range(1, arguments.seeds + 1):
        for lag in lags:
            rows[lag].append(run(lag=lag, seed=seed, num_env_steps=arguments.num_env_steps))
            print(json.dumps({"lag": lag, "seed": seed, **rows[lag][-1]}), flush=True)
    print(f"{'lag':>4}{'runs':>6}{'return':>9}{'std':>8}{'success':>9}{'policy lag':>12}{'seconds':>9}")
    for lag, found in rows.items():
        means = {key: statistics.mean(row[key] for row in found) for key in found[0]}
        spread = statistics.stdev(row["return"] for row in found) if len(found) > 1 else 0.0
        print(
            f"{lag:>4}{len(found):>6}{means['return']:>9.4f}{spread:>8.4f}{means['success']:>9.3f}"
            f"{means['policy_lag']:>12.2f}{means['wall_s']:>9.1f}"
        )


def run(*, lag: int, seed: int, num_env_steps: int) -> dict[str, float]:
    """Return what one training run came to."""
    with tempfile.TemporaryDirectory() as folder:
        flags: list[Any] = ["--backend", "embedded", "--encoder", "hash", "--latency-ms", 10, "--latency-sigma", 1]
        flags += ["--num-env-steps", num_env_steps, "--num-steps", 16, "--max-policy-lag", lag, "--seed", seed]
        flags += ["--no-evaluate", "--eval-interval", 0, "--cache", "off", "--save-dir", folder]
        command = [sys.executable, str(ROOT / "train_query_mutator.py"), *map(str, flags)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"the run failed with {done.returncode}:\n{done.stderr}")
        text = (Path(folder) / "latest" / "metrics.jsonl").read_text(encoding="utf-8")
        summary = json.loads((Path(folder) / "latest" / "summary.json").read_text(encoding="utf-8"))
    rows = [row for line in text.splitlines() if "charts/episodic_return" in (row := json.loads(line))]
    last = rows[-max(1, len(rows) // 4) :]
    return {
        "return": round(statistics.mean(row["charts/episodic_return"] for row in last), 4),
        "success": round(statistics.mean(row["charts/success"] for row in last), 4),
        "policy_lag": round(statistics.mean(row["losses/policy_lag"] for row in last), 3),
        "wall_s": summary["wall_s"],
    }


if __name__ == "__main__":
    main()
