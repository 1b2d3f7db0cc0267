"""OpenEnv's own validator and clients on a running server of ours whose model calls fail, in an environment with
openenv-core; `test_openenv.py` runs this file.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import requests
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync import client as websocket

from query_mutator.commands.env_serve import EnvServeFlags, sharing
from query_mutator.embedded.faults import FaultPlan
from query_mutator.embedded.http import listen
from query_mutator.embedded.server import EmbeddedServer, start_server
from query_mutator.errors import UsageError
from query_mutator.types import ERROR_KINDS, ChatRequest, Completion
from rl_query_mutator_env import make_env
from tests.conftest import Librarian, Softener
from tests.docs_blocks import blocks_of
from tests.integration.conftest import ROWS, write_dataset

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "environments" / "query_rewriting_env"
PAGE = ROOT / "docs" / "how-to" / "serve-with-openenv.md"
#: Failures that are the same whenever a call is made again, and counted alike by both sides.
KINDS = ("500", "503", "empty", "incomplete")
EPISODES, SESSIONS = 50, 20
UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class Served(NamedTuple):
    """A running `qm env serve`, as the folder for OpenEnv starts it, the models behind it, and the settings of both."""

    url: str
    models: EmbeddedServer
    settings: dict[str, Any]
    process: subprocess.Popen[str]


def flags_of(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of which 20 % of the model calls fail, and none is repeated."""
    dataset = write_dataset(tmp_path_factory.mktemp("openenv") / "questions.jsonl", ROWS)
    models = start_server([Librarian(), Softener()], num_parallel=4, faults=FaultPlan(0.2, kinds=KINDS, seed=3))
    settings: dict[str, Any] = {
        "ollama_url": models.url, "target_model": "librarian", "mutator_model": "softener", "encoder": "hash",
        "dataset": dataset, "operators": "spelling,neutral,filler", "forms": "question_answer,steps",
        "ask": "every_step", "max_episode_steps": 5, "cache": "off", "max_retries": 0, "batch_size": 4,
    }  # fmt: skip
    command = [sys.executable, "-m", "server.app", "--host", "127.0.0.1", "--port", "0", "--wait-for-server", "0"]
    command += flags_of(settings)
    with models, subprocess.Popen(command, cwd=FOLDER, stdout=subprocess.PIPE, text=True) as process:
        try:
            import openenv.core.env_client  # noqa: F401  # takes seconds, in which the server starts

            assert process.stdout is not None
            yield Served(process.stdout.readline().split()[-1], models, settings, process)
        finally:
            process.kill()


Episode = list[Any]  # the results of a reset and its steps


async def play(env: Any, seed: int) -> tuple[list[str], Episode]:
    """Play an episode at random among the allowed actions; return them and the results."""
    from query_mutator.adapters.openenv.client import QueryRewritingAction

    rng, names = random.Random(seed), list[str]()
    results = [await env.reset(seed=seed)]
    while not results[-1].done:
        mask = results[-1].observation.action_mask
        names.append(rng.choice([name for name, allowed in mask.items() if allowed and name != "rewrite"]))
        results.append(await env.step(QueryRewritingAction(name=names[-1])))
    return names, results


@pytest.fixture(scope="module")
def alone(served: Served) -> tuple[dict[int, tuple[list[str], Episode]], Any, int]:
    """Return the episodes of one session, one after the other, its state, and the faults while they were played."""
    from query_mutator.adapters.openenv.client import QueryRewritingEnv

    async def episodes() -> tuple[dict[int, tuple[list[str], Episode]], Any]:
        async with QueryRewritingEnv(base_url=served.url) as env:
            return {seed: await play(env, seed) for seed in range(EPISODES)}, await env.state()

    before = sum(served.models.stats()["faults"].values())
    found, state = asyncio.run(episodes())
    return found, state, sum(served.models.stats()["faults"].values()) - before


def test_every_failure_of_50_episodes_is_seen_and_counted(alone: Any) -> None:
    episodes, state, faults = alone
    steps = [result for _, results in episodes.values() for result in results[1:]]
    failed = [step for step in steps if not step.observation.valid]
    assert len(failed) > 5
    assert {step.observation.error.kind for step in failed} <= set(ERROR_KINDS)
    assert all(step.reward is None for step in failed)
    assert all(step.reward is not None and step.observation.error is None for step in steps if step not in failed)
    assert (state.episodes, state.steps, state.failed_steps) == (EPISODES, len(steps), len(failed))
    assert sum(state.failed_calls.values()) == faults >= len(failed)


