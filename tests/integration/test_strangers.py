"""Files of strangers: they choose neither where a key goes, nor what is read, nor which code runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.attack.policies import packed, parts_of, with_settings
from query_mutator import Rewriter
from query_mutator.cli.console import exit_code
from query_mutator.commands.main import main as qm_main
from query_mutator.errors import CheckpointError, UsageError
from query_mutator.files import read_checked_json, write_checked_json
from query_mutator.session.policy_file import POLICY_FILE, read_policy
from query_mutator.testing import StubServer
from train_query_mutator import main as train_main

FLAGS = ("--ask", "form", "--no-evaluate", "--eval-interval", "0", "--cache", "off", "--no-use-linear-lr-decay")
COMMANDS = {
    "rewrite": ["qm", "rewrite", "--checkpoint", "{policy}", "plz sort"],
    "eval": ["qm", "eval", "--checkpoint", "{policy}"],
}


@pytest.fixture
def run(trained: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run folder that somebody else made; this user has named no server yet."""
    folder = trained(*FLAGS)
    monkeypatch.delenv("OLLAMA_HOST")
    return folder


def policy_with(run: Path, place: str, **values: object) -> Path:
    path = run.parent / "stranger.qm"
    path.write_bytes(with_settings(run / POLICY_FILE, lambda about: about[place].update(values)))
    return path


def refused(words: list[str], capsys: pytest.CaptureFixture[str], **places: Path) -> str:
    """Run a command that is refused; return its one line."""
    prog, *argv = [word.format(**places) for word in words]
    capsys.readouterr()
    assert exit_code(qm_main if prog == "qm" else train_main, argv, prog=prog) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    return err


# --- keys and addresses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "values", "flag"),
    [
        ("system", {"ollama_url": ["http://127.0.0.1:9"]}, "--ollama-url http://127.0.0.1:9"),
        ("trained_with", {"ollama_url": ["http://127.0.0.1:9"]}, "--ollama-url http://127.0.0.1:9"),
        ("system", {"backend": "llama", "gguf": ["/elsewhere/m.gguf"]}, "--gguf /elsewhere/m.gguf"),
        ("system", {"encoder": "/elsewhere/encoder"}, "--encoder /elsewhere/encoder"),
        ("system", {"encoder": "stranger/encoder"}, "--encoder stranger/encoder"),
        ("system", {"cache": "all", "cache_path": "/elsewhere/x.sqlite"}, "--cache-path /elsewhere/x.sqlite"),
    ],
)
def test_what_a_policy_was_made_with_is_named_again(
    place: str, values: dict[str, Any], flag: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(about: dict[str, Any]) -> None:
        about["trained_with"] = {}
        about[place].update(values)

    path = run.parent / "stranger.qm"
    path.write_bytes(with_settings(run / POLICY_FILE, change))
    assert f"give {flag} " in refused(COMMANDS["rewrite"], capsys, policy=path)


def test_no_address_is_in_the_settings_of_a_policy(run: Path, tiny_server: StubServer) -> None:
    about, _ = parts_of(run / POLICY_FILE)
    assert about["trained_with"] == {"ollama_url": [tiny_server.url]}
    assert tiny_server.url not in json.dumps({**about, "trained_with": {}})
    assert read_policy(run).named_again == f" --ollama-url {tiny_server.url}"
    found = read_policy(policy_with(run, "system", ollama_url=["http://127.0.0.1:9"], cache_path="/elsewhere"))
    assert (found.system.ollama_url, found.system.cache_path) == ((), None)


def test_an_evaluation_reads_no_file_and_asks_no_judge_that_only_the_policy_names(
    run: Path, dataset: Path, tiny_server: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*COMMANDS["eval"], "--ollama-url", tiny_server.url]
    for name in ("questions.jsonl", str(dataset)):  # one in this folder too
        policy = policy_with(run, "task", dataset=name)
        assert f"give --dataset {name} " in refused(words, capsys, policy=policy)
    config = read_checked_json(run / "config.json")
    write_checked_json(run / "config.json", {**config, "flags": {**config["flags"], "dataset": "../questions.jsonl"}})
    assert "give --dataset ../questions.jsonl " in refused(words, capsys, policy=run)
    named = [*words, "--dataset", str(dataset)]
    assert exit_code(qm_main, [word.format(policy=policy) for word in named[1:]], prog="qm") == 0
    judged = policy_with(run, "task", reward="judge=1", judge_model="librarian")
    assert "--judge-model librarian" in refused(named, capsys, policy=judged)
    for name in ("judge_rubric", "system"):
        text = policy_with(run, "task", **{name: str(dataset)})
        assert name in refused(named, capsys, policy=text)


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"ollama_url": ["http://127.0.0.1:9"]}, "--ollama-url http://127.0.0.1:9"),
        ({"backend": "openai", "openai_url": "http://127.0.0.1:9/v1"}, "--openai-url http://127.0.0.1:9/v1"),
        ({"judge_rubric": "/etc/hostname"}, "--judge-rubric /etc/hostname"),
        ({"system": "/etc/hostname"}, "--system /etc/hostname"),
        ({"engine": "ray", "ray_address": "10.0.0.1:6379"}, "--ray-address 10.0.0.1:6379"),
        ({"dataset": "/elsewhere/questions.jsonl"}, "--dataset /elsewhere/questions.jsonl"),
        ({"cache_path": "/elsewhere/x.sqlite"}, "--cache-path /elsewhere/x.sqlite"),
    ],
)
def test_a_run_to_resume_chooses_none_of_them(
    flags: dict[str, object], flag: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_checked_json(run / "config.json")
    own = {"ollama_url": [], "dataset": "questions.jsonl", "save_dir": "runs"}
    write_checked_json(run / "config.json", {**config, "flags": {**config["flags"], **own, **flags}})
    words = ["train", "--resume", str(run), "--num-env-steps", "128"]
    assert f"give {flag} " in refused(words, capsys)


def test_qm_toml_and_the_environment_name_the_server_of_a_run(
    tiny_flags: list[str], tiny_server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "latest"
    assert exit_code(train_main, [*tiny_flags, *FLAGS], prog="train") == 0
    monkeypatch.delenv("OLLAMA_HOST")
    resume, evaluate = ["--resume", str(run), "--num-env-steps"], ["eval", str(run), "--dataset", "questions.jsonl"]
    assert exit_code(train_main, [*resume, "96"], prog="train") == 2
    assert exit_code(qm_main, evaluate, prog="qm") == 2
    Path("qm.toml").write_text(f'ollama-url = ["{tiny_server.url}"]\n[train]\nlr = 0.5\n')
    assert exit_code(train_main, [*resume, "96"], prog="train") == 0
    assert read_checked_json(run / "config.json")["flags"]["lr"] != 0.5  # other settings are those of the run
    assert exit_code(qm_main, evaluate, prog="qm") == 0
    Path("qm.toml").unlink()
    monkeypatch.setenv("OLLAMA_HOST", tiny_server.url)
    assert exit_code(train_main, [*resume, "128"], prog="train") == 0


# --- code ------------------------------------------------------------------------------------------------------------


def test_a_module_of_a_policy_file_is_not_imported(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_of_a_stranger"
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (package / "inner.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="--plugin"):
        Rewriter.load(policy_with(run, "plugins", **{"package_of_a_stranger.inner": "0" * 64}))
    assert not (tmp_path / "ran").exists()


# --- the file itself -------------------------------------------------------------------------------------------------

Tensors = dict[str, Any]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda tensors: {f"weights/{n}": np.zeros(0) for n in range(1001)}, "more than 1000 tensors"),
        (lambda tensors: {**tensors, "evil": np.zeros(1)}, "it has a tensor 'evil'"),
        (lambda tensors: {**tensors, "weights/evil$": np.zeros(1)}, "it has a tensor"),
        (lambda tensors: {**tensors, "weights/x": np.full(2, np.inf)}, "weights/x has numbers that are not finite"),
        (lambda tensors: {**tensors, "mean": tensors["mean"][None]}, "mean has the shape"),
        (lambda tensors: {**tensors, "probe": tensors["probe"][:-1]}, "the sizes of its tensors do not match"),
        (lambda tensors: {name: tensors[name] for name in tensors if name != "probe"}, "it has no probe"),
    ],
)
def test_tensors_that_no_policy_has_are_one_line(
    changed: Callable[[Tensors], Tensors], says: str, run: Path, tmp_path: Path
) -> None:
    about, tensors = parts_of(run / POLICY_FILE)
    (tmp_path / "stranger.qm").write_bytes(packed(about, changed(tensors)))
    with pytest.raises(CheckpointError, match=says) as caught:
        read_policy(tmp_path / "stranger.qm")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_is_one_line(run: Path, tmp_path: Path) -> None:
    content = (run / POLICY_FILE).read_bytes()
    for damaged in (b"", content[:7], content[:40], content[:-1]):
        (tmp_path / "stranger.qm").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="not a policy file, or damaged"):
            read_policy(tmp_path / "stranger.qm")


