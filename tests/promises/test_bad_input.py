"""Bad input: one line that names it, exit code 2, no traceback, nothing written or overwritten."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.promises.helpers import (
    QM,
    ROOT,
    TRAIN,
    ModelServer,
    contents,
    one_line_error,
    run,
    train_flags,
    write_questions,
)

#: Flags after those of `train_flags`, and what the line names. Files are made by `bad_files`.
TRAINING = [
    ("--batchsize 8", "--batch-size"),
    ("--batch-size 0", "batch_size"),
    ("--batch-size -3", "batch_size"),
    ("--batch-size many", "--batch-size"),
    ("--batch-size 1.5", "--batch-size"),
    ("--num-processes 0", "num_processes"),
    ("--num-steps 0", "num_steps"),
    ("--num-env-steps 0", "num_env_steps"),
    ("--num-mini-batch 5", "num_mini_batch"),
    ("--num-mini-batch 0", "num_mini_batch"),
    ("--ppo-epoch 0", "ppo_epoch"),
    ("--gamma 2", "gamma"),
    ("--gamma nan", "gamma"),
    ("--lr nan", "lr"),
    ("--lr -1", "lr"),
    ("--lr fast", "--lr"),
    ("--clip-param -1", "clip_param"),
    ("--gae-lambda 2", "gae_lambda"),
    ("--hidden-sizes 0", "hidden_sizes"),
    ("--seed x", "--seed"),
    ("--operators spellling,neutral", "spelling"),
    ("--forms no_such_form", "no_such_form"),
    ("--algo ppoo", "ppo"),
    ("--algo iqn --deterministic", "--deterministic"),
    ("--reward rigth=1", "rigth"),
    ("--reward right=much", "right"),
    ("--ask sometimes", "sometimes"),
    ("--answer loudest", "loudest"),
    ("--cache maybe", "maybe"),
    ("--validation-fold 7", "7"),
    ("--max-episode-steps 0", "max_episode_steps"),
    ("--max-failure-rate 2", "max_failure_rate"),
    ("--max-retries -1", "max_retries"),
    ("--timeout 0", "timeout_s"),
    ("--temperature -1", "temperature"),
    ("--target-max-tokens 0", "target_max_tokens"),
    ("--num-ctx 0", "num_ctx"),
    ("--embedding-dims -2", "embedding_dims"),
    ("--save-interval 0", "save_interval"),
    ("--device toaster", "toaster"),
    ("--encoder nowhere/no-such-encoder", "no-such-encoder"),
    ("--encoder ollama:nothing", "nothing"),
    ("--target-model librarianx", "librarianx"),
    ("--mutator-model nobody", "nobody"),
    ("--ollama-url not-a-url:port", "not-a-url"),
    ("--ollama-url ftp://127.0.0.1", "ftp"),
    ("--ollama-url CLOSED", "ollama serve"),
    ("--backend nosuch", "nosuch"),
    ("--plugin no_such_plugin_here", "no_such_plugin_here"),
    ("--config nowhere.json", "nowhere.json"),
    ("--config broken.json", "broken.json"),
    ("--config unknown.json", "batchsize"),
    ("--dataset nowhere.jsonl", "nowhere.jsonl"),
    ("--dataset empty.jsonl", "empty.jsonl"),
    ("--dataset folder", "folder"),
    ("--dataset broken.jsonl", "broken.jsonl:2"),
    ("--dataset blank.jsonl", "blank.jsonl:2"),
    ("--dataset columns.jsonl", "columns.jsonl"),
    ("--save-dir broken.json", "broken.json"),
    ("--resume nowhere", "nowhere"),
    ("--resume folder", "folder"),
    ("--resume garbage.pt", "garbage.pt"),
    ("--judge-rubric nowhere.txt --judge-model librarian --reward judge=1", "nowhere.txt"),
]

#: Other commands: the words after `python`, and what the line names.
COMMANDS = [
    ("QM trian", "train"),
    ("QM rewrite --checkpoint nowhere hello", "nowhere"),
    ("QM rewrite --checkpoint garbage.pt hello", "garbage.pt"),
    ("QM eval --checkpoint nowhere", "nowhere"),
    ("QM batch nowhere.jsonl -o out.jsonl --target-model librarian --ollama-url URL", "nowhere.jsonl"),
    ("QM batch questions.jsonl --target-model librarian --ollama-url URL", "--out"),
    ("QM batch questions.jsonl -o questions.jsonl --target-model librarian --ollama-url URL", "questions.jsonl"),
    ("QM plan --max-calls 0 --dataset questions.jsonl --ollama-url URL --target-model librarian", "max_calls"),
    ("QM plan --from-logs nowhere.csv", "nowhere.csv"),
    ("QM sweep --grid lr=0.1,0.2 --seeds 0 -- python trial.py", "seeds"),
    ("QM sweep --grid lr -- python trial.py", "lr"),
    ("QM sweep --grid lr=0.1", "--"),
    ("QM serve nowhere", "nowhere"),
    ("QM show nowhere", "nowhere"),
    ("QM compare nowhere elsewhere", "nowhere"),
    ("QM export-policy nowhere --out policy.qm", "nowhere"),
    ("QM analyze nowhere", "nowhere"),
    ("QM data export nowhere", "nowhere"),
    ("benchmark_batching.py --batchsize 8", "--batch-size"),
    ("benchmark_batching.py --ollama-url CLOSED --target-model librarian", "CLOSED"),
    ("-m ppo --env-id Nowhere-v9", "Nowhere"),
    ("-m ppo --num-envs 0", "num_processes=0"),
    ("-m ppo --num-minibatches 7", "num_mini_batch=7"),
    ("-m ppo --resume nowhere.pt", "nowhere.pt"),
]


@pytest.fixture
def closed_url() -> str:
    """Return an address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def bad_files(tmp_path: Path) -> Path:
    """Write files that are not what they should be; return their folder."""
    (tmp_path / "folder").mkdir()
    for name, text in {
        "broken.json": '{"seed": ',
        "unknown.json": '{"batchsize": 8}',
        "empty.jsonl": "",
        "broken.jsonl": '{"query": "which planet", "accept": ["Jupiter"]}\n{"query": \n',
        "blank.jsonl": '{"query": "which planet", "accept": ["Jupiter"]}\n{"query": " ", "accept": ["x"]}\n',
        "columns.jsonl": '{"colour": "red"}\n',
        "garbage.pt": "this is not a checkpoint",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("flags", "named"), TRAINING, ids=[flags for flags, _ in TRAINING])
