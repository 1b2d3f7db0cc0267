"""The event reader against TensorBoard's own, runs of several files, metric files, curves, watch rules, and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util import tensor_util

from query_mutator.errors import UsageError
from query_mutator.files.run_dir import METRICS, MetricsWriter
from query_mutator.lab.analysis.curves import Curve, UnknownDivisorError, curves_of, reduced, setting, value_at, watch
from query_mutator.lab.analysis.events import EventFile, read_event_file
from query_mutator.lab.analysis.report import write_csv
from query_mutator.lab.analysis.runs import find_runs, load_run, load_runs
from query_mutator.lab.analysis.spec import DEFAULT_SPEC, MetricSpec, TagPattern, WatchRule, read_spec
from tests.promises.events import write_events, write_run
from tests.qm_command import qm

Triples = dict[str, list[tuple[int, float, float]]]


def tensorboards(path: Path) -> Triples:
    """Return every scalar as TensorBoard's loader gives it, which turns old ones into tensors."""
    found: Triples = {}
    plugins: dict[str, str] = {}
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            plugin = plugins.setdefault(value.tag, value.metadata.plugin_data.plugin_name)
            if plugin == "scalars":
                number = float(tensor_util.make_ndarray(value.tensor).item())
                found.setdefault(value.tag, []).append((event.step, event.wall_time, number))
    return found


def triples(file: EventFile) -> Triples:
    return {
        tag: list(zip(points.step.tolist(), points.wall.tolist(), points.value.tolist(), strict=True))
        for tag, points in file.scalars.items()
    }


def test_a_file_of_our_trainer_reads_as_in_tensorboard(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, first_step=512)
    for step in range(600, 5000, 7):
        writer.write(
            {"validation/success": step / 9000, "llm/calls": step, "losses/entropy": -1 / step}, step=step, wall_s=1
        )
    writer.close()
    path = next((tmp_path / "tensorboard").iterdir())
    file = read_event_file(path)
    assert triples(file) == tensorboards(path)
    assert file.restarts == [513]


