"""From the name of an encoder to the encoder.

resolve_encoder("all-MiniLM-L6-v2")  ->  CachedEncoder(BertEncoder(...))
resolve_encoder("ollama:NAME")       ->  CachedEncoder(RemoteEncoder(...))     the server's /api/embed
resolve_encoder("hash")              ->  CachedEncoder(HashEncoder(...))       instant, for benchmarks; no torch
"""

from __future__ import annotations

from query_mutator.encoder.base import Encoder
from query_mutator.encoder.cached import CachedEncoder
from query_mutator.encoder.hashing import HashEncoder
from query_mutator.encoder.remote import Embed, RemoteEncoder
from query_mutator.encoder.weights import DEFAULT_ENCODER, EncoderSettings, Weights, find_weights
from query_mutator.errors import EncoderError, reason_of

__all__ = ["resolve_encoder"]


def resolve_encoder(
    spec: str = DEFAULT_ENCODER,
    *,
    device: str = "cpu",
    deterministic: bool = False,
    max_tokens: int | None = None,
    embed: Embed | None = None,
    light: bool = False,
) -> CachedEncoder:
    """Return the encoder that `spec` names: a folder, a model name, `ollama:NAME` or `hash`.

    Longer texts are truncated to `max_tokens` and to the model's limit. `embed(model, texts)` calls the server for
    `ollama:NAME`. `light`: run plain BERT on a CPU without torch, which starts a second earlier and encodes many texts
    more slowly. Raises EncoderError for an encoder that is not available.
    """
    if max_tokens is not None and (spec == "hash" or spec.startswith("ollama:")):
        raise EncoderError(f"encoder {spec!r} reads whole texts; leave --encoder-max-tokens out")
    if spec == "hash":
        return CachedEncoder(HashEncoder())
    if spec.startswith("ollama:"):
        if embed is None:
            raise EncoderError(f"encoder {spec!r} needs an Ollama server; use --backend ollama or --ollama-url")
        return CachedEncoder(RemoteEncoder(spec.removeprefix("ollama:"), embed))
    settings = EncoderSettings(device=device, deterministic=deterministic, max_tokens=max_tokens)
    return CachedEncoder(_load(find_weights(spec), settings, light=light and device == "cpu" and not deterministic))


def _load(weights: Weights, settings: EncoderSettings, *, light: bool) -> Encoder:
    """Load plain BERT directly and everything else with sentence-transformers, which takes seconds to import."""
    from query_mutator.encoder.bert import is_plain_bert

    try:
        if is_plain_bert(weights.folder):
            if light:
                from query_mutator.encoder.bert_numpy import NumpyBert

                return NumpyBert(weights, settings)
            from query_mutator.encoder.bert_torch import BertEncoder

            return BertEncoder(weights, settings)
        from query_mutator.encoder.sentence_transformer import SentenceTransformerEncoder

        return SentenceTransformerEncoder(weights, settings)
    except Exception as error:  # each reader reports a broken file with its own exception types
        reason = reason_of(error)
        raise EncoderError(f"encoder {weights.name!r} ({weights.source}) cannot be loaded: {reason[:160]}") from error
