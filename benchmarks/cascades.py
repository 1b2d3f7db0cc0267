"""A small model first, and a large one for the questions where that is predicted to gain most: four fixed pairs.

    python -m benchmarks.cascades FOLDER [--pairs NAME ...] [--train-only] [--json FILE]

FOLDER has the sets of logged answers, as benchmarks/logged_arms.py reads them. The gain is fitted on the part "train",
and so is the threshold for each share of questions that the large model answers; the part "test" is read once. Points
of right answers above a cascade that sends as many questions at random, with intervals over questions and refits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.logged_arms import Logged, answer, read_logs
from query_mutator.cli.console import exit_code
from query_mutator.confidence import AnswerKind
from query_mutator.confidence.crossfit import attempt_columns, infer_kind
from query_mutator.confidence.gain import GainModel, gain_inputs
from query_mutator.files import write_json
from query_mutator.stats import crossed_intervals
from query_mutator.types import DoubleArray, IntArray

PAIRS = {
    "Llama-3-8B > Gemma-2-9B": ("gsm8k_models", "llama3_8b", "gemma2_9b"),
    "Qwen2-7B > Haiku": ("gsm8k_models", "qwen2_7b", "haiku3"),
    "Mistral-7B > Mixtral": ("mmlu_pro", "mistral_7b", "mixtral_8x7b"),
    "Mistral-24B > Maverick": ("rgym_easy", "mistral_24b", "llama4_maverick"),
}
SHARES = (0.2, 0.4, 0.6)  # of the questions, that the large model answers too
FOLDS = 5
REFITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The questions of a part: inputs of both replies [n, 2, I] and whether they are right [n, 2]."""

    inputs: DoubleArray
    right: DoubleArray

    @classmethod
    def of(cls, logs: Sequence[Logged], arms: tuple[str, str], kind: AnswerKind | None) -> Part:
        """Return the inputs of logged answers that are read in one way."""
        questions = [log.question for log in logs]
        columns = [attempt_columns(log.question, [log.attempt(arm) for arm in arms], kind=kind) for log in logs]
        each = [gain_inputs(np.stack([rows[place] for rows in columns]), questions) for place in range(2)]
        right = np.array([[log.right[arm] for arm in arms] for log in logs], dtype=np.float64)
        return cls(inputs=np.stack(each, axis=1), right=right)

    def drawn(self, rows: IntArray) -> Part:
        """Return some of the questions."""
        return Part(inputs=self.inputs[rows], right=self.right[rows])

    def leads(self, orders: DoubleArray, thresholds: DoubleArray) -> tuple[DoubleArray, DoubleArray]:
        """Return what each question adds to the lead over chance [n, shares], and the shares that were sent on."""
        sent = orders[:, None] >= thresholds
        shares = sent.mean(axis=0)
        return (sent - shares) * (self.right[:, 1] - self.right[:, 0])[:, None], shares


def main(argv: Sequence[str]) -> int:
    """Print the table of the pairs."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--refits", type=int, default=REFITS, help="bootstrap samples of the training questions")
    parser.add_argument("--train-only", action="store_true", help="score training questions, out of fold")
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args(argv)
    found = {}
    print("| pair | small | large | by | " + " | ".join(f"share {share:g}" for share in SHARES) + " |")
    print("|---|---|---|---|" + "---|" * len(SHARES))
    for name in options.pairs:
        folder, *arms = PAIRS[name]
        found[name] = evaluate(name, options.folder / folder, (arms[0], arms[1]), options)
    if options.json is not None:
        write_json(options.json, found)
    return 0


def evaluate(name: str, folder: Path, arms: tuple[str, str], options: Any) -> dict[str, Any]:
    """Print and return the leads of a pair, by predicted gain and by low P(right) of the small model's answer."""
    logs = [log for log in read_logs(folder)[1] if all(arm in log.prompts() for arm in arms)]
    learned = [log for log in logs if log.part == "train"]
    kind = infer_kind([answer(log, arm) for log in learned for arm in arms])
    train = Part.of(learned, arms, kind)
    test = train if options.train_only else Part.of([log for log in logs if log.part == "test"], arms, kind)
    rng = np.random.default_rng(0)
    folds = rng.permutation(len(learned)) % FOLDS
    refits = 1 if options.train_only else options.refits
    leads: dict[str, list[DoubleArray]] = {"gain": [], "low P(right)": []}
    sent = dict.fromkeys(leads, np.zeros(len(SHARES)))
    for _ in range(refits):
        rows = np.arange(len(folds)) if options.train_only else rng.integers(len(folds), size=len(folds))
        drawn = train.drawn(rows)
        model = GainModel.fit(arms, drawn.inputs, drawn.right, folds[rows])
        known = orders_of(model.fold_models, drawn, folds[rows])
        scored = known if options.train_only else orders_of((model,), test, np.zeros(len(test.right), dtype=np.int64))
        for by, order in scored.items():
            lead, shares = test.leads(order, np.quantile(known[by], 1 - np.array(SHARES)))
            leads[by].append(lead)
            sent[by] = sent[by] + shares / refits
    rates = 100 * test.right.mean(axis=0)
    result: dict[str, Any] = {"n": len(test.right), "small": rates[0], "large": rates[1]}
    for by, values in leads.items():
        intervals = 100 * crossed_intervals(np.stack(values), [str(at) for at in range(len(test.right))])
        cells = [
            [round(float(value), 2) for value in (100 * np.mean(np.stack(values)[:, :, at]), *intervals[at])]
            for at in range(len(SHARES))
        ]
        result[by] = {"leads": cells, "shares": np.round(sent[by], 3).tolist()}
        shown = " | ".join("{:+.1f} [{:+.1f}, {:+.1f}]".format(*cell) for cell in cells)
        print(f"| {name} | {rates[0]:.1f} | {rates[1]:.1f} | {by} | {shown} |", flush=True)
    return result


def orders_of(models: Sequence[GainModel], part: Part, folds: IntArray) -> dict[str, DoubleArray]:
    """Return for each question how much it should be sent on [n], by the model of its fold, in two ways."""
    gain, wrong = np.empty(len(folds)), np.empty(len(folds))
    for at, fold in enumerate(np.unique(folds)):
        inside = folds == fold
        gain[inside] = models[at].gains(models[at].arms[0], part.inputs[inside, 0])[:, 1]
        wrong[inside] = -models[at].scorers[0][0].log_odds(part.inputs[inside, 0])
    return {"gain": gain, "low P(right)": wrong}


if __name__ == "__main__":
    raise SystemExit(exit_code(main, sys.argv[1:], prog="cascades"))
