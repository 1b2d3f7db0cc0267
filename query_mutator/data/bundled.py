"""The question sets that come with the product; `--dataset` takes the names in BUNDLED."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path

from query_mutator.data.loaders import load_questions
from query_mutator.types import UNSAFE, Question

FOLDER = Path(str(resources.files("query_mutator"))) / "data" / "questions"
GENERAL_2 = FOLDER / "general_2.jsonl"


def python_docs() -> list[Question]:
    """Return the ordinary questions about Python's standard library, in the voices people type."""
    return load_questions(FOLDER / "python_docs.jsonl")


def reference_tables() -> list[Question]:
    """Return ordinary questions about the tables that `reference-assistant` knows: characters, statuses, errors, ..."""
    return load_questions(FOLDER / "reference_tables.jsonl")


def general() -> list[Question]:
    """Return ordinary questions of many families for a language model; `committed` is their reward part."""
    return load_questions(FOLDER / "general.jsonl")


def general_bank() -> list[Question]:
    """Return plain questions about other things than those of `general`, as examples to show a model."""
    return load_questions(FOLDER / "general_bank.jsonl")


def guard_questions() -> list[Question]:
    """Return requests that should be refused; used only to check that rewriting does not lower refusals."""
    return [replace(request, tags=(*request.tags, UNSAFE)) for request in load_questions(FOLDER / "guard.jsonl")]


def second_hand_questions() -> list[Question]:
    """Return a second author's questions about objects that no question of `python_docs` is about.

    Another author wrote them without seeing the rewrite rules, the phrasebook or any method's answers. Use them for
    evaluation only: never train on them, choose a model or plan with them, or edit them after a measurement.
    """
    return load_questions(FOLDER / "python_docs_2.jsonl")


def general_second_author() -> list[Question]:
    """Return a second author's questions about things that no question of `general` is about; for evaluation only."""
    return load_questions(GENERAL_2)


#: Sets to train on, by name. Evaluation-only sets are not among them.
BUNDLED: Mapping[str, Callable[[], list[Question]]] = {
    "python_docs": python_docs,
    "reference_tables": reference_tables,
    "general": general,
}

#: Questions with answers to show a model as examples, by the name of the set that they are for.
BANKS: Mapping[str, Callable[[], list[Question]]] = {"general": general_bank}

#: Sets that are only asked, by name.
EVALUATION_ONLY: Mapping[str, Callable[[], list[Question]]] = {"second_hand": second_hand_questions}

#: The reward part of sets that the usual ones do not grade, by name or path.
GRADED_BY: Mapping[str, str] = {"general": "committed", str(GENERAL_2): "committed"}

#: What opens each set that is never trained on; `general-2` is opened where the reading is logged, not by `qm eval`.
OPENED_BY: Mapping[str, str] = {
    "second_hand": "qm eval --dataset second_hand",
    "general-2": "python -m benchmarks.second_author",
}