@pytest.mark.parametrize(
    ("place", "values", "says"),
    [
        ("task", {"call_price": "x"}, "task.call_price is 'x', not float"),
        ("task", {"max_episode_steps": 0}, "max_episode_steps=0 must be at least 1"),
        ("system", {"batch_size": "8"}, "system.batch_size is '8', not int"),
        ("system", {"ollama_url": [["x"]]}, "system.ollama_url is ['x'], not str"),
        ("trained_with", {"ollama_url": [1]}, "trained_with.ollama_url is 1, not str"),
        ("flags", {"num_eval_quantiles": 10**9}, "num_eval_quantiles=1000000000 must be at most"),
        ("plugins", {"evil.py": 1}, "plugins.evil.py is 1, not str"),
    ],
)
def test_a_value_of_another_type_is_one_line(
    place: str, values: dict[str, object], says: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(COMMANDS["rewrite"], capsys, policy=policy_with(run, place, **values))


@pytest.mark.parametrize(
    ("name", "says"), [("x" * 5000, "is longer than 4096 characters"), ("a\0b", "control character")]
)
def test_an_action_that_no_setting_takes_is_one_line(
    name: str, says: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about, tensors = parts_of(run / POLICY_FILE)
    path = run.parent / "stranger.qm"
    path.write_bytes(packed({**about, "actions": [name, *about["actions"][1:]]}, tensors))
    assert says in refused(COMMANDS["rewrite"], capsys, policy=path)


def test_weights_for_other_observations_are_one_line(
    run: Path, tiny_server: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = policy_with(run, "task", ask="every_step")  # an action less
    words = [*COMMANDS["rewrite"], "--ollama-url", tiny_server.url]
    assert "stranger.qm" in refused(words, capsys, policy=policy)
