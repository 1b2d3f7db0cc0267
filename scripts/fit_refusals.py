"""Fit the weights of the refusal classifier to all labeled replies of the tests except the frozen ones.

Replies of the bundled recording without a word that refusals use serve as ordinary answers.

    python scripts/fit_refusals.py [ROWS.jsonl ...]

Prints the F1 of refusals on each file by weights fitted to the other files, then writes `reading/refusals.npz`. With
files, whose rows have `reply` and `refusal`, it prints the F1 of the stored weights on them and writes nothing.
"""

from __future__ import annotations

import json
import lzma
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, vstack
from sklearn.linear_model import LogisticRegression

from query_mutator.reading import is_refusal
from query_mutator.reading.refusals import BUCKETS, WEIGHTS, ngrams

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "tests" / "unit" / "reading" / "replies"
RECORDING = ROOT / "query_mutator" / "data" / "recorded" / "smollm2-135m.jsonl.xz"
RECORDED, WEIGHT = 1000, 0.5  # replies of the recording, and what one counts
MAY_REFUSE = re.compile(r"sorry|can't|cannot|unable|\bAI\b|assist", re.IGNORECASE)
C = 30.0  # inverse penalty, by the F1 on files that were left out
LEVELS = 127  # of a weight in a byte


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def inputs(replies: Sequence[str]) -> csr_matrix:
    """Return the inputs [n, 2 BUCKETS] of replies: the square roots of equal shares of their n-grams."""
    rows = []
    for reply in replies:
        words, letters = ngrams(reply)
        at = np.array([*words, *(BUCKETS + letter for letter in letters)])
        values = np.concatenate([np.full(len(part), max(1, len(part)) ** -0.5) for part in (words, letters)])
        rows.append(csr_matrix((values, (np.zeros(len(at), dtype=int), at)), shape=(1, 2 * BUCKETS)))
    return vstack(rows).tocsr()


def recorded() -> list[str]:
    """Return a random sample of recorded replies that are not refusals."""
    with lzma.open(RECORDING, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.startswith("[")]
    texts = sorted({row[1] for row in rows if isinstance(row[1], str) and not MAY_REFUSE.search(row[1])})
    return random.Random(0).sample(texts, RECORDED)


def fitted(columns: csr_matrix, labels: np.ndarray, ordinary: csr_matrix) -> LogisticRegression:
    """Return the regression of labeled replies and of ordinary answers."""
    weights = np.append(np.ones(len(labels)), np.full(ordinary.shape[0], WEIGHT))
    is_refusal = np.append(labels, np.zeros(ordinary.shape[0], dtype=bool))
    return LogisticRegression(C=C, max_iter=1000).fit(vstack([columns, ordinary]), is_refusal, sample_weight=weights)


def f1(found: Sequence[bool], labels: Sequence[bool]) -> float:
    """Return the F1 of refusals."""
    both = sum(a and b for a, b in zip(found, labels, strict=True))
    return 2 * both / max(1, sum(found) + sum(labels))


def main(argv: Sequence[str]) -> None:
    """Print F1 by file and write the weights."""
    if argv:
        for path in map(Path, argv):
            rows = rows_of(path)
            print(
                f"{path.name}: {f1([is_refusal(row['reply']) for row in rows], [row['refusal'] for row in rows]):.3f}"
            )
        return
    files = {path: rows_of(path) for path in sorted(ROWS.glob("*_refusals.jsonl")) if "frozen" not in path.name}
    sets = [str(row.get("author", path.stem)) for path, rows in files.items() for row in rows]
    names, labels = np.array(sets), np.array([row["refusal"] for rows in files.values() for row in rows])
    columns = inputs([row["reply"] for rows in files.values() for row in rows])
    ordinary = inputs(recorded())
    for name in np.unique(names).tolist():
        rest = names != name
        found = fitted(columns[rest], labels[rest], ordinary).predict(columns[~rest])
        errors = int((found != labels[~rest]).sum())
        print(f"{name}: {len(found)} rows, F1 {f1(found, labels[~rest]):.3f}, {errors} errors, left out")
    model = fitted(columns, labels, ordinary)
    weights = model.coef_.reshape(2, BUCKETS)
    scale = float(np.abs(weights).max()) / LEVELS
    np.savez_compressed(
        WEIGHTS,
        weights=np.rint(weights / scale).astype(np.int8),
        scale=np.float64(scale),
        intercept=np.float64(model.intercept_[0]),
    )
    print(f"{len(labels)} rows; {WEIGHTS.name} {WEIGHTS.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
