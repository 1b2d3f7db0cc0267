"""The sentence encoder: texts to unit vectors [n, dim], each encoded once.

`resolve_encoder(name)` returns a `CachedEncoder`. The bundled encoder needs numpy only; sentence-transformers is
imported when another model is loaded. The room imports `types` and `errors`.
"""

from query_mutator.encoder.base import Encoder, HashEncoder, unit_rows
from query_mutator.encoder.cached import CachedEncoder, resolve_encoder
from query_mutator.encoder.minilm import DEFAULT_ENCODER, vocabulary

__all__ = ["DEFAULT_ENCODER", "CachedEncoder", "Encoder", "HashEncoder", "resolve_encoder", "unit_rows", "vocabulary"]