def test_newer_scalars_texts_and_other_plugins(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    for step in range(300):
        writer.add_scalar("new/style", step / 7, step, new_style=True)
        writer.add_scalar("new/double", step / 7, step, new_style=True, double_precision=True)
        writer.add_scalar("old/style", float("nan") if step == 5 else step, step)
    writer.add_histogram("weights", np.arange(10.0), 3)
    writer.add_text("hyperparameters", "|param|value|\n|-|-|\n|lr|0.001|")
    writer.close()
    path = next(tmp_path.iterdir())
    file, expected = read_event_file(path), tensorboards(path)
    found = triples(file)
    assert np.isnan(found["old/style"].pop(5)[2])
    assert np.isnan(expected["old/style"].pop(5)[2])
    assert found == expected
    assert file.texts["hyperparameters/text_summary"].endswith("|lr|0.001|")


@pytest.mark.parametrize("cut", [1, 5, 13, 20])
def test_a_torn_last_record_is_left_out(tmp_path: Path, cut: int) -> None:
    path = write_events(tmp_path, [(step, step, {"a": step}) for step in range(4)])
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_event_file(path).scalars["a"].step.tolist() == [0, 1, 2]


def test_what_follows_a_damaged_frame_is_left_out(tmp_path: Path) -> None:
    path = write_events(tmp_path, [(step, step, {"a": step}) for step in range(100)])
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    path.write_bytes(data)
    steps = read_event_file(path).scalars["a"].step
    assert 40 <= len(steps) <= 50
    assert (steps == np.arange(len(steps))).all()
    (tmp_path / "empty").write_bytes(b"")
    assert not read_event_file(tmp_path / "empty").scalars


def test_records_inside_a_record_are_not_taken_for_frames(tmp_path: Path) -> None:
    inner = write_events(tmp_path / "inner", [(step, step, {"inside": step}) for step in range(50)]).read_bytes()
    path = tmp_path / "outer.tfevents"
    with path.open("wb") as file:
        image = Summary.Value(tag="image", image=Summary.Image(encoded_image_string=inner))
        for step in range(3):
            number = Summary.Value(tag="number", simple_value=step)
            RecordWriter(file).write(Event(step=step, summary=Summary(value=[image, number])).SerializeToString())
    found = triples(read_event_file(path))
    assert list(found) == ["number"]
    assert [step for step, _, _ in found["number"]] == [0, 1, 2]


def rows(start: int, stop: int, value: float, *, every: int = 10) -> list[tuple[int, float, dict[str, float]]]:
    return [(step, step - start, {"loss": value}) for step in range(start, stop, every)]


def test_a_resumed_step_cuts_every_tag_whatever_the_number_of_resumes(tmp_path: Path) -> None:
    """Also a tag that the last run did not write again, but not one that counts epochs or the starts themselves."""

    def part(first: int, last: int, value: float) -> list[tuple[int, float, dict[str, float]]]:
        steps = [(step, float(step), {"loss": value}) for step in range(first, last, 10)]
        evals = [(step, float(step), {"eval": value}) for step in range(first, last) if step % 50 == 25]
        epochs = [(step // 100, float(step), {"epoch/loss": value}) for step in range(first, last) if step % 100 == 99]
        return [(0, float(first), {"hp_metric": value}), *sorted(steps + evals + epochs, key=lambda row: row[1])]

    write_events(tmp_path, part(0, 500, 1.0), name="0", began=1000.0)
    write_events(tmp_path, part(260, 460, 2.0), name="1", began=5000.0)
    write_events(tmp_path, part(210, 222, 3.0), name="2", began=9000.0)
    series = load_run(tmp_path).series
    assert series["loss"].step.tolist() == list(range(0, 230, 10))
    assert series["loss"].value.tolist() == [1.0] * 21 + [3.0] * 2
    assert series["eval"].step.tolist() == [25, 75, 125, 175]
    assert series["epoch/loss"].step.tolist()[:2] == [0, 1]
    assert series["hp_metric"].step.tolist() == [0]


def test_files_written_side_by_side_clash_at_equal_steps_only(tmp_path: Path) -> None:
    write_events(tmp_path, rows(0, 60, 1.0), name="0", began=1000.0)
    write_events(tmp_path, rows(5, 60, 2.0), name="1", began=1010.0)
    write_events(tmp_path, [(20, 0.0, {"loss": 3.0})], name="2", began=1025.0)
    loss = load_run(tmp_path).series["loss"]
    assert loss.step.tolist() == list(range(0, 60, 5))
    assert loss.value[loss.step == 20] == 3.0


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


def test_numbered_runs_stay_apart_and_one_that_logged_nothing_is_left_out_of_a_pattern(tmp_path: Path) -> None:
    for number in (1, 2, 10):  # as Stable-Baselines3 names them
        write_run(tmp_path / f"PPO_{number}", {"rollout/ep_rew_mean": [1.0, 2.0]})
    (tmp_path / "PPO_plan").mkdir()
    (tmp_path / "PPO_plan" / "metrics.jsonl").touch()
    paths = find_runs(["PPO_*"], logdir=str(tmp_path))
    assert [path.name for path in paths] == ["PPO_1", "PPO_2", "PPO_10"]
    assert all(len(run.folders) == 1 for run in load_runs(paths))


def test_a_session_start_drops_what_was_logged_from_its_step_on_and_the_earliest_event_is_t0(tmp_path: Path) -> None:
    write_events(tmp_path, rows(0, 100, 1.0), name="0", began=1000.0)
    write_events(tmp_path, rows(90, 120, 2.0), name="1", began=5000.0, restart=31)
    loss = load_run(tmp_path).series["loss"]
    assert loss.step.tolist() == [0, 10, 20, 30, 90, 100, 110]
    assert loss.wall.tolist() == [0, 10, 20, 30, 4000, 4010, 4020]


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


@pytest.mark.parametrize(
    ("text", "steps", "walls", "series"),
    [
        ("\ufeffstep,loss\r\n1,0.5\r\n2,0.25\r\n", [1, 2], None, {"loss": [0.5, 0.25]}),
        ("\ufeffstep;loss;note\r\n1;0,5;a,b\r\n2;2,5e-1;c\r\n", [1, 2], None, {"loss": [0.5, 0.25]}),
        ("step;loss\n1;1.234,5\n2;-0,25\n", [1, 2], None, {"loss": [1234.5, -0.25]}),
        ("step\tloss\n1\t0.5\n2\t0,25\n", [1, 2], None, {"loss": [0.5, 0.25]}),
        ("Wall time,Step,Value\n1700000000,1,0.5\n1700000060,2,0.25\n", [1, 2], [0.0, 60.0], {"Value": [0.5, 0.25]}),
        (
            "time/total_timesteps,time/time_elapsed,rollout/ep_rew_mean,note\n64,1,20.5,x\n128,2,,x\n192,3,22.5,x\n",
            [64, 192],
            [1.0, 3.0],
            {"rollout/ep_rew_mean": [20.5, 22.5]},
        ),
    ],
    ids=["a byte order mark", "decimal commas", "thousands", "tabs", "TensorBoard", "Stable-Baselines3"],
)
def test_csv_files_are_read_as_spreadsheets_and_other_trainers_write_them(
    text: str, steps: list[int], walls: list[float] | None, series: dict[str, list[float]], tmp_path: Path
) -> None:
    (tmp_path / "progress.csv").write_bytes(text.encode())
    for place in (tmp_path, tmp_path / "progress.csv"):
        found = load_run(place).series
        assert {name: points.value.tolist() for name, points in found.items()} == series
        for points in found.values():
            assert points.step.tolist() == steps
            assert walls is None or points.wall.tolist() == walls


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


SPEC = read_spec()
#: Keys of our own that say nothing about which run is better, nor what else moved between runs
NOT_COMPARED = {"buffer/size", "buffer/largest_priority", "counters/training_s"}


def curve(y: list[float], *, every: float = 10.0) -> Curve:
    x = every * np.arange(1, len(y) + 1)
    return Curve(x=x, y=np.array(y, dtype=float), run="run", tag="tag", axis="step")


def metric(**fields: object) -> MetricSpec:
    return MetricSpec(name="m", tags=(TagPattern(tag="m"),), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reducer", "value", "x"),
    [
        ("last", 3.0, 40), ("best_so_far", 1.0, 20), ("mean_last_k", 3.5, 40), ("max", 5.0, 40), ("min", 1.0, 40),
        ("mean", 3.25, 40), ("median", 3.5, 40), ("auc", (3 + 2.5 + 3.5) / 3, 40), ("rate", -2 / 30, 40),
        ("time_to_threshold", 20, 20),
    ],
)  # fmt: skip
def test_one_number_of_a_curve(reducer: str, value: float, x: float) -> None:
    spec = metric(reducer=reducer, direction="down", k=2, threshold=2.0)
    found = reduced(curve([5, 1, 4, 3]), spec)
    assert (found.value, found.x) == pytest.approx((value, x))
    if reducer == "time_to_threshold":  # which is not reached
        assert math.isnan(reduced(curve([5, 3, 4, 3]), spec).value)


def test_values_between_points_and_never_beyond_them() -> None:
    line, best = metric(direction="down"), metric(direction="down", reducer="best_so_far")
    found = curve([5, 1, math.nan, 3])
    assert value_at(found, 15, line).value == 3.0
    assert value_at(found, 30, line).value == 2.0
    before = value_at(found, 35, best)
    assert (before.value, before.x) == (1.0, 20.0)
    assert math.isnan(value_at(found, 41, line).value)
    assert math.isnan(value_at(found, 9, best).value)


def test_axes_of_a_run(tmp_path: Path) -> None:
    rows = [(step, wall, {"loss": step, "llm/calls": 2 * step}) for step, wall in ((10, 5), (20, 10), (30, 15))]
    rows += [(40, 4000, {"loss": 40.0, "llm/calls": 80}), (50, 4005, {"loss": 50.0})]
    write_events(tmp_path, rows)
    run, spec = load_run(tmp_path), metric()
    loss = MetricSpec(name="loss", tags=(TagPattern(tag="loss"),))
    against = {axis: curves_of(run, loss, SPEC, axis=axis)[""] for axis in ("step", "time", "calls")}
    assert against["step"].x.tolist() == [10, 20, 30, 40, 50]
    assert against["time"].x.tolist() == [5, 10, 15, 4000, 4005]
    assert against["calls"].x.tolist() == [20, 40, 60, 80]  # the counter ends there
    assert not curves_of(run, loss, SPEC, axis="updates")
    with pytest.raises(UsageError, match="unknown axis 'stepp'"):
        curves_of(run, loss, SPEC, axis="stepp")
    assert not curves_of(run, spec, SPEC)


def test_a_summed_loss_is_divided_by_the_batch_or_left_out(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "told", {"Training/loss": [64.0], "Training/batch_size": [32.0]}))
    found = curves_of(run, SPEC.metric("loss"), SPEC)[""]
    assert (found.y.tolist(), found.divided_by) == ([2.0], "batch_size 32.0")
    with pytest.raises(UnknownDivisorError, match="--set not_told:batch_size="):
        curves_of(load_run(write_run(tmp_path / "not_told", {"Training/loss": [64.0]})), SPEC.metric("loss"), SPEC)


def test_every_family_of_our_own_keys_is_known_with_the_direction_of_the_metric_table() -> None:
    tags = [pattern for spec in SPEC.metrics for pattern in spec.tags]
    counters = {tag for names in SPEC.axes.values() for tag in names}
    families = ("validation/success", "perf/", "grads/", "rl/", "counters/", "buffer/")
    compared = {key for key in METRICS if key.startswith(families)} - NOT_COMPARED - counters
    assert {key for key in compared if not any(pattern.match([key]) for pattern in tags)} == set()
    directions = {pattern.tag: spec.direction for spec in SPEC.metrics for pattern in spec.tags}
    assert {tag for tag, one in directions.items() if tag in METRICS and METRICS[tag]["better"] != one} == set()


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        ('{"algo": "iqn", "train_batch_size": 512, "batch_size": 8, "num_processes": 16, "num_steps": 8}', 512),
        ('{"algo": "ppo", "train_batch_size": 9, "num_processes": 16, "num_steps": 128, "num_mini_batch": 4}', 512),
        ('{"batch_size": 2048, "minibatch_size": 64, "num_steps": 128}', 64),  # CleanRL: a rollout, and a part of it
        ('{"batch_size": 256}', 256),
    ],
)
def test_the_batch_of_a_gradient_step_under_every_trainer_s_name(tmp_path: Path, config: str, batch: float) -> None:
    run = load_run(write_run(tmp_path / "run", {"losses/value_loss": [1.0]}))
    run.config = json.loads(config)
    assert setting(run, SPEC, "batch") == batch


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("metrics: [{name: a}]", "metric 'a': tags: Field required"),
        ("metrics: [{name: a, tags: x, direktion: up}]", "did you mean 'direction'"),
        ("metrics: [{name: a, tags: x, direction: sideways}]", "'up', 'down' or '-'"),
        ("metrics: [{name: a, tags: x}, {name: a, tags: y}]", "defined twice"),
        ("metrics: [{name: a, tags: 're:('}]", "not a regular expression"),
        ("metrics: [{name: a, tags: x, reducer: time_to_threshold}]", "needs a threshold"),
        ("metrics: {", "cannot be read"),
    ],
)
def test_an_error_in_a_metric_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "metrics.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        read_spec(path)
    assert "\n" not in str(caught.value)
    assert DEFAULT_SPEC.is_file()


