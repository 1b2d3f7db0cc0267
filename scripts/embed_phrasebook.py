"""Write the embeddings of the phrasebook next to it, so that the first start does not compute them.

python scripts/embed_phrasebook.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from query_mutator.embedded.rules import phrasebook
from query_mutator.encoder import resolve_encoder


def main() -> None:
    """Embed every row with the default encoder and save the rows as float16 with the sha256 of weights and texts."""
    encoder = resolve_encoder()
    path = Path(phrasebook.__file__).with_name(phrasebook.VECTORS)
    rows = phrasebook.embed_rows(encoder).astype(np.float16)
    np.savez_compressed(path, rows=rows, weights=encoder.fingerprint, texts=phrasebook.texts_sha256())
    print(f"{path.name}: {len(rows)} rows, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
