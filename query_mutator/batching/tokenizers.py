"""Tokenizers by name: a folder or a hub id through transformers, or `bytes`, which needs no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError, reason_of
from query_mutator.files.gguf_file import source_of

BYTES = "bytes"


class ByteTokenizer:
    """One token per byte of UTF-8; 256 is the end of text, 257 padding."""

    eos_token_id = 256
    pad_token_id = 257

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the text."""
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Return the text of the ids that are bytes."""
        return bytes(one for one in ids if one < 256).decode("utf-8", "replace")

    def __len__(self) -> int:
        return 258


def load_tokenizer(spec: str) -> Any:
    """Return the tokenizer of a folder or hub id, or `ByteTokenizer` for `bytes`; raise UsageError if none loads."""
    if spec == BYTES:
        return ByteTokenizer()
    from transformers import AutoTokenizer

    source, of_gguf = source_of(spec)
    try:
        return AutoTokenizer.from_pretrained(source, **of_gguf, trust_remote_code=False)
    except Exception as error:  # each reader of tokenizer files fails in its own way
        what = (
            "the folder has no loadable tokenizer" if Path(spec).is_dir() else "not a folder, not loadable from the hub"
        )
        reason = reason_of(error)
        raise UsageError(
            f"tokenizer {spec!r}: {what} ({reason}); give a folder, a hub id, or {BYTES} (one token per byte)"
        ) from None


def pad_id_of(tokenizer: Any) -> int:
    """Return the padding id: the tokenizer's, else its end-of-text id, else 0 (padding is masked)."""
    for name in ("pad_token_id", "eos_token_id"):
        found = getattr(tokenizer, name, None)
        if found is not None:
            return int(found)
    return 0
