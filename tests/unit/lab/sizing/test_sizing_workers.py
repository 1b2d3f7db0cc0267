"""How many workers pay, by a queue and by trials; what replay, rollout and attention caches take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from query_mutator.commands.main import main
from query_mutator.errors import UsageError
from query_mutator.lab.sizing.collecting import cache_bytes, cache_line, replay_bytes, rollout_bytes, size_calls
from query_mutator.lab.sizing.loading import SYNTHETIC, as_loader, with_workers
from query_mutator.lab.sizing.machine import Budget, machine_budget
from query_mutator.lab.sizing.workers import (
    Advice,
    Loaded,
    LoadTrial,
    Profile,
    Tuner,
    batch_times,
    most_workers,
    predicted_stall,
    run_trial,
)


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


PLENTY = Budget(cpus=16, memory_bytes=64 * 2**30, shm_bytes=8 * 2**30, why="a test")


def profile(item_s: list[float], *, cpu_share: float = 0.02, batch_bytes: int = 4096) -> Profile:
    return Profile(item_s=item_s, collate_s=0.0, step_s=0.0, batch_size=8, batch_bytes=batch_bytes, cpu_share=cpu_share)


def tuned(
    items: Profile, *, step_s: float, budget: Budget = PLENTY, handover_s: float = 0.001, late: float = 1.0
) -> Advice:
    """Return the advice where trials give what the queue worked by hand says, and a hand-over, at times `late`."""
    batch_s = batch_times(items.item_s, batch_size=items.batch_size)

    def measure(trial: LoadTrial) -> Loaded:
        stall = predicted_stall(
            batch_s,
            workers=trial.workers or 0,
            prefetch=trial.prefetch,
            step_s=step_s,
            cpus=budget.cpus,
            cpu_share=items.cpu_share,
        )
        for_data = 0.0 if trial.ready else step_s * stall / (1 - stall)
        passing = handover_s if trial.workers else 0.0
        stalls = [(for_data + one) / (for_data + one + step_s) for one in (passing, passing, late * passing)]
        return Loaded(
            stalls=stalls,
            samples_per_s=items.batch_size * (1 - stalls[0]) / step_s,
            step_s=step_s,
            wait_p95_s=0.0,
            startup_s=0.1,
            worker_bytes=0,
        )

    trial = LoadTrial(source="-", step_s=step_s)
    return Tuner(trial, items, budget, time_s=60, measure=measure).advice()


def test_a_queue_worked_by_hand() -> None:
    steady = [0.030] * 400
    assert predicted_stall(steady, workers=0, prefetch=2, step_s=0.010) == pytest.approx(0.75)
    assert predicted_stall(steady, workers=1, prefetch=2, step_s=0.010) == pytest.approx(2 / 3, rel=0.01)
    assert predicted_stall(steady, workers=2, prefetch=2, step_s=0.010) == pytest.approx(1 / 3, rel=0.05)
    assert predicted_stall(steady, workers=3, prefetch=2, step_s=0.010) == pytest.approx(0.0, abs=1e-9)


def test_computing_workers_beyond_the_processors_slow_each_other_down() -> None:
    steady = [0.030] * 400
    stalls = [
        predicted_stall(steady, workers=workers, prefetch=2, step_s=0.010, cpus=2, cpu_share=1.0)
        for workers in (2, 4, 8)
    ]
    assert stalls == pytest.approx([1 / 3] * 3, rel=0.05)


def test_batches_ahead_absorb_a_burst() -> None:
    bursty = ([0.005] * 7 + [0.060]) * 100  # 11.9 ms on average, at most 60
    stalls = [predicted_stall(bursty, workers=1, prefetch=prefetch, step_s=0.015) for prefetch in (2, 4, 8)]
    assert stalls[0] > 0.05 > stalls[2]
    assert stalls == sorted(stalls, reverse=True)


def test_waiting_items_need_as_many_workers_as_a_step_takes_less() -> None:
    advice = tuned(profile([0.004] * 50), step_s=0.0115)  # 32 ms a batch
    assert (advice.workers, advice.prefetch, advice.enough) == (3, 2, True)  # 10.7 ms a batch at 11.5 ms a step
    assert {t.workers for t in advice.tried} >= {2, 3}  # one fewer was tried and is not enough


@pytest.mark.parametrize(
    ("name", "step_s", "workers", "prefetch"),
    [
        ("synthetic:io", 0.014, 3, 2),  # 32 ms a batch, 14 ms a step
        ("synthetic:cpu", 0.024, 2, 2),  # 32 ms a batch, 24 ms a step
        ("synthetic:bursty", 0.035, 1, 4),  # 23 ms a batch, at times 67; 35 ms a step
    ],
)
@pytest.mark.parametrize("handover_s", [0.0, 0.0003, 0.005])
def test_known_answers_are_found_however_slow_the_transfer_is(
    name: str, step_s: float, workers: int, prefetch: int, handover_s: float
) -> None:
    items = profile(SYNTHETIC[name]().seconds, cpu_share=1.0 if name == "synthetic:cpu" else 0.02)
    advice = tuned(items, step_s=step_s, budget=replace(PLENTY, cpus=2), handover_s=handover_s, late=2.0)
    assert (advice.workers, advice.prefetch, advice.enough) == (workers, prefetch, True)


def test_a_trial_that_contradicts_the_queue_is_taken_again() -> None:
    taken: list[int | None] = []

    def measure(trial: LoadTrial) -> Loaded:
        taken.append(None if trial.ready else trial.workers)
        first = not trial.ready and taken.count(trial.workers) == 1
        stalls = [0.4, 0.4, 0.4] if first and trial.workers == 1 else [0.01] * 3  # as if something else had run then
        return Loaded(stalls=stalls, samples_per_s=80.0, step_s=0.1, wait_p95_s=0.0, startup_s=0.1, worker_bytes=0)

    items, trial = profile([0.01] * 50), LoadTrial(source="-", step_s=0.1)
    advice = Tuner(trial, items, PLENTY, time_s=60, measure=measure).advice()
    one = next(t for t in advice.tried if t.workers == 1)
    assert one.loaded.stalls == [0.4] * 3 + [0.01] * 6
    assert one.enough


def test_a_long_step_needs_no_workers() -> None:
    assert tuned(profile([0.0001] * 50), step_s=0.5).workers == 0


def test_computing_items_are_the_limit_where_processors_are_few() -> None:
    few = Budget(cpus=2, memory_bytes=None, shm_bytes=None, why="a test")
    advice = tuned(profile([0.004] * 50, cpu_share=1.0), step_s=0.005, budget=few)
    assert (advice.workers, advice.enough, advice.profile.bound) == (2, False, "computing")


def test_bursts_are_met_by_batches_ahead_before_workers() -> None:
    items = profile(([0.001] * 31 + [0.060]) * 20)  # 23 ms a batch, one in four 67
    advice = tuned(items, step_s=0.030)
    assert (advice.workers, advice.enough) == (1, True)
    assert advice.prefetch > 2


def test_memory_and_shared_memory_limit_workers() -> None:
    narrow = Budget(cpus=16, memory_bytes=64 * 2**30, shm_bytes=64 * 2**20, why="a container")
    assert most_workers(profile([0.004], batch_bytes=8 * 2**20), narrow) == (3, "shared memory for batches")
    assert most_workers(profile([0.004]), Budget(cpus=4, memory_bytes=2**30, shm_bytes=None, why=""))[1] == "memory"
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


@pytest.mark.slow
def test_the_command_on_items_that_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "workers.json"
    flags = ["--step-ms", "300", "--window-s", "0.1", "--time-s", "30", "--start-method", "fork", "--json", str(out)]
    assert main(["size", "workers", "--dataset", "synthetic:io", *flags]) == 0
    said = capsys.readouterr().out
    assert "they wait, so workers help beyond the number of processors" in said
    data = json.loads(out.read_text())
    assert data["workers"] == 1  # 32 ms a batch: without a worker steps wait 10 % of the time
    assert "DataLoader(..., batch_size=8, num_workers=1, prefetch_factor=2, persistent_workers=True" in said
    assert "--num_workers=1 --prefetch_factor=2 --persistent_workers=true" in said


def test_a_data_set_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_bad.py").write_text("numbers = 3\ndef broken(): raise ZeroDivisionError('of mine')\n")
    for source, words in (("nowhere", "no such folder"), ("mine_bad:numbers", "should be a data set or a DataLoader")):
        with pytest.raises(UsageError, match=words):
            as_loader(source, batch_size=None)
    with pytest.raises(UsageError, match="ZeroDivisionError: of mine"):
        run_trial(LoadTrial(source="mine_bad:broken"))


def test_files_of_a_folder_and_where_a_trial_begins(tmp_path: Path) -> None:
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", np.full(3, number))
    loader = with_workers(as_loader(str(tmp_path), batch_size=2), workers=0, prefetch=2, start_method=None, first=2)
    batches = [batch for _, batch in zip(range(4), loader, strict=False)]
    assert [tuple(batch.shape) for batch in batches] == [(2, 3)] * 4
    assert sorted(int(row[0]) for batch in batches[:2] for row in batch) == [0, 1, 2, 3]


def test_a_loader_of_a_program_keeps_its_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "def make():\n    return DataLoader(TensorDataset(torch.zeros(100, 6)), batch_size=5)\n"
        "def step(batch):\n    assert batch[0].shape == (5, 6)\n"
    )
    found = Loaded(
        **run_trial(LoadTrial(source="mine:make", workers=1, step="mine:step", window_s=0.05, windows=1))  # type: ignore[arg-type]
    )
    assert found.samples_per_s > 0
