"""`qm gym`: generated puzzles, a real server of the environment, and values that never worked."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import gymnasium
import pytest

from query_mutator import forms
from query_mutator.batching import GymConfig, GymEpisodeStream, ReplayBuffer
from query_mutator.batching.gym.server import GymnasiumTextEnv, GymServer
from query_mutator.batching.tokenizers import ByteTokenizer
from query_mutator.cli.console import exit_code
from query_mutator.commands.gym_serve import GymServeFlags, describe, in_turn, rewriting_game, serving
from query_mutator.env.task import Task
from query_mutator.llm.client import Client
from query_mutator.testing import StubServer
from rl_query_mutator_env import QueryMutationEnv
from tests.qm_command import qm
from train_query_mutator import main as train_main

MakeTask = Callable[..., Task]


@pytest.fixture
def game_port(tiny_task: MakeTask, tiny_client: Client) -> Iterator[int]:
    with GymServer([rewriting_game(tiny_task(), tiny_client)], port=0) as server:
        yield server.port


def test_our_environment_is_a_text_environment(tiny_task: MakeTask, tiny_client: Client) -> None:
    env = QueryMutationEnv(tiny_task(), client=tiny_client)
    assert isinstance(env, gymnasium.Env)
    words = GymnasiumTextEnv(
        env, env.task.actions, text=lambda one, info: describe(one), hint=in_turn,
        solved=lambda info, total: info["success"] >= 0.5,
    )  # fmt: skip
    assert words.reset(seed=3, difficulty="easy").startswith("question: ")
    assert words.hint() in env.task.actions
    first = words.step("neutral")
    assert "done: neutral" in first.text
    assert not words.step("jump").valid
    last = words.step("submit")
    assert last.terminated
    assert env.episode is not None
    assert last.success == (env.episode.best.reward.parts["right"] == 1.0)
    words.close()


def test_hints_name_forms_where_there_is_no_operator(tiny_task: MakeTask, tiny_client: Client) -> None:
    task = replace(tiny_task(forms=forms.select("question_answer,steps")), operators=())
    env = QueryMutationEnv(task.with_rules(), client=tiny_client)
    env.reset(seed=0, options={"question": 1})
    assert in_turn(env) == "steps"
    env.step(env.task.actions.index("steps"))
    assert "form: steps" in describe(env).splitlines()


def test_a_client_plays_our_environment_to_the_end(game_port: int) -> None:
    config = GymConfig(host="127.0.0.1", port=game_port, seed=2)
    chosen = iter(["undo", "submit"] * 12)
    stream = GymEpisodeStream(config, ByteTokenizer(), max_episodes=12, policy=lambda seen: next(chosen))
    samples = asyncio.run(_all(stream))
    assert [sample.step_index for sample in samples] == [0, 1] * 12
    assert 0 < stream.metrics.episodes_successful < 12
    assert "actions: spelling, neutral, filler, undo, submit" in ByteTokenizer().decode(samples[0].input_ids.tolist())


async def _all(stream: GymEpisodeStream) -> list[object]:
    return [sample async for sample in stream]


@pytest.mark.parametrize("transport", ["telnet", "tcp", "websocket"])
def test_gym_run_plays_our_environment(
    game_port: int, transport: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--host", "127.0.0.1", "--port", str(game_port), "--transport", transport)
    out = tmp_path / "buffer.json"
    assert qm("gym", "run", "-t", "bytes", *where, "--num-episodes", "3", "-o", out, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["episodes"] == 3
    assert ReplayBuffer.load(out).size == report["samples"] > 3


def test_gym_run_plays_generated_puzzles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mock = ("gym", "run", "-t", "bytes", "--mock", "--num-episodes", "4", "--steps-per-episode", "3", "--json")
    assert qm(*mock, "--success-rate", "1") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["solved"]) == (12, 4)
    assert qm(*mock, "--max-samples", "5", "--buffer-size", "2", "-o", tmp_path / "b.bin") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["kept"], report["evicted"]) == (5, 2, 3)
    assert ReplayBuffer.load(tmp_path / "b.bin").size == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--transport", "http"], "--transport http does not exist; use websocket (telnet, tcp, websocket)"),
        (["--output-mode", "text"], "--output-mode text does not exist; use normal (normal, agent, json)"),
        (["--output-mode", "binary"], "--output-mode binary does not exist; use json (normal, agent, json)"),
        (["--difficulty-min", "0.9", "--difficulty-max", "0.1"], "difficulty_range=(0.9, 0.1)"),
        (["--success-rate", "7", "--mock"], "success_rate=7.0 must be between 0 and 1"),
        (["--port", "1", "--retries", "0"], "nothing answers at telnet://localhost:1"),
    ],
)
def test_a_mistake_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("gym", "run", "-t", "bytes", *flags) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"qm: {said}")
    assert err.count("\n") == 1


def test_gym_info_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("gym", "info", "--json") == 0
    info = json.loads(capsys.readouterr().out)
    assert info["transports"] == ["telnet", "tcp", "websocket"]
    assert info["connection"]["port"] == 8023
    assert qm("gym", "info") == 0
    assert "sudoku" in capsys.readouterr().out


def test_gym_serve_serves_until_interrupted(tiny_server_flags: list[str]) -> None:
    command = [sys.executable, "-m", "query_mutator", "gym", "serve", "--port", "0", *tiny_server_flags]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            stream = GymEpisodeStream(GymConfig(host="127.0.0.1", port=port), ByteTokenizer(), max_episodes=2)
            assert len(asyncio.run(_all(stream))) >= 2
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_hints_are_a_trained_policys(tiny_flags: list[str], tiny_server: StubServer, tmp_path: Path) -> None:
    assert exit_code(train_main, [*tiny_flags, "--no-evaluate", "--eval-interval", "0"], prog="train") == 0
    flags = GymServeFlags(
        checkpoint=str(tmp_path / "runs" / "latest"),
        ollama_url=tiny_server.url,
        target_model="librarian",
        mutator_model="softener",
        encoder="hash",
    )
    with serving(flags) as game:
        env = game.make()
        env.reset(seed=1, difficulty="easy")
        taken = []
        ended = False
        while not ended:
            hint = env.hint()
            assert hint is not None
            taken.append(hint)
            ended = env.step(hint).terminated
        assert taken[-1] == "submit" or len(taken) == 5


@pytest.fixture
def tiny_server_flags(tiny_flags: list[str]) -> list[str]:
    """What points `qm gym serve` at the small server."""
    keep = {"--ollama-url", "--target-model", "--mutator-model", "--encoder", "--dataset", "--operators"}
    pairs = zip(tiny_flags[::2], tiny_flags[1::2], strict=True)
    return [word for name, value in pairs if name in keep for word in (name, value)]
