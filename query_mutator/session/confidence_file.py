"""The file of a run that has the model of P(right) with those of its folds: a resumed run submits by the same."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from query_mutator.confidence import ConfidenceModel
from query_mutator.errors import CheckpointError
from query_mutator.files import atomic_write

__all__ = ["load_or_learn"]

_FOLDS = "fold_of"


def load_or_learn(path: Path, learn: Callable[[], ConfidenceModel]) -> ConfidenceModel:
    """Return the model in a file; without a file, that of `learn`, which is written there."""
    if path.exists():
        return _read(path)
    found = learn()
    models: dict[str, ConfidenceModel] = {
        "all": found,
        **{str(number): model for number, model in enumerate(found.fold_models)},
    }
    arrays = {f"{name}/{key}": array for name, model in models.items() for key, array in model.to_arrays().items()}
    folds = np.frombuffer(json.dumps(dict(found.fold_of)).encode(), dtype=np.uint8)
    packed = io.BytesIO()
    np.savez_compressed(packed, allow_pickle=False, **{_FOLDS: folds}, **arrays)
    with atomic_write(path) as file:
        file.write(packed.getvalue())
    return found


def _read(path: Path) -> ConfidenceModel:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        fold_of = json.loads(arrays.pop(_FOLDS).tobytes())
        count = 1 + max(fold_of.values(), default=-1)
        names = ["all", *map(str, range(count))]
        first, *folds = (
            ConfidenceModel.from_arrays(
                {key.partition("/")[2]: array for key, array in arrays.items() if key.partition("/")[0] == name}
            )
            for name in names
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise CheckpointError(f"{path} holds no model of P(right) ({error}); restore it from a copy") from error
    return replace(first, fold_models=tuple(folds), fold_of=fold_of)
