"""Groups of seeds against a baseline: verdicts, confounders, and the page of the racing project's experiment."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docutils.core import publish_string
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from query_mutator.commands.main import main
from query_mutator.errors import UsageError
from query_mutator.lab.analysis.compare import Analysis, analyze, at_checkpoints
from query_mutator.lab.analysis.groups import group_runs
from query_mutator.lab.analysis.report import as_csv, as_json, page, render
from query_mutator.lab.analysis.runs import find_runs, load_runs
from query_mutator.lab.analysis.spec import read_spec
from tests.promises.events import write_events, write_run

SPEC = read_spec()


def write_group(folder: Path, name: str, finals: list[float], **config: object) -> None:
    """Write a run for each final value, success rising to it."""
    for seed, final in enumerate(finals):
        write_run(
            folder / f"{name}-s{seed}",
            {"validation/success": np.linspace(0, final, 20), "llm/calls": range(20)},
            seed=seed,
            **config,
        )


def compared(folder: Path, **options: object) -> Analysis:
    groups = group_runs(load_runs(find_runs(["*"], logdir=str(folder))), SPEC)
    return analyze(groups, SPEC, **options)  # type: ignore[arg-type]


def verdict(folder: Path, **options: object) -> str:
    (comparison,) = compared(folder, **options).of_role("performance")[0].comparisons
    return comparison.verdict


def test_seeds_are_grouped_and_a_clear_difference_is_called(tmp_path: Path) -> None:
    write_group(tmp_path, "a", [0.50, 0.51, 0.52, 0.504], batch=64)
    write_group(tmp_path, "b", [0.70, 0.71, 0.72, 0.714], batch=128)
    analysis = compared(tmp_path)
    assert [(group.name, group.num_seeds) for group in analysis.groups] == [("batch=64", 4), ("batch=128", 4)]
    (comparison,) = analysis.of_role("performance")[0].comparisons
    assert comparison.verdict == "better"
    assert comparison.difference == pytest.approx((0.711 - 0.5085) * 17 / 19, abs=1e-6)  # mean of the last five points
    assert analysis.settings == {"batch": ("64", "128")}
    assert verdict(tmp_path, baseline="batch=128") == "worse"
    assert verdict(tmp_path, baseline="b-s0") == "worse"


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([0.50, 0.504, 0.502, 0.503], [0.503, 0.501, 0.505, 0.50], "equivalent"),
        ([0.4, 0.6, 0.5], [0.45, 0.7, 0.5], "inconclusive"),
        ([0.9], [0.1], "inconclusive"),
        ([0.9], [0.1, 0.11, 0.12], "inconclusive"),
    ],
)
def test_verdicts(tmp_path: Path, ours: list[float], theirs: list[float], expected: str) -> None:
    write_group(tmp_path, "a", theirs, batch=64)
    write_group(tmp_path, "b", ours, batch=128)
    assert verdict(tmp_path) == expected


@pytest.mark.parametrize(
    ("late", "expected", "why"),
    [(0.9, "worse", "the interval excludes 0"), (0.3, "inconclusive", "1 of 4 runs of batch=128 did not reach")],
)
def test_a_late_threshold_is_worse_and_one_that_a_run_never_reaches_decides_nothing(
    late: float, expected: str, why: str, tmp_path: Path
) -> None:
    for batch, steps in ((64, [3, 4, 3, 4]), (128, [12, 13, 12, 13])):
        for seed, step in enumerate(steps):
            top = late if (batch, seed) == (128, 3) else 0.9
            rising = np.where(np.arange(20) >= step, top, 0.1)
            write_run(tmp_path / f"b{batch}-s{seed}", {"validation/success": rising}, seed=seed, batch=batch)
    spec = SPEC.adjusted(thresholds=["success=0.5"])
    analysis = analyze(group_runs(load_runs(find_runs(["*"], logdir=str(tmp_path))), spec), spec)
    (comparison,) = analysis.of_role("performance")[0].comparisons
    assert comparison.verdict == expected
    assert why in comparison.why


@pytest.mark.parametrize(
    ("ours", "theirs", "questions", "expected"),
    [
        ([0.50, 0.504, 0.502, 0.503], [0.503, 0.501, 0.505, 0.50], 8, "inconclusive"),
        ([0.50, 0.504, 0.502, 0.503], [0.503, 0.501, 0.505, 0.50], 20_000, "equivalent"),
        ([0.625, 0.625, 0.625], [0.5, 0.5, 0.5], 8, "inconclusive"),
        ([0.62, 0.62, 0.62], [0.5, 0.5, 0.5], 400, "better"),
        ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5], None, "inconclusive"),
        ([0.9, 0.9], [0.1, 0.1], None, "inconclusive"),
    ],
)
def test_the_noise_of_few_questions_counts(
    ours: list[float], theirs: list[float], questions: int | None, expected: str, tmp_path: Path
) -> None:
    for name, finals in (("a", theirs), ("b", ours)):
        for seed, final in enumerate(finals):
            asked = {} if questions is None else {"validation/questions": [questions] * 9}
            asked["time/fps"] = [100.0 + seed] * 9  # equal numbers alone would make them copies
            write_run(tmp_path / f"{name}-s{seed}", {"validation/success": [final] * 9, **asked}, seed=seed, batch=name)
    (comparison,) = compared(tmp_path).of_role("performance")[0].comparisons
    assert comparison.verdict == expected
    assert (f"from {questions} questions" in comparison.why) == (questions is not None)
    assert "nan" not in comparison.why
    low, high = comparison.interval
    assert (low, high) == (-math.inf, math.inf) or -1 <= low <= high <= 1


def test_validation_folds_are_averaged_and_their_questions_add_up(tmp_path: Path) -> None:
    for name, share, folds in (("a", 0.50, range(5)), ("b", 0.60, range(5)), ("a", 0.5, ["none"])):
        for number, fold in enumerate(folds):
            values = {"validation/success": [share + 0.002 * number] * 9, "validation/questions": [100] * 9}
            write_run(tmp_path / f"{name}-{fold}", values, seed=1, validation_fold=fold, batch=name)
    everything = load_runs(find_runs(["a-*"], logdir=str(tmp_path)))
    sizes = {group.name: len(group.runs) for group in group_runs(everything, SPEC)}
    assert sizes == {"validation_fold=any": 5, "validation_fold=none": 1}
    analysis = analyze(group_runs(load_runs(find_runs(["*-[0-4]"], logdir=str(tmp_path))), SPEC), SPEC)
    assert [(group.name, group.num_seeds) for group in analysis.groups] == [("batch=a", 5), ("batch=b", 5)]
    result = analysis.of_role("performance")[0]
    assert [value.mean for value in result.groups] == pytest.approx([0.504, 0.604])
    assert [value.sample for value in result.groups] == [500, 500]
    assert "from 500 questions" in result.comparisons[0].why
    assert not [line for line in analysis.remarks if "seed" in line]


@settings(max_examples=25, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_any_numbers_give_a_page_without_nonsense(data: st.DataObject, tmp_path_factory: Any) -> None:
    odd = st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e30, -1e30, 1e-30, math.nan, math.inf, -math.inf])
    folder = tmp_path_factory.mktemp("runs")
    for group in range(data.draw(st.integers(1, 3))):
        for seed in range(data.draw(st.integers(1, 3))):
            values = data.draw(st.lists(odd, min_size=1, max_size=5))
            names = data.draw(st.sets(st.sampled_from(["validation/success", "eval/mean_reward", "llm/calls", "x"])))
            write_run(
                folder / f"g{group}-s{seed}", dict.fromkeys({"losses/td_loss", *names}, values), seed=seed, batch=group
            )
    analysis = compared(folder)
    assert analysis.results
    text = render(page(analysis, title="Any", command="qm analyze"), "text")
    json.loads(as_json(analysis))
    assert as_csv(analysis).startswith("metric,")
    told = [line for line in text.splitlines() if "not finite" not in line]  # the watch rule "nan" says so
    assert not re.search(r"\b(nan|inf)\b", "\n".join(told))
    for result in analysis.results:
        assert all(value.interval[0] <= value.interval[1] for value in result.groups)
        assert all(one.interval[0] <= one.interval[1] and 0 <= one.p <= 1 for one in result.comparisons)


def test_runs_of_one_seed_count_as_their_mean(tmp_path: Path) -> None:
    for name, seed, final in (("r-s1", 1, 0.4), ("r-s2", 1, 0.6), ("r-s3", 2, 0.7)):
        write_run(tmp_path / name, {"rollout/ep_rew_mean": [final] * 9}, seed=seed)
    (value,) = compared(tmp_path).of_role("performance")[0].groups
    assert value.numbers == pytest.approx([0.5, 0.7])
    assert value.mean == pytest.approx(0.6)


def test_equivalence_is_corrected_for_the_number_of_comparisons(tmp_path: Path) -> None:
    values = {"a": [0.500, 0.506, 0.494, 0.503], "b": [0.504, 0.497, 0.509, 0.499]}
    shifts = {"c": 0.0, "d": 1e-4, "e": -1e-4, "f": 2e-4}
    others = {name: [value + shift for value in values["b"]] for name, shift in shifts.items()}
    found = []
    for finals_of in (values, {**values, **others}):
        for name, finals in finals_of.items():
            write_group(tmp_path / str(len(finals_of)), name, finals, batch=name)
        found.append(compared(tmp_path / str(len(finals_of))).of_role("performance")[0].comparisons[0].p_equivalent)
    assert found[0] < found[1]


def test_runs_without_a_common_step_are_not_called_one_seed(tmp_path: Path) -> None:
    for name, began in (("a", 0), ("b", 1000)):
        for seed in range(3):
            rows = [(began + 100 * (at + 1), 10.0 * at, {"rollout/ep_rew_mean": 0.1 * at + seed}) for at in range(6)]
            write_events(tmp_path / f"{name}-s{seed}", rows)
    (comparison,) = compared(tmp_path).of_role("performance")[0].comparisons
    assert comparison.verdict == "inconclusive"
    assert "one seed" not in comparison.why
    assert "no step in common" in comparison.why


@pytest.mark.parametrize(
    ("lost", "sick", "verdict", "why"),
    [
        ("b", 2, "worse", "2 of 3 runs of b diverged"),
        ("a", 1, "better", "1 of 3 runs of a diverged"),
        ("ab", 1, "inconclusive", "1 of 3 runs of b diverged and 1 of 3 runs of a diverged"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("first", [0, 12])
def test_a_run_that_diverged_loses_and_says_so(
    lost: str, sick: int, verdict: str, why: str, value: float, first: int, tmp_path: Path
) -> None:
    """Its best value before does not count, and it does not shorten the window of the others."""
    for name in "ab":
        for seed in range(3):
            points = np.linspace(0, 1, 20) + 0.01 * seed + (5.0 if name in lost and seed < sick else 0.0)
            if name in lost and seed < sick:
                points = np.append(points[:first], [value] * 3)
            rows = [(100 * at, 10.0 * at, {"rollout/ep_rew_mean": point}) for at, point in enumerate(points)]
            write_events(tmp_path / f"{name}-s{seed}", rows)
    analysis = compared(tmp_path)
    (result,) = analysis.of_role("performance")
    (comparison,) = result.comparisons
    assert (comparison.verdict, comparison.why) == (verdict, why)
    assert result.window[1] == 1900
    assert all(value.mean < 2 for value in result.groups if value.numbers)
    said = [line for line in analysis.remarks if "diverged" in line]
    assert len(said) == sick * len(lost)
    assert all(f"diverged: rollout/ep_rew_mean is not finite from {100 * first:,} on" in line for line in said)


def test_only_the_common_window_counts(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / f"long-s{seed}", {"validation/success": np.linspace(0, 1, 20)})
        write_run(tmp_path / f"short-s{seed}", {"validation/success": np.linspace(0, 1, 20)[:10]})
    (result,) = compared(tmp_path).results
    assert result.window == (100, 1000)
    assert {value.mean for value in result.groups} == {result.groups[0].mean}
    assert list(at_checkpoints(result, interval=300)) == [300, 600, 900]


def test_runs_of_stable_baselines3_are_grouped_by_given_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for batch in (64, 256):
        for seed in (1, 2, 3):
            tags = {"rollout/ep_rew_mean": np.linspace(20, 70 + seed - batch / 8, 9), "train/learning_rate": [3e-4] * 9}
            write_run(tmp_path / f"ppo-b{batch}-s{seed}_1", tags, every=1_234_567)
    told = ["ppo-b64-*:batch_size=64", "ppo-b256-*:batch_size=256", "ppo-*:n_epochs=4"]
    page = tmp_path / "page.md"
    command = ["analyze", "ppo-*", "--logdir", str(tmp_path), "--baseline", "batch_size=64", "--set", *told]
    assert main([*command, "--markdown", str(page), "--html", f"{page}.html"]) == 0
    printed, written = capsys.readouterr().out, page.read_text()
    assert "batch_size=256 is worse than batch_size=64" in printed
    assert re.search(r"ppo-b256-s3_1 +batch_size=256 +3 ", printed)
    assert re.search(r"updates per environment step +0.0625 +0.01562 +moved", printed)
    assert shlex.join(["qm", *command]) in written
    assert "ppo-b64-s1_1 rollout/ep_rew_mean x=11111103" in Path(f"{page}.html").read_text()  # with all its digits


def test_groups_by_setting_by_patterns_and_by_the_shape_of_a_name(tmp_path: Path) -> None:
    write_group(tmp_path, "ppo", [0.5, 0.5], batch=64, lr=0.1)
    write_group(tmp_path, "iqn", [0.5, 0.5], batch=64, lr=0.2)
    runs = load_runs(find_runs(["*"], logdir=str(tmp_path)))
    names = {
        by: [group.name for group in group_runs(runs, SPEC, by=by)] for by in ("batch", "ppo-*,iqn-*", "{group}-s{n}")
    }
    assert names == {"batch": ["batch=64"], "ppo-*,iqn-*": ["iqn-*", "ppo-*"], "{group}-s{n}": ["iqn", "ppo"]}
    for by, words in (("bach", "did you mean 'batch'"), ("x-*", "not match"), ("{group}_{n}", "not match")):
        with pytest.raises(UsageError, match=words):
            group_runs(runs, SPEC, by=by)


def test_any_tag_by_logged_hyperparameters_with_a_metric_file_in_toml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for lr, seed in itertools.product((0.1, 0.5), range(3)):
        with SummaryWriter(str(tmp_path / f"{lr}-{seed}")) as writer:
            for summary in hparams({"lr": lr, "seed": seed}, {"eval/error": 0.0}):
                writer.file_writer.add_summary(summary)
            for step in range(5):
                writer.add_scalar("eval/error", lr + seed / 1000, step)
                writer.add_scalar("eval/reward", lr + seed / 1000, step)
    spec = tmp_path / "metrics.toml"
    spec.write_text('[[metrics]]\nname = "reward"\ntags = "eval/reward"\nrole = "performance"\ndirection = "up"\n')
    flags = ["--logdir", str(tmp_path), "--group-by", "lr", "--spec", str(spec)]
    assert main(["analyze", "*-*", *flags, "--metric", "reward", "eval/error:down"]) == 0
    printed = capsys.readouterr().out
    assert "reward: lr=0.5 is better than lr=0.1" in printed
    assert "eval/error: lr=0.5 is worse than lr=0.1" in printed
    assert re.search(r"0\.5-2 +lr=0\.5 +2 ", printed)


def test_several_tasks_are_compared_apart(tmp_path: Path) -> None:
    for name, shift in (("a", 0.0), ("b", -2.0)):
        for seed in range(3):
            tags = {f"Race/eval_race_time_robust_trained_{track}": [50.0, 30 + seed / 10 + shift] for track in "wxyz"}
            write_run(tmp_path / f"{name}-s{seed}", tags)
    analysis = compared(tmp_path)
    assert len(analysis.of_role("performance")) == 4
    assert {c.verdict for result in analysis.of_role("performance") for c in result.comparisons} == {"better"}


# --- the racing project's experiment ----------------------------------------------------------------------------------


@pytest.fixture
def racing(tmp_path: Path) -> Path:
    """Write runs of four batch sizes, whose losses are summed and whose counters move with the batch."""
    frames = 1e5 * np.arange(1, 31)
    for name, batch, loss in (("uni_5", 2048, 300.96), ("uni_6", 8192, 2962), ("uni_7", 512, 77.72), ("uni_9", 64, 29)):
        tags = {
            "Training/loss": np.linspace(3 * loss, loss, 30),
            "alltime_min_ms_hock": np.linspace(60_000, 25_000, 30),
            "Race/eval_race_time_robust_trained_hock": np.linspace(60, 25, 30),
            "Gradients/norm_before_clip_max": [40.0] * 29 + [120.0],
            "cumul_number_frames_played": frames,
            "cumul_number_single_memories_used": 32 * frames,
            "cumul_number_batches_done": 32 * frames / batch,
            "cumul_number_target_network_updates": 32 * frames / max(batch, 2048),
        }
        write_run(tmp_path / "tensorboard" / name, tags, every=100_000, batch_size=batch, seed=444)
    return tmp_path


def test_what_moves_with_the_batch_size(racing: Path) -> None:
    runs = load_runs(find_runs(["uni_*"], logdir=str(racing / "tensorboard")))
    analysis = analyze(group_runs(runs, SPEC), SPEC, baseline="uni_5")
    moved = {row.name for row in analysis.confounders if row.moved}
    assert moved == {f"updates per {of}" for of in ("environment step", "sample learned")} | {
        "target updates per sample learned"
    }
    (replay,) = [row for row in analysis.confounders if "replay ratio" in row.name]
    assert replay.values == pytest.approx((32.0,) * 4)


def test_the_script_writes_every_output(racing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: str(racing / f"out.{name}") for name in ("json", "csv", "markdown", "rst", "html", "svg")}
    outputs = [word for name, path in files.items() for word in (f"--{'figure' if name == 'svg' else name}", path)]
    command = ["analyze", "uni_*", "--logdir", str(racing / "tensorboard"), *outputs]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert re.search(r"loss / batch_size +uni_7 +1 +0.1518 +\+0.004844 \(\+3.3 %\) +inconclusive", printed)
    data = json.loads((racing / "out.json").read_text())
    (loss,) = [metric for metric in data["metrics"] if metric["name"] == "loss"]
    assert loss["groups"][2]["values"][0]["tag"] == "Training/loss"
    with (racing / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows if row["metric"] == "loss"} == {"uni_5", "uni_6", "uni_7", "uni_9"}
    assert any(row["reading"] == "at" and row["tag"] == "Training/loss" and row["divided_by"] for row in rows)
    page = (racing / "out.rst").read_text()
    assert "uni\\_7" in page
    publish_string(page, writer="null", settings_overrides={"report_level": 2, "halt_level": 2, "warning_stream": ""})
    for title in ("Results", "Run Analysis", "Detailed Metrics Analysis", "By step", "Configuration Changes",
                  "Hardware"):  # fmt: skip
        assert f"\n{title}\n" in page
    assert (racing / "out.svg").read_text().count("<svg") == 1
    page = (racing / "out.html").read_text()
    assert page.count("<table>") > 4
    assert len(re.findall('<td title="[^"]* x=[^"]*"', page)) > 20
    assert "<svg" in page
    assert not re.search(r"(src|href)=.https?:|url\(.?http|@import", page)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("a-s0 --metric los", "did you mean 'loss'"),
        ("a-s0 --baseline uni_8", "neither a group nor a run"),
        ("a-s0 --axis updates", "no run logged what"),
        ("a-s0 --set b-s0:a=1", "with a run of these: a-s0"),
        ("a-s0 --figure a.gif", ".png or .svg"),
        ("a-s0 --margin loss=few", "write METRIC=NUMBER"),
    ],
)
def test_invalid_input_is_one_line(arguments: str, words: str, tmp_path: Path) -> None:
    write_group(tmp_path, "a", [0.5])
    write_run(tmp_path / "a-s0", {"losses/loss": [1.0, 0.5]})
    with pytest.raises(UsageError, match=words):
        main(["analyze", *arguments.split(), "--logdir", str(tmp_path)])
