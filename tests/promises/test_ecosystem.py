"""Other people's programs: the official clients, Gymnasium, Stable-Baselines3, threads and tasks, plug-ins by name."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ollama
import openai
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from query_mutator import Rewrite, Rewriter
from rl_query_mutator_env import make_env, make_vector_env
from tests.promises import helpers
from tests.promises.helpers import QM, TRAIN, Command, ModelServer, good, one_line_error, resume, rows_of, run
from tests.promises.proxied import REFUSED, VIRTUAL, serving

ID = "rl_query_mutator_env:QueryMutation-v0"
RIVER, ANSWER = "which river is it", "It is Nile."
PLUGINS = helpers.ROOT / "tests" / "plugins"


# --- the official clients --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Asked:
    """A server and a model of it that answers RIVER with ANSWER."""

    url: str
    model: str


@contextlib.contextmanager
def product_server(folder: Path) -> Iterator[Asked]:
    """Run the product's own test server; this is the one place that knows its command."""
    canned = folder / "canned.jsonl"
    canned.write_text(json.dumps({"prompt": RIVER, "reply": ANSWER}) + "\n")
    command = Command([*QM, "test-server", "--port", "0", "--canned", canned], cwd=folder)
    try:
        yield Asked(command.wait_for_line("listening on ").split()[-1], "canned:latest")
    finally:
        command.kill()


@pytest.fixture(scope="module")
def proxied(plan: Path, upstream: ModelServer) -> Iterator[Asked]:
    """`qm serve` in front of a model server."""
    upstream.set(latency_ms=0)
    with serving(plan, upstream, plan.parents[1]) as proxy:
        yield Asked(proxy.url, "librarian:latest")


@pytest.fixture(params=["proxy", "test-server"], scope="module")
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """The proxy, and the test server."""
    if request.param == "proxy":
        yield request.getfixturevalue("proxied")
        return
    with product_server(tmp_path_factory.mktemp("test-server")) as found:
        yield found


def user(text: str) -> list[Any]:
    """Return the messages of a question."""
    return [{"role": "user", "content": text}]


def test_the_official_ollama_client_works(asked: Asked) -> None:
    """The `ollama` package chats, generates, streams, lists and describes models, and gets its own errors."""
    client, model = ollama.Client(host=asked.url), asked.model
    assert client.chat(model, user(RIVER)).message.content == ANSWER
    parts = list(client.chat(model, user(RIVER), stream=True))
    assert "".join(part.message.content or "" for part in parts) == ANSWER
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 2
    assert client.generate(model, RIVER).response == ANSWER
    assert "".join(part.response for part in client.generate(model, RIVER, stream=True)) == ANSWER
    assert client.chat(model, user(RIVER), options={"num_predict": 1}).done_reason == "length"
    assert model in {one.model for one in client.list().models}
    assert "completion" in (client.show(model).capabilities or ())
    with pytest.raises(ollama.ResponseError) as raised:
        client.chat("no-such-model", user(RIVER))
    assert raised.value.status_code == 404


