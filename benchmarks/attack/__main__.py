"""Run random attacks: `python -m benchmarks.attack --cases 10000 --seed 1`, or one again: `--case servers:123`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.attack.campaign import AREAS, run_campaign, run_case
from benchmarks.attack.harness import VERDICTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="in all, equally many of each area")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=AREAS)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--journal", type=Path, default=Path("build/attack.jsonl"), help="a run resumes from it")
    parser.add_argument("--case", metavar="AREA:INDEX", help="run one case in this process and print its outcome")
    flags = parser.parse_args()
    if flags.case:
        area, index = flags.case.split(":")
        outcome = run_case(area, int(index), flags.seed)
        print(f"{outcome.verdict}: {outcome.case}\n{outcome.detail}")
        return int(outcome.verdict != "ok")
    begun = time.monotonic()
    counts = run_campaign(
        flags.areas, cases=flags.cases, seed=flags.seed, jobs=flags.jobs, journal=flags.journal, report=print
    )
    print(f"{'area':12}" + "".join(f"{verdict:>15}" for verdict in VERDICTS))
    for area in flags.areas:
        print(f"{area:12}" + "".join(f"{counts[area, verdict]:15}" for verdict in VERDICTS))
    failed = sum(count for (_, verdict), count in counts.items() if verdict != "ok")
    print(f"{sum(counts.values())} cases, {failed} failed, {time.monotonic() - begun:.0f} s, {flags.journal}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
