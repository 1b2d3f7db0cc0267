"""The file of a run that has the model of P(right) with those of its folds: a resumed run submits by the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from query_mutator.confidence import ConfidenceModel
from query_mutator.errors import CheckpointError
from query_mutator.files.typed import as_type
from query_mutator.learners.learner import tensors
from query_mutator.session.checkpoint import arrays_of, load_state, save_state

__all__ = ["load_or_learn"]


def load_or_learn(path: Path, learn: Callable[[], ConfidenceModel]) -> ConfidenceModel:
    """Return the model in a file; without a file, that of `learn`, which is written there."""
    if path.exists():
        return _read(path)
    found = learn()
    models: list[ConfidenceModel] = [found, *found.fold_models]
    arrays = [tensors(model.to_arrays()) for model in models]
    save_state(path, {"models": arrays, "fold_of": dict(found.fold_of)})
    return found


def _read(path: Path) -> ConfidenceModel:
    """Return the model in a file; CheckpointError for one that is damaged or holds none."""
    state = load_state(path, entry="fold_of")
    try:
        first, *folds = (ConfidenceModel.from_arrays(arrays_of(model)) for model in state["models"])
        fold_of: Mapping[str, int] = as_type(state["fold_of"], Mapping[str, int], "fold_of")
        if not {*fold_of.values()} <= {*range(len(folds))}:
            raise ValueError("a target is in a fold that is not there")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no model of P(right) ({error}); restore it from a copy") from error
    return replace(first, fold_models=tuple(folds), fold_of=fold_of)