def test_the_official_openai_client_works(asked: Asked) -> None:
    """The `openai` package completes chats, streams with usage, lists models, and gets its own errors."""
    client, model = openai.OpenAI(base_url=f"{asked.url}/v1", api_key="none", max_retries=0), asked.model
    create: Any = client.chat.completions.create
    whole = create(model=model, messages=user(RIVER))
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (ANSWER, "stop")
    parts = list(create(model=model, messages=user(RIVER), stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == ANSWER
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens > 1
    assert create(model=model, messages=user(RIVER), max_tokens=1).choices[0].finish_reason == "length"
    assert model.removesuffix(":latest") in {one.id.removesuffix(":latest") for one in client.models.list()}
    with pytest.raises(openai.NotFoundError):
        create(model="no-such-model", messages=user(RIVER))


def test_the_official_clients_get_rewritten_answers(proxied: Asked) -> None:
    """NAME+qm answers a question that the model refuses, through both official clients, streaming and not."""
    theirs = ollama.Client(host=proxied.url)
    ours: Any = openai.OpenAI(base_url=f"{proxied.url}/v1", api_key="none").chat.completions
    assert "sorry" in (theirs.chat(proxied.model, user(REFUSED)).message.content or "")
    assert theirs.chat(VIRTUAL, user(REFUSED)).message.content == ANSWER
    streamed = theirs.chat(VIRTUAL, user(REFUSED), stream=True)
    assert "".join(part.message.content or "" for part in streamed) == ANSWER
    assert ours.create(model=VIRTUAL, messages=user(REFUSED)).choices[0].message.content == ANSWER
    events = ours.create(model=VIRTUAL, messages=user(REFUSED), stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in events if part.choices) == ANSWER


# --- Gymnasium and Stable-Baselines3 ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def settings(server: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keywords of the environment, as docs/how-to/use-the-environment.md has them."""
    dataset = helpers.write_questions(tmp_path_factory.mktemp("env") / "questions.jsonl")
    return {
        "ollama_url": server.url, "target_model": "librarian", "mutator_model": "softener", "encoder": "hash",
        "dataset": str(dataset), "operators": "neutral,filler", "forms": "none", "ask": "every_step", "answer": "best",
        "reward": "right=1", "max_episode_steps": 3,
    }  # fmt: skip


def test_the_environment_passes_gymnasiums_checker(settings: dict[str, Any]) -> None:
    """gymnasium.make gives an environment that Gymnasium's checker accepts."""
    env = gymnasium.make(ID, render_mode="ansi", **settings)
    check_env(env.unwrapped)
    env.close()


def test_the_environment_passes_stable_baselines_checker_and_trains(settings: dict[str, Any]) -> None:
    """Stable-Baselines3's checker accepts the environment, and MaskablePPO trains on it through the adapter."""
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.env_checker import check_env as check_for_sb3
    from stable_baselines3.common.vec_env import VecMonitor

    from query_mutator.adapters.sb3 import GymVecEnv

    env = gymnasium.make(ID, **settings)
    check_for_sb3(env.unwrapped)
    env.close()
    envs = VecMonitor(GymVecEnv(make_vector_env(2, **settings)))
    model = MaskablePPO("MlpPolicy", envs, n_steps=16, batch_size=16, n_epochs=1, seed=0, device="cpu").learn(32)
    obs, ended = envs.reset(), 0
    for _ in range(10):
        masks = np.stack(envs.env_method("action_masks"))
        actions, _ = model.predict(obs, action_masks=masks)
        assert masks[range(2), actions].all()
        obs, _, dones, infos = envs.step(actions)
        ended += int(dones.sum())
        assert all(("terminal_observation" in info) == bool(done) for info, done in zip(infos, dones, strict=True))
    assert ended > 2
    envs.close()


def assert_same(one: Any, other: Any) -> None:
    """Compare nested results to the bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)) or (isinstance(one, np.ndarray) and one.dtype == object):
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert np.array_equal(one, other)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_the_vector_environment_is_gymnasiums_of_singles(mode: AutoresetMode, settings: dict[str, Any]) -> None:
    """make_vec gives the data of Gymnasium's SyncVectorEnv of single ones, by default with SAME_STEP autoreset."""
    more = {} if mode is AutoresetMode.SAME_STEP else {"autoreset_mode": mode}
    ours = gymnasium.make_vec(ID, num_envs=3, **more, **settings)
    theirs = SyncVectorEnv([partial(make_env, **settings)] * 3, autoreset_mode=mode)
    assert ours.metadata["autoreset_mode"] is mode
    assert_same(ours.reset(seed=7), theirs.reset(seed=7))
    rng, ended = np.random.default_rng(7), 0
    for _ in range(12):
        actions = rng.integers(4, size=3)
        step = ours.step(actions)
        assert_same(step, theirs.step(actions))
        done = step[2] | step[3]
        ended += int(done.sum())
        assert ("final_obs" in step[4]) == (mode is AutoresetMode.SAME_STEP and bool(done.any()))
    assert ended > 5
    ours.close()
    theirs.close()


def test_send_and_recv_give_the_data_of_step(settings: dict[str, Any], own_server: ModelServer) -> None:
    """Environments stepped by send and recv, each as it is ready, have the episodes of those stepped together."""
    own_server.set(latency_ms=60, latency_sigma=1)
    num_envs, num_steps = 6, 8
    settings = {**settings, "ollama_url": own_server.url, "batch_size": 4}

    def action(env: int, step: int) -> int:
        return (env + 3 * step) % 3

    def rows(step: Sequence[Any], env_ids: Sequence[int]) -> Iterator[tuple[int, tuple[Any, ...]]]:
        for row, env in enumerate(env_ids):
            yield env, tuple(np.asarray(part[row]).tolist() for part in step[:4])

    together, apart = defaultdict(list), defaultdict(list)
    with contextlib.closing(make_vector_env(num_envs, **settings)) as envs:
        envs.reset(seed=3)
        for step in range(num_steps):
            actions = np.array([action(env, step) for env in range(num_envs)])
            for env, row in rows(envs.step(actions), range(num_envs)):
                together[env].append(row)
    sizes = []
    with contextlib.closing(make_vector_env(num_envs, **settings)) as envs:
        envs.reset(seed=3)
        envs.send([action(env, 0) for env in range(num_envs)], range(num_envs))
        while sum(map(len, apart.values())) < num_envs * num_steps:
            found = envs.recv()
            ready = found[4]["env_id"].tolist()
            sizes.append(len(ready))
            for env, row in rows(found, ready):
                apart[env].append(row)
            more = [env for env in ready if len(apart[env]) < num_steps]
            envs.send([action(env, len(apart[env])) for env in more], more)
    assert apart == together
    assert max(sizes) < num_envs  # not in step with each other
    assert own_server.stats()["max_in_service"] == 4


# --- programs --------------------------------------------------------------------------------------------------------


def test_a_rewriter_serves_fifty_threads_and_fifty_tasks(trained: Path, own_server: ModelServer) -> None:
    """One Rewriter gives 50 threads and 50 asyncio tasks what it gives one caller, within its batch_size."""
    texts = [row["query"] + " now" * (n // 24) for n, row in enumerate(helpers.questions() * 3)][:50]

    def untimed(found: Rewrite) -> Rewrite:
        return dataclasses.replace(found, seconds=0.0)

    async def tasks(rewriter: Rewriter) -> list[Rewrite]:
        return await asyncio.gather(*(rewriter.arewrite(text) for text in texts))

    with Rewriter.load(trained, ollama_url=own_server.url, batch_size=8) as rewriter:
        expected = [untimed(rewriter.rewrite(text)) for text in texts]
        own_server.set(latency_ms=60, latency_sigma=1)
        own_server.reset()
        gate = threading.Barrier(50)

        def at_once(text: str) -> Rewrite:
            gate.wait(20)
            return rewriter.rewrite(text)

        with ThreadPoolExecutor(50) as threads:
            assert [untimed(found) for found in threads.map(at_once, texts)] == expected
        assert [untimed(found) for found in asyncio.run(tasks(rewriter))] == expected
    assert len({found.answer for found in expected}) > 10
    assert own_server.stats()["max_in_service"] == 8


# --- plug-ins --------------------------------------------------------------------------------------------------------


def test_operators_forms_reward_parts_and_callbacks_come_by_name(server: ModelServer, tmp_path: Path) -> None:
    """Operators, forms, reward parts and callbacks of --plugin files train by name, and act where it is given again."""
    names = ("polite_operator", "brief_form", "judge_reward", "csv_callback")
    plugins = ["--plugin", *(str(PLUGINS / f"{name}.py") for name in names)]
    flags = [*plugins, "--operators", "spelling,polite"]
    flags += ["--forms", "brief", "--ask", "form", "--reward", "right=0.5,quoted=0.2,judged=0.3"]
    folder = helpers.train(server, tmp_path, *flags, "--no-use-linear-lr-decay")
    good(run([*TRAIN, *resume(server, folder), *plugins, "--num-env-steps", "96"], cwd=tmp_path))
    rows = rows_of(folder / "transcripts.jsonl")
    assert len(rows) == 96
    assert {row["operator"] for row in rows} >= {"polite", "brief"}
    assert {row["form"] for row in rows} >= {"brief"}
    assert {name for row in rows for name in row["parts"] or ()} == {"right", "quoted", "judged"}
    assert len((folder / "rollouts.csv").read_text().splitlines()) == 3
    assert "custom/csv_bytes" in rows_of(folder / "metrics.jsonl")[-1]
    named = ["--ollama-url", server.url, *plugins]
    words = ["eval", "--plan-calls", "0", "--json", *named]
    report = json.loads(good(run([*QM, *words], cwd=tmp_path)).stdout)
    assert report["methods"]["policy"]["scored"] > 0
    assert good(run([*QM, "rewrite", "plz tell me the river", *named], cwd=tmp_path)).stdout.strip()


def test_a_learner_comes_by_name(server: ModelServer, tmp_path: Path) -> None:
    """A learner of a --plugin file trains, resumes and rewrites by its name; a misspelled name lists the known ones."""
    plugin = tmp_path / "mean_reward.py"
    source = (PLUGINS / "installed_learner" / "mean_reward.py").read_text()
    added = "from query_mutator.learners import LEARNERS\n\nLEARNERS.add('mean_reward', MeanReward)\n"
    plugin.write_text(source + added)
    folder = helpers.train(server, tmp_path, "--plugin", str(plugin), "--no-use-linear-lr-decay", algo="mean_reward")
    named = ["--ollama-url", server.url, "--plugin", plugin]
    good(run([*TRAIN, "--resume", folder, *named, "--num-env-steps", "96"], cwd=tmp_path))
    assert len(rows_of(folder / "transcripts.jsonl")) == 96
    assert good(run([*QM, "rewrite", "plz tell me the river", *named], cwd=tmp_path)).stdout.strip()
    wrong = [*TRAIN, *helpers.train_flags(server, tmp_path, algo="mean_rewrad"), "--plugin", plugin]
    line = one_line_error(run(wrong, cwd=tmp_path))
    assert "mean_reward" in line
    assert "ppo" in line


def test_a_backend_comes_by_name(server: ModelServer, tmp_path: Path) -> None:
    """A backend of a --plugin file answers and rewrites by its name, in training and for the run's commands."""
    flags = helpers.train_flags(server, tmp_path)
    at = flags.index("--ollama-url")
    plugin = ["--plugin", str(PLUGINS / "function_backend.py")]
    flags[at : at + 2] = ["--backend", "function", *plugin]
    server.reset()
    good(run([*TRAIN, *flags], cwd=tmp_path))
    rows = rows_of(helpers.latest(tmp_path) / "transcripts.jsonl")
    assert all(row["valid"] and row["answer"].endswith("is what you want.") for row in rows)
    said = good(run([*QM, "rewrite", "plz tell me the river", *plugin], cwd=tmp_path)).stdout
    assert "`river` is what you want." in said
    assert server.stats()["calls_by_model"] == {}
