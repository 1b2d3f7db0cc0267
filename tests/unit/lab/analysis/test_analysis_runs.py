"""Runs made of several files and folders: what counts when they disagree, where time begins, where runs are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from query_mutator.errors import UsageError
from query_mutator.files.metrics import MetricsWriter
from query_mutator.lab.analysis.runs import find_runs, load_run, load_runs
from tests.promises.events import write_events, write_run
from tests.qm_command import qm


def rows(start: int, stop: int, value: float, *, every: int = 10) -> list[tuple[int, float, dict[str, float]]]:
    return [(step, step - start, {"loss": value}) for step in range(start, stop, every)]


def test_a_resumed_run_counts_once_from_the_step_it_was_resumed_at(tmp_path: Path) -> None:
    write_events(tmp_path, rows(0, 100, 1.0), name="0", began=1000.0)
    write_events(tmp_path, rows(65, 120, 2.0), name="1", began=5000.0)
    loss = load_run(tmp_path).series["loss"]
    assert loss.step.tolist() == [0, 10, 20, 30, 40, 50, 60, 65, 75, 85, 95, 105, 115]
    assert loss.value.tolist() == [1.0] * 7 + [2.0] * 6
    assert loss.wall[7] == 4000.0


def test_files_written_side_by_side_clash_at_equal_steps_only(tmp_path: Path) -> None:
    write_events(tmp_path, rows(0, 60, 1.0), name="0", began=1000.0)
    write_events(tmp_path, rows(5, 60, 2.0), name="1", began=1010.0)
    write_events(tmp_path, [(20, 0.0, {"loss": 3.0})], name="2", began=1025.0)
    loss = load_run(tmp_path).series["loss"]
    assert loss.step.tolist() == list(range(0, 60, 5))
    assert loss.value[loss.step == 20] == 3.0


def test_a_session_start_drops_what_was_logged_from_its_step_on(tmp_path: Path) -> None:
    write_events(tmp_path, rows(0, 100, 1.0), name="0", began=1000.0)
    write_events(tmp_path, rows(90, 120, 2.0), name="1", began=5000.0, restart=31)
    assert load_run(tmp_path).series["loss"].step.tolist() == [0, 10, 20, 30, 90, 100, 110]


def test_a_suffixed_folder_is_a_continuation_when_its_steps_continue(tmp_path: Path) -> None:
    write_events(tmp_path / "uni_6", rows(10, 100, 1.0), began=1000.0)
    write_events(tmp_path / "uni_6_2", rows(80, 150, 2.0), began=5000.0)
    write_events(tmp_path / "uni_6_3", rows(0, 50, 3.0), began=9000.0)  # starts again from step 0: another run
    run = load_run(tmp_path / "uni_6")
    assert [folder.name for folder in run.folders] == ["uni_6", "uni_6_2"]
    assert run.last_step == 140
    assert load_run(tmp_path / "uni_6", merge_suffixed=False).last_step == 90
    apart = load_runs([tmp_path / "uni_6", tmp_path / "uni_6_2"])
    assert [run.last_step for run in apart] == [90, 140]


def test_numbered_runs_of_stable_baselines3_stay_apart(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        write_run(tmp_path / f"PPO_{number}", {"rollout/ep_rew_mean": [1.0, 2.0]})
    paths = find_runs(["PPO_*"], logdir=str(tmp_path))
    assert [path.name for path in paths] == ["PPO_1", "PPO_2", "PPO_10"]
    assert all(len(run.folders) == 1 for run in load_runs(paths))


def test_one_t0_for_all_tags_is_the_earliest_event(tmp_path: Path) -> None:
    write_events(tmp_path, [(1, 300.0, {"late": 1.0}), (2, 400.0, {"later": 1.0})], began=1000.0)
    run = load_run(tmp_path)
    assert run.t0 == 1000.0
    assert (run.series["late"].wall[0], run.series["later"].wall[0]) == (300.0, 400.0)


def test_a_folder_of_our_trainer_has_settings_hardware_and_what_tensorboard_lacks(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write({"validation/success": 0.25}, step=512, wall_s=3.0)
    writer.rows.append({"step": 1024, "wall_s": 6.0, "validation/score": 0.75})
    writer.close()
    config = {"flags": {"lr": 1e-3, "optim": {"eps": 1e-5}}, "hardware": {"processor": "some"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = load_run(tmp_path)
    assert run.config == {"lr": 1e-3, "optim.eps": 1e-5}
    assert run.hardware == {"processor": "some"}
    assert run.series["validation/success"].value.tolist() == [0.25]
    score = run.series["validation/score"]
    assert (score.step[0], score.wall[0], score.value[0]) == (1024, 6.0, 0.75)


def test_cleanrl_s_table_of_hyperparameters_is_the_config(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    writer.add_text("hyperparameters", "|param|value|\n|-|-|\n|learning_rate|0.00025|\n|seed|3|\n|cuda|True|")
    writer.add_scalar("charts/episodic_return", 1.0, 5)
    writer.close()
    assert load_run(tmp_path).config == {"learning_rate": 0.00025, "seed": 3, "cuda": True}


def test_csv_and_json_tables_of_other_trainers(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "progress.csv").write_text(
        "time/total_timesteps,time/time_elapsed,rollout/ep_rew_mean,note\n64,1,20.5,x\n128,2,,x\n192,3,22.5,x\n"
    )
    series = load_run(tmp_path / "a").series
    assert list(series) == ["rollout/ep_rew_mean"]
    assert series["rollout/ep_rew_mean"].step.tolist() == [64, 192]
    assert series["rollout/ep_rew_mean"].wall.tolist() == [1.0, 3.0]
    table = tmp_path / "export.csv"
    table.write_text("Wall time,Step,Value\n1700000000,1,0.5\n1700000060,2,0.25\n")
    value = load_run(table).series["Value"]
    assert (value.wall.tolist(), value.value.tolist()) == ([0.0, 60.0], [0.5, 0.25])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "nowhere.*--logdir"),
        ("", "a folder of runs.*uni_6"),
        ("empty", "no numbers"),
        ("bad", "config.json"),
    ],
)
def test_a_path_without_a_run_says_what_to_do(tmp_path: Path, name: str, words: str) -> None:
    write_events(tmp_path / "uni_6", rows(10, 100, 1.0))
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "bad", {"loss": [1.0]})
    (tmp_path / "bad" / "config.json").write_text("{")
    with pytest.raises(UsageError, match=words):
        load_runs(find_runs([str(tmp_path / name)]))


@pytest.mark.parametrize("wall", ["1e999", "NaN", "-1e999"])
def test_times_that_are_not_finite_are_not_known(wall: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("a-s1", "a-s2", "b-s1", "b-s2"):
        (tmp_path / run).mkdir()
        times = [wall if (run, step) == ("a-s1", 7) else f"{step}" for step in range(1, 8)]
        rows = [f'{{"step": {time}, "wall_s": {time}, "validation/success": 0.5}}\n' for time in times[:-1]]
        rows.append(f'{{"step": 7, "wall_s": {times[-1]}, "validation/success": 0.5}}\n')
        (tmp_path / run / "metrics.jsonl").write_text("".join(rows))
    assert qm("analyze", *sorted(tmp_path.iterdir())) == 0


def test_a_plan_run_is_left_out_of_a_pattern_and_said_to_log_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "ppo", {"rollout/ep_rew_mean": [1.0, 2.0]})
    plan = tmp_path / "plan"
    plan.mkdir()
    (plan / "config.json").write_text(json.dumps({"flags": {"algo": "plan"}}), encoding="utf-8")
    (plan / "metrics.jsonl").touch()
    assert find_runs([str(tmp_path / "p*")]) == [tmp_path / "ppo"]
    assert qm("analyze", plan) == 2
    assert f"{plan}: a run of qm plan, which logs no metrics; see qm show {plan}" in capsys.readouterr().err
