"""What somebody else made, a policy file or a run folder, takes no key, runs no code, and names no address or path."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save

from query_mutator import Rewriter
from tests.promises import helpers
from tests.promises.helpers import QM, TRAIN, Command, ModelServer, contents, good, one_line_error, run

KEY = "sk-of-the-user-0123456789"
QUESTION = "plz tell me the river umm"
COMMANDS = ("rewrite", "eval", "serve", "batch", "train")
EVIL = """
from pathlib import Path
from query_mutator.operators import OPERATORS, LocalOperator

Path(__file__).with_name("ran").touch()
OPERATORS.add("evil", LocalOperator(name="evil", summary="As it is.", function=lambda question, context: question))
"""


@dataclass
class Stranger:
    """Two runs of another user: one with a plug-in, the other with a server that would see the key, and a cache."""

    folder: Path
    plugin: Path
    plugged: Path
    server: ModelServer
    openai: Path


@pytest.fixture(scope="module")
def stranger(server: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    """Train the two runs, with another home and another server."""
    folder = tmp_path_factory.mktemp("stranger")
    plugin = folder / "evil.py"
    plugin.write_text(EVIL)
    plugged = helpers.train(server, folder, "--plugin", str(plugin), "--operators", "spelling,neutral,evil")
    with helpers.model_server(api_key="") as theirs:
        flags = helpers.train_flags(theirs, folder)
        at = flags.index("--ollama-url")
        flags[at : at + 2] = ["--backend", "openai", "--openai-url", f"{theirs.url}/v1"]
        good(run([*TRAIN, *flags, "--cache", "all", "--cache-path", str(folder / "replies.sqlite")], cwd=folder))
        theirs.reset()
        (folder / "ran").unlink()
        yield Stranger(folder, plugin, plugged, theirs, helpers.latest(folder))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of the user, who never saw these runs."""
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def user_runs(run_folder: Path, home: Path, *more: str, commands: Sequence[str] = COMMANDS) -> Iterator[str]:
    """Run commands that take a policy or a run on that of a stranger, with the user's key; yield their one line."""
    policy, lines = home / "policy.qm", home / "lines.jsonl"
    shutil.copy(run_folder / "policy.qm", policy)
    lines.write_text('{"id": "1", "prompt": "plz tell me the river"}\n')
    named = ["--dataset", run_folder.parents[1] / "questions.jsonl", "--save-dir", home / "runs"]
    words: dict[str, list[str | Path]] = {
        "rewrite": ["rewrite", QUESTION, "--checkpoint", policy],
        "eval": ["eval", "--checkpoint", policy],
        "serve": ["serve", policy, "--port", "0"],
        "batch": ["batch", lines, "--checkpoint", policy, "--out", home / "out.jsonl"],
        "train": ["train", "--resume", run_folder, "--num-env-steps", "128", *named],
    }
    for name in commands:
        yield one_line_error(run([*QM, *words[name], *more], cwd=home, env={"OPENAI_API_KEY": KEY}))


def test_a_strangers_policy_or_run_does_not_choose_where_the_key_goes(stranger: Stranger, home: Path) -> None:
    """No command sends the user's key, or anything, to an address that only a stranger's file names."""
    for line in user_runs(stranger.openai, home):
        assert f"--openai-url {stranger.server.url}" in line
    assert (stranger.server.keys, stranger.server.stats()["routes"]) == ([], {})
    named = ["rewrite", QUESTION, "--checkpoint", home / "policy.qm", "--openai-url", f"{stranger.server.url}/v1"]
    good(run([*QM, *named], cwd=home, env={"OPENAI_API_KEY": KEY}))
    assert stranger.server.keys == [f"Bearer {KEY}"]
    stranger.server.reset()


