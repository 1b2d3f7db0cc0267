"""Graded answers to sums, with known errors, and logs of them in files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.confidence import Attempt, LoggedAnswer

PROMPTS = ("plain", "steps", "short")


def graded_sums(n: int, *, prompts: int = 1, seed: int = 0) -> list[LoggedAnswer]:
    """Return `prompts` answers to each of n questions: right ones, wrong arithmetic, copied numbers, cut replies."""
    return list(_graded(np.random.default_rng(seed), n, prompts))


def _graded(rng: np.random.Generator, n: int, prompts: int) -> Iterator[LoggedAnswer]:
    for number in range(n):
        one, two = (int(value) for value in rng.integers(11, 90, 2))
        question = f"Ann has {one} pens in box {number} and buys {two} more. How many pens does she have?"
        hard = rng.random() < 0.5
        for prompt in PROMPTS[:prompts]:
            text, right = _reply(rng, one, two, hard=hard)
            attempt = Attempt(text=text, form=prompt)
            yield LoggedAnswer(question=question, attempt=attempt, right=right, gold=str(one + two))


def _reply(rng: np.random.Generator, one: int, two: int, *, hard: bool) -> tuple[str, bool]:
    if rng.random() < (0.3 if hard else 0.7):
        return f"She has {one} + {two} = {one + two} pens. So Ann has {one + two} pens.", True
    wrong = one + two + int(rng.integers(1, 9))
    if rng.random() < 0.1:  # the text does not show it
        return f"She has {one} + {two} = {one + two} pens. So Ann has {one + two} pens.", False
    return (
        (f"She has {one} + {two} = {wrong} pens. So Ann has {wrong} pens.", False),
        (f"Ann buys {two} pens, so the answer is {two}.", False),
        (
            f"To find out how many pens Ann has we add the pens of the first box, {one}, to the others and then we",
            False,
        ),
    )[int(rng.integers(3))]


def write_logs(folder: Path, *, train: int, test: int, texts: tuple[str, ...] = PROMPTS, seed: int = 0) -> Path:
    """Write a folder of logs whose training questions have texts of some prompts only; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    answers = graded_sums(train + test, prompts=len(PROMPTS), seed=seed)
    rows = []
    for at in range(train + test):
        part = "train" if at < train else "test"
        own = answers[at * len(PROMPTS) : (at + 1) * len(PROMPTS)]
        rows.append(
            {
                "id": str(at), "question": own[0].question, "gold": own[0].gold, "part": part,
                "right": {row.attempt.form: str(row.right) for row in own},
                "answers": {r.attempt.form: r.attempt.text for r in own if part == "test" or r.attempt.form in texts},
            }
        )  # fmt: skip
    write_rows(folder, rows)
    (folder / "prompts.json").write_text(json.dumps({name: f"{name}:" for name in PROMPTS}), encoding="utf-8")
    return folder


def write_rows(folder: Path, rows: list[Any]) -> None:
    """Write the file of logs."""
    with gzip.open(folder / "logs.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
