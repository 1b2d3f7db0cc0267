"""Servers of one pool must answer with the same weights, else a reply would depend on which one was free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from query_mutator.errors import UsageError
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.types import ChatRequest

ModelServer = OllamaBackend | OpenAIBackend

_SHOWN_CHARS = 12  # of a digest, as `ollama list` does


def require_same_models(servers: Sequence[ModelServer], models: Sequence[str], *, allow_mixed: bool = False) -> None:
    """Raise ModelMissingError unless every server has all models, UsageError when the digests of one differ.

    `allow_mixed` lets digests differ. A server that tells none is not compared.
    """
    for model in dict.fromkeys(models):
        digests = {server.url: server.digest(model) for server in servers}
        if not allow_mixed and len({digest for digest in digests.values() if digest}) > 1:
            told = ", ".join(f"{url} has {digest[:_SHOWN_CHARS]}" for url, digest in digests.items())
            raise UsageError(
                f"{model} is not the same on all servers ({told}): run `ollama pull {model}` on each, "
                "or give --allow-mixed"
            )


class Identity:
    """Says of a request what weights answer it and how they are run, for the cache; asks the servers once a model."""

    def __init__(self, servers: Sequence[ModelServer], *, extra: str) -> None:
        self._servers = tuple(servers)
        self._extra = extra
        self._known: dict[str, str] = {}

    def know(self, digests: Mapping[str, str]) -> None:
        """Take the digests of models that no server has."""
        self._known |= digests

    def __call__(self, request: ChatRequest) -> str:
        """Return the model's digest, or its name and server where no digest is told, and `extra`.

        Raises BackendError when a server does not answer, or has no such model.
        """
        model = request.model
        if model not in self._known:
            told = sorted({server.digest(model) or f"{model} at {server.url}" for server in self._servers})
            self._known[model] = f"{' '.join(told)} {self._extra}"
        return self._known[model]