def test_watch_rules() -> None:
    rules = (WatchRule(rule="above", value=100, says="gradient explosion"), WatchRule(rule="spike", ratio=10))
    nan, above, spike = watch(curve([1, 2, 1, 150, 1, math.nan, 3]), metric(watch=rules))
    assert (nan.rule, nan.x) == ("nan", 60)
    assert (above.rule, above.x, above.value) == ("above", 40, 150)
    assert above.says == "gradient explosion (1 of 6 points, first at 40)"
    assert (spike.rule, spike.x, spike.value) == ("spike", 40, 150)
    y = np.ones(200_000)  # a long curve is not thinned before
    y[123_456] = 1000
    assert [finding.x for finding in watch(curve(y.tolist()), metric(watch=rules[1:]))] == [1_234_570]


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3", "'-2+3"),
        ("\t=1", "'\t=1"),
        ("-0.5", "-0.5"),
        (-0.5, "-0.5"),
        ("", ""),
    ],
)
def test_a_text_is_never_a_formula_and_a_number_stays_one(value: object, cell: str) -> None:
    out = io.StringIO()
    write_csv(out, [("name", value)])
    assert list(csv.reader(io.StringIO(out.getvalue()))) == [["name", cell]]


def test_settings_with_tags_of_python_are_read_as_text_and_run_no_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tags = "!!python/object/apply:os.mkdir [ran]"
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "hparams.yaml").write_text(
        "lr: 0.1\nsizes: !!python/tuple\n- 1\n- 2\nact: !!python/name:torch.nn.ReLU ''\n"
        f"net: !mine.Net {{depth: 3}}\nmade: {tags}\n"
    )
    write_run(tmp_path / "one", {"loss": [1.0, 2.0]})
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "hparams.yaml").write_text("lr: [0.1\n")
    write_run(tmp_path / "two", {"loss": [1.0, 2.0]})
    one, two = load_runs([tmp_path / "one", tmp_path / "two"])
    assert one.config == {"lr": 0.1, "sizes": [1, 2], "act": "", "net.depth": 3, "made": ["ran"]}
    assert not Path("ran").exists()
    assert two.config == {}
    assert "the run is read without its settings" in caplog.text
