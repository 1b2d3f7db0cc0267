"""A small real system for tests: the test server over real HTTP with two tiny models, and a hash encoder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported: no test waits for a hub

from query_mutator import operators, registry
from query_mutator.encoder import Encoder, resolve_encoder
from query_mutator.env.episode import EpisodeRules
from query_mutator.env.task import CallSettings, Task, build_task
from query_mutator.forms import FORMS, Form
from query_mutator.learners import LEARNERS
from query_mutator.llm.backends import BACKENDS
from query_mutator.llm.client import Client
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.stack import Limit
from query_mutator.registry import Registry
from query_mutator.rewards import PARTS, WeightedReward
from query_mutator.testing import StubServer, start_server
from query_mutator.training.callbacks import CALLBACKS
from query_mutator.types import Question
from tests import children
from tests.promises import helpers
from tests.tiny_lm import save_model, save_tokenizer

#: All of the product's, which tests/conformity/test_surface.py checks.
REGISTRIES: tuple[Registry[Any], ...] = (operators.OPERATORS, FORMS, PARTS, BACKENDS, LEARNERS, CALLBACKS)

QUESTIONS = tuple(
    Question(id=f"q{index}", text=text, accept=(name,), reference=reference)
    for index, (text, name, reference) in enumerate(
        [
            ("plz sort my list", "sorted", "Return a new sorted list."),
            ("how do i kill the process", "os.kill", "Kill a process with a signal."),
            ("please count how often a word occurs", "collections.Counter", "Count hashable items."),
            ("umm join path parts", "os.path.join", "Join path components."),
            ("what is the length of it", "len", "Return the number of items."),
        ]
    )
)


SHELF = {"sort": "sorted", "stop": "os.kill", "count": "collections.Counter", "join": "os.path.join", "length": "len"}


class Upper:
    """Answers in capitals; remembers the prompts."""

    name = "upper"

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def reply(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return prompt.upper()


class OnUpper(Upper):
    """A model whose file starts FROM upper."""

    def __init__(self, name: str, **parameters: int) -> None:
        super().__init__()
        self.name, self.weights, self.parameters = name, "upper", parameters


class Librarian:
    """A target that answers when it sees the right word, refuses on "kill", and else is not sure."""

    name = "librarian"

    def reply(self, prompt: str) -> str:
        if "kill" in prompt:
            return "I'm sorry, but I can't help with that."
        found = next((name for word, name in SHELF.items() if word in prompt.split()), None)
        return f"`{found}` is what you want." if found else "I'm not sure what you mean."


class Softener:
    """A mutator that drops noise words and says "stop" for "kill", whatever the operator."""

    name = "softener"

    def reply(self, prompt: str) -> str:
        tag = "question" if "<question>" in prompt else "answer"
        question = prompt.split(f"<{tag}>")[-1].split(f"</{tag}>")[0]  # a server may have cut the beginning
        return " ".join(question.replace("kill", "stop").replace("plz", "").replace("umm", "").split())


def pytest_configure(config: pytest.Config) -> None:
    """Start what the workers of pytest-xdist share: the process whose forks are commands."""
    if config.getoption("numprocesses", 0) and not hasattr(config, "workerinput"):
        children.bind_to_this_process()
        helpers.zygote()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal the tests out as `SharedFixtures` does where `--dist loadscope` is given."""
    if config.getvalue("dist") != "loadscope":
        return None
    from tests.scheduling import SharedFixtures

    return SharedFixtures(config, log)


@pytest.fixture(autouse=True, scope="session")
def children_end_with_the_session() -> None:
    children.bind_to_this_process()


@pytest.fixture(autouse=True)
def registries_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a test or its plugins register, and forget the plugins it loads."""
    for one in REGISTRIES:
        one.names()  # reads entry points the first time, which is slow
        monkeypatch.setattr(one, "_entries", dict(one._entries))
    before = dict(registry._loaded)
    monkeypatch.setattr(registry, "_loaded", dict(before))
    yield
    for key in registry._loaded.keys() - before.keys():
        if not key.startswith("query_mutator."):
            sys.modules.pop(registry._loaded[key].__name__, None)


@pytest.fixture(autouse=True)
def no_replies_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep replies out of the user's cache folder, and out of other tests."""
    monkeypatch.setenv("QUERY_MUTATOR_REPLIES", str(tmp_path / "replies.sqlite"))


@pytest.fixture(scope="session")
def tiny_server() -> Iterator[StubServer]:
    with start_server([Librarian(), Softener()], num_parallel=8) as server:
        yield server


@pytest.fixture
def tiny_client(tiny_server: StubServer) -> Iterator[Client]:
    client = Limit(OllamaBackend(tiny_server.url, timeout_s=20, pool_size=8), limit=8)
    yield client
    client.close()


@pytest.fixture(scope="session")
def hash_encoder() -> Encoder:
    return resolve_encoder("hash")


@pytest.fixture(scope="session")
def tiny_task(hash_encoder: Encoder) -> Callable[..., Task]:
    def make(
        questions: Sequence[Question] = QUESTIONS,
        reward: WeightedReward | None = None,
        forms: Sequence[Form] = (),
        **rules: Any,
    ) -> Task:
        return build_task(
            questions,
            calls=CallSettings(target_model="librarian", mutator_model="softener"),
            encoder=hash_encoder,
            operators=operators.select("spelling,neutral,filler"),
            embedding_dims=4,
            rules=EpisodeRules(**rules),
            reward=reward,
            forms=forms,
        )

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer of 320 tokens."""
    return str(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a Llama of two layers and its tokenizer."""
    return str(save_model(tmp_path_factory.mktemp("llama")))
