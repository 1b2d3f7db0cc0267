"""Fit the weights by which readers choose an option to the labeled pairs of the tests except the frozen ones.

    python scripts/fit_choice.py [--left-out]

Only replies without a mark to questions with options count. Writes `reading/choice.npz`; with `--left-out` it writes
nothing and prints for each author how many of all rows are graded as labeled by weights fitted to the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.sparse import csr_matrix

from query_mutator.reading import Gold, choice, kind_of_gold
from query_mutator.reading import gold as golds
from query_mutator.reading.choice import BUCKETS, WEIGHTS, candidates
from query_mutator.reading.marks import marked
from query_mutator.reading.reply import body, read
from query_mutator.reading.text import clean, hashed, spelled

ROWS = Path(__file__).parent.parent / "tests" / "unit" / "reading" / "replies"
AUTHOR = 300  # rows of an author in authors_pairs.jsonl
PENALTY = 0.05  # of squared weights, by the authors that were left out
LEVELS = 127  # of a weight in a byte


class Example(NamedTuple):
    """A labeled reply: its candidates, which of them are accepted answers, and whether the reply gives one."""

    found: list[list[int]]  # the buckets of each
    is_good: list[bool]
    is_right: bool


def example(row: dict[str, Any]) -> Example | None:
    """Return a row as an example, None where no option is chosen without a mark."""
    question, text = spelled(row["question"]), clean(row["reply"])
    accepted = [gold for gold in row["accept"] if kind_of_gold(gold, row["question"]) == "letter"]
    if not accepted or marked(text, question):
        return None
    found = candidates(body(text), question)
    good = [letter is not None and any(_is_gold(letter, gold, question) for gold in accepted) for letter, _ in found]
    return Example([hashed(cues, BUCKETS) for _, cues in found], good, row["right"])


def _is_gold(letter: str, gold: str, question: str) -> bool:
    return Gold((gold,), question).matches(f"\\boxed{{{letter}}}")


def fitted(examples: Sequence[Example]) -> np.ndarray:
    """Return the weights [BUCKETS] of the likeliest labels; a right reply without an accepted candidate is left out."""
    examples = [one for one in examples if not one.is_right or any(one.is_good)]
    rows = [at for one in examples for at in one.found]
    values = np.concatenate([np.full(len(row), len(row) ** -0.5) for row in rows])
    ends = np.cumsum([0, *map(len, rows)])
    inputs = csr_matrix((values, np.concatenate(rows), ends), shape=(len(rows), BUCKETS))
    inputs.sum_duplicates()
    starts = np.cumsum([0, *(len(one.found) for one in examples)])[:-1]
    owner = np.repeat(np.arange(len(examples)), [len(one.found) for one in examples])
    agrees = np.array([good == one.is_right for one in examples for good in one.is_good])
    transposed = inputs.T.tocsr()

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        scores = inputs @ weights
        raised = np.exp(scores - np.maximum.reduceat(scores, starts)[owner])
        whole, part = np.add.reduceat(raised, starts), np.add.reduceat(raised * agrees, starts) + 1e-12
        gradient = transposed @ (raised / whole[owner] - raised * agrees / part[owner]) + PENALTY * weights
        return float(np.log(whole / part).sum() + PENALTY * (weights @ weights) / 2), gradient

    return minimize(loss, np.zeros(BUCKETS), jac=True, method="L-BFGS-B", options={"maxiter": 300}).x


def rounded(weights: np.ndarray) -> tuple[np.ndarray, np.float64]:
    """Return weights in bytes and their scale."""
    scale = np.float64(np.abs(weights).max() / LEVELS)
    return np.rint(weights / scale).astype(np.int8), scale


def as_labeled(rows: Sequence[dict[str, Any]], weights: np.ndarray) -> int:
    """Return how many rows are graded as labeled by these weights."""
    stored, scale = rounded(weights)
    found = (stored * float(scale)).tolist()
    choice.stored = lambda _: (found, 0.0)  # type: ignore[assignment]
    read.cache_clear()
    golds._says.cache_clear()
    return sum(Gold(tuple(row["accept"]), row["question"]).matches(row["reply"]) == row["right"] for row in rows)


def main(argv: Sequence[str]) -> None:
    """Write the weights, or print how well authors that were left out are read."""
    files = {path.stem: path for path in sorted(ROWS.glob("*_pairs.jsonl")) if "frozen" not in path.stem}
    authors: dict[str, list[dict[str, Any]]] = {}
    for stem, path in files.items():
        for at, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            name = f"{stem} {at // AUTHOR}" if stem.startswith("authors") else stem
            authors.setdefault(name, []).append(json.loads(line))
    examples = {name: [one for one in map(example, rows) if one is not None] for name, rows in authors.items()}
    for name, rows in authors.items() if "--left-out" in argv else ():
        weights = fitted([one for other, found in examples.items() if other != name for one in found])
        print(f"{name}: {as_labeled(rows, weights)} of {len(rows)} left out", flush=True)
    if "--left-out" not in argv:
        everything = [one for found in examples.values() for one in found]
        stored, scale = rounded(fitted(everything))
        np.savez_compressed(WEIGHTS, weights=stored, scale=scale, intercept=np.float64(0))
        print(f"{len(everything)} rows; {WEIGHTS.name} {WEIGHTS.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
