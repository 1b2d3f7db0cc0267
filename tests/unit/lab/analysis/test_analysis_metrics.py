"""Metric files, curves against axes, what a curve is reduced to, watch rules, and cells of CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest

from query_mutator.errors import UsageError
from query_mutator.files.metrics import METRICS
from query_mutator.lab.analysis.csv_file import write_csv
from query_mutator.lab.analysis.curves import Curve, UnknownDivisorError, curves_of, reduced, setting, value_at
from query_mutator.lab.analysis.runs import load_run
from query_mutator.lab.analysis.spec import DEFAULT_SPEC, MetricSpec, TagPattern, WatchRule, read_spec
from query_mutator.lab.analysis.watch import watch
from tests.promises.events import write_events, write_run

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


def test_a_threshold_that_is_not_reached_is_no_number() -> None:
    spec = metric(reducer="time_to_threshold", direction="up", threshold=9.0)
    assert math.isnan(reduced(curve([5, 1, 4, 3]), spec).value)


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
    (tmp_path / "config.json").write_text('{"num_gpus": 2}')
    run, spec = load_run(tmp_path), metric()
    loss = MetricSpec(name="loss", tags=(TagPattern(tag="loss"),))
    against = {
        axis: curves_of(run, loss, SPEC, axis=axis)[""] for axis in ("step", "time", "active", "gpu_hours", "calls")
    }
    assert against["step"].x.tolist() == [10, 20, 30, 40, 50]
    assert against["time"].x.tolist() == [5, 10, 15, 4000, 4005]
    assert against["active"].x.tolist() == [5, 10, 15, 20, 25]
    assert against["gpu_hours"].x.tolist() == pytest.approx([x * 2 / 3600 for x in (5, 10, 15, 20, 25)])
    assert against["calls"].x.tolist() == [20, 40, 60, 80]  # the counter ends there
    assert not curves_of(run, loss, SPEC, axis="updates")
    with pytest.raises(UsageError, match="unknown axis 'stepp'"):
        curves_of(run, loss, SPEC, axis="stepp")
    assert not curves_of(run, spec, SPEC)


def test_one_metric_under_the_tags_of_every_trainer(tmp_path: Path) -> None:
    for tag in ("rollout/ep_rew_mean", "charts/episodic_return"):
        run = load_run(write_run(tmp_path / tag.replace("/", "-"), {tag: [1.0, 2.0]}))
        assert curves_of(run, SPEC.metric("return"), SPEC)[""].y.tolist() == [1.0, 2.0]
    maps = {"Race/eval_race_time_robust_trained_hock": [30.0], "Race/eval_race_time_robust_trained_A01": [25.0]}
    race = curves_of(load_run(write_run(tmp_path / "race", maps)), SPEC.metric("race_time"), SPEC)
    assert {task: found.tag for task, found in race.items()} == {
        "hock": "Race/eval_race_time_robust_trained_hock",
        "A01": "Race/eval_race_time_robust_trained_A01",
    }
    record = load_run(write_run(tmp_path / "record", {"alltime_min_ms_hock": [24560.0]}))
    assert curves_of(record, SPEC.metric("record"), SPEC)["hock"].y.tolist() == pytest.approx([24.56])


def test_a_summed_loss_is_divided_by_the_batch_or_left_out(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "told", {"Training/loss": [64.0], "Training/batch_size": [32.0]}))
    found = curves_of(run, SPEC.metric("loss"), SPEC)[""]
    assert (found.y.tolist(), found.divided_by) == ([2.0], "batch_size 32.0")
    with pytest.raises(UnknownDivisorError, match="--set not_told:batch_size="):
        curves_of(load_run(write_run(tmp_path / "not_told", {"Training/loss": [64.0]})), SPEC.metric("loss"), SPEC)


def test_every_family_of_our_own_keys_is_known() -> None:
    tags = [pattern for spec in SPEC.metrics for pattern in spec.tags]
    counters = {tag for names in SPEC.axes.values() for tag in names}
    families = ("validation/success", "perf/", "grads/", "rl/", "counters/", "buffer/")
    for key in METRICS:
        if key.startswith(families) and key not in NOT_COMPARED | counters:
            assert any(pattern.match([key]) for pattern in tags), key


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        ('{"algo": "iqn", "train_batch_size": 512, "batch_size": 8, "num_processes": 16, "num_steps": 8}', 512),
        (
            '{"algo": "ppo", "train_batch_size": 512, "batch_size": 8, "num_processes": 16, "num_steps": 128,'
            ' "num_mini_batch": 4}',
            16 * 128 / 4,
        ),
        ('{"batch_size": 2048, "minibatch_size": 64, "num_steps": 128}', 64),  # CleanRL: a rollout, and a part of it
        ('{"batch_size": 256}', 256),
    ],
)
def test_the_batch_of_a_gradient_step_under_every_trainer_s_name(tmp_path: Path, config: str, batch: float) -> None:
    run = load_run(write_run(tmp_path / "run", {"losses/value_loss": [1.0]}))
    run.config = json.loads(config)
    assert setting(run, SPEC, "batch") == batch


def test_our_own_keys_have_the_direction_and_unit_that_the_metric_table_gives() -> None:
    for spec in SPEC.metrics:
        for pattern in spec.tags:
            if pattern.tag in METRICS:
                assert spec.direction == METRICS[pattern.tag].better, pattern.tag


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("metrics: [{name: a}]", "metric 'a': tags: Field required"),
        ("metrics: [{name: a, tags: x, direktion: up}]", "did you mean 'direction'"),
        ("metrics: [{name: a, tags: x, direction: sideways}]", "'up', 'down' or '-'"),
        ("metrics: [{name: a, tags: x, watch: [peak]}]", "'nan', 'above', 'below'"),
        ("metrics: [{name: a, tags: x, margin: much}]", "margin must be"),
        ("metrics: [{name: a, tags: x}, {name: a, tags: y}]", "defined twice"),
        ("metrics: [{name: a, tags: 're:('}]", "not a regular expression"),
        ("metrics: [{name: a, tags: x, reducer: time_to_threshold}]", "needs a threshold"),
        ("metrics: []\nfields: {batch: [{product: [a], field: b}]}", "either a field or a product"),
        ("metrics: {", "cannot be read"),
        ("- a", "a list where"),
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
    found = list(watch(curve([1, 2, 1, 150, 1, math.nan, 3]), metric(watch=rules)))
    assert [(finding.rule, finding.x, finding.value) for finding in found[1:]] == [
        ("above", 40, 150),
        ("spike", 40, 150),
    ]
    assert (found[0].rule, found[0].x) == ("nan", 60)
    assert found[1].says == "gradient explosion (1 of 6 points, first at 40)"
    flat = metric(direction="up", watch=(WatchRule(rule="plateau"),))
    assert [finding.x for finding in watch(curve([1, 2, 3, *[2.5] * 12]), flat)] == [30]
    assert not list(watch(curve([float(y) for y in range(15)]), flat))


def test_a_spike_in_a_very_long_curve_is_found() -> None:
    y = np.ones(200_000)
    y[123_456] = 1000
    found = list(watch(curve(y.tolist()), metric(watch=(WatchRule(rule="spike"),))))
    assert [finding.x for finding in found] == [1_234_570]


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t=1"),
        ("-0.5", "-0.5"),
        (-0.5, "-0.5"),
        ("+1e5", "+1e5"),
        ("run-1", "run-1"),
        ("", ""),
    ],
)
def test_a_text_is_never_a_formula_and_a_number_stays_one(value: object, cell: str) -> None:
    out = io.StringIO()
    write_csv(out, [("name", value)])
    assert list(csv.reader(io.StringIO(out.getvalue()))) == [["name", cell]]