def test_bad_flag_of_a_training(flags: str, named: str, server: ModelServer, bad_files: Path, closed_url: str) -> None:
    """A training with a bad flag or file ends before it writes anything: one line that names it, exit code 2."""
    words = [*train_flags(server, bad_files), *flags.replace("CLOSED", closed_url).split()]
    before = contents(bad_files)
    said = one_line_error(run([*TRAIN, *words], cwd=bad_files))
    assert said.startswith("train_query_mutator.py: ")
    assert named in said
    assert {name: text for name, text in contents(bad_files).items() if not name.startswith(".")} == before


@pytest.mark.parametrize(("line", "named"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_bad_input_of_a_command(line: str, named: str, server: ModelServer, bad_files: Path, closed_url: str) -> None:
    """Every command ends bad input with one line that names it and exit code 2, and writes nothing."""
    write_questions(bad_files / "questions.jsonl")
    before = contents(bad_files)
    words = line.replace("CLOSED", closed_url).replace("URL", server.url).split()
    words = [*QM, *words[1:]] if words[0] == "QM" else words
    words[0] = str(ROOT / words[0]) if words[0].endswith(".py") else words[0]
    said = one_line_error(run(words, cwd=bad_files))
    assert named.replace("CLOSED", closed_url) in said
    assert {name: text for name, text in contents(bad_files).items() if not name.startswith(".")} == before
