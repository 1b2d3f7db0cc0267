"""`qm sweep` with real commands: settings, seeds, failures, resuming, extending the grid, confirming the best."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from query_mutator.commands.main import main
from query_mutator.errors import TooManyFailuresError, UsageError
from query_mutator.lab.sweep.trials import (
    Trial,
    command_of,
    extended,
    grid_settings,
    parse_grid,
    parse_ranges,
    random_settings,
    trials_of,
)

pytestmark = pytest.mark.slow

#: A trainer of one line: success is best at batch 512, throughput grows with the batch.
TRAINER = """
import json, math, os, sys

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
batch, seed = float(flags["--train-batch-size"]), int(flags["--seed"])
if (os.environ.get("BROKEN"), seed) == ("yes", 1001):
    sys.exit("no memory left")
noise = 0.01 * math.sin(7 * seed + batch)
print("training ...")
print(json.dumps({"success": 0.7 - 0.03 * (math.log2(batch) - 9) ** 2 + noise, "steps_per_s": batch}))
"""


@pytest.fixture
def trainer(tmp_path: Path) -> list[str]:
    path = tmp_path / "train.py"
    path.write_text(TRAINER)
    return ["--", sys.executable, str(path)]


def run_sweep(folder: Path, trainer: list[str], values: str, *options: str) -> dict[str, object]:
    grid = ["--grid", f"train_batch_size={values}", "--jobs", "2", "--dir", str(folder)]
    assert main(["sweep", *grid, *options, *trainer]) == 0
    return json.loads((folder / "results.json").read_text())


def test_the_golden_middle_of_a_command(tmp_path: Path, trainer: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = run_sweep(tmp_path / "s", trainer, "64,128,512,2048,8192", "--confirm", "2")
    said = capsys.readouterr().out
    assert "The golden middle is at train_batch_size about" in said
    assert "Confirmed with 2 fresh seeds: train_batch_size=512 has success 0.69" in said
    assert found["optimum"]["kind"] == "interior"  # type: ignore[index]
    fresh = (tmp_path / "s" / "trials" / "train_batch_size=512,seed=4001" / "command.txt").read_text()
    assert fresh.strip().endswith("--train-batch-size 512 --seed 4001")


def test_failures_are_reported_and_a_rerun_resumes_the_sweep(
    tmp_path: Path, trainer: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN", "yes")
    with pytest.raises(TooManyFailuresError, match="3 of 9 trials failed; --retry-failed"):
        run_sweep(tmp_path / "s", trainer, "128,512,2048")
    told = capsys.readouterr()
    assert told.err.count("failed (exit code 1): no memory left") == 3
    assert "2 of 3" in told.out
    monkeypatch.delenv("BROKEN")
    before = (tmp_path / "s" / "trials.jsonl").read_text().splitlines()
    run_sweep(tmp_path / "s", trainer, "128,512,2048", "--retry-failed")
    after = (tmp_path / "s" / "trials.jsonl").read_text().splitlines()
    assert after[: len(before)] == before
    assert {json.loads(row)["seed"] for row in after[len(before) :]} == {1001}
    with pytest.raises(UsageError, match="another --out"):
        main(["sweep", "--grid", "train_batch_size=1,2", "--dir", str(tmp_path / "s"), "--", "other"])


def test_a_run_that_ends_in_nan_does_not_count_and_shortens_no_other(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import json, math, os, pathlib, sys\n"
        "value, seed = int(sys.argv[2]), int(sys.argv[4])\n"
        "folder = pathlib.Path(os.environ['QM_TRIAL_DIR']) / 'run'\n"
        "folder.mkdir(parents=True)\n"
        "(folder / 'config.json').write_text('{}')\n"
        "broken = (value, seed) == (4, 1)\n"
        "value = lambda k: math.nan if broken and k > 2 else k / 10\n"
        "rows = [{'step': 100 * k, 'validation/success': value(k)} for k in range(1, 9)]\n"
        "(folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\\n' for row in rows))\n"
    )
    grid = ["--grid", "x=2,4,8", "--seeds", "2", "--dir", str(tmp_path / "s"), "--", sys.executable, str(script)]
    with pytest.raises(TooManyFailuresError, match="1 of 6 trials failed"):
        main(["sweep", *grid])
    found = json.loads((tmp_path / "s" / "results.json").read_text())
    assert [len(row["values"]) for row in found["settings"]] == [2, 1, 2]
    assert min(value for row in found["settings"] for value in row["values"]) > 0.5


SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPER!r}])"


def wait_for_the_end_of(process: str) -> None:
    """Wait until a process that was killed is gone or a zombie (Z)."""
    give_up_at = time.monotonic() + 60
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while process and Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < give_up_at
            time.sleep(0.01)


def test_a_trial_that_times_out_is_killed_with_all_it_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", "--grid", "x=1", "--seeds", "1", "--timeout-min", "0.05", "--dir", str(tmp_path / "s")]
    with pytest.raises(UsageError, match="no setting has a finite number"):
        main([*command, "--", sys.executable, "-c", CHILD])
    assert "timed out" in capsys.readouterr().err
    wait_for_the_end_of((tmp_path / "s" / "trials" / "x=1,seed=1" / "stdout.txt").read_text().strip())


def test_a_sweep_that_is_killed_takes_its_trials_along(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "query_mutator", "sweep", "--grid", "x=1", "--seeds", "1", "--out"]
    sweep = subprocess.Popen([*command, str(tmp_path / "s"), "--", "{python}", "-c", CHILD], stderr=subprocess.DEVNULL)
    stdout = tmp_path / "s" / "trials" / "x=1,seed=1" / "stdout.txt"
    give_up_at = time.monotonic() + 60
    while not (stdout.exists() and stdout.read_text().strip()):
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
    sweep.kill()
    sweep.wait()
    wait_for_the_end_of(stdout.read_text().strip())


def test_a_run_folder_is_read_where_the_command_writes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        f"import sys; from pathlib import Path; sys.path.insert(0, {str(Path(__file__).resolve().parents[4])!r})\n"
        "from query_mutator.files.run_dir import MetricsWriter\n"
        "folder = Path(sys.argv[1]) / 'a-run'; folder.mkdir(); writer = MetricsWriter(folder)\n"
        "last = 1000 * int(sys.argv[3])\n"
        "for step in range(100, last + 1, 100):\n"
        "    numbers = {'validation/success': step / 10_000 * float(sys.argv[2]), 'charts/SPS': 5.0}\n"
        "    writer.write(numbers, step=step, wall_s=1)\n"
    )
    grid = ["--grid", "x=1,2,4", "--seeds", "2", "--seed-step", "1", "--dir", str(tmp_path / "s"), "--jobs", "2"]
    assert main(["sweep", *grid, "--", sys.executable, "-c", code, "{dir}", "{x}", "{seed}"]) == 0
    found = json.loads((tmp_path / "s" / "results.json").read_text())
    assert [row["throughput"] for row in found["settings"]] == [5, 5, 5]
    values = [row["values"] for row in found["settings"]]  # all read up to step 1000, where the shortest ended
    assert values == [pytest.approx([0.08 * x] * 2) for x in (1, 2, 4)]
    capsys.readouterr()
    again = ["sweep", *grid, "--reducer", "last", "--", sys.executable, "-c", code, "{dir}", "{x}", "{seed}"]
    assert main(again) == 0
    found = json.loads((tmp_path / "s" / "results.json").read_text())
    assert found["settings"][0]["values"] == pytest.approx([0.1] * 2)


def test_validation_folds_are_repeats_and_no_axis(
    tmp_path: Path, trainer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Success is 0.01 higher in each later fold, which is not an optimum at the last one."""
    script = Path(trainer[2])
    script.write_text(TRAINER.replace("+ noise", '+ noise + 0.01 * int(flags["--validation-fold"])'))
    folds = ("--grid", "validation_fold=0,1,2,3,4", "--seeds", "1")
    found = run_sweep(tmp_path / "s", trainer, "64,512,4096", *folds)
    settings: list[dict[str, Any]] = found["settings"]  # type: ignore[assignment]
    assert [list(row["setting"]) for row in settings] == [["train_batch_size"]] * 3
    assert [(row["folds"], len(row["values"])) for row in settings] == [(5, 5)] * 3
    assert np.diff(settings[1]["values"]) == pytest.approx([0.01] * 4)
    assert "train_batch_size=512 (success 0.7" in (said := capsys.readouterr().out)
    assert "5 runs over 5 validation folds" in said
    assert {row["trial"]["fold"] for row in found["trials"]} == {0, 1, 2, 3, 4}  # type: ignore[attr-defined]


