"""The questions of a run: a bundled set, a file, or a set of the Hugging Face hub, and their split."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from query_mutator.data import (
    BANKS,
    BUNDLED,
    QuestionSet,
    Split,
    guard_questions,
    hub,
    load_question_set,
    split_questions,
    validation_split,
)
from query_mutator.data.bundled import GENERAL_2, OPENED_BY
from query_mutator.errors import DatasetError, UsageError
from query_mutator.settings.episode import TaskSettings
from query_mutator.types import Question

__all__ = ["NO_DATASET", "example_bank", "guard_requests", "read_dataset", "split_dataset"]

NO_DATASET = "none"  # of a plan that was learned from a log


def read_dataset(settings: TaskSettings, *, for_training: bool = True) -> QuestionSet:
    """Return the questions of `settings.dataset`, the name of a bundled set or a file.

    Bundled sets come with the bundled requests that should be refused.
    """
    dataset = settings.dataset
    if dataset in BUNDLED and not os.path.exists(dataset):
        for name in ("question_column", "answer_column"):
            if getattr(settings, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is for a file; {dataset} has its own columns")
        return QuestionSet(questions=BUNDLED[dataset](), guard=tuple(guard_questions()))
    _check_not_held_out(dataset, for_training=for_training)
    paths, source = ([Path(dataset)], {}) if not dataset.startswith(hub.PREFIX) else hub.fetch(dataset)
    if not source and not os.path.splitext(dataset)[1] and not os.path.exists(dataset):
        sets = ", ".join(BUNDLED)
        raise DatasetError(
            f"{dataset}: no such file; give a .jsonl, .json, .csv or .parquet file, hf:NAME, or a bundled set: {sets}"
        )
    found = load_question_set(
        paths, name=dataset, question_column=settings.question_column, answer_column=settings.answer_column
    )
    if not found.questions:
        raise DatasetError(
            f"{dataset}: all {len(found.guard)} rows are marked unsafe; they serve the guard metric only, next to "
            "other questions"
        )
    return replace(found, source=source)


def _check_not_held_out(dataset: str, *, for_training: bool) -> None:
    """Raise for the name of a set that something else opens, or for training on the file of one."""
    path = Path(dataset)
    name = "general-2" if for_training and os.path.realpath(path) == os.path.realpath(GENERAL_2) else dataset
    if name in OPENED_BY and not (name == dataset and path.exists()):
        raise DatasetError(
            f"{dataset}: only for evaluation, by `{OPENED_BY[name]}`; to train or choose use {', '.join(BUNDLED)}"
        )


def split_dataset(settings: TaskSettings) -> Split:
    """Return the hash-stable split of the dataset, with the validation fold of the settings taken from `train`."""
    found = read_dataset(settings)
    split = replace(split_questions(found.questions), guard=found.guard, source=found.source)
    if settings.validation_fold == "none":
        return split
    fold = validation_split(split.train, settings.validation_fold)
    return replace(split, train=fold.train, validation=fold.validation)


def example_bank(dataset: str) -> list[Question] | None:
    """Return the questions with answers that a bundled set has for examples, None for a set without them."""
    return BANKS[dataset]() if dataset in BANKS and not Path(dataset).exists() else None


def guard_requests(own: Sequence[Question], *, with_bundled: bool) -> tuple[Question, ...]:
    """Return the requests of a set that should be refused, after the bundled ones where these are wanted too."""
    known = {question.id for question in own}
    bundled = guard_questions() if with_bundled else ()
    return (*(question for question in bundled if question.id not in known), *own)
