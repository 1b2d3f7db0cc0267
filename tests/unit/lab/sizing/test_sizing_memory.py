"""Estimates of memory against what the CPU profiler counts when the same step is really taken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.sizing_errors import measured_peak
from query_mutator.commands.main import main
from query_mutator.errors import UsageError
from query_mutator.lab.sizing.machine import MIB
from query_mutator.lab.sizing.memory import estimate, fit, largest_batch
from query_mutator.lab.sizing.models import language_model, model
from query_mutator.lab.sizing.sizes import (
    PLAIN,
    TABLED,
    Recipe,
    Workload,
    recipe_of,
    room_on,
    tabled,
    vram_bytes,
)

pytestmark = pytest.mark.slow

CPU = Recipe(device="cpu")


def small() -> Workload:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256}
    more = {"vocab_size": 64, "use_cache": False}
    return language_model("small", model="GPTNeoXForCausalLM", tokens=32, config=config | more)


@pytest.fixture(autouse=True)
def _without_onednn() -> Iterator[None]:
    before = torch.backends.mkldnn.enabled  # its scratch memory is not PyTorch's to count
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    yield
    torch.backends.mkldnn.enabled = before  # type: ignore[assignment]


def mlp() -> Workload:
    return Workload(
        name="mlp",
        build=lambda: nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)),
        batch=lambda size: (torch.randn(size, 256), torch.randint(0, 10, (size,))),
        loss=lambda module, x, target: nn.functional.cross_entropy(module(x), target),
    )


def copied() -> Workload:
    """Layers that are deep copies of one, as those of PyTorch's own transformer are."""
    return Workload(
        name="copied",
        build=lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(64, 2, 512, dropout=0.0), 3, enable_nested_tensor=False
        ),
        batch=lambda size: (torch.randn(4, size, 64),),
        loss=lambda module, x: module(x).square().mean(),
    )


CASES = {
    "copies of a layer": (copied(), 2, CPU),
    "gpt": (small(), 8, CPU),
    "gpt checkpointed": (small(), 8, replace(CPU, checkpointing=True)),
    "gpt accumulating": (small(), 4, replace(CPU, accumulate=2)),
    "gpt half frozen": (small(), 8, replace(CPU, frozen=("gpt_neox.layers",))),
}


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_within_one_per_cent_of_the_truth(name: str) -> None:
    workload, batch, recipe = CASES[name]
    found = estimate(workload, batch, recipe, rounding=1)
    assert found.peak == pytest.approx(measured_peak(workload, batch, recipe), rel=0.01)
    assert found.reserved >= found.peak


def test_what_an_estimate_is_made_of() -> None:
    found = estimate(mlp(), 64, CPU, rounding=1)
    weights = 256 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10
    assert (found.parameters, found.gradients) == (4 * weights, 4 * weights)
    assert found.optimizer == 2 * 4 * weights + 6 * 4  # two moments, and six counters of steps
    assert set(found.phases) == {"inputs", "forward", "backward", "clip", "optimizer"}


def test_recomputed_blocks_keep_a_gpu_s_list_of_operations_in_fp32() -> None:
    """Transformers' layer norm of a recomputed block has the types it had at first; PyTorch refuses other ones."""
    workload, recipe = model("minilm", tokens=16), Recipe(precision="bf16")
    plain, recomputed = (estimate(workload, 32, replace(recipe, checkpointing=on)) for on in (False, True))
    assert recomputed.phases["forward"] < plain.phases["forward"]


def test_the_line_through_two_batches_holds_far_beyond_and_below() -> None:
    line = fit(small(), CPU)
    for batch in (1, 128):
        assert line.at(batch) == pytest.approx(estimate(small(), batch, CPU).peak, rel=0.02)


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    room = room_on("64MiB", context_bytes=8 * MIB)
    assert room == 0.94 * 64 * MIB - 8 * MIB
    batch, found = largest_batch(small(), room, CPU)
    assert found is not None
    assert found.peak <= room < estimate(small(), batch + 2, CPU).peak
    assert largest_batch(small(), 0.5 * MIB, CPU) == (0, None)


def test_memory_of_cards() -> None:
    assert vram_bytes("12GB") == vram_bytes("12 GiB") == vram_bytes("RTX 5070") == 12 * 1024 * MIB
    assert vram_bytes("12227MiB") == 12227 * MIB
    with pytest.raises(UsageError, match="write 12GB"):
        vram_bytes("a lot")
    assert recipe_of("bf16+accumulate:4,frozen") == Recipe(precision="bf16", accumulate=4, frozen=("*",))
    with pytest.raises(UsageError, match="known are"):
        recipe_of("bf17")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "size.json")
    flags = ["--batch", "4", "--vram", "2GB", "--what-if", "sgd", "bf16+accumulate:2", "--json", out]
    assert main(["size", "mlp", *flags]) == 0
    said = capsys.readouterr().out
    assert "largest batch on 2GB (sgd):" in said
    assert "takes one more gradient buffer" in said
    data = json.loads(Path(out).read_text())
    assert [row["variant"] for row in data["estimates"]] == ["as it is", "sgd", "bf16+accumulate:2"]
    assert data["largest_batch"]["sgd"] > 100


def test_sizes_from_the_table() -> None:
    two, three, unfrozen = tabled("smolvla"), tabled("smolvla", cameras=3), tabled("smolvla", "unfrozen")
    assert [round(two.at(batch) / MIB) for batch in (1, 2, 8, 16)] == [3248, 3248, 4287, 6095]
    assert [unfrozen.at(batch) / MIB for batch in (8, 16)] == pytest.approx([17132, 29550], rel=0.001)
    assert [row.largest(room_on("12227MiB")) for row in (two, three, unfrozen)] == [37, 26, 3]
    act = tabled("act", cameras=2, resolution=(480, 640))
    assert [act.slope / MIB, act.at(1) / MIB] == pytest.approx([463.3, 1070], rel=0.01)  # as LeRobot's own: 463
    assert all(tabled(name, PLAIN).largest(room_on("12GB")) > 30 for name in TABLED)
