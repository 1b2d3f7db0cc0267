"""The sentence encoder: texts to unit vectors [n, dim], cached, from wherever its weights are found.

`resolve_encoder(name)` returns a `CachedEncoder`; `embed_documents` adds a cache on disk for texts that are the same in
every run, and `english_ranks` is the word list that comes with the default weights. Importing this package loads numpy
only: torch and sentence-transformers are imported when weights are loaded. It imports `files`, `types` and `errors`.
"""

from query_mutator.encoder.base import Encoder, HashEncoder, RemoteEncoder, unit_rows
from query_mutator.encoder.cached import CachedEncoder, cache_dir, embed_documents, resolve_encoder, sha256_of
from query_mutator.encoder.weights import DEFAULT_ENCODER, PACKAGE, english_ranks, english_words, packaged_folder
from query_mutator.errors import EncoderError

__all__ = [
    "DEFAULT_ENCODER",
    "PACKAGE",
    "CachedEncoder",
    "Encoder",
    "EncoderError",
    "HashEncoder",
    "RemoteEncoder",
    "cache_dir",
    "embed_documents",
    "english_ranks",
    "english_words",
    "packaged_folder",
    "resolve_encoder",
    "sha256_of",
    "unit_rows",
]
