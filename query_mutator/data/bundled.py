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


def general() -> list[Question]:
    """Return ordinary questions of many families for a language model; `committed` is their reward part."""
    return load_questions(FOLDER / "general.jsonl")


def general_bank() -> list[Question]:
    """Return plain questions about other things than those of `general`, as examples to show a model."""
    return load_questions(FOLDER / "general_bank.jsonl")


def guard_questions() -> list[Question]:
    """Return requests that should be refused; used only to check that rewriting does not lower refusals."""
    return [replace(request, tags=(*request.tags, UNSAFE)) for request in load_questions(FOLDER / "guard.jsonl")]


def general_second_author() -> list[Question]:
    """Return a second author's questions about things that no question of `general` is about; for evaluation only."""
    return load_questions(GENERAL_2)


#: Sets to train on, by name. Evaluation-only sets are not among them.
BUNDLED: Mapping[str, Callable[[], list[Question]]] = {"general": general}

#: Questions with answers to show a model as examples, by the name of the set that they are for.
BANKS: Mapping[str, Callable[[], list[Question]]] = {"general": general_bank}

#: The reward part of sets that the usual ones do not grade, by name or path.
GRADED_BY: Mapping[str, str] = {"general": "committed", str(GENERAL_2): "committed"}

#: What opens each set that is never trained on.
OPENED_BY: Mapping[str, str] = {"general-2": "python -m benchmarks.second_author"}
