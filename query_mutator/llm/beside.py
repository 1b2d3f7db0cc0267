"""Models in this process beside a server's: each request goes to the one that has its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from query_mutator.llm.client import Backend
from query_mutator.llm.hf import HfModel
from query_mutator.types import ChatRequest, Completion, ErrorInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float32]


class Beside:
    """A backend with some models of its own; everything else is the inner backend's."""

    def __init__(self, backend: Backend, models: Sequence[HfModel]) -> None:
        self._backend = backend
        self._models = {model.name: model for model in models}

    def __repr__(self) -> str:
        return f"Beside({self._backend!r}, {list(self._models.values())!r})"

    @property
    def url(self) -> str:
        """Where the inner backend's server is."""
        return self._backend.url

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply of the model that the request names."""
        client = self._models.get(request.model)
        return client.complete(request) if client else self._backend.complete(request)

    def embed(self, model: str, texts: Sequence[str]) -> FloatArray | ErrorInfo:
        """Return the inner backend's embeddings."""
        return self._backend.embed(model, texts)

    def close(self) -> None:
        """Close the models and the inner backend; idempotent."""
        for model in self._models.values():
            model.close()
        self._backend.close()
