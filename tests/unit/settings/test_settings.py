"""qm.toml and --config: which file sets a flag, for which command, and one line for every mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from query_mutator.cli.flags import parse_flags
from query_mutator.cli.settings import SHARED_GROUPS, TABLES, files_read, shared_fields
from query_mutator.commands import COMMANDS
from query_mutator.data.loaders import load_questions
from query_mutator.errors import UsageError
from query_mutator.training.config import TrainConfig, parse_config
from tests.qm_command import qm


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return qm.toml of the current folder, still to be written."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "qm.toml"


def parse(name: str, *argv: str) -> Any:
    return parse_flags(COMMANDS[name].flags, argv, prog=f"qm {name}", table=name)


def test_tables_are_those_of_the_commands() -> None:
    assert set(TABLES) - {"benchmark"} == set(COMMANDS)


def test_shared_keys_are_flags_of_the_trainer() -> None:
    assert set(TrainConfig.__dataclass_fields__) >= {*shared_fields(*SHARED_GROUPS).values()}


def test_command_line_wins_over_config_file_over_table_over_shared_keys(project: Path) -> None:
    project.write_text("batch-size = 2\ntimeout = 7\n[train]\nbatch_size = 3\nnum-envs = 4\nlr = 0.5\n")
    Path("more.toml").write_text("lr = 0.25\nseed = 9\n")
    config = parse_config(["--config", "more.toml", "--num-processes", "6"])
    assert (config.batch_size, config.timeout_s, config.num_processes) == (3, 7.0, 6)
    assert (config.lr, config.seed) == (0.25, 9)
    assert {str(project), str(project.parent / "more.toml")} <= files_read().keys()


def test_the_file_is_named_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project.write_text("[train]\nseed = 5\nlr = 0.5\n")
    assert [parse_config(["--lr", "0.1"]).seed for _ in range(2)] == [5, 5]
    assert capsys.readouterr().err == "settings: qm.toml (seed)\n"


def test_shared_keys_reach_the_commands_that_mean_the_same_by_them(project: Path) -> None:
    project.write_text('dataset = "mine.jsonl"\nbatch-size = 3\ntarget-model = "m"\n[eval]\nseed = 4\n')
    assert parse("plan").dataset == "mine.jsonl"
    assert (parse("eval").dataset, parse("eval").batch_size, parse("eval").seed) == (None, 3, 4)
    assert (parse("doctor").target_model, parse("size calls").target_model) == ("m", "m")
    assert parse("train sft", "--model", "x", "--dataset", "d", "--out", "o").batch_size != 3  # samples, not calls
    assert parse("size workers", "--from-logs", "runs").dataset != "mine.jsonl"


def test_tables_of_commands_with_several_words(project: Path) -> None:
    project.write_text('[train]\nseed = 5\n[train.sft]\nseed = 6\n[data.export]\noutput = "o"\n[size.calls]\n')
    assert parse_config([]).seed == 5
    assert parse("train sft", "--model", "x", "--dataset", "d", "--out", "o").seed == 6


def test_a_server_that_is_named_elsewhere_replaces_that_of_the_file(project: Path) -> None:
    project.write_text('ollama-url = "http://box:1"\nbackend = "ollama"\n')
    assert parse_config([]).ollama_url == ("http://box:1",)
    other = parse_config(["--openai-url", "http://127.0.0.1:2/v1"])
    assert (other.ollama_url, other.backend, other.openai_url) == ((), "auto", "http://127.0.0.1:2/v1")
    assert parse_config(["--backend", "recorded"]).ollama_url == ()


def test_a_resumed_run_keeps_its_settings(project: Path) -> None:
    project.write_text("[train]\nseed = 5\n")
    assert parse_config(["--resume", "run"]).seed == parse_config(["--resume", "run", "--seed", "1"]).seed == 1


def test_a_config_file_may_have_the_tables_of_a_project(project: Path) -> None:
    project.with_name("other.toml").write_text("batch-size = 2\n[train]\nseed = 5\n[serve]\nport = 1\n")
    config = parse_config(["--config", "other.toml"])
    assert (config.batch_size, config.seed) == (2, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('targt-model = "m"', "qm.toml: unknown key 'targt-model'; did you mean 'target-model'?"),
        (
            "num-env-steps = 5",
            "qm.toml: unknown key 'num-env-steps'; above the tables are only keys that commands share",
        ),
        ("[train]\nbatchsize = 5", "qm.toml: unknown key 'batchsize'; did you mean 'batch_size'?"),
        ("[trian]\nseed = 5", "qm.toml: unknown table [trian]; did you mean [train]?"),
        ("[zzz]\nseed = 5", "qm.toml: unknown table [zzz]; tables are named after commands, as [train]"),
        ("train = 5", "qm.toml: train must be a table; write its flags under a line [train]"),
        ("[[train]]\nseed = 5", "qm.toml: train must be a table"),
        ("[train]\nseed = 'x'", "qm.toml: --seed must be a whole number, not 'x'"),
        ("[train]\nuse-batching = 1", "qm.toml: use-batching must be true or false, not 1"),
        ("[train.seed]\na = 1", "qm.toml: seed must be a whole number, not {'a': 1}"),
        ("[train]\nseed = ", "qm.toml: not TOML (Invalid value (at end of document)); write `name = value` lines"),
        ("batch-size = 0", "batch_size=0 must be at least 1; the default is 8"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(project: Path, text: str, message: str) -> None:
    project.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_config([])


def test_help_needs_no_valid_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project.write_text("[")
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    assert "--target-model" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_an_error(project: Path) -> None:
    project.mkdir()
    with pytest.raises(UsageError, match=re.escape("qm.toml: Is a directory; make it readable, or remove it")):
        parse_config([])


# --- qm init ---------------------------------------------------------------------------------------------------------


def test_init_writes_valid_settings_and_ten_questions(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("init") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("next: qm train,")
    config = parse_config([])
    assert (config.ask, config.dataset) == ("form", "general")
    assert parse("eval").dataset is None  # the held-out questions of the run
    questions = load_questions("questions.jsonl")
    assert len(questions) == 10
    assert all(question.accept for question in questions)


def test_every_line_that_init_comments_out_is_valid(project: Path) -> None:
    assert qm("init") == 0
    text = re.sub(r"^# (?=[a-z-]+ = )", "", project.read_text(), flags=re.MULTILINE)
    assert text != project.read_text()
    project.write_text(text)
    config = parse_config([])
    assert (config.target_model, config.dataset, config.domain) == (
        "llama3.2:3b",
        "questions.jsonl",
        "our shop's handbook",
    )
    assert parse("doctor").ollama_url == ("http://127.0.0.1:11434",)


@pytest.mark.parametrize("name", ["qm.toml", "questions.jsonl"])
def test_init_overwrites_nothing(project: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("there").mkdir()
    Path("there", name).symlink_to("nowhere")
    assert qm("init", "there") == 2
    assert f"there/{name} exists and is not replaced" in capsys.readouterr().err
    assert [path.name for path in Path("there").iterdir()] == [name]


def test_init_makes_the_folder_it_is_given(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("init", "a/b") == 0
    assert sorted(path.name for path in Path("a/b").iterdir()) == ["qm.toml", "questions.jsonl"]
    assert "cd a/b && qm train" in capsys.readouterr().out
    Path("file").touch()
    assert qm("init", "file/x") == 2
