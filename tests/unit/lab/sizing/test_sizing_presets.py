"""Presets against published figures; what is measured and calibrated; memory of buffers; flags for a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from query_mutator.commands import size_presets  # noqa: F401  registers policy and iqn
from query_mutator.commands.main import main
from query_mutator.errors import UsageError
from query_mutator.lab.sizing.act import ACT
from query_mutator.lab.sizing.cards import GIB, Calibration, fit_calibration, read_calibration
from query_mutator.lab.sizing.collecting import cache_bytes, cache_line, replay_bytes, rollout_bytes, size_calls
from query_mutator.lab.sizing.lerobot import smolvla
from query_mutator.lab.sizing.memory import estimate
from query_mutator.lab.sizing.presets import PRESETS, preset
from query_mutator.lab.sizing.real_steps import bisect, knee_line, knee_of
from query_mutator.lab.sizing.tracker import _warn_of_guesses
from query_mutator.lab.sizing.workload import Workload

MIB = 2**20


def parameters(module: nn.Module, *, trained: bool = False) -> int:
    return sum(part.numel() for part in module.parameters() if part.requires_grad or not trained)


def test_act_has_the_parameters_of_the_real_one() -> None:
    with torch.device("meta"):
        assert round(parameters(ACT()) / 1e6, 1) == 51.6


def test_smolvla_is_from_a_table() -> None:
    two, three, unfrozen = smolvla(), smolvla(cameras=3), smolvla(unfrozen=True)
    assert [round(two.fit.at(batch) / MIB) for batch in (1, 2, 8, 16)] == [3248, 3248, 4287, 6095]
    assert [unfrozen.fit.at(batch) / MIB for batch in (8, 16)] == pytest.approx([17132, 29550], rel=0.001)
    room = Calibration().room(12227 * MIB)
    assert [row.fit.largest(room) for row in (two, three, unfrozen)] == [37, 26, 3]
    with pytest.raises(UsageError, match="2 or 3 cameras"):
        smolvla(cameras=7)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith(("sb3", "cleanrl", "iqn"))])
def test_control_networks_can_be_sized(name: str) -> None:
    assert estimate(preset(name), 4).peak > 0


def test_dqn_of_cleanrl_has_a_form_without_images() -> None:
    assert {name: preset(name).name for name in ("cleanrl-dqn", "cleanrl-dqn-atari", "sb3-dqn-cnn")} == {
        "cleanrl-dqn": "dqn, mlp",
        "cleanrl-dqn-atari": "dqn, images",
        "sb3-dqn-cnn": "dqn, images",
    }


def test_networks_have_as_many_parameters_as_those_of_stable_baselines3() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    real = sb3.PPO("MlpPolicy", "CartPole-v1", device="cpu").policy
    assert parameters(preset("sb3-ppo-mlp").build()) == parameters(real)


def test_replay_and_rollout_take_what_those_of_stable_baselines3_take() -> None:
    pytest.importorskip("stable_baselines3")
    import numpy as np
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer

    seen, actions = spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6)
    buffer = ReplayBuffer(50, seen, actions, device="cpu")
    held = (
        buffer.observations,
        buffer.next_observations,
        buffer.actions,
        buffer.rewards,
        buffer.dones,
        buffer.timeouts,
    )
    assert sum(part.nbytes for part in held) == replay_bytes(4 * 84 * 84, capacity=50)
    rollout = RolloutBuffer(16, spaces.Box(-1, 1, (8,), np.float32), actions, device="cpu", n_envs=2)
    kept = (
        rollout.observations, rollout.actions, rollout.rewards, rollout.returns, rollout.episode_starts, rollout.values,
        rollout.log_probs, rollout.advantages,
    )  # fmt: skip
    assert sum(part.nbytes for part in kept) == rollout_bytes(8 * 4, steps=16, num_envs=2)


def test_sizes_that_a_preset_has_not() -> None:
    with pytest.raises(UsageError, match="--tokens is not for act; it is for"):
        preset("act", tokens=3)


def test_the_knee() -> None:
    assert knee_of({1: 10, 2: 19, 4: 36, 8: 38, 16: 38}) == 4
    assert "knee at batch 4: 95 %" in knee_line({1: 10, 2: 19, 4: 36, 8: 38, 16: 38}).replace("95%", "95 %")
    assert "no knee up to batch 4" in knee_line({1: 10, 2: 19, 4: 36})


@pytest.mark.parametrize("truth", [0, 1, 5, 37])
def test_bisection_finds_the_largest_that_fits(truth: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= truth

    assert bisect(fits) == truth
    assert max(tried) <= max(1, 2 * truth)


def test_a_calibration_is_recovered_from_measured_points() -> None:
    estimated = [1000.0 * MIB, 2000.0 * MIB, 4000.0 * MIB]
    found = fit_calibration([500 * MIB + 1.1 * one for one in estimated], estimated, totals=True)
    assert (round(found.context_bytes / MIB), round(found.factor, 3)) == (500, 1.1)
    assert found.room(8000 * MIB) == pytest.approx((8000 * 0.98 - 500) / 1.1 * MIB, rel=1e-6)
    assert fit_calibration([2.2], [2.0], totals=False).factor == pytest.approx(1.1)
    with pytest.raises(ValueError, match="does not grow"):
        fit_calibration([4.0, 2.0], [1.0, 2.0], totals=True)


def test_the_documented_calibration_of_act_has_a_result() -> None:
    # Estimates of act at batch 8 and 16; the figures of nvidia-smi are rounded to 0.1 GiB.
    estimated = [2.25 * GIB, 3.975 * GIB]
    found = fit_calibration([2.6 * GIB, 4.6 * GIB], estimated, totals=True)
    assert (found.context_bytes, 0.9 < found.factor < 1.1) == (600 * MIB, True)
    assert found.rests_on == "2 measured points, context of 600 MiB by rule of thumb"
    with pytest.raises(ValueError, match="leave out --totals"):
        fit_calibration([0.2 * GIB], [0.2 * GIB], totals=True)


@pytest.mark.parametrize(
    "wrong", ['"factor": 0', '"factor": NaN', '"context_bytes": -1', '"slack": 1', '"factor": "x"']
)
def test_a_calibration_that_cannot_be_is_refused(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text("{" + wrong + "}")
    with pytest.raises(ValueError, match="`qm size calibrate` writes such a file"):
        read_calibration(path)


@pytest.mark.parametrize(("seen", "expected"), [(False, 0), (True, 1)])
def test_only_code_of_the_model_that_reads_a_number_is_warned_of(
    seen: bool, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = module(x).sum()
        return total * total.item() if seen else total

    _warn_of_guesses.cache_clear()
    workload = Workload(name="net", build=lambda: nn.Linear(4, 4), batch=lambda b: (torch.zeros(b, 4),), loss=loss)
    estimate(workload, 2)
    assert sum(".item()" in record.getMessage() for record in caplog.records) == expected


def test_calibrating_from_a_log_and_using_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.log").write_text("INFO step:200 updt_s:0.1 mem_gb:0.40\nINFO step:400 updt_s:0.1 mem_gb:0.42\n")
    assert main(["size", "calibrate", "mlp", "--log", "train.log", "--log-batch", "16"]) == 0
    assert "1 measured point" in capsys.readouterr().out
    assert main(["size", "smolvla", "--vram", "12GB", "--calibration", "calibration.json", "--batch", "8"]) == 0
    said = capsys.readouterr().out
    assert "from a table" in said
    assert "lerobot-train --dataset.repo_id=USER/DATASET --policy.type=smolvla" in said
    assert json.loads(Path("calibration.json").read_text())["rests_on"] == "1 measured point"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["calibrate", "mlp"], "give --measured"),
        (["calibrate", "mlp", "--measured", "8:2GB"], "write BATCH=MEMORY"),
        (["calibrate", "mlp", "--measured", "8=lots"], "write BATCH=MEMORY"),
        (["verify", "mlp", "--batch", "0"], "must be at least 1"),
        (["verify", "mlp", "--largest", "--device", "cpu"], "--largest needs a GPU"),
        (["throughput", "mlp", "--seconds", "-1"], "must be above 0"),
        (["mlp", "--batch", "1", "--what-if", "frozen:nowhere"], "matches no parameter"),
        (["calibrate", "mlp", "--log", "nowhere.log"], "No such file"),
        (["mlp", "--calibration", "nowhere.json"], "writes such a file"),
        (["verify", "mlp", "--device", "cuda"], "PyTorch sees no GPU"),
        (["smolvla", "--what-if", "bf16"], "knows unfrozen alone"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], words: str) -> None:
    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match=words):
        main(["size", *argv])


@pytest.mark.slow
def test_throughput_by_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--batch", "8", "64", "--seconds", "0.1", "--device", "cpu"]
    assert main(["size", "throughput", "cleanrl-ppo", *flags]) == 0
    assert "knee" in capsys.readouterr().out


def test_memory_of_a_replay_buffer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "replay", "--capacity", "1000000", "--num-collectors", "8", "--parameters", "1700000"]) == 0
    said = capsys.readouterr().out
    assert "an observation takes 28,224 bytes" in said
    assert "53,852.1" in said  # a million pairs of Atari observations
    with pytest.raises(UsageError, match="write a shape"):
        main(["size", "replay", "--obs", "4x"])


def test_calls_and_environments_follow_from_slots_and_time() -> None:
    advice = size_calls(4, width=16, service_s=0.5)
    assert advice is not None
    assert (advice.batch_size, advice.num_processes, advice.steps_per_s) == (4, 8, 4.0)
    assert "4 slots, 0.5 s a call" in str(advice)
    assert "or more" in str(size_calls(16, width=16, service_s=0.5))
    assert size_calls(None, width=16, service_s=0.5) is None


def test_memory_of_attention_caches() -> None:
    llama = {
        "llama.block_count": 32, "llama.attention.head_count": 32, "llama.attention.head_count_kv": 8,
        "llama.embedding_length": 4096,
    }  # fmt: skip
    assert cache_bytes(llama, num_ctx=4096, slots=4) == 4 * 512 * 2**20  # 128 KiB a token
    assert cache_bytes({}, num_ctx=4096, slots=4) is None
    assert cache_line(llama, num_ctx=4096, slots=4).startswith("attention caches: 2,048 MiB for 4 slots of 4096 tokens")
