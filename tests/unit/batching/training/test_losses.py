"""Packed and padded rows give every token the same loss, and a step is the same however it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from query_mutator.batching import (
    BatchingConfig,
    BatchPlanBuilder,
    DistributedConfig,
    PackingConfig,
    PackingMode,
)
from query_mutator.batching.planning.batch_plan import BatchPlan
from query_mutator.batching.tokenizers import load_tokenizer
from query_mutator.batching.training.data import TokenData, read_tokens
from query_mutator.batching.training.losses import to_tensors, token_losses
from query_mutator.batching.training.microbatch import Microbatch
from query_mutator.batching.training.sources import PlanSource
from query_mutator.batching.training.stepper import Stepper, cosine_lr
from query_mutator.errors import UsageError
from tests.tiny_lm import pairs, save_model, write_rows

ALONE = DistributedConfig()
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_lm: str) -> TokenData:
    path = write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", pairs(24))
    return read_tokens(str(path), load_tokenizer(tiny_lm), mask_prompt=True)


def plan_of(data: TokenData, packing: PackingConfig | None = None, **settings: Any) -> BatchPlan:
    config = BatchingConfig.throughput(
        **{"token_budget": 512, "bucket_edges": (128,), "overflow_max": 128, "seed": 3} | settings
    )
    return BatchPlanBuilder(data.lengths, config, pack_config=packing, loss_lengths=data.loss_lengths).build_sync(1)


def microbatches(plan: BatchPlan, data: TokenData) -> list[Microbatch]:
    return [one for step in PlanSource(plan, data.rows, ranks=ALONE).steps() for one in step]


def losses_by_sample(model: Any, batches: list[Microbatch], attention: str = "sdpa") -> dict[str, list[float]]:
    """Return the losses of each sample's learned tokens, in their order."""
    found: dict[str, list[float]] = {}
    for one in batches:
        batch = one.collated(0)
        with torch.no_grad():
            losses = token_losses(model, to_tensors(batch, CPU, attention=attention)).numpy()
        learned = batch.labels[:, 1:] != -100
        rows = one.spec.packs or [(name,) for name in one.spec.samples]
        for row, names in enumerate(rows):
            segments = np.zeros(batch.input_ids.shape[1], int) if batch.segment_ids is None else batch.segment_ids[row]
            for number, name in enumerate(names):
                found[name] = losses[row][learned[row] & (segments[1:] == number)].tolist()
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_and_padded_rows_give_the_same_losses(
    data: TokenData, kind: str, attention: str, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path, kind=kind), attn_implementation=attention).eval()
    padded = losses_by_sample(model, microbatches(plan_of(data), data), attention)
    packing = PackingConfig(mode=PackingMode.GREEDY, max_length=200)
    packed = losses_by_sample(model, microbatches(plan_of(data, packing, overflow_max=200), data), attention)
    assert padded.keys() == packed.keys() == data.rows.keys()
    for name, losses in padded.items():
        assert len(losses) == data.loss_lengths[name]
        assert packed[name] == pytest.approx(losses, abs=1e-5)


def test_unknown_attention_cannot_hold_packs(data: TokenData) -> None:
    (first, *_) = microbatches(plan_of(data, PackingConfig(max_length=200), overflow_max=200), data)
    with pytest.raises(UsageError, match="packed rows cannot be kept apart"):
        to_tensors(first.collated(0), CPU, attention="flash_attention_2")


class SmallMemory(LlamaForCausalLM):
    """A Llama on a card that holds 160 tokens."""

    limit = 160

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:  # type: ignore[override]
        output = super().forward(input_ids, **inputs)
        if input_ids.numel() > self.limit:
            output.logits.register_hook(self._run_out)  # it is the backward pass that fails
        return output

    @staticmethod
    def _run_out(gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_out_of_memory_is_cut_and_the_step_is_the_same(
    data: TokenData, tiny_lm: str, packed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    packing = PackingConfig(max_length=200) if packed else None
    batches = microbatches(plan_of(data, packing, overflow_max=200), data)
    weights = []
    for kind in (LlamaForCausalLM, SmallMemory):
        stepper, optimizer = stepper_of(kind.from_pretrained(tiny_lm))
        results = [stepper.step(batches[place : place + 2], optimizer) for place in range(0, len(batches), 2)]
        weights.append((results, [one.detach() for one in stepper.parameters]))
    (wide, narrow) = weights
    assert [one.loss for one in narrow[0]] == pytest.approx([one.loss for one in wide[0]], abs=1e-5)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(wide[1], narrow[1], strict=True))
    assert capsys.readouterr().err.count("out of memory with") == 1


def stepper_of(model: Any) -> tuple[Stepper, torch.optim.Optimizer]:
    stepper = Stepper(model, pad_id=0, device=CPU, bf16=False, attention="sdpa", max_grad_norm=1.0)
    return stepper, torch.optim.SGD(stepper.parameters, lr=0.5)


def test_a_single_sample_that_does_not_fit_is_an_error(data: TokenData, tiny_lm: str) -> None:
    model = SmallMemory.from_pretrained(tiny_lm)
    model.limit = 8
    stepper, optimizer = stepper_of(model)
    with pytest.raises(UsageError, match=r"a single sample of \d+ tokens does not fit into memory"):
        stepper.step(microbatches(plan_of(data), data)[:1], optimizer)


def test_gradients_weigh_every_token_alike(data: TokenData, tiny_lm: str) -> None:
    """Two batches of unlike size in one step give the gradient of their tokens in one batch."""
    gradients = []
    for budget in (4096, 256):
        plan = plan_of(data, token_budget=budget)
        stepper, optimizer = stepper_of(LlamaForCausalLM.from_pretrained(tiny_lm))
        before = [one.detach().clone() for one in stepper.parameters]
        stepper.step(microbatches(plan, data), optimizer)
        gradients.append([old - new for old, new in zip(before, stepper.parameters, strict=True)])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*gradients, strict=True))


def test_the_step_size_rises_and_falls() -> None:
    sizes = [cosine_lr(step, 10, peak=1.0, warmup_ratio=0.2, min_lr_ratio=0.1) for step in range(11)]
    assert sizes[:3] == [0.5, 1.0, 1.0]
    assert sizes[6] == pytest.approx(0.1 + 0.9 * 0.5)
    assert sizes[10] == pytest.approx(0.1)
    assert sizes[2:] == sorted(sizes[2:], reverse=True)
    assert cosine_lr(0, 1, peak=2.0, warmup_ratio=0.0, min_lr_ratio=0.0) == 2.0
