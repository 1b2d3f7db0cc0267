"""Weights in GGUF files: reading one by transformers, and writing a fine-tuned model as another, for llama.cpp.

The finished file has the metadata and the tokenizer of the file that the training started from. Rows of the query and
key matrices are in llama.cpp's order: its rotary embedding turns neighboring values, that of transformers halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.errors import UsageError
from query_mutator.files.gguf_file import PACKAGED, check_file, gguf_path

__all__ = ["base_of", "source_of", "write_gguf"]

ARCHITECTURE = "llama"  # others have an order of rows of their own
_WRITTEN_ANEW = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version", "general.name")
_HEADS = {"attn_q": "head_count", "attn_k": "head_count_kv"}


def source_of(spec: str) -> tuple[str, dict[str, str]]:
    """Return what `from_pretrained` takes for a model: its first argument, and `gguf_file` for a GGUF file.

    UsageError for a GGUF file that cannot be used, or without the packages that read one.
    """
    if spec not in PACKAGED and not spec.endswith(".gguf"):
        return spec, {}
    path = Path(gguf_path(spec))
    check_file(path)
    _package()
    return str(path.parent), {"gguf_file": path.name}


def base_of(spec: str) -> Path | None:
    """Return the GGUF file of a model, or the one in its folder; None for a model of other files."""
    if spec in PACKAGED or spec.endswith(".gguf"):
        return Path(gguf_path(spec))
    return next(iter(sorted(Path(spec).glob("*.gguf"))), None)


def write_gguf(state: Mapping[str, Any], base: Path, out: Path) -> None:
    """Write the state dict of a model as `transformers` names it; `base` is the file that it was read from.

    UsageError for another architecture than llama.
    """
    gguf = _package()
    reader = gguf.GGUFReader(base)
    told = {name: field.contents() for name, field in reader.fields.items() if field.types}
    if (found := told.get("general.architecture")) != ARCHITECTURE:
        raise UsageError(f"{base}: a GGUF file can be written of {ARCHITECTURE} models, not of {found!r}")
    writer = gguf.GGUFWriter(out, ARCHITECTURE)
    for name, field in reader.fields.items():
        if field.types and not name.startswith(_WRITTEN_ANEW):
            writer.add_key_value(name, told[name], field.types[0], field.types[-1] if len(field.types) > 1 else None)
    writer.add_name(out.stem)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    named = _named(gguf, state, blocks=int(told[f"{ARCHITECTURE}.block_count"]))
    for tensor in reader.tensors:
        values = np.ascontiguousarray(named[tensor.name].detach().cpu().float().numpy())
        if key := next((key for part, key in _HEADS.items() if f".{part}." in tensor.name), None):
            values = _interleaved(values, heads=int(told[f"{ARCHITECTURE}.attention.{key}"]))
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _named(gguf: Any, state: Mapping[str, Any], *, blocks: int) -> dict[str, Any]:
    """Return the tensors under their names in a GGUF file."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, blocks)
    return {names.get_name(name, try_suffixes=(".weight", ".bias")): tensor for name, tensor in state.items()}


def _interleaved(matrix: np.ndarray, *, heads: int) -> np.ndarray:
    """Return rows [heads * 2 * d, n] of which both halves of each head alternate."""
    split = matrix.reshape(heads, 2, -1, *matrix.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(matrix.shape))


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise UsageError("a GGUF file is read and written by gguf: pip install 'query-mutator[sft]'") from None
    return gguf
