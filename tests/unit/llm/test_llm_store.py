"""Replies that are kept: in the file of a run, and in the one that all runs share."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from query_mutator.errors import BackendError, UsageError
from query_mutator.llm.cache import Cache
from query_mutator.llm.store import Store, default_cache_path
from query_mutator.types import ChatRequest, Completion
from tests.fake_client import FakeClient, script

REQUEST = ChatRequest.user("why?", model="m")
BUSY = Completion.failed("busy", "later", status=503, retry_after_s=2.0)
ANSWER = Completion(text="Because é.", model="m", total_s=0.1, latency_s=0.30000000000000004, logprob=-0.5)
WRITER = """
import sys
from query_mutator.llm.cache import Cache
from query_mutator.llm.store import Store
from query_mutator.types import ChatRequest, Completion
class Echo:
    def complete(self, request):
        return Completion(text=request.messages[0].content)
    def close(self):
        pass
cache = Cache(Echo(), shared=Store(sys.argv[1], is_cache=True))
for number in [*map(str, range(200)), sys.argv[2]]:
    request = ChatRequest.user(number, model="m")
    assert [cache.complete(request).text for _ in range(2)] == [number] * 2
cache.close()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "replies.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = Store(path)
    yield opened
    opened.close()


@contextmanager
def begun(path: Path, steps: int = 0) -> Iterator[Store]:
    """Open a store at a checkpoint."""
    with closing(Store(path)) as opened:
        opened.begin(steps)
        yield opened


def over(store: Store, *replies: Completion, identity: str = "weights") -> tuple[Cache, FakeClient]:
    client = script(*replies)
    return Cache(client, run=store, identity=lambda model: identity), client


def turn(step: int, *, attempt: int = 1, env: int = 3) -> ChatRequest:
    return replace(REQUEST, turn=(env, step, "answer"), attempt=attempt)


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_a_reply_is_kept_whole_and_costs_nothing_again(store: Store) -> None:
    cache, client = over(store, ANSWER)
    assert cache.complete(REQUEST) == ANSWER
    assert cache.complete(REQUEST) == replace(ANSWER, attempts=0)
    assert (client.calls, cache.hits, len(store)) == (1, 1, 1)


def test_a_reply_of_all_runs_is_copied_into_the_file_of_this_one(store: Store, tmp_path: Path) -> None:
    shared = Store(tmp_path / "shared.sqlite", is_cache=True)
    Cache(script(ANSWER), shared=shared).complete(REQUEST)
    client = script(Completion(text="another"))
    assert Cache(client, shared=shared, run=store).complete(REQUEST).text == ANSWER.text
    assert (client.calls, len(store)) == (0, 1)
    shared.close()


@pytest.mark.parametrize("kind", ["server", "timeout", "empty", "cancelled"])
def test_a_failure_is_asked_again(store: Store, kind: str) -> None:
    cache, client = over(store, Completion.failed(kind, "x"), ANSWER)
    assert not cache.complete(turn(1)).ok
    assert cache.complete(turn(1)).ok
    assert client.calls == 2


def test_other_weights_or_another_request_are_unknown(store: Store) -> None:
    over(store, Completion(text="old"))[0].complete(REQUEST)
    newer, client = over(store, Completion(text="new"), identity="newer weights")
    assert newer.complete(REQUEST).text == "new"
    assert newer.complete(replace(REQUEST, sample=1)).attempts == 1
    assert newer.complete(replace(REQUEST, seed=1, temperature=0.7)).attempts == 1
    assert client.calls == 3


def test_a_random_reply_is_asked_for_anew_unless_a_draw_is_named(store: Store) -> None:
    cache, client = over(store, ANSWER)
    for _ in range(2):
        cache.complete(replace(REQUEST, temperature=0.7))
        cache.complete(replace(REQUEST, temperature=0.7, sample=4))
    assert client.calls == 3


def test_several_processes_write_one_file_at_once(path: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", WRITER, str(path), f"own {number}"], stderr=subprocess.PIPE
        )
        for number in range(3)
    ]
    for writer in writers:
        _, said = writer.communicate(timeout=60)
        assert (writer.returncode, said) == (0, b"")
    with closing(Store(path)) as store:
        assert len(store) == 203


def test_a_shared_call_is_stored_once_and_known_before_its_twin_could_ask_again(store: Store) -> None:
    client = script(ANSWER)
    cache = Cache(client, run=store)
    got: list[Completion] = []
    work = cache.join(REQUEST, got.append)
    assert work is not None
    assert cache.join(REQUEST, got.append) is None  # in flight
    work()
    assert cache.join(REQUEST, got.append) is None  # known
    assert got == [ANSWER, replace(ANSWER, attempts=0), replace(ANSWER, attempts=0)]
    assert (client.calls, len(store)) == (1, 1)


def test_text_that_has_no_utf8_is_stored_too(store: Store) -> None:
    cache, client = over(store, Completion(text="\ud800"))
    assert [cache.complete(REQUEST).text for _ in range(2)] == ["\ud800"] * 2
    assert client.calls == 1


def test_a_person_can_read_it(store: Store, path: Path) -> None:
    over(store, ANSWER)[0].complete(REQUEST)
    reader = sqlite3.connect(path)
    [row] = reader.execute("SELECT model, prompt ->> '$[0][1]', reply ->> 'text' FROM replies").fetchall()
    assert row == ("m", "why?", ANSWER.text)
    reader.close()


def test_without_an_identity_the_call_is_made_and_nothing_stored(store: Store) -> None:
    def unknown(model: str) -> str:
        raise BackendError("the server is gone")

    client = script(BUSY)
    assert Cache(client, run=store, identity=unknown).complete(REQUEST) == BUSY
    assert (client.calls, len(store)) == (1, 0)


