"""Files of strangers: they choose neither where a key goes, nor what is read, nor which code runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.attack.policies import archive, entries_of, signed, with_settings
from query_mutator import Rewriter
from query_mutator.cli.console import exit_code
from query_mutator.commands.main import main as qm_main
from query_mutator.errors import CheckpointError, UnnamedError
from query_mutator.plugins import source_sha256
from query_mutator.session.checkpoint import read_checkpoint
from query_mutator.session.policy_file import POLICY_FILE, read_policy_file
from query_mutator.session.trust import remember
from query_mutator.testing import StubServer
from train_query_mutator import main as train_main

FLAGS = ("--ask", "form", "--no-evaluate", "--eval-interval", "0", "--cache", "off", "--no-use-linear-lr-decay")
COMMANDS = {
    "rewrite": ["qm", "rewrite", "--checkpoint", "{policy}", "plz sort"],
    "eval": ["qm", "eval", "--checkpoint", "{policy}"],
}


@pytest.fixture
def run(trained: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run folder that somebody else made: this user has no file of trust yet."""
    folder = trained(*FLAGS)
    monkeypatch.setenv("QUERY_MUTATOR_TRUSTED", str(tmp_path / "own" / "trusted.jsonl"))
    return folder


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Return a plugin that leaves a file next to it when it runs."""
    path = tmp_path / "evil.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return path


def policy_with(run: Path, place: str, **values: object) -> Path:
    path = run.parent / "stranger.qm"
    path.write_bytes(with_settings(run / POLICY_FILE, lambda about: about[place].update(values)))
    return path


def plugged(run: Path, code: Path, sha256: str = "") -> Path:
    return policy_with(run, "plugins", **{str(code): sha256})


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
    ("values", "flag"),
    [
        ({"ollama_url": ["http://127.0.0.1:9"]}, "--ollama-url"),
        ({"backend": "llama", "ollama_url": [], "gguf": ["/elsewhere/m.gguf"]}, "--gguf"),
        ({"encoder": "/elsewhere/encoder"}, "--encoder"),
        ({"encoder": "stranger/encoder"}, "--encoder"),
        ({"cache": "all", "cache_path": "/elsewhere/cache.sqlite"}, "--cache-path"),
    ],
)
def test_other_stored_settings_that_reach_out_are_named_first(
    values: dict[str, object], flag: str, run: Path, tiny_server: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    remember({"ollama_url": tiny_server.url})
    assert f"give {flag} " in refused(COMMANDS["rewrite"], capsys, policy=policy_with(run, "system", **values))


def test_an_evaluation_reads_no_file_and_asks_no_judge_that_only_the_policy_names(
    run: Path, dataset: Path, tiny_server: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*COMMANDS["eval"], "--ollama-url", tiny_server.url]
    for place in ("task", "background"):
        policy_with(run, place, dataset=str(dataset)).replace(run.parent / f"{place}.qm")
    assert f"--dataset {dataset}" in refused(words, capsys, policy=run.parent / "task.qm")
    assert (
        exit_code(qm_main, [*words[1:3], str(run.parent / "task.qm"), *words[4:], "--dataset", str(dataset)], prog="qm")
        == 0
    )
    assert "questions.jsonl" in refused(words, capsys, policy=run.parent / "background.qm")
    judged = policy_with(run, "task", reward="judge=1", judge_model="librarian")
    assert "--judge-model librarian" in refused(words, capsys, policy=judged)
    rubric = policy_with(run, "task", judge_rubric=str(dataset))
    assert "judge_rubric" in refused(words, capsys, policy=rubric)


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"ollama_url": ("http://127.0.0.1:9",)}, "--ollama-url"),
        ({"ollama_url": (), "backend": "openai", "openai_url": "http://127.0.0.1:9/v1"}, "--openai-url"),
        ({"save_dir": "/elsewhere"}, "--save-dir"),
        ({"judge_rubric": "/etc/hostname"}, "--judge-rubric"),
        ({"engine": "ray", "ray_address": "10.0.0.1:6379"}, "--ray-address"),
    ],
)
def test_a_checkpoint_to_resume_chooses_none_of_them(
    flags: dict[str, object], flag: str, run: Path, tiny_server: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = read_checkpoint(run / "checkpoints" / "step_64.pt")
    remember(checkpoint.flags)
    file = dataclasses.replace(checkpoint, flags={**checkpoint.flags, **flags}).save(run.parent / "stranger.pt")
    words = ["train", "--resume", str(file), "--num-env-steps", "128"]
    assert f"give {flag} " in refused(words, capsys)


def test_a_run_of_this_user_needs_no_flag(
    tiny_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = tmp_path / "own" / "trusted.jsonl"
    monkeypatch.setenv("QUERY_MUTATOR_TRUSTED", str(trusted))
    run = tmp_path / "runs" / "latest"
    assert exit_code(train_main, [*tiny_flags, *FLAGS], prog="train") == 0
    known = trusted.read_text()
    assert exit_code(train_main, ["--resume", str(run), "--num-env-steps", "128"], prog="train") == 0
    assert exit_code(qm_main, ["eval", str(run)], prog="qm") == 0
    assert trusted.read_text() == known  # nothing twice
    trusted.unlink()
    assert exit_code(qm_main, ["eval", str(run)], prog="qm") == 2


# --- code ------------------------------------------------------------------------------------------------------------


def test_a_plugin_runs_if_it_is_named_or_was_trained_with(
    run: Path, code: Path, tiny_server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, ran = plugged(run, code, hashlib.sha256(code.read_bytes()).hexdigest()), tmp_path / "ran"
    remember({"ollama_url": tiny_server.url})
    with Rewriter.load(policy, plugins=[str(code)]):
        ran.unlink()
    monkeypatch.setattr("query_mutator.plugins._loaded", {})
    remember({}, plugins=[hashlib.sha256(code.read_bytes()).hexdigest()])
    with Rewriter.load(policy):
        ran.unlink()
    monkeypatch.setattr("query_mutator.plugins._loaded", {})
    code.write_text(code.read_text() + "# changed\n")
    with pytest.raises(UnnamedError, match="--plugin"):
        Rewriter.load(policy)
    assert not ran.exists()


def test_a_module_of_a_policy_file_is_found_without_importing_its_package(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package_of_a_stranger"
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (package / "inner.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    remember({}, plugins=["0" * 64])
    with pytest.raises(UnnamedError, match="--plugin"):
        Rewriter.load(policy_with(run, "plugins", **{"package_of_a_stranger.inner": "0" * 64}))
    assert source_sha256("package_of_a_stranger.inner") == hashlib.sha256(b"").hexdigest()
    assert not (tmp_path / "ran").exists()


# --- the file itself -------------------------------------------------------------------------------------------------


def test_a_long_list_of_entries_is_one_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_policy_file(run / POLICY_FILE)
    monkeypatch.setattr("query_mutator.session.policy_file.MAX_DIRECTORY_BYTES", 100)
    with pytest.raises(CheckpointError, match="its list of entries is not that of a policy"):
        read_policy_file(run / POLICY_FILE)


def test_the_list_of_entries_of_a_zip64_archive_is_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, path = entries_of(run / POLICY_FILE), tmp_path / "zip64.qm"
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    path.write_bytes(archive(entries))
    assert entries_of(path) == entries
    with pytest.raises(CheckpointError, match="its list of entries is not that of a policy"):
        read_policy_file(path)


def test_an_end_of_an_archive_in_another_one_is_one_line(run: Path, tmp_path: Path) -> None:
    whole, path = archive(entries_of(run / POLICY_FILE)), tmp_path / "two.qm"
    end, last = whole.rindex(b"PK\5\6"), whole.rindex(b"PK\1\2")
    size = end - whole.index(b"PK\1\2") + 4
    entries = whole[: last + 32] + struct.pack("<H", 4) + whole[last + 34 : end]  # the last one's comment has 4 bytes
    path.write_bytes(signed(entries + b"PK\5\6" * 2 + bytes(8) + struct.pack("<LH", size, 71)))
    with zipfile.ZipFile(path) as listed:
        assert listed.namelist() == [name for name, _, _ in entries_of(run / POLICY_FILE)]
    with pytest.raises(CheckpointError, match="its list of entries is not that of a policy"):
        read_policy_file(path)


@pytest.mark.parametrize(
    ("place", "values", "says"),
    [
        ("task", {"call_price": "x"}, "task.call_price is 'x', not float"),
        ("task", {"max_episode_steps": 0}, "max_episode_steps=0 must be at least 1"),
        ("system", {"batch_size": "8"}, "system.batch_size is '8', not int"),
        ("system", {"ollama_url": [["x"]]}, "system.ollama_url is ['x'], not str"),
        ("flags", {"num_eval_quantiles": 10**9}, "num_eval_quantiles=1000000000 must be at most"),
        ("background", {"operators": {"spelling": 1}}, "background.operators.spelling is 1, not str"),
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
    name: str, says: str, run: Path, tiny_server: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (_, content, _), *rest = entries_of(run / POLICY_FILE)
    about = json.loads(content)
    path = run.parent / "stranger.qm"
    changed = json.dumps({**about, "actions": [name, *about["actions"][1:]]}).encode()
    path.write_bytes(archive([("policy.json", changed, 0), *rest]))
    words = [*COMMANDS["rewrite"], "--ollama-url", tiny_server.url]
    assert says in refused(words, capsys, policy=path)


def test_weights_for_other_observations_are_one_line(
    run: Path, tiny_server: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = policy_with(run, "task", ask="every_step")  # an action less
    words = [*COMMANDS["rewrite"], "--ollama-url", tiny_server.url]
    assert "stranger.qm" in refused(words, capsys, policy=policy)
