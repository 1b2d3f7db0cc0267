"""Replies remembered on disk: what counts as known, what is never stored, several threads and processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from query_mutator.errors import BackendError, UsageError
from query_mutator.llm.cache import Cache, Identity, ReplyStore, default_cache_path
from query_mutator.llm.coalesce import Coalesce
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.testing import start_server
from query_mutator.types import ChatRequest, Completion

REQUEST = ChatRequest.user("why?", model="m")


class Script:
    """A client that plays replies back and counts the calls."""

    def __init__(self, *replies: Completion) -> None:
        self.replies = list(replies)
        self.calls = 0

    def __repr__(self) -> str:
        return "Script()"

    def complete(self, request: ChatRequest) -> Completion:
        self.calls += 1
        return self.replies[min(self.calls, len(self.replies)) - 1]

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ReplyStore]:
    opened = ReplyStore(tmp_path / "deep" / "replies.sqlite")
    yield opened
    opened.close()


def cached(store: ReplyStore, *replies: Completion, identity: str = "weights") -> tuple[Cache, Script]:
    client = Script(*replies)
    return Cache(client, store, identity=lambda model: identity), client


def test_a_reply_is_remembered_with_its_counts_and_without_times(store: ReplyStore) -> None:
    kept = {"text": "because", "model": "m", "prompt_tokens": 3, "completion_tokens": 2, "hit_limit": True}
    reply = Completion(**kept, logprob=-0.5, total_s=9.0, latency_s=9.0)
    cache, client = cached(store, reply)
    assert cache.complete(REQUEST) == reply
    known = Completion(**kept, logprob=-0.5, attempts=0)
    assert cache.complete(REQUEST) == known
    assert (client.calls, store.hits, store.misses, len(store)) == (1, 1, 1, 1)


@pytest.mark.parametrize("kind", ["server", "timeout", "empty", "cancelled"])
def test_a_failure_is_never_stored(store: ReplyStore, kind: str) -> None:
    cache, client = cached(store, Completion.failed(kind, "x"), Completion(text="because"))
    assert not cache.complete(REQUEST).ok
    assert cache.complete(REQUEST).ok
    assert (client.calls, len(store)) == (2, 1)


def test_other_weights_or_another_request_are_unknown(store: ReplyStore) -> None:
    cached(store, Completion(text="old"))[0].complete(REQUEST)
    newer, client = cached(store, Completion(text="new"), identity="newer weights")
    assert newer.complete(REQUEST).text == "new"
    assert newer.complete(ChatRequest.user("why?", model="m", sample=1)).attempts == 1
    assert client.calls == 2


def test_a_random_reply_is_asked_for_anew_unless_a_draw_is_named(store: ReplyStore) -> None:
    cache, client = cached(store, Completion(text="because"))
    for _ in range(2):
        cache.complete(ChatRequest.user("why?", model="m", temperature=0.7))
        cache.complete(ChatRequest.user("why?", model="m", temperature=0.7, sample=4))
    assert client.calls == 3


def test_replies_outlive_the_process_that_stored_them(tmp_path: Path) -> None:
    for expected_calls in (1, 0):
        store = ReplyStore(tmp_path / "replies.sqlite")
        cache, client = cached(store, Completion(text="because"))
        assert cache.complete(REQUEST).text == "because"
        cache.close()
        assert client.calls == expected_calls


WRITER = """
import sys
from query_mutator.llm.cache import ReplyStore
from query_mutator.types import Completion
store = ReplyStore(sys.argv[1])
for number in range(200):
    store.put(f"key {number}", Completion(text=f"{number}"))
    assert store.get(f"key {number}").text == f"{number}"
store.put(sys.argv[2], Completion(text="mine"))
store.close()
"""


def test_several_processes_write_one_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "replies.sqlite"
    writers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", WRITER, str(path), f"own {number}"], stderr=subprocess.PIPE
        )
        for number in range(3)
    ]
    for writer in writers:
        _, said = writer.communicate(timeout=60)
        assert (writer.returncode, said) == (0, b"")
    store = ReplyStore(path)
    assert len(store) == 203
    store.close()


def test_many_threads_share_the_store(store: ReplyStore) -> None:
    cache, client = cached(store, Completion(text="because"))
    requests = [ChatRequest.user(f"why {number % 20}?", model="m") for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert all(reply.text == "because" for reply in pool.map(cache.complete, requests))
    assert len(store) == 20
    assert 20 <= client.calls == store.misses


def test_a_shared_call_is_stored_once_and_known_before_its_twin_could_ask_again(store: ReplyStore) -> None:
    client = Script(Completion(text="because"))
    cache = Cache(Coalesce(client), store, identity=lambda model: "weights")
    got: list[Completion] = []
    work = cache.join(REQUEST, got.append)
    assert work is not None
    assert cache.join(REQUEST, got.append) is None  # in flight
    work()
    assert cache.join(REQUEST, got.append) is None  # known
    assert [reply.text for reply in got] == ["because"] * 3
    assert (client.calls, len(store)) == (1, 1)


def test_a_path_that_cannot_be_a_file_is_refused_with_the_flag(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, but long enough to look like one" * 50, encoding="utf-8")
    for path in (tmp_path, tmp_path / "text", tmp_path / "text" / "below"):
        with pytest.raises(UsageError, match="--cache-path"):
            ReplyStore(path)


def test_a_store_that_fails_later_costs_a_warning_and_not_the_reply(
    store: ReplyStore, caplog: pytest.LogCaptureFixture
) -> None:
    cache, client = cached(store, Completion(text="because"))
    store._connection.execute("DROP TABLE replies_v2")
    assert [cache.complete(REQUEST).text for _ in range(2)] == ["because"] * 2
    assert client.calls == 2
    assert len(caplog.records) == 1


def test_text_that_has_no_utf8_is_returned_and_not_stored(store: ReplyStore) -> None:
    cache, _ = cached(store, Completion(text="\ud800"))
    assert cache.complete(REQUEST).text == "\ud800"
    assert len(store) == 0


def test_the_identity_is_the_digest_and_what_stands_beside_it() -> None:
    with start_server({}) as server:
        backend = OllamaBackend(server.url)
        assert Identity([backend], extra="num_ctx=1")("echo") == f"{backend.digest('echo')} num_ctx=1"
        with pytest.raises(BackendError):
            Identity([backend], extra="")("nowhere")
        backend.close()


def test_without_an_identity_the_call_is_made_and_nothing_stored(store: ReplyStore) -> None:
    def unknown(model: str) -> str:
        raise BackendError("the server is gone")

    client = Script(Completion.failed("connect", "refused"))
    reply = Cache(client, store, identity=unknown).complete(REQUEST)
    assert reply.error is not None
    assert (reply.error.kind, client.calls, len(store)) == ("connect", 1, 0)


def test_the_file_is_in_the_users_cache_folder_unless_told_otherwise() -> None:
    assert default_cache_path({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/query-mutator/replies.sqlite")
    assert default_cache_path({}).parts[-3:] == (".cache", "query-mutator", "replies.sqlite")


def test_repr_prints_the_nesting(store: ReplyStore) -> None:
    assert repr(cached(store, Completion())[0]) == "Cache(Script())"
