"""The model that is trained: loaded, given adapters, partly frozen, checked against the data, saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from query_mutator.errors import UsageError
from query_mutator.llm.hf import PROMPT_FILE

if TYPE_CHECKING:
    from query_mutator.sft.config import SftFlags


def load_model(flags: SftFlags, device: torch.device) -> Any:
    """Return the model of --model in float32 on `device`, with what the flags ask to be frozen, adapted, recomputed."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any
    try:
        model = AutoModelForCausalLM.from_pretrained(
            flags.model, dtype=torch.float32, attn_implementation=flags.attention
        )
    except Exception as error:  # files that are no model fail in as many ways as there are readers of them
        what = "no model can be read from it" if Path(flags.model).is_dir() else "neither a folder nor to be had"
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"--model {flags.model!r}: {what} ({reason}); give a folder or a hub id") from None
    _freeze(model, flags.freeze_layers)
    if flags.gradient_checkpointing:
        settings = {"use_reentrant": False}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    if flags.use_lora:
        model = _with_adapters(model, flags)
    return model.to(device)


def _freeze(model: Any, count: int) -> None:
    if not count:
        return
    layers = max((one for one in model.modules() if isinstance(one, torch.nn.ModuleList)), key=len, default=())
    if count > len(layers):
        raise UsageError(f"--freeze-layers {count}: the model has {len(layers)} layers")
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
    """Raise a UsageError when token ids or row lengths are beyond what the model was built for."""
    config = model.config
    size = model.get_input_embeddings().weight.shape[0]
    if largest_id >= size:
        raise UsageError(f"the data hold token id {largest_id}, the model knows {size}: give its own --tokenizer")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and longest_row > limit:
        raise UsageError(f"rows of {longest_row} tokens do not fit the model's {limit} positions; lower --max-length")


def trainable_state(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights that are trained, on the CPU, by name."""
    return {name: one.detach().cpu().clone() for name, one in model.named_parameters() if one.requires_grad}


def load_trainable(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Put the weights of `trainable_state` back; other names or shapes are a UsageError."""
    mine = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if mine.keys() != state.keys() or any(mine[name].shape != state[name].shape for name in mine):
        raise UsageError("the checkpoint holds the weights of another model, or other layers were trained")
    with torch.no_grad():
        for name, one in mine.items():
            one.copy_(state[name])


def save_model(model: Any, tokenizer: Any, folder: Path, *, about: dict[str, Any]) -> None:
    """Save model (adapters merged in), tokenizer, and how it was asked, so that `hf:FOLDER` serves it."""
    whole = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    whole.save_pretrained(folder)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
    text = json.dumps({"asks": "question", **about}, indent=2, ensure_ascii=False)
    (folder / PROMPT_FILE).write_text(text + "\n", encoding="utf-8")
