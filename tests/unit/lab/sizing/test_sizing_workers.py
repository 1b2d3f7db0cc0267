"""Workers of a data loader: the queue worked by hand, the search for the smallest number, the budget, logs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from query_mutator.commands.main import main
from query_mutator.errors import UsageError
from query_mutator.lab.sizing.budget import Budget, machine_budget
from query_mutator.lab.sizing.datasets import STEP_MS, SYNTHETIC, Known, as_loader, known_answer, with_workers
from query_mutator.lab.sizing.lerobot import train_line
from query_mutator.lab.sizing.loading import Loaded, LoadTrial, Profile, run_trial
from query_mutator.lab.sizing.stalls import batch_times, predicted_stall
from query_mutator.lab.sizing.workers import Tuner, WorkersAdvice, bound_of, most_workers

PLENTY = Budget(cpus=16, memory_bytes=64 * 2**30, shm_bytes=8 * 2**30, why="a test")


def profile(item_s: list[float], *, cpu_share: float = 0.02, batch_bytes: int = 4096) -> Profile:
    return Profile(
        item_s=item_s, collate_s=0.0, step_s=0.0, batch_size=8, batch_bytes=batch_bytes, cpu_share=cpu_share, size=100
    )


def tuned(
    items: Profile, *, step_s: float, budget: Budget = PLENTY, handover_s: float = 0.001, late: float = 1.0
) -> WorkersAdvice:
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
    return Tuner(trial, items, budget, start_methods=["fork", "spawn"], time_s=60, measure=measure).advice()


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
    assert {t.start_method for t in advice.tried} == {"fork", "spawn"}


@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_known_answers_are_found_however_slow_the_handing_over_is(name: str) -> None:
    step_s, few = STEP_MS[name] / 1000, replace(PLENTY, cpus=2)
    known = known_answer(name, batch_size=8, step_s=step_s, cpus=2)
    assert (
        known
        == {
            "synthetic:io": Known(workers=3, prefetch=2, enough=True),  # 32 ms a batch, 14 ms a step
            "synthetic:cpu": Known(workers=2, prefetch=2, enough=True),  # 32 ms a batch, 24 ms a step
            "synthetic:bursty": Known(workers=1, prefetch=4, enough=True),  # 23 ms a batch, at times 67; 35 ms a step
        }[name]
    )
    items = profile(SYNTHETIC[name]().seconds, cpu_share=1.0 if name == "synthetic:cpu" else 0.02)
    for handover_s in (0.0, 0.0003, 0.005):
        advice = tuned(items, step_s=step_s, budget=few, handover_s=handover_s, late=2.0)
        assert (advice.workers, advice.prefetch, advice.enough) == (known.workers, known.prefetch, True)
        assert advice.chosen.hidden == (handover_s == 0.005)


def test_one_processor_is_not_enough_for_items_that_compute() -> None:
    assert known_answer("synthetic:cpu", batch_size=8, step_s=0.024, cpus=1) == Known(
        workers=1, prefetch=2, enough=False
    )


def test_a_trial_that_contradicts_the_queue_is_taken_again() -> None:
    taken: list[int | None] = []

    def measure(trial: LoadTrial) -> Loaded:
        taken.append(None if trial.ready else trial.workers)
        first = not trial.ready and taken.count(trial.workers) == 1
        stalls = [0.4, 0.4, 0.4] if first and trial.workers == 1 else [0.01] * 3  # as if something else had run then
        return Loaded(stalls=stalls, samples_per_s=80.0, step_s=0.1, wait_p95_s=0.0, startup_s=0.1, worker_bytes=0)

    items, trial = profile([0.01] * 50), LoadTrial(source="-", step_s=0.1)
    advice = Tuner(trial, items, PLENTY, start_methods=["fork"], time_s=60, measure=measure).advice()
    one = next(t for t in advice.tried if t.workers == 1)
    assert one.loaded.stalls == [0.4] * 3 + [0.01] * 6
    assert one.enough


def test_a_long_step_needs_no_workers() -> None:
    assert tuned(profile([0.0001] * 50), step_s=0.5).workers == 0


def test_computing_items_are_the_limit_where_processors_are_few() -> None:
    few = Budget(cpus=2, memory_bytes=None, shm_bytes=None, why="a test")
    advice = tuned(profile([0.004] * 50, cpu_share=1.0), step_s=0.005, budget=few)
    assert (advice.workers, advice.enough, advice.bound) == (2, False, "computing")


def test_bursts_are_met_by_batches_ahead_before_workers() -> None:
    items = profile(([0.001] * 31 + [0.060]) * 20)  # 23 ms a batch, one in four 67
    advice = tuned(items, step_s=0.030)
    assert (advice.workers, advice.enough) == (1, True)
    assert advice.prefetch > 2


def test_memory_and_shared_memory_limit_workers() -> None:
    narrow = Budget(cpus=16, memory_bytes=64 * 2**30, shm_bytes=64 * 2**20, why="a container")
    assert most_workers(profile([0.004], batch_bytes=8 * 2**20), narrow) == (3, "shared memory for batches")
    assert most_workers(profile([0.004]), Budget(cpus=4, memory_bytes=2**30, shm_bytes=None, why=""))[1] == "memory"
    assert [bound_of(share) for share in (0.9, 0.5, 0.1)] == ["computing", "both", "waiting"]


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
    assert "known answer for synthetic:io at 300 ms a step: num_workers=1 prefetch_factor=2; found" in said


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


#: Options of `lerobot-train` (LeRobot 0.6) that our lines use; there is no --bf16
LEROBOT_OPTIONS = {
    "dataset.repo_id", "policy.type", "policy.push_to_hub", "batch_size", "steps", "num_workers", "prefetch_factor",
    "persistent_workers", "dataloader_multiprocessing_context", "accelerator.mixed_precision",
    "accelerator.gradient_accumulation.steps",
}  # fmt: skip


def test_lines_for_lerobot_have_options_that_exist() -> None:
    line = train_line(batch_size=16, workers=4, prefetch=4, start_method="spawn", precision="bf16", accumulate=2)
    names = [word.removeprefix("--").partition("=")[0] for word in line.split()[1:]]
    assert set(names) <= LEROBOT_OPTIONS
    assert "accelerator.mixed_precision=bf16" in line
    assert "workers" not in train_line(batch_size=16)
