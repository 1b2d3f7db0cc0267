"""What the embedded assistant knows: docstrings of Python's standard library, read on this machine at run time.

`corpus_dump.py` reads them in a clean child interpreter; the result is kept in the user's cache folder under the sha256
of what it depends on. A damaged or unwritable cache costs time and is only logged.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from query_mutator.encoder import cache_dir, sha256_of
from query_mutator.errors import BackendError, DiskError
from query_mutator.files import write_text

__all__ = ["Corpus", "Entry", "load_corpus", "split_identifier"]

logger = logging.getLogger(__name__)

DUMP_SCRIPT = Path(__file__).with_name("corpus_dump.py")
NAMES = Path(__file__).with_name("corpus_names.tsv")
_DUMP_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One function, class or method."""

    name: str
    signature: str
    summary: str  # the docstring's first paragraph of prose, on one line


class Corpus:
    """The entries in a fixed order."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries: tuple[Entry, ...] = tuple(entries)

    def __len__(self) -> int:
        return len(self.entries)

    def vocabulary(self) -> frozenset[str]:
        """Return the lower-case words of names and summaries, identifiers both whole and split into words."""
        text = "\n".join(f"{entry.name} {entry.summary}" for entry in self.entries)
        words: set[str] = set()
        for token in set(re.findall(r"[A-Za-z_]+", text)):
            words.update((token.strip("_").lower(), *split_identifier(token)))
        return frozenset(words - {""})


def split_identifier(name: str) -> list[str]:
    """Return the words of an identifier in lower case: `OrderedDict.move_to_end` -> ordered dict move to end."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def load_corpus(*, cache: Path | None = None) -> Corpus:
    """Return the corpus of this interpreter, from the cache if this Python was read before.

    Raises BackendError when the docstrings cannot be read.
    """
    sources = (path.read_text(encoding="utf-8") for path in (DUMP_SCRIPT, NAMES))
    key = sha256_of(*sources, sys.version, sys.platform, sys.prefix)
    path = (cache or cache_dir()) / f"corpus-{key[:24]}.json"
    try:
        return _read_corpus(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("cached corpus %s is damaged; reading the docstrings again: %s", path, error)
    corpus = Corpus(_entries(_dump()))
    try:
        write_text(path, json.dumps([asdict(entry) for entry in corpus.entries]))
    except (DiskError, OSError) as error:
        logger.warning("cache cannot be written: %s", error)
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
