"""What the embedded assistant knows: docstrings of Python's standard library, read on this machine at run time.

`corpus_dump.py` reads them in a clean child interpreter; texts and their embeddings are kept in the user's cache
folder (`QUERY_MUTATOR_CACHE`, else `XDG_CACHE_HOME`), under the sha256 of what they were made from. A damaged or
unwritable cache costs time, never a failure.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np

from query_mutator.encoder.sentence import Encoder, FloatArray
from query_mutator.errors import BackendError

logger = logging.getLogger(__name__)

DUMP_SCRIPT = Path(__file__).with_name("corpus_dump.py")
_DUMP_TIMEOUT_S = 120
_ENCODE_CHUNK = 64  # documents between two updates of the progress bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One function, class or method; `aliases` are other qualified names of the same object."""

    name: str
    aliases: tuple[str, ...]
    signature: str
    summary: str  # the docstring's first paragraph of prose, on one line


class Corpus:
    """The entries, in a fixed order, and what their names and words are."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries: tuple[Entry, ...] = tuple(entries)

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def _by_name(self) -> dict[str, Entry]:
        named = {alias: entry for entry in self.entries for alias in entry.aliases}
        return named | {entry.name: entry for entry in self.entries}

    def find(self, name: str) -> Entry | None:
        """Return the entry for a qualified name or one of its aliases."""
        return self._by_name.get(name)

    def resolve(self, name: str) -> str | None:
        """Return the canonical name for a qualified name or alias, or None."""
        entry = self.find(name)
        return entry.name if entry else None

    def vocabulary(self) -> frozenset[str]:
        """Return the lower-case words of names and summaries, identifiers taken apart as well as whole."""
        words: set[str] = set()
        for entry in self.entries:
            for token in re.findall(r"[A-Za-z_]+", f"{entry.name} {entry.summary}"):
                words.update((token.strip("_").lower(), *split_identifier(token)))
        return frozenset(words - {""})


def split_identifier(name: str) -> list[str]:
    """Return the words of an identifier in lower case: `OrderedDict.move_to_end` -> ordered dict move to end."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for files that can be made again."""
    if environ.get("QUERY_MUTATOR_CACHE"):
        return Path(environ["QUERY_MUTATOR_CACHE"]).expanduser()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]).expanduser() / "query-mutator"
    return Path.home() / ".cache" / "query-mutator"


def load_corpus(*, cache: Path | None = None) -> Corpus:
    """Return the corpus of this interpreter, from the cache if this Python was read before."""
    key = _sha256(DUMP_SCRIPT.read_text(encoding="utf-8"), sys.version, sys.platform, sys.prefix)
    path = (cache or cache_dir()) / f"corpus-{key[:24]}.json"
    try:
        return _read_corpus(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("cached corpus %s is damaged and is read again: %s", path, error)
    corpus = Corpus(_entries(_dump()))
    text = json.dumps([asdict(entry) for entry in corpus.entries])
    _write(path, lambda file: file.write(text.encode()))
    return corpus


def _read_corpus(path: Path) -> Corpus:
    corpus = Corpus(_entries(path.read_text(encoding="utf-8")))
    if not corpus.entries:
        raise ValueError("no entries")
    return corpus


def _entries(text: str) -> list[Entry]:
    return [
        Entry(
            name=str(row["name"]),
            aliases=tuple(map(str, row["aliases"])),
            signature=str(row["signature"]),
            summary=str(row["summary"]),
        )
        for row in json.loads(text)
    ]


def _dump() -> str:
    """Run the reader in a clean child: isolated from the environment (-I) and from installed packages (-S)."""
    command = [sys.executable, "-I", "-S", str(DUMP_SCRIPT)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DUMP_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines() or [""]
        raise BackendError(f"reading the standard library's docstrings failed: {said[-1]}") from error
    return done.stdout


def embed_documents(
    texts: Sequence[str], encoder: Encoder, *, cache: Path | None = None, what: str = "reading the standard library"
) -> FloatArray:
    """Return one unit row per document, [n, dim], from the cache when these texts met these weights before."""
    key = _sha256(encoder.fingerprint, *texts)
    path = (cache or cache_dir()) / f"embeddings-{key[:24]}.npz"
    try:
        return _read_rows(path, shape=(len(texts), encoder.dim))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("cached embeddings %s are damaged and are made again: %s", path, error)
    rows = _encode_with_bar(texts, encoder, what)
    _write(path, lambda file: np.savez(file, rows=rows))
    return rows


def _read_rows(path: Path, *, shape: tuple[int, int]) -> FloatArray:
    with np.load(path, allow_pickle=False) as saved:
        rows: FloatArray = saved["rows"]
    if rows.shape != shape or rows.dtype != np.float32 or not np.isfinite(rows).all():
        raise ValueError(f"expected finite float32 {shape}, found {rows.dtype} {rows.shape}")
    return rows


def _encode_with_bar(texts: Sequence[str], encoder: Encoder, what: str) -> FloatArray:
    from tqdm import tqdm

    rows = np.empty((len(texts), encoder.dim), np.float32)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # alike in length, so little padding
    with tqdm(total=len(texts), desc=what, unit="text", disable=None) as bar:
        for start in range(0, len(order), _ENCODE_CHUNK):
            chunk = order[start : start + _ENCODE_CHUNK]
            rows[chunk] = encoder.encode([texts[i] for i in chunk])
            bar.update(len(chunk))
    return rows


def _sha256(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)  # the length, so that ("ab", "c") is not ("a", "bc")
    return digest.hexdigest()


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write by rename, so that a reader never sees half a file; a folder that cannot be written is only logged."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            write(file)
        partial.replace(path)
    except OSError as error:
        logger.warning("cache %s cannot be written: %s", path, error)
        with suppress(OSError):
            partial.unlink()
