"""`qm serve --shadow`: questions answered both ways over real HTTP, kept in a private file, and clients come first."""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from query_mutator.apply.proxy.answers import Mode
from query_mutator.encoder import Encoder
from query_mutator.runs.shadow import read_shadow
from query_mutator.testing import StubServer, start_server
from tests.conftest import Librarian, Softener
from tests.integration.proxied import KILL, MODEL, SORT, VIRTUAL, answer, chat, proxy

REWRITTEN_KILL = "how do i stop the process that hangs"
REFUSAL = "I'm sorry, but I can't help with that."


class Umpire(Librarian):
    """A judge that prefers an answer to a refusal, and else the one that comes first."""

    name = "umpire"

    def reply(self, prompt: str) -> str:
        a, b = re.findall(r"Answer [AB]:\n(.*)\n", prompt)
        return "B" if "sorry" in a and "sorry" not in b else "The answer is A."


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "shadow.jsonl"


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with start_server([Librarian(), Softener(), Umpire()], num_parallel=8) as found:
        yield found


def outcomes(url: str) -> dict[str, int]:
    lines = requests.get(f"{url}/metrics", timeout=10).text.splitlines()
    found = [re.fullmatch(r'qm_shadow_total\{outcome="(\w+)"\} (\d+)', line) for line in lines]
    return {match[1]: int(match[2]) for match in found if match}


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_both_ways_are_kept_whichever_was_sent(server: StubServer, hash_encoder: Encoder, file: Path) -> None:
    with proxy(server.url, hash_encoder, slots=8, shadow=file, judge="umpire") as url:
        replies = [chat(url, KILL), chat(url, SORT, stream=True), chat(url, "how long is it")]
        chat(url, SORT, model=MODEL)  # not a virtual model
        chat(url, SORT, format="json")  # not a plain question
        wait_for(lambda: outcomes(url) == {"kept": 3})
    assert [reply.headers["x-qm-calls"] for reply in replies] == ["3", "1", "1"]
    refused, kept, same = read_shadow(file)
    assert (refused["question"], refused["rewrite"], refused["sent"]) == (KILL, REWRITTEN_KILL, "rewritten")
    assert (refused["model"], refused["mode"], refused["operators"]) == (VIRTUAL, "gate", ["neutral"])
    assert refused["original"].items() >= {"answer": REFUSAL, "refused": True, "not_sure": False, "calls": 1}.items()
    assert refused["rewritten"].items() >= {"answer": answer(replies[0]), "refused": False, "calls": 3}.items()
    assert refused["judge"] == {"model": "umpire", "choice": "rewritten"}
    assert (kept["rewrite"], kept["sent"], kept["decision"]) == ("sort my list", "original", "kept")
    assert kept["original"]["calls"] == 1
    assert kept["rewritten"]["calls"] == 3  # the first answer, the rewrite, and the answer to it
    assert kept["judge"]["choice"] == "tie"  # equal answers
    assert same["rewrite"] == same["question"]
    assert same["original"]["not_sure"]
    for row in (refused, kept, same):
        for way in (row["original"], row["rewritten"]):
            assert way["chars"] == len(way["answer"])
            assert way["tokens"] > 0
            assert -1 <= way["fit"] <= 1
            assert way["seconds"] >= 0


@pytest.mark.parametrize("mode", ["blind", "full"])
def test_other_modes_ask_the_original(server: StubServer, hash_encoder: Encoder, file: Path, mode: Mode) -> None:
    with proxy(server.url, hash_encoder, mode=mode, shadow=file) as url:
        body: dict[str, Any] = {"model": VIRTUAL, "messages": [{"role": "user", "content": KILL}], "stream": True}
        requests.post(f"{url}/v1/chat/completions", json=body, timeout=10)
        wait_for(lambda: outcomes(url) == {"kept": 1})
    (row,) = read_shadow(file)
    assert (row["sent"], row["mode"], row["original"]["answer"]) == ("rewritten", mode, REFUSAL)
    assert row["rewritten"]["answer"] == "`os.kill` is what you want."
    assert row["judge"] is None


def test_the_file_is_private_and_grows(server: StubServer, hash_encoder: Encoder, file: Path) -> None:
    for count in (1, 2):
        with proxy(server.url, hash_encoder, shadow=file) as url:
            chat(url, KILL)
            wait_for(lambda: outcomes(url) == {"kept": 1})
        assert len(read_shadow(file)) == count
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def at_upstream(url: str, model: str = MODEL) -> int:
    models = requests.get(f"{url}/qm/queue", timeout=10).json()["models"]
    return int(models.get(model, {"in_flight": 0})["in_flight"])


@contextmanager
def slow(encoder: Encoder, file: Path, *, slots: int, latency_ms: float = 400) -> Iterator[str]:
    """Serve a proxy in front of an upstream whose calls take a while."""
    with (
        start_server([Librarian(), Softener()], num_parallel=8, latency_ms=latency_ms) as server,
        proxy(server.url, encoder, slots=slots, shadow=file) as url,
    ):
        yield url


@pytest.mark.parametrize("slots", [0, 1])
def test_a_client_takes_the_slot_of_the_background(hash_encoder: Encoder, file: Path, slots: int) -> None:
    with slow(hash_encoder, file, slots=slots) as url:
        chat(url, SORT)
        wait_for(lambda: at_upstream(url) == 1)  # the answer to the rewrite
        assert chat(url, SORT, format="json").status_code == 200
        assert outcomes(url) == {"cut": 1}
    assert read_shadow(file) == []


def test_a_client_takes_the_slot_of_a_rewrite_too(hash_encoder: Encoder, file: Path) -> None:
    with slow(hash_encoder, file, slots=0) as url:
        chat(url, SORT)
        wait_for(lambda: at_upstream(url, "softener") == 1)
        chat(url, SORT, format="json")
        assert outcomes(url) == {"cut": 1}


def test_with_a_second_slot_both_run(hash_encoder: Encoder, file: Path) -> None:
    with slow(hash_encoder, file, slots=2) as url:
        chat(url, SORT)
        wait_for(lambda: at_upstream(url) == 1)
        chat(url, SORT, format="json")
        wait_for(lambda: outcomes(url) == {"kept": 1})
    assert len(read_shadow(file)) == 1


def test_no_more_wait_than_there_is_room_for_and_a_stop_drops_them(
    server: StubServer, hash_encoder: Encoder, file: Path
) -> None:
    with slow(hash_encoder, file, slots=50, latency_ms=1000) as url, ThreadPoolExecutor(40) as pool:
        asked = list(pool.map(lambda n: chat(url, f"plz sort {n}").status_code, range(40)))
        assert set(asked) == {200}
        assert outcomes(url)["busy"] >= 1  # 32 wait
        kept = outcomes(url).get("kept", 0)
    assert len(read_shadow(file)) - kept in (0, 1)  # the others were dropped


def test_a_dead_upstream_drops_the_pair_and_nothing_else(hash_encoder: Encoder, file: Path) -> None:
    with (
        start_server([Librarian(), Softener()], latency_ms=300) as server,
        proxy(server.url, hash_encoder, shadow=file) as url,
    ):
        chat(url, KILL)
        server.close()
        wait_for(lambda: outcomes(url) == {"failed": 1})
        assert requests.get(f"{url}/healthz", timeout=10).status_code == 200
