"""The trainer's flags: names and aliases, files of flags, and one line for every mistake."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from query_mutator.cli.flags import flags_of
from query_mutator.training.config import PROG, TrainConfig, parse_config, remarks

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--num-envs", "4"], "num_processes", 4),
        (["--num_processes", "4"], "num_processes", 4),
        (["--total-timesteps=64"], "num_env_steps", 64),
        (["--clip-coef", "0.1"], "clip_param", 0.1),
        (["--learning-rate", "1e-3"], "lr", 1e-3),
        (["--no-batching"], "use_batching", False),
        (["--no-batching", "--use-batching"], "use_batching", True),
        (["--seed", "1", "--seed", "2"], "seed", 2),
        (["--ollama-url", "a:1", "--batch-size", "4", "--ollama-url", "b:2"], "ollama_url", ("a:1", "b:2")),
        (["--timeout", "3"], "timeout_s", 3.0),
        (["--budget", "1.5"], "budget", 1.5),
        (["--budget", "None"], "budget", None),
        (["--hidden-sizes", "32", "16"], "hidden_sizes", (32, 16)),
        (["--mutator-model", "qwen2.5:3b"], "mutator_model", "qwen2.5:3b"),
        (["--operators="], "operators", ""),
    ],
)
def test_flag_is_read(argv: list[str], field: str, value: object) -> None:
    assert getattr(parse_config(argv), field) == value


@pytest.fixture
def flags_file(tmp_path: Path) -> Path:
    path = tmp_path / "flags.json"
    path.write_text(json.dumps({"num-processes": 4, "lr": 0.5, "use_batching": False, "hidden_sizes": [8, 8]}))
    return path


def test_command_line_wins_over_file_and_file_over_defaults(flags_file: Path) -> None:
    config = parse_config(["--config", str(flags_file), "--lr", "0.25"])
    assert (config.num_processes, config.lr, config.use_batching, config.hidden_sizes) == (4, 0.25, False, (8, 8))


def test_base_loses_against_file(flags_file: Path) -> None:
    config = parse_config(
        ["--config", str(flags_file), "--resume", "run"], base=lambda _: ({"lr": 0.1, "gamma": 0.5}, "a checkpoint")
    )
    assert (config.lr, config.gamma) == (0.5, 0.5)


def test_config_of_a_run_is_a_file_of_flags(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"flags": {"seed": 7, "target_model": None}, "commit": "abc"}))
    config = parse_config(["--config", str(path)])
    assert (config.seed, config.target_model) == (7, ())


def test_steps_are_rounded_up_to_whole_rollouts_and_said_so() -> None:
    config = parse_config(["--num-env-steps", "1", "--num-processes", "8"])
    assert (config.num_updates, config.total_steps) == (1, 256)
    assert "rounded up to 256" in remarks(config)[0]


def test_no_batching_says_that_batch_size_is_ignored() -> None:
    config = parse_config(["--num-env-steps", "512", "--no-batching"])
    assert remarks(config) == ["--no-batching: --batch-size is ignored, calls are made one at a time"]
    assert config.calls_in_flight == 1


@pytest.mark.parametrize(("processes", "batch", "advice"), [(4, 8, "--batch-size 4"), (17, 8, "--batch-size 9")])
def test_rule_of_thumb_gives_advice(processes: int, batch: int, advice: str) -> None:
    steps = str(32 * processes)
    argv = ["--num-processes", str(processes), "--batch-size", str(batch), "--num-env-steps", steps]
    (line,) = remarks(parse_config(argv))
    assert line.endswith(advice)


def test_looks_are_about_ten_a_run_unless_given() -> None:
    assert parse_config([]).updates_between_evals == 2
    assert parse_config(["--num-env-steps", "1"]).updates_between_evals == 1
    assert parse_config(["--eval-interval", "0"]).updates_between_evals == 0


@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_help_names_its_flags_and_loads_nothing_heavy(option: str) -> None:
    code = (
        "import sys, train_query_mutator\n"
        f"try: train_query_mutator.main(['{option}'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'tensorboard', 'matplotlib', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed = set(re.findall(r"--[a-z-]+", " ".join(re.findall(r"^│ --.*", done.stdout, re.MULTILINE))))
    for field, flag in flags_of(TrainConfig).items():
        assert (flag.name in listed) == (option == "--help-all" or field in TrainConfig.FIRST)
    assert PROG in done.stdout


def test_first_run_is_a_file_of_flags() -> None:
    config = parse_config(["--config", str(ROOT / "examples" / "first_run.json")])
    assert (config.name, config.dataset) == ("first-run", "general")
    assert remarks(config) == []
