"""What a resumed run counts on from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from query_mutator.session.checkpoint import Checkpoint, Progress
from query_mutator.training.config import TrainConfig
from query_mutator.training.parts import RunParts, envs_seed
from query_mutator.training.resume import resumed_models, resumed_view


def parts_of(config: TrainConfig, tmp_path: Path) -> RunParts:
    return cast(
        RunParts,
        SimpleNamespace(config=config, run_dir=SimpleNamespace(path=tmp_path), learner=SimpleNamespace(updates_done=3)),
    )


def checkpoint_of(fold: Any) -> Checkpoint:
    progress = Progress(env_steps=96, invalid_steps=2, best_success=0.7)
    task, system = SimpleNamespace(validation_fold=fold), SimpleNamespace(file_digests=("a" * 64,))
    return cast(Checkpoint, SimpleNamespace(progress=progress, task=task, system=system))


@pytest.mark.parametrize(("fold", "best"), [(0, 0.7), (1, 0.0), ("none", 0.0)])
def test_the_best_success_is_that_of_the_same_questions(fold: Any, best: float, tmp_path: Path) -> None:
    view = resumed_view(parts_of(TrainConfig(), tmp_path), checkpoint_of(fold))
    assert (view.env_steps, view.updates_done, view.invalid_steps, view.best_success) == (96, 3, 2, best)


def test_a_new_run_counts_from_the_start(tmp_path: Path) -> None:
    view = resumed_view(parts_of(TrainConfig(), tmp_path), None)
    assert (view.env_steps, view.invalid_steps, view.best_success, view.is_last) == (0, 0, 0.0, False)


def test_only_a_resumed_folder_needs_the_files_it_was_started_with(tmp_path: Path) -> None:
    (tmp_path / "step_96.pt").touch()
    folder, file = TrainConfig(resume=str(tmp_path)), TrainConfig(resume=str(tmp_path / "step_96.pt"))
    assert resumed_models(folder, checkpoint_of(0)).file_digests == ("a" * 64,)
    assert resumed_models(file, checkpoint_of(0)).file_digests == ()


def test_a_servers_address_of_workers_is_that_of_evaluations() -> None:
    config = TrainConfig(engine="ray", local_server_url="http://127.0.0.1:11434")
    assert resumed_models(config, None).ollama_url == ("http://127.0.0.1:11434",)


def test_adjacent_seeds_and_updates_share_no_environment() -> None:
    seeds = [envs_seed(seed, updates_done=done) for seed in (1, 2) for done in (0, 1)]
    assert min(abs(one - other) for one in seeds for other in seeds if one != other) > 1000
    assert len(set(seeds)) == 4
