"""What acting needs besides the policy: training questions to merge in, known words, and what was loaded in training.

Q training questions, D dimensions of an embedding
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.data.split import Split, target_key
from query_mutator.encoder import Encoder, sha256_of
from query_mutator.env.task import Task
from query_mutator.errors import CheckpointError
from query_mutator.operators import LocalOperator, Operator, PromptOperator
from query_mutator.session.models import OpenModels
from query_mutator.types import FloatArray, Question

__all__ = ["Background", "background_of", "check_encoder", "text_digest", "warn_of_operators", "without_gold"]

logger = logging.getLogger(__name__)


MAX_NEIGHBORS = 10_000  # training questions that are kept, a fixed sample of more: 15 MB of vectors
PROBE = "What does this encoder make of a plain sentence?"
_SAME_ENCODER = 1e-3  # largest difference of a row between two machines
_DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """The training questions with their vectors [Q, D], and digests that tell whether acting uses the same parts."""

    train: tuple[Question, ...] = ()  # without gold in an exported file
    train_vectors: FloatArray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    vocabulary: frozenset[str] = frozenset()  # words of the subject
    operators: Mapping[str, str] = field(default_factory=dict)  # name -> digest
    encoder: str = ""  # its fingerprint, the sha256 of weights and tokenizer
    probe: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))  # [D] its row for PROBE
    trained_texts: frozenset[str] = frozenset()  # digests of the texts of training and validation
    trained_targets: frozenset[str] = frozenset()
    dataset: str | None = None  # absolute path of the file of the questions


def background_of(models: OpenModels, task: Task, split: Split, *, dataset: str) -> Background:
    """Return the background of a run: its questions, its models' vocabulary, and digests of operators and encoder."""
    seen = (*split.train, *split.validation)
    chosen: Sequence[int] = range(len(task.train_questions))
    if len(chosen) > MAX_NEIGHBORS:
        chosen = sorted(np.random.default_rng(0).choice(len(chosen), MAX_NEIGHBORS, replace=False).tolist())
    return Background(
        train=tuple(task.train_questions[index] for index in chosen),
        train_vectors=task.train_vectors[list(chosen)],
        vocabulary=models.vocabulary,
        operators={operator.name: operator_digest(operator) for operator in task.operators},
        encoder=models.encoder.fingerprint,
        probe=models.encoder.encode([PROBE])[0],
        trained_texts=frozenset(text_digest(question.text) for question in seen),
        trained_targets=frozenset(text_digest(target_key(question)) for question in seen),
        dataset=str(Path(dataset).resolve()) if os.path.isfile(dataset) else None,
    )


def without_gold(background: Background) -> Background:
    """Return the background without reference answers and the dataset's path, for a file to give away."""
    bare = tuple(Question(id=question.id, text=question.text) for question in background.train)
    return replace(background, train=bare, dataset=None)


def text_digest(text: str) -> str:
    """Return a short digest of a text."""
    return sha256_of(text)[:_DIGEST_CHARS]


def operator_digest(operator: Operator) -> str:
    """Return a digest of an operator's prompt or code, "" where its code cannot be read."""
    if isinstance(operator, PromptOperator):
        return text_digest(operator.template)
    made_of: Any = operator.function if isinstance(operator, LocalOperator) else type(operator)
    try:
        return text_digest(inspect.getsource(made_of))
    except (OSError, TypeError):
        return ""


def warn_of_operators(background: Background, operators: Sequence[Operator]) -> None:
    """Log a warning for each operator whose prompt or code differs from the one in training."""
    for operator in operators:
        if background.operators.get(operator.name, "") not in ("", operator_digest(operator)):
            logger.warning("operator %s has changed since the training; results may differ", operator.name)


def check_encoder(background: Background, encoder: Encoder, *, path: object) -> None:
    """Raise a CheckpointError unless the encoder gives the rows of the training's encoder."""
    row = background.probe if encoder.fingerprint == background.encoder else encoder.encode([PROBE])[0]
    if background.probe.shape != (encoder.dim,) or float(np.abs(row - background.probe).max()) > _SAME_ENCODER:
        raise CheckpointError(
            f"{path}: its policy was trained with other weights of the encoder (sha256 {background.encoder[:12]}) than "
            f"those found here ({encoder.source}, {encoder.fingerprint[:12]}); use the same ones"
        )
