"""OpenEnv's own validator and clients on a running server, a fifth of whose model calls fail.

Needs openenv-core; tests/integration/test_peers.py runs it in an environment that has it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from websockets.sync import client as websocket

from query_mutator.testing import FaultPlan, start_server
from query_rewriting_env import QueryRewritingAction, QueryRewritingEnv
from query_rewriting_env.server.environment import REWRITE, Environments, QueryRewritingEnvironment
from rl_query_mutator_env import make_env

FOLDER = Path(__file__).resolve().parents[1]
PAGE = FOLDER.parents[1] / "docs" / "how-to" / "openenv-and-verifiers.md"
SHELF = {"sort": "sorted", "count": "Counter", "join": "path.join", "length": "len", "stop": "os.kill"}
EPISODES, SESSIONS = 30, 12


class Librarian:
    """A target that answers when it sees the right word."""

    name = "librarian"

    def reply(self, prompt: str) -> str:
        name = next((name for word, name in SHELF.items() if word in prompt.split()), "")
        return f"It is `{name}`." if name else "I'm not sure what you mean."


class Softener:
    """A mutator that drops a word."""

    name = "softener"

    def reply(self, prompt: str) -> str:
        text = prompt.partition("<question>")[2].partition("</question>")[0]
        return text.replace("plz", "").strip()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keywords of `make_env`, without the address."""
    words = [*SHELF, "zort", "kount", "joint"]
    rows = [
        {"id": f"q{at}", "query": f"plz {word} item {at}", "accept": [SHELF.get(word, "none")], "about": f"{word} {at}"}
        for at, word in enumerate(words * 4)
    ]
    dataset = tmp_path_factory.mktemp("openenv") / "questions.jsonl"
    dataset.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {
        "target_model": "librarian", "mutator_model": "softener", "encoder": "hash", "dataset": str(dataset),
        "operators": "spelling,neutral", "forms": "question_answer", "ask": "every_step", "max_episode_steps": 5,
        "max_retries": 0, "batch_size": 4, "wait_for_server_s": 0,
    }  # fmt: skip