def test_a_failed_step_leaves_the_episode_as_it_was(alone: Any) -> None:
    for _, results in alone[0].values():
        for before, after in itertools.pairwise(results):
            if not after.observation.valid:
                same = ("question", "text", "form", "answers", "submitted")
                assert all(getattr(before.observation, name) == getattr(after.observation, name) for name in same)


def test_rewards_are_those_of_a_world_without_failures(alone: Any, served: Served) -> None:
    # Played again without the failed steps; each of them left the episode as it was.
    with start_server([Librarian(), Softener()]) as models:
        settings = {**served.settings, "ollama_url": models.url, "dataset": str(served.settings["dataset"])}
        env = make_env(on_failure="raise", **settings)
        ids = [question.id for question in env.task.questions]
        for names, results in alone[0].values():
            env.reset(options={"question": ids.index(results[0].observation.question_id)})
            for name, step in zip(names, results[1:], strict=True):
                if step.observation.valid:
                    assert env.step(env.task.actions.index(name))[1] == pytest.approx(step.reward, abs=1e-9)
        env.close()


def test_20_sessions_at_once_play_as_one_alone(alone: Any, served: Served) -> None:
    from query_mutator.adapters.openenv.client import QueryRewritingEnv

    async def session(first: int) -> tuple[dict[int, tuple[list[str], Episode]], Any]:
        async with QueryRewritingEnv(base_url=served.url) as env:
            return {seed: await play(env, seed) for seed in (first, first + SESSIONS)}, await env.state()

    async def sessions() -> list[tuple[dict[int, tuple[list[str], Episode]], Any]]:
        return await asyncio.gather(*map(session, range(SESSIONS)))

    for episodes, state in asyncio.run(sessions()):
        for seed, (names, results) in episodes.items():
            assert (names, results) == alone[0][seed]
        failed = [one for _, results in episodes.values() for one in results if not one.observation.valid]
        assert (state.episodes, state.failed_steps) == (2, len(failed))
    assert served.models.stats()["max_in_service"] <= 4


def test_validate_accepts_the_server_and_the_folder(served: Served, tmp_path: Path) -> None:
    from openenv.cli.__main__ import app
    from typer.testing import CliRunner

    found = CliRunner().invoke(app, ["validate", "--url", served.url])
    assert found.exit_code == 0, found.output
    assert json.loads(found.output)["mode"] == "simulation"
    folder = shutil.copytree(FOLDER, tmp_path / FOLDER.name, ignore=shutil.ignore_patterns("uv.lock"))
    project = folder / "pyproject.toml"
    project.write_text(project.read_text().replace("../..", str(ROOT)))
    lock = subprocess.run(
        ["uv", "lock", "--directory", str(folder)], capture_output=True, text=True, check=False, timeout=120
    )
    if lock.returncode:
        pytest.skip(f"uv lock finds no index: {lock.stderr.splitlines()[-1]}")
    found = CliRunner().invoke(app, ["validate", str(folder), "--verbose"])
    assert found.exit_code == 0, found.output
    assert "[YES] docker" in found.output


def test_the_folders_app_has_the_settings_of_the_project(
    dataset: Path, tiny_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"ollama-url": tiny_server.url, "target-model": "librarian", "encoder": "hash", "dataset": str(dataset)}
    lines = [f'{name} = "{value}"' for name, value in settings.items()]
    (tmp_path / "qm.toml").write_text("\n".join([*lines, "[env.serve]", "max-sessions = 3"]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FOLDER))
    app = importlib.import_module("server.app").app

    async def metadata() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return (await client.get("/metadata")).json()

    assert asyncio.run(metadata())["name"] == "query_rewriting_env"


def test_a_reset_that_fails_begins_no_episode(served: Served) -> None:
    from query_mutator.adapters.openenv.client import QueryRewritingAction, QueryRewritingEnv

    with QueryRewritingEnv(base_url=served.url).sync() as env:
        found = [env.reset(question=index) for index in range(8)]
        failed = [one for one in found if not one.observation.valid]
        assert failed
        assert all(one.done and one.reward is None and one.observation.error.kind in ERROR_KINDS for one in failed)
        assert env.state().failed_resets == len(failed)
        env.reset(question=found.index(failed[0]))
        assert not env.step(QueryRewritingAction(name="submit")).observation.valid
        with pytest.raises(RuntimeError, match="question 99 must be from 0 to"):
            env.reset(question=99)


