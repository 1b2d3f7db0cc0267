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
from query_mutator.env.examples import can_be_shown
from query_mutator.env.task import Task
from query_mutator.errors import CheckpointError
from query_mutator.forms import Example, Form, FormContext
from query_mutator.operators import LocalOperator, Operator, PromptOperator
from query_mutator.session.dataset import example_bank
from query_mutator.types import FloatArray, Question

__all__ = ["Background", "background_of", "check_encoder", "text_digest", "warn_of_rewrites", "without_gold"]

logger = logging.getLogger(__name__)


MAX_NEIGHBORS = 10_000  # training questions that are kept, a fixed sample of more: 15 MB of vectors
PROBE = "What does this encoder make of a plain sentence?"
FORM_PROBE, REPLY_PROBE = f"Hello. {PROBE} Thanks!", "One step.\nAnswer: two\nthree"
_SAME_ENCODER = 1e-3  # largest difference of a row between two machines
_DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """The training questions with their vectors [Q, D], and digests that tell whether acting uses the same parts."""

    train: tuple[Question, ...] = ()  # without gold in an exported file
    train_vectors: FloatArray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    operators: Mapping[str, str] = field(default_factory=dict)  # name -> digest; forms too
    encoder: str = ""  # its fingerprint, the sha256 of weights and tokenizer
    probe: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))  # [D] its row for PROBE
    shows_examples: bool = False  # whether forms show training questions with their answers
    has_gold: bool = True  # False in an exported file, even if some answers are there to show
    trained_texts: frozenset[str] = frozenset()  # digests of the texts of training and validation
    trained_targets: frozenset[str] = frozenset()
    dataset: str | None = None  # absolute path of the file of the questions


def background_of(task: Task, split: Split, *, dataset: str) -> Background:
    """Return the background of a run: its questions, and digests of operators and encoder."""
    seen = (*split.train, *split.validation)
    chosen: Sequence[int] = range(len(task.train_questions))
    if len(chosen) > MAX_NEIGHBORS:
        chosen = sorted(np.random.default_rng(0).choice(len(chosen), MAX_NEIGHBORS, replace=False).tolist())
    return Background(
        train=tuple(task.train_questions[index] for index in chosen),
        train_vectors=task.train_vectors[list(chosen)],
        operators=_digests([*task.operators, *task.forms]),
        encoder=task.encoder.fingerprint,
        probe=task.encoder.encode([PROBE])[0],
        shows_examples=task.bank is not None and example_bank(dataset) is None,
        trained_texts=frozenset(text_digest(question.text) for question in seen),
        trained_targets=frozenset(text_digest(target_key(question)) for question in seen),
        dataset=str(Path(dataset).resolve()) if os.path.isfile(dataset) else None,
    )


def _digests(rewrites: Sequence[Operator | Form]) -> dict[str, str]:
    return {one.name: digest_of(one) for one in rewrites}


def without_gold(background: Background) -> Background:
    """Return the background without reference answers and the dataset's path, for a file to give away.

    Of questions that forms show as examples the accepted answer that they show stays.
    """
    bare = tuple(
        Question(id=question.id, text=question.text, accept=question.accept[: _is_shown(background, question)])
        for question in background.train
    )
    return replace(background, train=bare, has_gold=False, dataset=None)


def _is_shown(background: Background, question: Question) -> bool:
    return background.shows_examples and can_be_shown(question)


def text_digest(text: str) -> str:
    """Return a short digest of a text."""
    return sha256_of(text)[:_DIGEST_CHARS]


def digest_of(one: Operator | Form) -> str:
    """Return a digest of an operator's prompt or code ("" for unreadable code), or of what a form makes of a probe."""
    if isinstance(one, Form):
        framed = one.frame(FORM_PROBE, context=FormContext(examples=(Example("Which?", "That."),)))
        return text_digest(f"{framed} {one.read(REPLY_PROBE)}")
    if isinstance(one, PromptOperator):
        return text_digest(one.template)
    made_of: Any = one.function if isinstance(one, LocalOperator) else type(one)
    try:
        return text_digest(inspect.getsource(made_of))
    except (OSError, TypeError):
        return ""


def warn_of_rewrites(background: Background, rewrites: Sequence[Operator | Form]) -> None:
    """Log a warning for each operator or form whose prompt, code or request differs from the one in training."""
    for one in rewrites:
        if background.operators.get(one.name, "") not in ("", digest_of(one)):
            what = "form" if isinstance(one, Form) else "operator"
            logger.warning("%s %s has changed since the training; results may differ", what, one.name)


def check_encoder(background: Background, encoder: Encoder, *, path: object) -> None:
    """Raise a CheckpointError unless the encoder gives the rows of the training's encoder."""
    row = background.probe if encoder.fingerprint == background.encoder else encoder.encode([PROBE])[0]
    if background.probe.shape != (encoder.dim,) or float(np.abs(row - background.probe).max()) > _SAME_ENCODER:
        raise CheckpointError(
            f"{path}: its policy was trained with other weights of the encoder (sha256 {background.encoder[:12]}) than "
            f"those found here ({encoder.source}, {encoder.fingerprint[:12]}); use the same ones"
        )
