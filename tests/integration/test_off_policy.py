"""IQN and the direct method through the trainer: run folder, evaluation, resume and Ctrl-C as with PPO."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from query_mutator.files.metrics import METRICS
from query_mutator.learners.direct import ITERATIONS
from query_mutator.session.checkpoint import read_checkpoint
from query_mutator.training.config import parse_config
from tests.integration.test_interrupt import ROOT
from tests.integration.training_runs import rows, the_run, train

LEARNERS = ["iqn", "direct"]
SMALL = ("--train-batch-size", "16", "--learning-starts", "16", "--replay-ratio", "4")


@pytest.mark.parametrize("algo", LEARNERS)
def test_run_leaves_what_every_run_leaves(algo: str, tiny_flags: list[str], tmp_path: Path) -> None:
    assert train(*tiny_flags, *SMALL, "--algo", algo) == 0
    run = the_run(tmp_path)
    assert run.name.endswith(f"-{algo}")
    steps = rows(run, "transcripts")
    assert Counter((row["env"], row["step"]) for row in steps) == {
        (env, step): 1 for env in range(4) for step in range(16)
    }
    written = rows(run, "metrics")
    assert [row["step"] for row in written] == [0, 32, 64]
    assert all(set(row) <= {"step", "wall_s", *METRICS} for row in written)
    assert {path.name for path in run.glob("*.pt")} == {"resume.pt", "resume.previous.pt"}
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["eval"]["methods"]["policy"]["success"] <= 1


def test_row_of_iqn_has_every_family(tiny_flags: list[str], tmp_path: Path) -> None:
    train(*tiny_flags, *SMALL, "--algo", "iqn", "--no-evaluate")
    last = rows(the_run(tmp_path), "metrics")[-1]
    assert {
        *(
            "validation/success",
            "validation/best_success",
            "losses/td_loss",
            "rl/avg_value",
            "rl/action_gap",
            "rl/epsilon",
        ),
        *("perf/transitions_learned_per_second", "perf/learner_share_training", "perf/learner_share_waiting"),
        *("perf/replay_ratio_requested", "perf/replay_ratio_achieved", "perf/updates_per_sample"),
        *("perf/weight_sync_age", "buffer/size", "grads/norm_before_clip_median", "grads/norm_before_clip_max"),
        *("grads/norm_after_clip_max", "counters/env_steps", "counters/updates", "counters/samples_learned"),
        *("counters/llm_calls", "counters/tokens", "counters/training_s", "counters/target_updates"),
    } <= set(last)
    assert last["counters/env_steps"] == 64
    assert last["counters/samples_learned"] == 16 * last["counters/updates"]
    # What waits for its n-step return at the end of the run was gathered, but is no transition yet.
    assert last["perf/replay_ratio_achieved"] == pytest.approx(4, abs=16 / last["buffer/size"])
    assert 0 < last["perf/learner_share_training"] + last["perf/learner_share_waiting"] <= 1


@pytest.mark.parametrize("algo", ["ppo", "direct"])
def test_rows_of_the_others_have_the_families_they_can(algo: str, tiny_flags: list[str], tmp_path: Path) -> None:
    train(*tiny_flags, "--algo", algo, "--no-evaluate")
    last = rows(the_run(tmp_path), "metrics")[-1]
    assert {
        *("rl/avg_value", "perf/transitions_learned_per_second", "perf/learner_share_waiting", "counters/updates"),
        *("counters/samples_learned", "counters/llm_calls", "counters/tokens", "validation/best_success"),
    } <= set(last)
    learned = last["counters/samples_learned"]
    assert learned == {"direct": ITERATIONS, "ppo": 4}[algo] * 64


@pytest.mark.parametrize("algo", LEARNERS)
def test_resume_goes_on_in_the_middle_of_episodes(algo: str, tiny_flags: list[str], tmp_path: Path) -> None:
    train(*tiny_flags, *SMALL, "--algo", algo, "--no-evaluate", "--no-use-linear-lr-decay")
    run = the_run(tmp_path)
    first = read_checkpoint(run)
    assert train("--resume", str(run), "--num-env-steps", "128") == 0
    steps = rows(run, "transcripts")
    assert Counter((row["env"], row["step"]) for row in steps) == {
        (env, step): 1 for env in range(4) for step in range(32)
    }
    second = read_checkpoint(run)
    assert second.learner["updates_done"] == 4
    assert second.learner["counts"]["samples_learned"] > first.learner["counts"]["samples_learned"]
    counts = [row["counters/samples_learned"] for row in rows(run, "metrics")[1:]]
    assert counts == sorted(counts)
    if algo == "iqn":
        assert second.learner["replay"]["added"] > first.learner["replay"]["added"]
        known = first.learner["replay"]["returns"]
        torch.testing.assert_close(second.learner["replay"]["returns"][: len(known)], known)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--deterministic"], "--algo iqn has no deterministic mode"),
        (["--learning-starts", "200000"], "try --replay-size 200000"),
    ],
)
def test_flags_that_do_not_fit_are_one_line(
    flags: list[str], wanted: str, tiny_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*tiny_flags, "--algo", "iqn", *flags) == 2
    err = capsys.readouterr().err
    assert wanted in err
    assert err.count("\n") == 1


def test_dry_run_counts_gradient_steps(tiny_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*tiny_flags, *SMALL, "--algo", "iqn", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "gradient steps, about" in out
    assert " 16\n" in out  # 4 uses of 64 steps, 16 at once


def test_example_is_a_run_of_iqn() -> None:
    config = parse_config(["--config", str(ROOT / "examples" / "iqn_run.json")])
    assert (config.algo, config.total_steps) == ("iqn", 1408)
