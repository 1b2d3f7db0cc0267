"""The model that is trained: load it, add adapters, freeze layers, check it against the data, save it and its state."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ppo.checkpoint import load_checkpoint, save_checkpoint
from query_mutator.errors import CheckpointError, UsageError, reason_of
from query_mutator.files import disk_errors
from query_mutator.files.gguf_file import source_of
from query_mutator.files.run_dir import first_readable

if TYPE_CHECKING:
    from query_mutator.batching.training.config import SftFlags


FORMAT = "sft 3"
KEPT_CHECKPOINTS = 2


def load_model(flags: SftFlags, device: torch.device) -> Any:
    """Return the model of --model in float32 on `device`, with layers frozen and adapters added as the flags say."""
    model = read_model(flags.model)
    _freeze(model, flags.freeze_layers)
    if flags.gradient_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if flags.use_lora:
        model = _with_adapters(model, flags)
    return model.to(device)


def read_model(spec: str) -> Any:
    """Return a model in float32; UsageError for what is none."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source, of_gguf = source_of(spec)
    model: Any
    try:
        with redirect_stderr(StringIO()):  # a bar that nothing else disables
            model = AutoModelForCausalLM.from_pretrained(
                source, **of_gguf, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
            )
    except Exception as error:  # files that are not a model fail in many ways
        what = "no model can be read from it" if Path(spec).exists() else "not a folder, and not on the hub"
        reason = reason_of(error)
        raise UsageError(f"--model {spec!r}: {what} ({reason}); give a folder, a GGUF file or a hub id") from None
    if of_gguf:  # the weights are float32 now, and are saved as such
        model.hf_quantizer.remove_quantization_config(model)
    return model


def _freeze(model: Any, count: int) -> None:
    if not count:
        return
    layers = max((one for one in model.modules() if isinstance(one, torch.nn.ModuleList)), key=len, default=())
    if count > len(layers):
        raise UsageError(f"--freeze-layers {count}: the model has {len(layers)} layers; freeze fewer")
    for part in (model.get_input_embeddings(), *layers[:count]):
        part.requires_grad_(False)


def _with_adapters(model: Any, flags: SftFlags) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UsageError("--use-lora needs peft: pip install 'query-mutator[sft]'") from None
    names = [name.strip() for name in flags.lora_targets.split(",") if name.strip()]
    config = LoraConfig(
        r=flags.lora_rank, lora_alpha=2 * flags.lora_rank, target_modules=names or "all-linear", task_type="CAUSAL_LM"
    )
    torch.manual_seed(flags.seed)  # the adapters' first weights are drawn
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        reason = str(error).partition(".")[0]
        raise UsageError(f"--lora-targets {flags.lora_targets or 'all-linear'}: {reason}") from None


def check_fit(model: Any, *, largest_id: int, longest_row: int) -> None:
    """Raise a UsageError if token ids or row lengths exceed what the model was built for."""
    size = model.get_input_embeddings().weight.shape[0]
    if largest_id >= size:
        raise UsageError(f"the data have token id {largest_id}, the model knows {size}; give the model's --tokenizer")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and longest_row > limit:
        raise UsageError(f"rows of {longest_row} tokens do not fit the model's {limit} positions; lower --max-length")


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save model (adapters merged) and tokenizer, as `from_pretrained` and model servers read them."""
    with disk_errors(folder):
        whole = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
        whole.save_pretrained(folder)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)


# --- checkpoints: OUTPUT/checkpoints/step_N.pt -----------------------------------------------------------------------


def trainable_state(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights that are trained, on the CPU, by name."""
    return {name: one.detach().cpu().clone() for name, one in model.named_parameters() if one.requires_grad}


def load_trainable(model: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Load the weights of `trainable_state`; UsageError for other names or shapes."""
    mine = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if mine.keys() != state.keys() or any(mine[name].shape != state[name].shape for name in mine):
        raise UsageError("the checkpoint is of another model, or of other trained layers; give the same flags")
    with torch.no_grad():
        for name, one in mine.items():
            one.copy_(state[name])


def write_checkpoint(output: Path, state: Mapping[str, Any], *, step: int) -> None:
    """Write a checkpoint atomically and remove all but the newest two; DiskError if it cannot be written."""
    path = output / "checkpoints" / f"step_{step}.pt"
    with disk_errors(path):
        save_checkpoint(path, {"format": FORMAT, **state})
        for old in checkpoints_in(output)[KEPT_CHECKPOINTS:]:
            old.unlink(missing_ok=True)


def checkpoints_in(output: Path) -> list[Path]:
    """Return the checkpoints in an output folder, the newest first."""
    found = [path for path in (output / "checkpoints").glob("step_*.pt") if path.stem[5:].isdecimal()]
    return sorted(found, key=lambda path: -int(path.stem[5:]))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in a `.pt`, or in the newest readable one of an output folder; CheckpointError without one."""
    if not (found := checkpoints_in(path) if path.is_dir() else [path]):
        raise CheckpointError(f"{path}: no checkpoint in it; give an output folder of `qm train sft`, or a .pt")
    return first_readable(found, _read)


def _read(path: Path) -> dict[str, Any]:
    try:
        state = load_checkpoint(path, entry="format")
    except ValueError as error:
        raise CheckpointError(f"{error}; give an output folder of `qm train sft`") from None
    if state["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {state['format']!r}, not {FORMAT!r} of this `qm train sft`")
    return state
