"""The trainer's command line from flags to files, and checkpoints that do not fit."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from query_mutator.commands.main import main as qm
from query_mutator.files.run_dir import METRICS
from query_mutator.learners import Plan
from query_mutator.learners.direct import ITERATIONS
from query_mutator.session.policy_file import read_policy
from query_mutator.testing import StubServer
from query_mutator.training.config import parse_config
from query_mutator.training.run_folder import read_checkpoint
from tests.integration.conftest import write_dataset
from tests.integration.training_runs import rows, summary, the_run, train


def test_run_leaves_everything_behind(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = list[str](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    assert train(*tiny_flags, "--name", "demo", "--seed", "3") == 0
    run = the_run(tmp_path)
    assert run.name.endswith("-demo")
    assert {path.name for path in run.iterdir()} == {
        "config.json", "metrics.jsonl", "tensorboard", "transcripts.jsonl", "resume.pt", "summary.json",
        "evaluation.jsonl", "replies.sqlite", "report.html", "policy.qm", "resume.previous.pt",
    }  # fmt: skip
    first = [place for place, path in enumerate(synced) if ".resume.next.pt" in path][1]
    assert {str(run / name) for name in ("transcripts.jsonl", "metrics.jsonl")} <= set(synced[:first])
    out, err = capsys.readouterr()
    assert str(run) in out
    assert "best_of_k" in out
    found = summary(tmp_path)
    assert (found["cut_replies"], found["prompts_too_long"]) == (0, {})
    assert not re.search("token limit|context", err)


def test_metrics_have_a_row_for_every_update_and_only_known_keys(tiny_flags: list[str], tmp_path: Path) -> None:
    train(*tiny_flags, "--no-evaluate", "--validation-fold", "1")
    written = rows(the_run(tmp_path), "metrics")
    assert [row["step"] for row in written] == [0, 32, 64]
    assert all(set(row) <= {"step", "wall_s", *METRICS} for row in written)
    assert {"losses/value_loss", "losses/approx_kl", "charts/SPS", "llm/calls", "validation/success"} <= set(
        written[-1]
    )
    assert written[-1]["llm/calls"] > written[1]["llm/calls"] > 0
    success = [row["validation/success"] for row in written]
    assert [row["validation/best_success"] for row in written] == np.maximum.accumulate(success).tolist()
    assert max(success) > 0
    progress = read_checkpoint(the_run(tmp_path)).progress
    assert (progress.best_success, progress.totals.calls) == (max(success), written[-1]["llm/calls"])
    assert progress.wall_s >= written[-1]["wall_s"] > 0


@pytest.mark.parametrize(("fold", "count"), [("0", 3), ("none", None)])
def test_validation_questions_have_a_curve_or_are_learned_from(
    fold: str, count: int | None, tiny_flags: list[str], validation: list[str], tmp_path: Path
) -> None:
    train(*tiny_flags, "--no-evaluate", "--validation-fold", fold)
    asked = {row["question"] for row in rows(the_run(tmp_path), "transcripts")}
    assert bool(asked & set(validation)) == (count is None)
    assert rows(the_run(tmp_path), "metrics")[-1].get("validation/questions") == count


def test_a_fold_that_leaves_nothing_is_one_line(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*tiny_flags, "--no-evaluate", "--validation-fold", "2") == 0
    assert "--validation-fold 2 holds none of the 10 questions to learn from" in capsys.readouterr().err
    one_fold = write_dataset(tmp_path / "one.jsonl", [("kill the group plz", "os.killpg"), ("all of it", "all")])
    where = tiny_flags.index("--dataset") + 1
    flags = [*tiny_flags[:where], str(one_fold), *tiny_flags[where + 1 :]]
    assert train(*flags) == 2
    assert "--validation-fold 0 takes all 2 questions that are not held out; give another fold, or none" in (
        capsys.readouterr().err
    )
    assert train(*flags, "--validation-fold", "none", "--embedding-dims", "1", "--dry-run") == 0
    assert "2 / 0 / 0" in capsys.readouterr().out


def test_a_mutator_that_nothing_would_call_is_one_line(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*tiny_flags, "--operators", "clean", "--no-evaluate") == 2
    assert "--mutator-model softener would never be called" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "latest").exists()


@pytest.mark.parametrize("deploy", ["best_plan", "policy", "identity", None])
def test_a_run_folder_stands_for_what_its_verdict_deploys(
    deploy: str | None, tiny_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = {"deploy": deploy, "sentence": "."}
    monkeypatch.setattr("query_mutator.evaluation.summary.recommend", lambda *_, **__: verdict)
    assert train(*tiny_flags, "--forms", "statement", "--plan-calls", "60", "--eval-calls", "160") == 0
    run = the_run(tmp_path)
    assert (run / "best.qm").exists() == (deploy is not None)
    assert qm(["rewrite", str(run), "umm which planet", *tiny_flags[:2]]) == 0
    best = read_policy(run, best=True).flags
    assert (read_policy(run).flags.algo, best.algo) == ("ppo", "ppo" if deploy in ("policy", None) else "plan")
    found = summary(tmp_path)["eval"]["plan_search"]["best"]["steps"]
    assert best.plan == {"best_plan": Plan(steps=tuple(found)), "identity": Plan()}.get(str(deploy))


def test_dry_run_prints_the_estimate_and_writes_nothing(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*tiny_flags, "--dry-run", "--num-env-steps", "1000") == 0
    out, err = capsys.readouterr()
    assert re.search(r"--num-env-steps 1000 .* 1024", err)
    assert re.search(r"held out +\d+ / \d+ / (\d+)\n(.|\n)*1024 = 32 x 4 processes x 8 steps(.|\n)*\n\1 held-out", out)
    assert train(*tiny_flags, "--dry-run", "--no-evaluate") == 0
    assert "held-out questions" not in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_resume_continues_in_the_run_folder_with_its_flags(tiny_flags: list[str], tmp_path: Path) -> None:
    train(*tiny_flags, "--no-evaluate", "--seed", "5", "--no-use-linear-lr-decay")
    run = the_run(tmp_path)
    assert train("--resume", str(tmp_path / "runs" / "latest"), "--num-env-steps", "128") == 0
    assert the_run(tmp_path) == run
    assert [path.name for path in (tmp_path / "runs").iterdir() if not path.is_symlink()] == [run.name]
    steps = rows(run, "transcripts")
    assert Counter((row["env"], row["step"]) for row in steps) == {
        (env, step): 1 for env in range(4) for step in range(32)
    }
    written = rows(run, "metrics")
    assert [row["step"] for row in written] == [0, 32, 64, 96, 128]
    assert [row["wall_s"] for row in written] == sorted(row["wall_s"] for row in written)
    config = json.loads((run / "config.json").read_text())
    assert (config["flags"]["seed"], config["resumed"][0]["at_step"]) == (5, 64)


def test_run_that_was_ended_before_its_results_writes_them_when_gone_on_with(
    tiny_flags: list[str], tiny_server: StubServer, tmp_path: Path
) -> None:
    train(*tiny_flags, "--plan-calls", "400")
    run = the_run(tmp_path)
    before = summary(tmp_path)
    (run / "summary.json").unlink()
    calls = tiny_server.stats()["calls"]
    assert train("--resume", str(run)) == 0
    after = summary(tmp_path)
    assert tiny_server.stats()["calls"] == calls
    for found in (before, after):
        del found["eval"]["plan_search"]["seconds"]
    assert after["eval"] == before["eval"]
    assert after["llm_calls"] == before["llm_calls"]
    assert [row["step"] for row in rows(run, "metrics")] == [0, 32, 64]


def test_a_run_that_fails_before_it_begins_leaves_no_folder(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--forms", "question_answer,few_words", "--ask", "form", "--answer", "learned", "--answer-calls", "8"]
    assert train(*tiny_flags, *flags) == 2
    assert "too few" in capsys.readouterr().err
    assert not list((tmp_path / "runs").iterdir())


def test_a_run_without_held_out_questions_says_so(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text('{"query": "plz sort my list", "accept": ["sorted"]}\n')
    assert train(*tiny_flags, "--dataset", str(one), "--dry-run") == 0
    said = capsys.readouterr().err
    assert "one.jsonl: no question is held out, so the run ends without a comparison" in said


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--operators", "spelling,slang"], "operators: then spelling,neutral,filler, now spelling,slang"),
        (["--num-processes", "8"], "num_processes: then 4, now 8"),
        (["--algo", "direct"], "algo: then ppo, now direct"),
        (["--gamma", "0.5", "--batch-size", "2", "--num-env-steps", "96"], "gamma: then 0.9, now 0.5"),
        (["--validation-fold", "3", "--num-env-steps", "96"], "validation_fold: then 0, now 3"),
        (["--embedding-dims", "x"], "--embedding-dims"),
        ([], "--num-env-steps"),
    ],
)
def test_checkpoint_that_does_not_fit_changes_nothing(
    flags: list[str], message: str, trained: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("--no-evaluate", "--eval-interval", "0")
    before = contents(run)
    assert train("--resume", str(run), *flags) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), message in err) == ("", 1, True), err
    assert "batch_size" not in err
    assert contents(run) == before


# --- every learner ----------------------------------------------------------------------------------------------------

SMALL = ("--train-batch-size", "16", "--learning-starts", "16", "--replay-ratio", "4")


#: What the row of an update has, of each learner and of all.
FAMILIES = {
    "iqn": """losses/td_loss rl/action_gap rl/epsilon perf/learner_share_training perf/replay_ratio_requested
        perf/replay_ratio_achieved perf/updates_per_sample perf/weight_sync_age buffer/size
        grads/norm_before_clip_median grads/norm_before_clip_max grads/norm_after_clip_max counters/env_steps
        counters/training_s counters/target_updates""",
    "direct": "",
    "ppo": "",
}
OF_ALL = """validation/success validation/best_success rl/avg_value perf/transitions_learned_per_second
    perf/learner_share_waiting counters/updates counters/samples_learned counters/llm_calls counters/tokens"""


def assert_every_step_once(run: Path, *, steps: int) -> None:
    found = Counter((row["env"], row["step"]) for row in rows(run, "transcripts"))
    assert found == {(env, step): 1 for env in range(4) for step in range(steps)}


@pytest.mark.parametrize("algo", FAMILIES)
def test_a_run_and_its_resumption_in_the_middle_of_episodes(algo: str, tiny_flags: list[str], tmp_path: Path) -> None:
    assert train(*tiny_flags, *SMALL, "--algo", algo, "--no-evaluate", "--no-use-linear-lr-decay") == 0
    run = the_run(tmp_path)
    assert run.name.endswith(f"-{algo}")
    assert_every_step_once(run, steps=16)
    written, first = rows(run, "metrics"), read_checkpoint(run)
    assert [row["step"] for row in written] == [0, 32, 64]
    assert all(set(row) <= {"step", "wall_s", *METRICS} for row in written)
    last = written[-1]
    assert {*FAMILIES[algo].split(), *OF_ALL.split()} <= set(last)
    if algo == "iqn":
        assert last["counters/env_steps"] == 64
        assert last["counters/samples_learned"] == 16 * last["counters/updates"]
        # What waits for its n-step return at the end of the run was gathered, but is no transition yet.
        assert last["perf/replay_ratio_achieved"] == pytest.approx(4, abs=16 / last["buffer/size"])
        assert 0 < last["perf/learner_share_training"] + last["perf/learner_share_waiting"] <= 1
    else:
        assert last["counters/samples_learned"] == {"direct": ITERATIONS, "ppo": 4}[algo] * 64

    assert train("--resume", str(run), "--num-env-steps", "128") == 0
    assert_every_step_once(run, steps=32)
    second = read_checkpoint(run)
    assert second.learner["updates_done"] == 4
    counts = [row["counters/samples_learned"] for row in rows(run, "metrics")[1:]]
    assert counts == sorted(counts)
    assert counts[-1] > counts[1]
    if algo == "iqn":
        assert second.learner["replay"]["added"] > first.learner["replay"]["added"]
        known = first.learner["replay"]["returns"]
        torch.testing.assert_close(second.learner["replay"]["returns"][: len(known)], known)


def test_dry_run_counts_gradient_steps(tiny_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*tiny_flags, *SMALL, "--algo", "iqn", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "gradient steps, about" in out
    assert " 16\n" in out  # 4 uses of 64 steps, 16 at once


def test_example_is_a_run_of_iqn() -> None:
    config = parse_config(["--config", "examples/iqn_run.json"])
    assert (config.algo, config.total_steps) == ("iqn", 1408)
