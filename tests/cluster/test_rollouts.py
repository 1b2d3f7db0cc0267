"""Training with rollout workers gives the local engine's data, through deaths of workers and of the trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import psutil
import pytest
import torch

from query_mutator.bounds import group_of
from query_mutator.cluster.rollouts import RolloutWorker, WorkerSpec, require_same_weights, settings_of_workers, spec_of
from query_mutator.errors import ServerDownError, UsageError
from query_mutator.files import read_json_lines
from query_mutator.session.models import ResolvedModels, open_models
from query_mutator.session.task import make_task, split_dataset
from query_mutator.testing import StubServer, start_server
from query_mutator.training.callbacks import RunParts
from query_mutator.training.config import parse_config
from query_mutator.training.run_folder import read_checkpoint
from rl_query_mutator_env import QueryMutationEnv
from tests.cluster.conftest import RayCluster, wait_until
from tests.conftest import Librarian, Softener
from tests.integration.conftest import EVERY_STEP, ROWS, write_dataset
from tests.integration.killing import kill_when, run_in, start, transcript, weights
from train_query_mutator import main

pytestmark = pytest.mark.slow

IN_FLIGHT = 4


@pytest.fixture
def server() -> Iterator[StubServer]:
    with start_server([Librarian(), Softener()], num_parallel=8, latency_ms=20) as started:
        yield started


@pytest.fixture
def flags(server: StubServer, tmp_path: Path) -> list[str]:
    """Flags of a deterministic run of two updates."""
    return [
        *("--ollama-url", server.url, "--target-model", "librarian", "--mutator-model", "softener", "--seed", "3"),
        *("--encoder", "hash", "--dataset", str(write_dataset(tmp_path / "questions.jsonl", ROWS))),
        *("--embedding-dims", "4", "--operators", "spelling,neutral,filler", "--num-mini-batch", "2"),
        *("--num-processes", "4", "--num-steps", "8", "--num-env-steps", "64", "--batch-size", str(IN_FLIGHT)),
        *("--deterministic", "--no-evaluate", "--eval-interval", "0", "--save-interval", "1"),
        *(*EVERY_STEP, "--cache", "eval"),
    ]


def trained(flags: list[str], folder: Path, *more: str) -> Path:
    """Return the run folder of a run that ended well."""
    assert main([*flags, "--save-dir", str(folder), *more]) == 0
    return (folder / "latest").resolve()


def workers_of(cluster: RayCluster) -> list[psutil.Process]:
    """Return the processes of the cluster's rollout workers that collect now."""
    return [one for node in cluster.nodes if node.is_alive for one in node.named("ray::RolloutWorker")]


def assert_same(run: Path, other: Path) -> None:
    assert transcript(run) == transcript(other)
    mine, expected = weights(run), weights(other)
    assert all(torch.equal(mine[name], expected[name]) for name in expected)


@pytest.fixture
def local(flags: list[str], tmp_path: Path) -> Path:
    """Return a run of the local engine."""
    return trained(flags, tmp_path / "local")


def test_any_number_of_workers_gives_the_local_engines_data(
    ray_cluster: RayCluster, flags: list[str], local: Path, tmp_path: Path
) -> None:
    for num_workers in ("1", "3"):  # 3: unequal shares of the environments
        run = trained(flags, tmp_path / num_workers, "--engine", "ray", "--num-workers", num_workers)
        assert_same(run, local)
        shown = ("charts/episodic_return", "charts/success", "llm/invalid_steps", "losses/value_loss")
        for row, expected in zip(*(read_json_lines(one / "metrics.jsonl") for one in (run, local)), strict=True):
            assert {key: row[key] for key in shown} == pytest.approx({key: expected[key] for key in shown})
    wait_until(lambda: not workers_of(ray_cluster), "workers outlive their trainer")


def test_a_worker_that_is_killed_repeats_no_finished_call(
    ray_cluster: RayCluster, server: StubServer, flags: list[str], local: Path, tmp_path: Path
) -> None:
    before, killed = server.stats()["calls"], list[int]()

    def kill(moments: list[int]) -> None:
        for moment in moments:
            while server.stats()["calls"] - before < moment or not (found := workers_of(ray_cluster)):
                time.sleep(0.005)
            found[len(killed) % len(found)].kill()
            killed.append(moment)

    killer = threading.Thread(target=kill, args=([8, 24],), daemon=True)
    killer.start()
    run = trained(flags, tmp_path / "killed", "--engine", "ray", "--num-workers", "2")
    assert len(killed) == 2
    assert_same(run, local)
    answered, counted = server.stats()["calls"] - before, read_checkpoint(run).progress.totals.calls
    assert 0 <= answered - counted <= len(killed) * IN_FLIGHT  # answers that were on their way


