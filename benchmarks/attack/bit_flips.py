"""Flip single bits of every file of a run, read it, sometimes resume it: `python -m benchmarks.attack.bit_flips`.

Prints for each file how many flips were found, how many were harmless (the same result), and how many were neither.
"""

from __future__ import annotations

import argparse
import collections
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.attack.run_folder import wrong_reading, wrong_resumption
from benchmarks.attack.runs import KINDS, files_of, read, readers_of, run_of, undamaged

__all__ = ["flips_of"]

#: Readers that read a file, by its name; those of any other file are the checkpoint's own and these.
_READ_BY = {
    "metrics.jsonl": ("metrics", "analysis", "resume"),
    "transcripts.jsonl": ("transcripts", "resume"),
    "config.json": ("config", "reward", "analysis", "resume"),
    "summary.json": ("summary",),
    "evaluation.jsonl": ("evaluation",),
    "policy.qm": ("own policy",),
}


def flips_of(kind: str, *, flips: int, resumes: int, seed: int) -> Iterator[tuple[str, collections.Counter[str]]]:
    """Yield each file of a run with the number of flips "found", "harmless" and "wrong" in it."""
    whole = run_of(kind)
    for name in [str(path.relative_to(whole)) for path in files_of(whole)]:
        rng = random.Random(f"{seed}:{kind}:{name}")
        counts: collections.Counter[str] = collections.Counter()
        with tempfile.TemporaryDirectory() as folder:
            run = Path(shutil.copytree(whole, Path(folder) / "run"))
            for at, bit in _places(rng, run / name, flips):
                content = _flip(run / name, at, bit)
                counts[_read(kind, run, name, at, bit)] += 1
                (run / name).write_bytes(content)
        for at, bit in _places(rng, whole / name, resumes):
            with tempfile.TemporaryDirectory() as folder:
                run = Path(shutil.copytree(whole, Path(folder) / "run"))
                _flip(run / name, at, bit)
                counts["resumed"] += 1
                if wrong := wrong_resumption(kind, run):
                    counts["wrong"] += 1
                    print(f"{kind} {name}: bit {bit} of byte {at}, resumed: {wrong}", file=sys.stderr)
        yield name, counts


def _places(rng: random.Random, path: Path, count: int) -> list[tuple[int, int]]:
    size = path.stat().st_size
    return [(rng.randrange(size), rng.randrange(8)) for _ in range(count)]


def _flip(path: Path, at: int, bit: int) -> bytes:
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[at] ^= 1 << bit
    path.write_bytes(damaged)
    return content


def _read(kind: str, run: Path, name: str, at: int, bit: int) -> str:
    """Return "found", "harmless" or "wrong", the worst of all readers of the file."""
    all_readers, found = readers_of(run_of(kind)), False
    own = ("journal",) if name.startswith("journal/") else (Path(name).name, "policy", "resume")
    for reader in _READ_BY.get(name, own):
        now = read(run, all_readers[reader])
        found |= bool(now.error or now.logged)
        if wrong := wrong_reading(now, undamaged(kind)[reader], run):
            print(f"{kind} {name}: bit {bit} of byte {at}, {reader}: {wrong}", file=sys.stderr)
            return "wrong"
    return "found" if found else "harmless"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000, help="of each file")
    parser.add_argument("--resumes", type=int, default=20, help="of each file, to the run's end")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["ppo", "ppo killed", "iqn", "direct"])
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args(argv)
    print(f"{'run':11}{'file':24}{'found':>8}{'harmless':>10}{'resumed':>9}{'wrong':>7}")
    wrong = 0
    for kind in flags.kinds:
        for name, counts in flips_of(kind, flips=flags.flips, resumes=flags.resumes, seed=flags.seed):
            cells = f"{counts['found']:8}{counts['harmless']:10}{counts['resumed']:9}{counts['wrong']:7}"
            print(f"{kind:11}{name:24}{cells}", flush=True)
            wrong += counts["wrong"]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