def test_settings_of_grids_and_of_chance() -> None:
    grid = parse_grid(["lr=1e-3,1e-2", "--train-batch-size=64"])
    assert grid == {"lr": (1e-3, 1e-2), "train_batch_size": (64,)}
    assert [trial.name for trial in trials_of(grid_settings(grid), [1, 2])][1:3] == [
        "lr=0.01,train_batch_size=64,seed=1",
        "lr=0.001,train_batch_size=64,seed=2",
    ]
    ranges = parse_ranges(["lr=1e-4:1e-2", "batch=8:512"])
    drawn = random_settings(ranges, count=200)
    assert drawn[:5] == random_settings(ranges, count=5)
    assert all(1e-4 <= one["lr"] <= 1e-2 and one["batch"] in range(8, 513) for one in drawn)  # type: ignore[operator]
    assert 80 < sum(one["lr"] < 1e-3 for one in drawn) < 120  # type: ignore[operator]
    assert (extended((64, 512), "high"), extended((64, 512), "low"), extended(("a", "b"), "low")) == (4096, 8, None)
    filled = command_of(Trial(setting={"x": 2}, seed=1), ["run", "--n={x}", "{dir}/{seed}"], Path("d"))
    assert filled == ["run", "--n=2", "d/1"]
    for line in ("python x/train_query_mutator.py", "qm train", "{python} -m query_mutator train"):
        words = line.split()
        assert command_of(Trial(setting={}, seed=1), words, Path("d"))[-4:] == ["--seed", "1", "--save-dir", "d"]
    for words in (["qm", "train", "sft"], ["python", "train.py"], ["qm", "train", "--save-dir={dir}"]):
        assert "--save-dir" not in command_of(Trial(setting={}, seed=1), words, Path("d"))
    of_fold = Trial(setting={"x": 2}, seed=1, fold=3)
    assert of_fold.name == "x=2,validation_fold=3,seed=1"
    assert command_of(of_fold, ["run"], Path("d")) == ["run", "--x", "2", "--validation-fold", "3", "--seed", "1"]


