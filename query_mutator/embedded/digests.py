"""What an embedded model's replies depend on, as one digest; caches and server pools compare it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from query_mutator.encoder import sha256_of

__all__ = ["digest_of"]

_HERE = Path(__file__).parent


def digest_of(*parts: str, sources: Iterable[str]) -> str:
    """Return the sha256 of texts and of the package's files under `sources` (files or folders of this package)."""
    return sha256_of(*parts, *map(_digest_of_files, sources))


@lru_cache
def _digest_of_files(source: str) -> str:
    """Return the sha256 of a file, or of all files in a folder except compiled ones."""
    place = _HERE / source
    files = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
    digest = hashlib.sha256()
    for path in files:
        if "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(_HERE).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()
