"""The models a server offers, under Ollama's names: `echo` and `echo:latest` are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from query_mutator.embedded.models import EmbeddedModel
from query_mutator.embedded.wire import ApiError, model_name
from query_mutator.embedded.wire import field as payload_field
from query_mutator.embedded.worker import BatchWorker
from query_mutator.types import FloatArray

if TYPE_CHECKING:
    from query_mutator.encoder import Encoder

__all__ = ["CONTEXT_LENGTH", "EMBEDDING_MODEL", "MAX_CONTEXT", "Catalogue", "Entry"]

EMBEDDING_MODEL = "all-minilm"
CONTEXT_LENGTH = 4096  # tokens, without `num_ctx`
MAX_CONTEXT = 32768
#: The `details` object of `/api/tags`, `/api/show` and `/api/ps`.
DETAILS: Mapping[str, Any] = {
    "parent_model": "",
    "format": "python",
    "family": "query-mutator",
    "families": ["query-mutator"],
    "parameter_size": "",
    "quantization_level": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model: a text model with `replies`, or the encoder with `vectors`."""

    name: str  # without tag
    digest: str
    modified_at: datetime
    weights: str  # models with the same share a runner
    parameters: Mapping[str, int] = field(default_factory=dict)  # of the model's file, as num_ctx
    dim: int = 0
    operators: Sequence[str] = ()  # that a mutator can carry out
    fixed_reply: str | None = None
    replies: BatchWorker[str, str] | None = None
    vectors: BatchWorker[Sequence[str], FloatArray] | None = None

    @classmethod
    def of_text_model(cls, name: str, model: EmbeddedModel) -> Entry:
        """Return the entry of a model that writes text."""
        return cls(
            name=name.lower().removesuffix(":latest"),
            digest=getattr(model, "digest", None) or _sha256(f"{name}\0{type(model).__qualname__}"),
            modified_at=datetime.now(UTC),
            weights=getattr(model, "weights", name),
            parameters=getattr(model, "parameters", {}),
            operators=getattr(model, "operators", ()),
            fixed_reply=getattr(model, "fixed_reply", None),
            replies=BatchWorker(model.reply_many, name=f"model-{name}"),
        )

    @classmethod
    def of_encoder(cls, encoder: Encoder) -> Entry:
        """Return the entry of the encoder; concurrent requests are encoded together."""

        def encode_all(requests: Sequence[Sequence[str]]) -> list[FloatArray]:
            rows = encoder.encode([text for texts in requests for text in texts])
            ends = [sum(len(texts) for texts in requests[: i + 1]) for i in range(len(requests))]
            return [rows[end - len(texts) : end] for texts, end in zip(requests, ends, strict=True)]

        return cls(
            name=EMBEDDING_MODEL,
            digest=_sha256(encoder.fingerprint),
            modified_at=datetime.now(UTC),
            weights=EMBEDDING_MODEL,
            dim=encoder.dim,
            vectors=BatchWorker(encode_all, name=f"model-{EMBEDDING_MODEL}"),
        )

    @property
    def tagged(self) -> str:
        """Return the name as Ollama lists it."""
        return f"{self.name}:latest"

    @property
    def capabilities(self) -> list[str]:
        """Return the model's capabilities in Ollama's words."""
        return ["completion"] if self.replies is not None else ["embedding"]


class Catalogue:
    """All models of one server, in the order given."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = {entry.name: entry for entry in entries}

    def find(self, name: str, *, missing: str = "model '{}' not found") -> Entry:
        """Return the entry called `name`, with or without `:latest`; raises ApiError 404 with the `missing` text."""
        entry = self.entries.get(name) or self.entries.get(name.lower().removesuffix(":latest"))
        if entry is None:
            raise ApiError(404, missing.format(name))
        return entry

    def text_model(self, payload: Mapping[str, Any], verb: str) -> Entry:
        """Return the text model of a request; raises ApiError for another model, and for a chat with tools."""
        name = model_name(payload)
        entry = self.find(name)
        if entry.replies is None:
            raise ApiError(400, f'"{name}" does not support {verb}')
        if verb == "chat" and payload_field(payload, "tools", list):
            raise ApiError(400, f"{entry.tagged} does not support tools")
        return entry

    def close(self) -> None:
        """Stop the worker threads."""
        for entry in self.entries.values():
            for worker in (entry.replies, entry.vectors):
                if worker is not None:
                    worker.close()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