def test_over_http_an_episode_begins_and_a_step_says_where_to_play(served: Served) -> None:
    begun = requests.post(f"{served.url}/reset", json={"seed": 1}, timeout=20).json()
    assert (begun["done"], begun["reward"]) == (False, None)
    stepped = requests.post(f"{served.url}/step", json={"action": {"name": "submit"}}, timeout=20).json()
    assert stepped["reward"] is None
    assert "WebSocket /ws" in stepped["observation"]["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Host": "evil.example"}, b"{}", 403),
        ({"Origin": "https://evil.example"}, b"{}", 403),
        ({}, b"[" * 200_001, 413),
        ({}, b'{"action": {"name": "x", "text": "' + b"x" * 30_000 + b'"}}', 422),
    ],
)
def test_strangers_and_long_requests_are_refused(
    served: Served, headers: dict[str, str], body: bytes, status: int
) -> None:
    found = requests.post(f"{served.url}/step", data=body, headers=headers, timeout=20)
    assert found.status_code == status
    if "Origin" in headers:
        with pytest.raises(InvalidStatus, match="403"):
            websocket.connect(f"ws{served.url[4:]}/ws", additional_headers=headers)


def small_flags(dataset: Path, models: EmbeddedServer, **changes: Any) -> EnvServeFlags:
    names = {"target_model": "librarian", "mutator_model": "softener", "operators": "spelling", "forms": "none"}
    return EnvServeFlags(ollama_url=models.url, encoder="hash", dataset=str(dataset), cache="off", **names, **changes)


@contextmanager
def in_thread(dataset: Path, models: EmbeddedServer, **changes: Any) -> Iterator[str]:
    """Serve in a thread, where time limits can be made short, and yield the address."""
    from query_mutator.adapters.openenv.server import make_server

    flags = small_flags(dataset, models, **changes)
    with listen("127.0.0.1", 0) as listening, sharing(flags) as shared:
        server = make_server(
            shared, host="127.0.0.1", max_sessions=flags.max_sessions, session_timeout_s=flags.session_timeout_s
        )
        server.config.ws_ping_interval = server.config.ws_ping_timeout = 0.3
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:  # or a test that fails never ends
            server.should_exit = True
            thread.join()


def test_a_client_rewrites_in_its_own_words(dataset: Path, tiny_server: EmbeddedServer) -> None:
    from query_mutator.adapters.openenv.client import QueryRewritingAction, QueryRewritingEnv

    with (
        in_thread(dataset, tiny_server, ask="every_step", max_episode_steps=5) as url,
        QueryRewritingEnv(base_url=url).sync() as env,
    ):
        first = env.reset(question="q0", episode_id="mine").observation
        assert (first.question, first.action_mask["rewrite"]) == ("plz sort my list", True)
        better = env.step(QueryRewritingAction(text="how do I sort my list"))
        assert better.observation.text == "how do I sort my list"
        assert [one.text for one in better.observation.answers] == [first.question, better.observation.text]
        told = env.step(QueryRewritingAction(text="Use `sorted`."))  # an answer in place of a question
        assert (told.observation.guard, told.observation.text) == ("answer", better.observation.text)
        assert (told.reward, told.observation.valid) == (0.0, True)
        unknown = env.step(QueryRewritingAction(name="speling"))
        assert "did you mean 'spelling'?" in unknown.observation.error.message
        assert (unknown.reward, unknown.done, unknown.observation.steps_left) == (None, False, 3)
        assert unknown.observation.guard is None
        for action in ({"name": "rewrite"}, {"name": "spelling", "text": "x"}):
            assert env.step(QueryRewritingAction(**action)).observation.error.kind == "action"
        last = env.step(QueryRewritingAction(name="submit"))
        assert (last.done, last.observation.success) == (True, 1.0)
        over = env.step(QueryRewritingAction(name="submit"))
        assert (over.done, over.reward, over.observation.error.kind) == (True, None, "action")
        state = env.state()
        assert (state.episode_id, state.step_count, state.invalid_actions) == ("mine", 3, 4)


