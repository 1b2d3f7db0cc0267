"""User code through each of the doors: trained with for some steps, evaluated, resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from query_mutator import plugins
from query_mutator.cli.console import exit_code
from query_mutator.commands.main import main as qm_main
from query_mutator.env.task import Task
from query_mutator.errors import UsageError
from query_mutator.files.json_lines import read_json_lines
from query_mutator.forms import FORMS
from query_mutator.llm.client import Client
from query_mutator.operators import OPERATORS
from query_mutator.rewards import PARTS, Evidence, Scoring, WeightedReward
from query_mutator.session.checkpoint import read_checkpoint
from query_mutator.training.callbacks import CALLBACKS, Callback, RunView
from query_mutator.types import ChatRequest
from rl_query_mutator_env import QueryMutationEnv
from tests.conftest import QUESTIONS
from train_query_mutator import main

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "tests" / "plugins"
#: Runs two trainings and an evaluation in a process that sees the packages of another folder.
IN_TURN = """
import json, sys
from query_mutator.commands.main import main as qm
from train_query_mutator import main as train
for main, argv in zip((train, train, qm), json.loads(sys.argv[1])):
    assert main(argv) == 0, argv
"""
PLUGIN = ROOT / "tests" / "plugins" / "csv_callback.py"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0", "plugin {plugin}:4: ZeroDivisionError: division by zero"),
        ("OSError('no\\nluck')", "plugin {plugin}:4: OSError: no luck"),
        ("5", "operator 'broken' returned int; return the question as text"),
    ],
)
def test_an_operator_that_fails_is_one_line(
    body: str,
    said: str,
    tiny_flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin = tmp_path / "broken.py"
    result = f"raise {body}" if "Error" in body else f"return {body}"
    plugin.write_text(
        "from query_mutator.operators import OPERATORS, LocalOperator\n\n"
        f"def broken(question, context):\n    {result}\n"
        'OPERATORS.add("broken", LocalOperator(name="broken", summary="Fails.", function=broken))\n'
    )
    monkeypatch.setattr(OPERATORS, "_entries", dict(OPERATORS._entries))
    flags = [*tiny_flags, "--plugin", str(plugin), "--operators", "broken", "--no-evaluate"]
    assert exit_code(main, flags, prog="qm train") == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"qm train: {said.format(plugin=plugin)}"


def test_an_installed_form(tmp_path: Path) -> None:
    info = tmp_path / "quiz-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quiz\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[query_mutator.forms]\nquiz = quiz:QUIZ\n")
    (tmp_path / "quiz.py").write_text(
        'from query_mutator.forms import Form\nQUIZ = Form.of("quiz", "Quiz.", "Quiz! {question}")\n'
    )
    code = (
        "from query_mutator import forms; print(len(forms.select('all')), [one.name for one in forms.select('quiz')])"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.split()[1] == "['quiz']"
    assert int(said.stdout.split()[0]) == len(FORMS.registered()) - 1  # `all` has neither it nor as_is


def test_a_plugins_operators_are_among_the_default_ones(tiny_flags: list[str], tmp_path: Path) -> None:
    at = tiny_flags.index("--operators")
    flags = [*tiny_flags[:at], *tiny_flags[at + 2 :], "--plugin", str(PLUGINS / "polite_operator.py")]
    assert main([*flags, "--no-evaluate", "--eval-interval", "0"]) == 0
    assert read_checkpoint(tmp_path / "runs" / "latest").actions.count("polite") == 1


def test_a_judge_that_fails_makes_the_step_invalid(tiny_task: Callable[..., Task], tiny_client: Client) -> None:
    @PARTS.register("broken judge")
    def judge(evidence: Evidence) -> Scoring:
        reply = yield ChatRequest.user(
            "?", model="no such model" if evidence.rewrite != QUESTIONS[0].text else "librarian"
        )
        return float(len(reply.text) > 0)

    env = QueryMutationEnv(tiny_task(reward=WeightedReward({"broken judge": 1.0})), client=tiny_client)
    env.reset(options={"question": 0})  # the judge of the first answer works
    _, reward, terminated, _, info = env.step(0)
    assert (info["valid"], reward, terminated) == (False, 0.0, False)


@pytest.mark.slow
def test_an_installed_learner(tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site, run_dir = tmp_path / "site", tmp_path / "runs"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    source = tmp_path / "source"
    subprocess.run(["cp", "-r", str(PLUGINS / "installed_learner"), str(source)], check=True)
    subprocess.run([*install, "--target", str(site), str(source)], check=True, timeout=120)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    flags = [*tiny_flags, "--save-dir", str(run_dir), "--algo", "mean_reward"]
    flags += ["--no-use-linear-lr-decay"]
    more = ["--resume", str(run_dir / "latest"), "--num-env-steps", "96", "--no-evaluate"]
    commands = [[*flags, "--no-evaluate"], more, ["eval", "--checkpoint", str(run_dir / "latest")]]
    done = subprocess.run(
        [sys.executable, "-c", IN_TURN, json.dumps(commands)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    weights = read_checkpoint(run_dir / "latest").learner["policy"]
    assert weights["count"].sum() == 96 + len(weights["count"])
    assert exit_code(qm_main, ["eval", "--checkpoint", str(run_dir / "latest")], prog="qm") == 2
    assert "unknown learner 'mean_reward'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file; give the path"),
        ("import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("from query_mutator.operators import OPERATORS\nOPERATORS.add('spelling', None)", "is registered already"),
    ],
)
def test_a_broken_plugin_is_one_line(
    text: str | None, said: str, tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.py"
    if text is not None:
        path.write_text(text)
    assert exit_code(main, [*tiny_flags, "--plugin", str(path)], prog="train") == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_module_that_is_not_installed_is_one_line(tiny_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, [*tiny_flags, "--plugin", "not_installed_anywhere"], prog="train") == 2
    assert "no such module; install it" in capsys.readouterr().err


def test_a_changed_plugin_is_named_again_and_reported(
    tiny_flags: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "polite.py"
    path.write_text((PLUGINS / "polite_operator.py").read_text())
    assert main([*tiny_flags, "--plugin", str(path), "--operators", "polite", "--no-evaluate"]) == 0
    path.write_text(path.read_text() + "# changed\n")
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(OPERATORS, "_entries", {k: v for k, v in OPERATORS._entries.items() if k != "polite"})
    words = ["eval", "--checkpoint", str(tmp_path / "runs" / "latest")]
    assert exit_code(qm_main, words, prog="qm") == 2
    assert "give --plugin" in capsys.readouterr().err
    assert qm_main([*words, "--plugin", str(path)]) == 0
    assert "polite.py has changed since this run was started" in caplog.text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--algo", "ppa"], "unknown learner 'ppa' (did you mean 'ppo'?); known: ppo, iqn, direct"),
        (["--operators", "speling"], "unknown operator 'speling' (did you mean 'spelling'?)"),
        (["--reward", "rigth=1"], "unknown reward part 'rigth' (did you mean 'right'?)"),
    ],
)
def test_a_typo_lists_the_known_names(
    flags: list[str], said: str, tiny_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(main, [*tiny_flags, *flags], prog="train") == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_callback_from_a_file_survives_a_kill(tiny_flags: list[str], tmp_path: Path) -> None:
    flags = [*tiny_flags, "--plugin", str(PLUGIN), "--save-interval", "1", "--num-env-steps", "96", "--no-evaluate"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*flags, "--save-dir", str(whole)]) == 0
    rows = (whole / "latest" / "rollouts.csv").read_text()
    steps = [int(row.split(",")[0]) for row in rows.splitlines()]
    assert steps[-1] == 96
    assert sum(int(row.split(",")[1]) for row in rows.splitlines()) == 96

    command = [sys.executable, "train_query_mutator.py", *flags, "--save-dir", str(killed)]
    environ = {**os.environ, "KILLED_AT": str(steps[-2])}
    assert subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, timeout=120, check=False).returncode == 9
    run = (killed / "latest").resolve()
    assert len((run / "rollouts.csv").read_text().splitlines()) == len(steps) - 1
    assert main(["--resume", str(run)]) == 0
    assert (run / "rollouts.csv").read_text() == rows
    assert "custom/csv_bytes" in list(read_json_lines(run / "metrics.jsonl"))[-1]


def test_an_error_in_a_callback_is_one_line_that_names_it(tiny_flags: list[str]) -> None:
    @CALLBACKS.register("broken")
    class Broken(Callback):
        def on_rollout_end(self, run: RunView) -> None:
            raise KeyError("reward")

    with pytest.raises(UsageError, match="callback 'broken' failed in on_rollout_end: KeyError: 'reward'"):
        main([*tiny_flags, "--no-evaluate"])


def test_a_metric_of_a_callback_needs_its_prefix(tiny_flags: list[str]) -> None:
    @CALLBACKS.register("namer")
    class Namer(Callback):
        def on_log(self, run: RunView) -> None:
            run.row["my/figure"] = 1.0

    with pytest.raises(UsageError, match="call it custom/figure"):
        main([*tiny_flags, "--no-evaluate"])