@contextmanager
def serving(settings: dict[str, Any]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run the server as a command, and yield its address and process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]
    command = [sys.executable, "-m", "query_rewriting_env.server.app", "--port", str(port), "--set", *given]
    with subprocess.Popen(command) as process:
        try:
            for _ in range(600):
                assert process.poll() is None
                try:
                    requests.get(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except requests.ConnectionError:
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def served(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    faults = FaultPlan(0.2, kinds=("500", "503", "empty", "incomplete"), seed=3)
    with (
        start_server({"librarian": Librarian(), "softener": Softener()}, num_parallel=4, faults=faults) as models,
        serving({**settings, "ollama_url": models.url}) as (url, _),
    ):
        yield url, models


async def play(env: QueryRewritingEnv, seed: int) -> tuple[list[str], list[Any]]:
    """Play an episode at random among the allowed actions; return them and the results."""
    rng, names = random.Random(seed), list[str]()
    results = [await env.reset(seed=seed)]
    while not results[-1].done:
        mask = results[-1].observation.action_mask
        names.append(rng.choice([name for name, allowed in mask.items() if allowed and name != REWRITE]))
        results.append(await env.step(QueryRewritingAction(name=names[-1])))
    return names, results


@pytest.fixture(scope="module")
def alone(served: tuple[str, Any]) -> tuple[dict[int, Any], Any]:
    """Return the episodes of one session, one after the other, and its state."""

    async def episodes() -> tuple[dict[int, Any], Any]:
        async with QueryRewritingEnv(base_url=served[0]) as env:
            return {seed: await play(env, seed) for seed in range(EPISODES)}, await env.state()

    return asyncio.run(episodes())


def test_every_failed_step_is_seen_counted_and_no_reward(alone: Any) -> None:
    episodes, state = alone
    begun = [results for _, results in episodes.values() if len(results) > 1]
    steps = [result for results in begun for result in results[1:]]
    failed = [step for step in steps if not step.observation.valid]
    assert len(failed) > 5
    assert {step.observation.error.partition(":")[0] for step in failed} <= {"server", "busy", "empty", "incomplete"}
    assert all((step.reward is None) == (not step.observation.valid) for step in steps)
    assert (state.episodes, state.steps, state.failed_steps) == (len(begun), len(steps), len(failed))
    assert state.failed_resets == EPISODES - len(begun)
    for results in begun:
        for before, after in itertools.pairwise(results):
            if not after.observation.valid:
                same = ("question", "text", "form", "answer")
                assert all(getattr(before.observation, name) == getattr(after.observation, name) for name in same)


def test_rewards_are_those_of_the_environment_without_failures(alone: Any, settings: dict[str, Any]) -> None:
    # Played again without the failed steps; each of them left the episode as it was.
    with start_server({"librarian": Librarian(), "softener": Softener()}) as models:
        env = make_env(on_failure="raise", ollama_url=models.url, **settings)
        ids = [question.id for question in env.task.questions]
        for names, results in alone[0].values():
            if len(results) > 1:
                env.reset(options={"question": ids.index(results[0].observation.question_id)})
            for name, step in zip(names, results[1:], strict=True):
                if step.observation.valid:
                    assert env.step(env.task.actions.index(name))[1] == pytest.approx(step.reward, abs=1e-9)
        env.close()


def test_sessions_at_once_play_as_one_alone(alone: Any, served: tuple[str, Any]) -> None:
    async def session(seed: int) -> tuple[list[str], list[Any]]:
        async with QueryRewritingEnv(base_url=served[0]) as env:
            return await play(env, seed)

    async def sessions() -> list[tuple[list[str], list[Any]]]:
        return await asyncio.gather(*map(session, range(SESSIONS)))

    assert dict(enumerate(asyncio.run(sessions()))) == {seed: alone[0][seed] for seed in range(SESSIONS)}
    assert served[1].stats()["max_in_service"] <= 4


def test_the_validator_accepts_the_server_and_the_folder(served: tuple[str, Any], tmp_path: Path) -> None:
    from openenv.cli.__main__ import app
    from typer.testing import CliRunner

    found = CliRunner().invoke(app, ["validate", "--url", served[0]])
    assert found.exit_code == 0, found.output
    folder = shutil.copytree(FOLDER, tmp_path / FOLDER.name, ignore=shutil.ignore_patterns("uv.lock"))
    project = folder / "pyproject.toml"
    project.write_text(project.read_text().replace("../..", str(FOLDER.parents[1])))
    locking = ["uv", "lock", "--directory", folder]
    lock = subprocess.run(locking, capture_output=True, text=True, timeout=120, check=False)
    if lock.returncode:
        pytest.skip(f"uv lock finds no index: {lock.stderr.splitlines()[-1]}")
    found = CliRunner().invoke(app, ["validate", str(folder), "--verbose"])
    assert found.exit_code == 0, found.output


def test_a_client_rewrites_in_its_own_words(settings: dict[str, Any]) -> None:
    with start_server({"librarian": Librarian(), "softener": Softener()}) as models:
        environments = Environments(ollama_url=models.url, **settings)
        env, other = QueryRewritingEnvironment(environments), QueryRewritingEnvironment(environments)
        index = next(at for at in range(99) if "zort" in env.reset(question=at).text)
        first, _ = env.reset(question=index, episode_id="mine"), other.reset(question=index)
        better = env.step(QueryRewritingAction(text=first.question.replace("zort", "sort")))
        assert (better.text, better.answer) == (first.question.replace("zort", "sort"), "It is `sorted`.")
        told = env.step(QueryRewritingAction(text="Use `sorted`."))  # an answer in place of a question: a guard
        assert (told.text, told.reward, told.valid) == (better.text, 0.0, True)
        for action in ({"name": "speling"}, {"name": "rewrite"}, {"name": "spelling", "text": "x"}):
            refused = env.step(QueryRewritingAction(**action))
            assert (refused.reward, refused.done, refused.valid) == (None, False, False)
            assert refused.error.startswith("action: ")
        last = env.step(QueryRewritingAction(name="submit"))
        assert (last.done, last.success is None) == (True, False)
        assert not env.step(QueryRewritingAction(name="submit")).valid
        assert (env.state.episode_id, env.state.step_count, env.state.invalid_actions) == ("mine", 3, 3)
        assert other.step(QueryRewritingAction(name="submit")).text == first.question  # nobody else's words
        with pytest.raises(ValueError, match="99 must be from 0 to"):
            env.reset(question=99)
        env.close()
        assert not env.reset().valid
        environments.close()


def test_over_http_a_step_says_where_to_play(served: tuple[str, Any]) -> None:
    stepped = requests.post(f"{served[0]}/step", json={"action": {"name": "submit"}}, timeout=20).json()
    assert stepped["reward"] is None
    assert "WebSocket /ws" in stepped["observation"]["error"]


def test_one_session_more_is_told_so_and_ctrl_c_ends_the_server(settings: dict[str, Any]) -> None:
    with (
        start_server({"librarian": Librarian(), "softener": Softener()}) as models,
        serving({**settings, "ollama_url": models.url, "max_sessions": 2}) as (url, process),
        ExitStack() as stack,
    ):
        for one in [stack.enter_context(websocket.connect(f"ws{url[4:]}/ws")) for _ in range(2)]:
            one.send('{"type": "reset"}')
            assert json.loads(one.recv())["type"] == "observation"
        with websocket.connect(f"ws{url[4:]}/ws") as more:
            assert json.loads(more.recv())["data"]["code"] == "CAPACITY_REACHED"
        process.send_signal(signal.SIGINT)
        process.wait(20)


def test_the_lines_of_the_documentation_run(served: tuple[str, Any]) -> None:
    code = PAGE.read_text(encoding="utf-8").partition("```python needs: openenv\n")[2].partition("```")[0]
    assert "http://127.0.0.1:8000" in code
    exec(code.replace("http://127.0.0.1:8000", served[0]), {})