def test_a_program_asks_no_address_that_only_a_policy_names(
    stranger: Stranger, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Rewriter.load` refuses a stranger's address too, and takes one that the program names in its place."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(ValueError, match="--openai-url"):
        Rewriter.load(stranger.openai / "policy.qm")
    with Rewriter.load(stranger.openai / "policy.qm", ollama_url=server.url) as rewriter:
        assert rewriter.rewrite(QUESTION).answer == "It is Nile."
    assert stranger.server.stats()["routes"] == {}
    monkeypatch.setenv("OPENAI_BASE_URL", stranger.server.url)  # names it as well
    with Rewriter.load(stranger.openai / "policy.qm") as rewriter:
        assert rewriter.rewrite(QUESTION).answer == "It is Nile."
    stranger.server.reset()


def test_a_strangers_policy_or_run_runs_no_code(stranger: Stranger, server: ModelServer, home: Path) -> None:
    """No command imports a plug-in that only a stranger's file names, and one changed since it was read neither."""
    address = ["--ollama-url", server.url]
    for line in user_runs(stranger.plugged, home, *address, commands=("rewrite", "serve", "train")):
        assert f"the plugin {stranger.plugin}" in line
        assert "--plugin" in line
    export = ["data", "export", "--run", stranger.plugged, "--out", home / "rows.jsonl"]
    assert "--plugin" in one_line_error(run([*QM, *export], cwd=home))
    assert not (stranger.folder / "ran").exists()
    words = ["rewrite", QUESTION, "--checkpoint", home / "policy.qm", *address]
    good(run([*QM, *words, "--plugin", stranger.plugin], cwd=home))
    assert (stranger.folder / "ran").exists()
    (stranger.folder / "ran").unlink()


def test_a_strangers_policy_writes_and_reads_nothing_else(stranger: Stranger, server: ModelServer, home: Path) -> None:
    """A stranger's file names no cache to write, no questions to read, and no entry that is unpacked elsewhere."""
    outside, policy = contents(stranger.folder), home / "policy.qm"
    about, tensors = parts_of(stranger.openai / "policy.qm")
    system = {**about["system"], "cache": "all", "cache_path": str(stranger.folder / "replies.sqlite")}
    named = ["rewrite", QUESTION, "--checkpoint", policy, "--openai-url", f"{server.url}/v1"]
    policy.write_bytes(signed({**about, "system": system}, tensors))
    assert f"--cache-path {stranger.folder / 'replies.sqlite'}" in one_line_error(run([*QM, *named], cwd=home))
    for name in ("../escaped", str(home / "escaped")):
        policy.write_bytes(signed(about, {**tensors, name: np.zeros(1)}))
        assert "policy.qm" in one_line_error(run([*QM, *named], cwd=home))
    shutil.copy(stranger.openai / "policy.qm", policy)
    assert "--dataset" in one_line_error(run([*QM, "eval", *named[2:]], cwd=home))
    assert contents(stranger.folder) == outside
    assert {path.name for folder in (home, home.parent) for path in folder.iterdir()} <= {"home", ".cache", policy.name}


# --- the file itself -------------------------------------------------------------------------------------------------


def parts_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON and the tensors of a policy file."""
    with safe_open(path, framework="numpy") as file:
        return json.loads(file.metadata()["policy"][64:]), load_file(path)


def signed(about: dict[str, Any], tensors: dict[str, Any]) -> bytes:
    """Return a policy file that is not damaged: before the JSON stands the digest of it and the tensors."""
    text = json.dumps(about)
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype.str} {tensors[name].shape}".encode() + tensors[name].tobytes())
    return save(tensors, {"policy": digest.hexdigest() + text})


def peak_mb(command: Command) -> float:
    """Return the peak of a command's memory, watched until it ends."""
    peak = 0.0
    while command.poll(0.005) is None:
        try:
            status = Path(f"/proc/{command.pid}/status").read_text()
        except OSError:
            continue
        rows = [line for line in status.splitlines() if line.startswith("VmHWM")]
        peak = max(peak, *(int(row.split()[1]) / 1024 for row in rows), 0.0)
    return peak


def bomb(about: dict[str, Any], tensors: dict[str, Any]) -> bytes:
    """Add 400,000 empty tensors, of some bytes each."""
    file = signed(about, tensors)
    size = int.from_bytes(file[:8], "little")
    end = len(file) - 8 - size
    many = (b'"weights/%d":{"dtype":"F32","shape":[0],"data_offsets":[%d,%d]}' % (n, end, end) for n in range(400_000))
    head = file[8 : 8 + size].strip()[:-1] + b"," + b",".join(many) + b"}"
    return len(head).to_bytes(8, "little") + head + file[8 + size :]


def boast(about: dict[str, Any], tensors: dict[str, Any]) -> bytes:
    """Let a tensor say that it has a trillion rows."""
    file = signed(about, tensors)
    size = int.from_bytes(file[:8], "little")
    head = re.sub(rb'"shape":\[[0-9]+', b'"shape":[1000000000000', file[8 : 8 + size].strip(), count=1)
    return len(head).to_bytes(8, "little") + head + file[8 + size :]


def header(about: dict[str, Any], tensors: dict[str, Any]) -> bytes:
    """Let the file say that its header has a terabyte."""
    return (1 << 40).to_bytes(8, "little") + signed(about, tensors)[8:]


def values(about: dict[str, Any], tensors: dict[str, Any]) -> bytes:
    """Put four million values into its JSON."""
    return signed({**about, "a": [[]] * 4_000_000}, tensors)


@pytest.mark.parametrize("change", [bomb, boast, header, values])
def test_a_policy_file_takes_no_memory(
    change: Callable[[dict[str, Any], dict[str, Any]], bytes], trained: Path, server: ModelServer, home: Path
) -> None:
    """A policy file that would take gigabytes is one line, and the command stays within 150 MB of an honest one."""
    policy = home / "policy.qm"
    words = [*QM, "rewrite", QUESTION, "--checkpoint", policy, "--ollama-url", server.url]
    about, tensors = parts_of(trained / "policy.qm")
    policy.write_bytes(signed(about, tensors))
    honest = Command(words, cwd=home)
    usual = peak_mb(honest)
    good(honest.wait())
    policy.write_bytes(change(about, tensors))
    hostile = Command(words, cwd=home)
    assert peak_mb(hostile) < usual + 150
    assert "policy.qm" in one_line_error(hostile.wait())


def test_a_key_is_in_no_file_and_no_output(home: Path) -> None:
    """A key reaches the server that the user named, and is in no file and no output."""
    with helpers.model_server(api_key=KEY) as guarded:
        flags = helpers.train_flags(guarded, home)
        at = flags.index("--ollama-url")
        flags[at : at + 2] = ["--backend", "openai", "--openai-url", f"{guarded.url}/v1"]
        said, named = [], ["--openai-url", f"{guarded.url}/v1"]
        for command in (
            [*TRAIN, *flags, "--cache", "all", "--cache-path", str(home / "replies.sqlite")],
            [*QM, "eval", "--evaluation", home / "rows.jsonl", "--plan-calls", "40", *named],
            [*QM, "rewrite", QUESTION, *named],
        ):
            result = good(run(command, cwd=home, env={"OPENAI_API_KEY": KEY}))
            said.append(result.stdout + result.stderr)
        other = run([*QM, "rewrite", QUESTION, *named], cwd=home, env={"OPENAI_API_KEY": "sk-wrong"})
        line = one_line_error(other)
        assert "invalid API key" in line
        assert "sk-wrong" not in line
        assert guarded.keys == [f"Bearer {KEY}", "Bearer sk-wrong"]
    assert not [name for name, content in contents(home).items() if KEY.encode() in content]
    assert KEY not in "".join(said)
