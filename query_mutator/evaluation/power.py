"""What held-out questions can show, before anything is spent: one line for `--dry-run` and `qm plan`.

How often methods differ, and how much outcomes about one target correlate, is taken from the newest evaluation of the
same questions and models in `save_dir`, and assumed where there is none. Of its outcomes nothing else is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Protocol

import numpy as np

from query_mutator.data.split import target_key
from query_mutator.errors import UsageError
from query_mutator.evaluation.verdict import MIN_QUESTIONS
from query_mutator.files.run_dir import earlier_runs
from query_mutator.runs.pairs import outcome_columns, read_held_out
from query_mutator.stats.power import (
    CORRELATION,
    DISCORDANT,
    cluster_correlation,
    design_effect,
    detectable_difference,
    questions_needed,
)
from query_mutator.types import Question

__all__ = ["power_in_words"]

AIM = 0.02  # a difference that is worth knowing
#: Flags that decide how often two methods differ.
DECISIVE = (
    "dataset", "reward", "backend", "ollama_url", "openai_url", "gguf", "recording", "target_model", "target_max_tokens"
)  # fmt: skip


class Settings(Protocol):
    """The flags of a command, `DECISIVE` among them."""

    @property
    def save_dir(self) -> str:
        """Return the folder of runs."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The share of questions on which methods differ, the correlation within targets, and where both come from."""

    discordant: float = DISCORDANT
    correlation: float = CORRELATION
    source: str = "assumed"


def power_in_words(questions: Sequence[Question], settings: Settings) -> str:
    """Return the smallest difference that a comparison on held-out questions shows, and how many 2 points take."""
    spread = _measured(settings) or Spread()
    targets = [target_key(question) for question in questions]
    design = design_effect(targets, correlation=spread.correlation)
    least = detectable_difference(len(questions), discordant=spread.discordant, design=design)
    one, n = len(questions) == 1, len(questions)
    few = f"{'is' if one else 'are'} too few to show a difference"
    shown = f"show differences of {100 * least:.1f} points or more" if least <= 1 else few
    needed = questions_needed(AIM, discordant=max(AIM, spread.discordant), design=design)
    return (
        f"{n} held-out question{'' if one else 's'} {shown}, {100 * AIM:g} points take {needed:,} "
        f"(paired, 5 % two-sided, 80 % power; methods that differ on {spread.discordant:.0%} of the questions, "
        f"correlation {spread.correlation:.2g} within a target: {spread.source})"
    )


def _measured(settings: Settings) -> Spread | None:
    """Return the medians over pairs of methods of the newest evaluation with these settings."""
    for run in earlier_runs(settings.save_dir, {name: getattr(settings, name) for name in DECISIVE}):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, UsageError):
            if found := _spread(run):
                return found
    return None


def _spread(run: Path) -> Spread | None:
    shares, correlations = [], []
    for ours, theirs in combinations(read_held_out(run).values(), 2):
        one, other, targets = outcome_columns(ours, theirs)
        differences = np.array(one) - np.array(other)
        scored = ~np.isnan(differences)
        if scored.sum() >= MIN_QUESTIONS and np.any(differences[scored]):
            shares.append(np.mean(differences[scored] != 0))
            correlations.append(cluster_correlation(differences[scored], np.array(targets)[scored].tolist()))
    known = [value for value in correlations if not np.isnan(value)]
    correlation = float(np.median(known)) if known else CORRELATION
    return Spread(float(np.median(shares)), correlation, f"as in {run}") if shares else None