def test_a_trainer_that_is_killed_resumes_from_its_stores(
    ray_cluster: RayCluster, server: StubServer, flags: list[str], local: Path, tmp_path: Path
) -> None:
    before = server.stats()["calls"]
    folder = tmp_path / "killed"
    folder.mkdir()
    ray_flags = ["--engine", "ray", "--num-workers", "2"]
    trainer = start([*flags, "--save-dir", str(folder), *ray_flags], folder)
    assert kill_when(trainer, lambda: server.stats()["calls"] - before > 24)
    wait_until(lambda: not workers_of(ray_cluster), "workers outlive their trainer")
    run = run_in(folder)
    assert main(["--resume", str(run), *flags[:2], "--dataset", str(tmp_path / "questions.jsonl")]) == 0
    assert_same(run, local)
    answered, counted = server.stats()["calls"] - before, read_checkpoint(run).progress.totals.calls
    assert 0 <= answered - counted <= IN_FLIGHT


def test_the_error_of_a_worker_ends_the_run_with_its_line(
    ray_cluster: RayCluster, flags: list[str], tmp_path: Path
) -> None:
    (tmp_path / "down.json").write_text('{"local_server_url": "http://127.0.0.1:9"}')
    more = ["--engine", "ray", "--config", str(tmp_path / "down.json"), "--wait-for-server", "0"]
    with pytest.raises(ServerDownError, match=r"nothing answers at http://127\.0\.0\.1:9"):
        trained(flags, tmp_path / "down", *more)


def test_calls_in_flight_are_shared_and_servers_are_dealt_out() -> None:
    def dealt(urls: str, workers: int) -> list[tuple[int, tuple[str, ...]]]:
        config = parse_config(["--engine", "ray", "--num-workers", str(workers), "--num-processes", "8"])
        found = settings_of_workers(
            config, replace(group_of(ResolvedModels, config), batch_size=7, ollama_url=tuple(urls))
        )
        return [(one.batch_size, one.ollama_url) for one in found]

    assert dealt("abcde", 2) == [(4, ("a", "c", "e")), (3, ("b", "d"))]
    assert dealt("a", 3) == [(3, ("a",)), (2, ("a",)), (2, ("a",))]
    assert dealt("", 2) == [(4, ()), (3, ())]


def test_a_worker_in_place_of_a_dead_one_repeats_its_steps_without_a_call(
    server: StubServer, flags: list[str], tmp_path: Path
) -> None:
    config = parse_config(flags)
    questions = split_dataset(config).train
    with open_models(config) as models:
        task = make_task(models, config, questions)
        env = QueryMutationEnv(task, client=models.calls.client, env_id=2)
        run_dir = SimpleNamespace(path=tmp_path)
        parts = SimpleNamespace(config=config, models=models, task=task, run_dir=run_dir, env_list=[env])
        spec = spec_of(cast(RunParts, parts))
    found, calls = [], []
    for _ in range(2):
        worker, state, costs = RolloutWorker(group_of(ResolvedModels, config), 0), env.state_dict(), []
        for number in range(9):
            how = {"seed": 7} if number == 0 else {"action": number % len(task.actions)}
            step = worker.step(spec, state, env_id=2, since=0, **how)
            state = step.state
            costs.append(step.totals.calls)
        found.append((costs, step.result[0].tolist(), state["episode"]))
        worker._stack.close()
        calls.append(server.stats()["calls"])
    np.testing.assert_equal(*found)
    assert sum(found[0][0]) > 4
    assert calls[0] == calls[1]


def test_a_worker_without_the_run_folder_says_what_to_share(tmp_path: Path) -> None:
    missing = tmp_path / "of another machine"
    spec = cast(WorkerSpec, SimpleNamespace(run_dir=missing))
    worker = RolloutWorker(ResolvedModels(), 0)
    with pytest.raises(UsageError, match=r"of another machine: no such folder on .*; give a --save-dir that all"):
        worker.prepare(spec)
    assert not missing.exists()


@pytest.mark.parametrize("name", ["the sentence encoder", "librarian"])
def test_a_worker_with_other_weights_ends_the_run(name: str) -> None:
    own = {"the sentence encoder": frozenset("a"), "librarian": frozenset("b"), "softener": frozenset[str]()}
    spec = cast(WorkerSpec, SimpleNamespace(weights=own))
    require_same_weights(spec, own | {"softener": frozenset("c")})  # a server that reports no digest
    with pytest.raises(UsageError, match=rf"^{name} is not the same on .*: install the same weights on each$"):
        require_same_weights(spec, own | {name: frozenset("x")})