def test_optuna_finds_the_neighborhood_and_resumes(tmp_path: Path, trainer: list[str]) -> None:
    search = ["sweep", "--random", "train_batch_size=8:65536", "--sampler", "optuna", "--seeds", "1", "--jobs", "2"]
    place = ["--dir", str(tmp_path / "s")]
    for trials, rows in ((4, 4), (10, 10)):
        assert main([*search, *place, "--trials", str(trials), *trainer]) == 0
        assert len((tmp_path / "s" / "trials.jsonl").read_text().splitlines()) == rows


def test_a_key_in_the_command_reaches_the_trials_and_no_file(
    tmp_path: Path, trainer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    key = "sk-PLANTED-0123456789"
    checked = tmp_path / "checked.py"
    takes_address = "import sys; assert '@' in sys.argv[1] and '***' not in sys.argv.pop(1)\n"
    checked.write_text(takes_address + Path(trainer[-1]).read_text())
    address = f"https://me:{key}@host/v1?api_key={key}"
    for _ in range(2):  # the second one resumes
        run_sweep(tmp_path / "s", [*trainer[:-1], str(checked), address], "32,64,128")
    captured = capsys.readouterr()
    assert key not in captured.out + captured.err
    files = [path for path in (tmp_path / "s").rglob("*") if path.is_file()]
    assert [path for path in files if key.encode() in path.read_bytes()] == []


def test_settings_that_differ_in_punctuation_are_two_trials_and_long_ones_have_short_names() -> None:
    settings = grid_settings(parse_grid(["m=a/b,a:b", f"n={'x' * 400},1"]))
    names = [trial.name for trial in trials_of(settings, [1])]
    assert len({*names}) == 4
    assert max(map(len, names)) < 255