def test_slow_clients_are_cut_off_and_stall_nobody(
    dataset: Path, tiny_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from query_mutator.adapters.openenv import server
    from query_mutator.adapters.openenv.client import QueryRewritingEnv

    monkeypatch.setattr(server, "REQUEST_S", 0.5)
    monkeypatch.setattr(server, "MORE_CONNECTIONS", 20)
    with in_thread(dataset, tiny_server, max_sessions=4, ask="every_step") as url, ExitStack() as stack:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        slow = [stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(40)]
        for one in slow[10:15]:
            one.sendall(b"POST /reset HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        for one in slow[6:10]:
            one.sendall(UPGRADE)
        for one in slow:  # none answers a ping, so all are closed; those too many at once
            with suppress(ConnectionError):
                while one.recv(4096):
                    pass
        with QueryRewritingEnv(base_url=url).sync() as env:
            assert env.reset(seed=0).observation.valid


def test_a_session_more_than_there_may_be_is_told_so(dataset: Path, tiny_server: EmbeddedServer) -> None:
    with in_thread(dataset, tiny_server, max_sessions=2) as url, ExitStack() as stack:
        sessions = [stack.enter_context(websocket.connect(f"ws{url[4:]}/ws")) for _ in range(2)]
        for one in sessions:
            one.send('{"type": "reset"}')
            assert json.loads(one.recv())["type"] == "observation"
        with websocket.connect(f"ws{url[4:]}/ws") as more:
            assert json.loads(more.recv())["data"]["code"] == "CAPACITY_REACHED"


def test_a_hostile_message_harms_its_own_session_alone(dataset: Path, tiny_server: EmbeddedServer) -> None:
    messages = (b"x" * 200_001, "[" * 200_000, '{"type": "reset", "data": {"seed": []}}', "1")
    with in_thread(dataset, tiny_server) as url, websocket.connect(f"ws{url[4:]}/ws") as other:
        for message in messages:
            with websocket.connect(f"ws{url[4:]}/ws") as hostile, suppress(ConnectionClosed):
                hostile.send(message)
                assert json.loads(hostile.recv())["type"] == "error"
        other.send('{"type": "reset", "data": {"seed": 1}}')
        assert json.loads(other.recv())["data"]["observation"]["valid"]


def test_a_step_that_takes_too_long_is_a_visible_failure(dataset: Path) -> None:
    from query_mutator.adapters.openenv.client import QueryRewritingAction, QueryRewritingEnv

    faults = FaultPlan(1.0, kinds=["stall"])
    with (
        start_server([Librarian(), Softener()], faults=faults) as models,
        in_thread(dataset, models, step_timeout_s=0.3, ask="form") as url,
        QueryRewritingEnv(base_url=url).sync() as env,
    ):
        before = env.reset(seed=1).observation
        late = env.step(QueryRewritingAction(name="ask"))
        assert (late.reward, late.done, late.observation.error.kind) == (None, False, "timeout")
        assert (late.observation.text, late.observation.answers) == (before.text, [])
        last = env.step(QueryRewritingAction(name="submit"))
        assert (last.reward, last.done, last.observation.error.kind) == (None, True, "timeout")
        state = env.state()
        # On a busy machine the last step waits for the call that was cut, until that has ended.
        assert (state.step_count, state.failed_steps, state.failed_calls.pop("timeout")) == (2, 2, 2)
        assert set(state.failed_calls) <= {"incomplete"}


def test_the_lines_of_the_page_run(served: Served) -> None:
    (block,) = [block for block in blocks_of(PAGE) if block.language == "python"]
    exec(compile(block.code.replace("http://127.0.0.1:8000", served.url), str(PAGE), "exec"), {})


def test_a_session_without_a_server_plays_until_it_is_closed(dataset: Path, tiny_server: EmbeddedServer) -> None:
    from query_mutator.adapters.openenv.client import QueryRewritingAction
    from query_mutator.adapters.openenv.environment import QueryRewritingEnvironment

    with sharing(small_flags(dataset, tiny_server)) as shared:
        env = QueryRewritingEnvironment(shared)
        assert not env.step(QueryRewritingAction(name="submit")).valid
        assert env.reset().question == QueryRewritingEnvironment(shared).reset(seed=shared.seed).question
        assert env.step(QueryRewritingAction(name="submit")).valid
        env.close()  # as the server does with an idle one
        assert "idle" in env.reset().error.message
        assert "idle" in env.step(QueryRewritingAction(name="submit")).error.message


class NotRecorded:
    """A client as `--backend recorded` is for a wording that was not recorded."""

    def complete(self, request: ChatRequest) -> Completion:
        raise UsageError("no reply is recorded")

    def close(self) -> None:
        pass


def test_words_that_were_not_recorded_are_a_visible_failure(dataset: Path, tiny_server: EmbeddedServer) -> None:
    from query_mutator.adapters.openenv.client import QueryRewritingAction
    from query_mutator.adapters.openenv.environment import QueryRewritingEnvironment

    with sharing(small_flags(dataset, tiny_server, ask="form")) as shared:
        env = QueryRewritingEnvironment(replace(shared, client=NotRecorded()))
        env.reset()
        assert env.step(QueryRewritingAction(text="Which is sorted?")).valid
        last = env.step(QueryRewritingAction(name="submit"))
        assert (last.error.kind, last.reward, last.done) == ("request", None, True)
        assert (env.state.step_count, env.state.failed_calls) == (2, {"request": 1})


def test_ctrl_c_ends_the_server(served: Served) -> None:
    with websocket.connect(f"ws{served.url[4:]}/ws") as idle:
        idle.send('{"type": "state"}')
        assert json.loads(idle.recv())["type"] == "state"
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(20) == 130
