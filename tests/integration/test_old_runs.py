"""Run folders and checkpoints written by version 0.1.0, before the restructuring, still load, act and resume."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from query_mutator.commands.main import main as qm_main
from query_mutator.embedded.server import EmbeddedServer
from query_mutator.errors import CheckpointError
from query_mutator.files.json_lines import read_json_lines
from query_mutator.session.checkpoint import read_checkpoint
from query_mutator.session.loading import load_policy
from train_query_mutator import main

OLD = Path(__file__).resolve().parents[1] / "data" / "runs_of_0_1_0"
#: What the code of 0.1.0 did with these checkpoints for the observations of `test_old_policies_act_as_they_did`.
EXPECTED = json.loads((OLD / "expected.json").read_text())


@pytest.fixture
def old_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the runs to a folder, which is then the working directory: their dataset is a relative path."""
    copy = tmp_path / "old"
    shutil.copytree(OLD, copy)
    monkeypatch.chdir(copy)
    return copy


@pytest.mark.parametrize("name", ["ppo", "iqn.pt", "bandit.pt"])
def test_old_policies_act_as_they_did(name: str) -> None:
    policy = load_policy(read_checkpoint(OLD / name))
    obs = np.random.default_rng(0).normal(size=(6, 30)).astype(np.float32)
    obs[:, -5:] = 0  # all actions allowed
    acted = policy.act(obs, (), greedy=True)
    expected = EXPECTED[name.removesuffix(".pt")]
    assert acted.actions.tolist() == expected["actions"]
    np.testing.assert_allclose(acted.values, expected["values"], rtol=1e-5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["ppo", "iqn.pt", "bandit.pt"])
def test_old_runs_are_evaluated(
    name: str, old_runs: Path, tiny_server: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert qm_main(["eval", "--checkpoint", name, "--ollama-url", tiny_server.url]) == 0
    assert "policy" in capsys.readouterr().out


def test_a_run_with_the_default_operators_keeps_them_when_a_later_version_has_more(tmp_path: Path) -> None:
    old = read_checkpoint(OLD / "ppo")
    started_with_default = {**old.flags, "operators": ""}
    file = dataclasses.replace(old, flags=started_with_default).save(tmp_path / "checkpoint.pt")
    assert read_checkpoint(file).flags["operators"] == "spelling,neutral,filler"


def test_an_old_run_resumes_in_its_folder(
    old_runs: Path, tiny_server: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (old_runs / "ppo" / "transcripts.jsonl").read_text()
    flags = ["--num-env-steps", "24", "--ollama-url", tiny_server.url, "--no-evaluate"]
    assert main(["--resume", "ppo", *flags]) == 0
    assert (old_runs / "ppo" / "transcripts.jsonl").read_text().startswith(before)
    assert len(list(read_json_lines(old_runs / "ppo" / "transcripts.jsonl"))) == 24
    assert read_checkpoint(old_runs / "ppo").learner["updates_done"] == 3
    assert "periodic evaluations read held-out questions; from here on there are none" in capsys.readouterr().err
    rows = list(read_json_lines(old_runs / "ppo" / "metrics.jsonl"))
    assert "eval/success" in rows[0]
    assert not [row for row in rows[1:] if "validation/success" in row]


def test_an_old_run_gets_no_validation_fold_in_its_folder(old_runs: Path, tiny_server: EmbeddedServer) -> None:
    words = ["--resume", "ppo", "--num-env-steps", "24", "--validation-fold", "1", "--ollama-url", tiny_server.url]
    with pytest.raises(CheckpointError, match="validation_fold: then none, now 1"):
        main(words)


def test_the_curve_of_an_old_run_is_analyzed(old_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm_main(["analyze", "ppo"]) == 0
    assert "success in share" in capsys.readouterr().out


def test_the_old_name_of_a_renamed_flag_still_works(tiny_flags: list[str]) -> None:
    flags = [*tiny_flags, "--algo", "bandit", "--max-update-debt", "3", "--no-evaluate", "--eval-interval", "0"]
    assert main(flags) == 0