def test_the_file_of_all_runs_is_in_the_users_cache_folder_unless_told_otherwise() -> None:
    assert default_cache_path({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/query-mutator/replies.sqlite")
    assert default_cache_path({}).parts[-3:] == (".cache", "query-mutator", "replies.sqlite")


# --- a run that is played again --------------------------------------------------------------------------------------


def test_a_rollout_that_is_played_again_finds_its_failures_replies_and_actions_and_counts_them_once(path: Path) -> None:
    with begun(path) as store:
        cache, _ = over(store, BUSY, ANSWER, Completion(text="another"))
        assert store.replay([(3, 7), (4, 0)], [2, 5]) == [2, 5]
        for attempt in (1, 2):
            cache.complete(turn(7, attempt=attempt))
        cache.complete(ChatRequest.user("how?", model="m"))

    with begun(path) as again:
        cache, client = over(again, Completion(text="asked again"))
        assert again.replay([(3, 7), (4, 0), (4, 1)], [0, 0, 1]) == [2, 5, 1]
        first, second = (cache.complete(turn(7, attempt=attempt)) for attempt in (1, 2))
        assert first.error is not None
        assert (first.error.kind, first.error.retry_after_s) == ("busy", None)  # it was waited for
        assert second == ANSWER
        assert cache.complete(turn(9)) == replace(ANSWER, attempts=0)  # of another step: the one call is counted
        assert (cache.totals.calls, cache.totals.retries, cache.error_kinds) == (2, 1, {"busy": 1})
        assert cache.complete(ChatRequest.user("new?", model="m")).text == "asked again"
        assert cache.complete(ChatRequest.user("new?", model="m")).attempts == 0
        assert (client.calls, cache.totals.calls) == (1, 3)
        again.begin(32)  # past the kill
        assert cache.complete(turn(7)).attempts == 0
        assert not [action for action in again.replay([(3, 7)], [0]) if action]


def test_what_was_paid_before_the_checkpoint_is_not_counted_again(path: Path) -> None:
    with begun(path) as store:
        over(store, ANSWER)[0].complete(turn(1))
        store.begin(32)
    with begun(path, 32) as again:
        cache, _ = over(again)
        assert cache.complete(turn(33)).attempts == 0
        assert cache.totals.calls == 0


def test_a_call_that_was_ended_from_our_side_is_made_again_and_no_action_after_it_is_kept(path: Path) -> None:
    with begun(path) as store:
        cache, _ = over(store, Completion.failed("cancelled", "ended from this side"), ANSWER)
        cache.complete(turn(8))
        store.replay([(3, 9)], [1])  # chosen after a step that did not come about
        cache.complete(ChatRequest.user("came back in time", model="m"))
        store.put("00" * 32, turn(10), BUSY)  # left by the one who made the call
    with begun(path) as again:
        assert again.find("00" * 32, turn(10)) is None
        assert again.replay([(3, 9)], [0]) == [0]
        assert len(again) == 1


# --- damage ----------------------------------------------------------------------------------------------------------


def test_a_row_with_a_flipped_bit_is_asked_for_again_and_replaced(store: Store) -> None:
    for place in range(200):
        over(store, Completion(text=f"{place} because é"))[0].complete(replace(REQUEST, sample=place))
    columns = ("model", "prompt", "reply")
    for number, (key, *texts) in enumerate(store.execute(f"SELECT key, {', '.join(columns)} FROM replies")):
        column, text = columns[number % 3], texts[number % 3]
        at = number % len(text)
        flipped = text[:at] + bytes([text[at] ^ 1 << number % 8]) + text[at + 1 :]
        store.execute(f"UPDATE replies SET {column} = CAST(? AS TEXT) WHERE key = ?", (flipped, key))
    for place in range(200):
        cache, client = over(store, Completion(text="new"))
        assert [cache.complete(replace(REQUEST, sample=place)).text for _ in range(2)] == ["new"] * 2
        assert client.calls == 1


def test_after_a_damaged_action_the_later_ones_of_its_environment_are_chosen_again(path: Path) -> None:
    steps = [(env, step) for env in (0, 1) for step in range(4)]
    with begun(path) as store:
        store.replay(steps, list(range(8)))
        store.execute("UPDATE actions SET action = 7 WHERE env = 0 AND step = 2")
    with begun(path) as again:
        assert again.replay(steps, [9] * 8) == [0, 1, 9, 9, 4, 5, 6, 7]


def test_a_path_that_cannot_be_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, but long enough to look like one" * 50, encoding="utf-8")
    for name, table in (
        ("no-key", "replies (key, reply)"),
        ("code", "a (b); CREATE TRIGGER c AFTER INSERT ON a BEGIN SELECT 1; END"),
    ):
        with closing(sqlite3.connect(tmp_path / name)) as file:
            file.executescript(f"CREATE TABLE {table}")
    for path in (tmp_path, tmp_path / "text", tmp_path / "text" / "below", tmp_path / "no-key", tmp_path / "code"):
        with pytest.raises(UsageError, match="--cache-path"):
            Store(path, is_cache=True)
        with pytest.raises(UsageError, match="move it away"):
            Store(path)


def test_a_cache_that_fails_later_costs_a_warning_and_not_the_reply(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, client = Store(path, is_cache=True), script(ANSWER)
    cache = Cache(client, shared=store)
    store.execute("DROP TABLE replies")
    assert [cache.complete(REQUEST).text for _ in range(2)] == [ANSWER.text] * 2
    assert client.calls == 2
    assert len(caplog.records) == 1
    cache.close()
