"""How many workers pay, by a simulated queue; what replay, rollout and attention caches take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from query_mutator.commands.main import main
from query_mutator.errors import UsageError
from query_mutator.lab.sizing.collecting import cache_bytes, cache_line, replay_bytes, rollout_bytes
from query_mutator.lab.sizing.loading import profile_items
from query_mutator.lab.sizing.machine import Budget, machine_budget
from query_mutator.lab.sizing.workers import Profile, advice_text, advise, predicted_wait


def test_replay_and_rollout_take_what_those_of_stable_baselines3_take() -> None:
    pytest.importorskip("stable_baselines3")
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


def test_memory_of_a_replay_buffer_and_of_attention_caches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "replay", "--capacity", "1000000", "--num-collectors", "8", "--parameters", "1700000"]) == 0
    said = capsys.readouterr().out
    assert "an observation takes 28,224 bytes" in said
    assert "53,852.1" in said  # a million pairs of Atari observations
    sizes = {"block_count": 32, "attention.head_count": 32, "attention.head_count_kv": 8, "embedding_length": 4096}
    llama = {f"llama.{name}": size for name, size in sizes.items()}
    assert cache_bytes(llama, num_ctx=4096, slots=4) == 4 * 512 * 2**20  # 128 KiB a token
    assert cache_bytes({}, num_ctx=4096, slots=4) is None
    assert cache_line(llama, num_ctx=4096, slots=4).startswith("attention caches: 2,048 MiB for 4 slots of 4096 tokens")


PLENTY = Budget(cpus=16, memory_bytes=64 * 2**30, shm_bytes=8 * 2**30, why="a test")


def profile(item_s: list[float], *, cpu_share: float = 0.02, batch_bytes: int = 4096) -> Profile:
    return Profile(item_s=item_s, collate_s=0.0, step_s=0.0, batch_size=8, batch_bytes=batch_bytes, cpu_share=cpu_share)


def stall(batch_s: list[float], *, workers: int, prefetch: int = 2, step_s: float) -> float:
    wait_s = predicted_wait(batch_s, workers=workers, prefetch=prefetch, step_s=step_s)
    return wait_s / (wait_s + step_s)


@pytest.mark.parametrize(("workers", "share"), [(0, 0.75), (1, 2 / 3), (2, 1 / 3), (3, 0.0)])
def test_a_queue_worked_by_hand(workers: int, share: float) -> None:
    assert stall([0.030] * 400, workers=workers, step_s=0.010) == pytest.approx(share, rel=0.05, abs=1e-9)


def test_batches_ahead_absorb_a_burst() -> None:
    bursty = ([0.005] * 7 + [0.060]) * 100  # 11.9 ms on average, at most 60
    stalls = [stall(bursty, workers=1, prefetch=prefetch, step_s=0.015) for prefetch in (2, 4, 8)]
    assert stalls[0] > 0.05 > stalls[2]
    assert stalls == sorted(stalls, reverse=True)


BURSTY = ([0.001] * 31 + [0.060]) * 128  # 23 ms a batch of eight, at times 67
FEW = replace(PLENTY, cpus=2)


@pytest.mark.parametrize(
    ("items", "computes", "step_s", "budget", "workers", "prefetch", "enough"),
    [
        ([0.004] * 50, 0.02, 0.014, FEW, 3, 2, True),  # 32 ms a batch, which waits: beyond the processors
        ([0.004] * 50, 1.0, 0.024, FEW, 2, 2, True),
        ([0.004] * 50, 1.0, 0.005, FEW, 2, 2, False),  # more would slow each other down
        (BURSTY, 0.02, 0.035, FEW, 1, 4, True),  # batches ahead before workers
        ([0.0001] * 50, 0.02, 0.5, PLENTY, 0, 2, True),
        ([0.004] * 50, 0.02, 0.0115, PLENTY, 3, 2, True),  # 10.7 ms a batch at 11.5 ms a step
    ],
)
def test_the_smallest_number_of_workers_that_is_enough(
    items: list[float], computes: float, step_s: float, budget: Budget, workers: int, prefetch: int, enough: bool
) -> None:
    advice = advise(profile(items, cpu_share=computes), budget, step_s=step_s)
    assert (advice.chosen.workers, advice.chosen.prefetch, advice.enough) == (workers, prefetch, enough)
    assert f"num_workers={workers}" in advice_text(advice)
    assert ("make items cheaper" in advice_text(advice)) != enough


def test_memory_and_shared_memory_limit_workers() -> None:
    narrow = replace(PLENTY, shm_bytes=64 * 2**20)
    found = advise(profile([0.1], batch_bytes=8 * 2**20), narrow, step_s=0.001)
    assert (found.most, found.limited_by, found.enough) == (3, "shared memory for batches", False)
    assert advise(profile([0.1]), replace(PLENTY, memory_bytes=2**30), step_s=0.001).limited_by == "memory"
    assert [profile([0.1], cpu_share=share).bound for share in (0.9, 0.5, 0.1)] == ["computing", "both", "waiting"]


def test_the_budget_of_a_container(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/jobs/mine"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/mine\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable:  8000000 kB\n")
    (group / "cpu.max").write_text("max 100000\n")
    (group.parent / "cpu.max").write_text("50000 100000\n")
    (group / "memory.max").write_text("1073741824\n")
    found = machine_budget(tmp_path)
    assert (found.cpus, found.memory_bytes, found.shm_bytes) == (0.5, 2**30, None)
    assert "cgroup 0.5 processors" in str(found)
    (group / "memory.max").write_text("max\n")
    assert machine_budget(tmp_path).memory_bytes == 8000000 * 1024


MINE = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
numbers = 3
class Slow:
    def __len__(self): return 64
    def __getitem__(self, at):
        time.sleep(0.004)
        return torch.zeros(1024)
def make(): return DataLoader(TensorDataset(torch.zeros(100, 6)), batch_size=5)
def step(batch): assert batch[0].shape == (5, 6)
def broken(): raise ZeroDivisionError("of mine")
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)


@pytest.mark.slow
def test_the_command_on_items_that_wait(mine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dataset", "mine:Slow", "--step-ms", "300", "--seconds", "0.3", "--json", str(tmp_path / "workers.json")]
    assert main(["size", "workers", *flags]) == 0
    said = capsys.readouterr().out
    assert "they wait, so workers help beyond the number of processors" in said
    data = json.loads((tmp_path / "workers.json").read_text())
    assert data["chosen"]["workers"] == 1  # 32 ms a batch: without a worker steps wait 10 % of the time
    assert "DataLoader(..., batch_size=8, num_workers=1, prefetch_factor=2, persistent_workers=True" in said
    assert "--num_workers=1 --prefetch_factor=2 --persistent_workers=true" in said


def test_a_loader_of_a_program_keeps_its_batch_size_and_times_its_step_or_is_one_line(mine: None) -> None:
    found = profile_items("mine:make", batch_size=None, step="mine:step", seconds=0.05)
    assert (found.batch_size, found.batch_bytes) == (5, 5 * 6 * 4)
    for source, words in (
        ("nowhere", "give package.module:function"),
        ("mine:numbers", "should be a data set or a DataLoader"),
        ("mine:broken", "ZeroDivisionError: of mine"),
    ):
        with pytest.raises(UsageError, match=words):
            profile_items(source, batch_size=None, step=None, seconds=0.1)
