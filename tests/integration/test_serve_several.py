"""One proxy in front of two model servers with different models, over real HTTP; one of them may be down."""

from __future__ import annotations

from collections.abc import Iterator

import ollama
import openai
import pytest
import requests

from query_mutator.encoder import Encoder
from query_mutator.testing import StubServer, start_server
from tests.conftest import Librarian, Softener
from tests.integration.proxied import KILL, MODEL, SORT, VIRTUAL, answer, chat, proxy

OTHER = "other:latest"


class Other(Librarian):
    name = "other"

    def reply(self, prompt: str) -> str:
        return f"The other server says {super().reply(prompt)}"


@pytest.fixture
def first() -> Iterator[StubServer]:
    with start_server([Librarian(), Softener()], num_parallel=4) as server:
        yield server


@pytest.fixture
def second() -> Iterator[StubServer]:
    with start_server([Other(), Softener()], num_parallel=4) as server:
        yield server


@pytest.fixture
def both(first: StubServer, second: StubServer, hash_encoder: Encoder) -> Iterator[str]:
    with proxy(first.url, hash_encoder, others=[second.url]) as url:
        yield url


def names(url: str) -> list[str]:
    return [row["name"] for row in requests.get(f"{url}/api/tags", timeout=10).json()["models"]]


def test_the_lists_are_those_of_both(both: str) -> None:
    listed = [model.model for model in ollama.Client(host=both).list().models]
    assert {MODEL, VIRTUAL, OTHER, f"{OTHER}+qm"} <= set(listed)
    assert len(listed) == len(set(listed))  # the softener is on both
    ids = [model.id for model in openai.OpenAI(base_url=f"{both}/v1", api_key="x").models.list()]
    assert {MODEL, VIRTUAL, OTHER, f"{OTHER}+qm"} <= set(ids)
    for model in (MODEL, OTHER):
        chat(both, SORT, model=model)
    assert {MODEL, OTHER} <= {model.model for model in ollama.Client(host=both).ps().models}


def test_a_call_goes_to_the_server_that_has_its_model(both: str, first: StubServer, second: StubServer) -> None:
    assert answer(chat(both, SORT, model=MODEL)) == "`sorted` is what you want."
    assert answer(chat(both, SORT, model="other")) == "The other server says `sorted` is what you want."
    kept, rewritten = chat(both, SORT, model=f"{OTHER}+qm"), chat(both, KILL)
    assert answer(kept).startswith("The other server says")
    assert kept.json()["model"] == f"{OTHER}+qm"
    assert answer(rewritten) == "`os.kill` is what you want."
    for model in (MODEL, OTHER, f"{OTHER}+qm"):
        shown = requests.post(f"{both}/api/show", json={"model": model}, timeout=10)
        assert shown.status_code == 200
        assert openai.OpenAI(base_url=f"{both}/v1", api_key="x").models.retrieve(model).id == model
    assert first.stats()["calls_by_model"].get("other", 0) == 0
    assert second.stats()["calls_by_model"].get("librarian", 0) == 0


def test_a_model_that_nobody_has_is_the_upstreams_error(both: str, first: StubServer) -> None:
    theirs = chat(first.url, SORT, model="nobody")
    ours = chat(both, SORT, model="nobody")
    assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content) == (404, ours.content)


def test_a_server_that_is_down_is_named_where_nobody_else_has_its_model(
    first: StubServer, second: StubServer, hash_encoder: Encoder
) -> None:
    with proxy(second.url, hash_encoder, others=[first.url]) as url:
        assert answer(chat(url, SORT, model=OTHER))
        second.close()
        for model in (OTHER, f"{OTHER}+qm"):
            gone = chat(url, SORT, model=model)
            assert gone.status_code == 502
            assert second.url in gone.json()["error"]
            assert first.url not in gone.json()["error"]
        assert chat(url, SORT, model=MODEL).status_code == 200
        assert MODEL in names(url)
        assert OTHER not in names(url)
        assert second.url in requests.get(f"{url}/api/version", timeout=10).json()["error"]  # of no model: the first
        first.close()
        gone = requests.get(f"{url}/api/tags", timeout=10)
        assert gone.status_code == 502
        assert first.url in gone.json()["error"]
        assert second.url in gone.json()["error"]
