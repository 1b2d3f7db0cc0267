"""What a server can take: slots, models, context and memory, as `qm doctor` says it and calls heed it."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from query_mutator.commands.main import main
from query_mutator.llm.llama import LlamaBackend
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.llm.probe import PROBE_TEXT
from query_mutator.llm.stack import build_client
from query_mutator.testing import Echo, StubServer, start_server
from query_mutator.types import ChatRequest, Completion
from tests.conftest import OnUpper, Upper
from tests.fake_client import kind_of
from tests.integration.raw_http import chat
from tests.patience import measured

DEFAULT_ADVICE = "server answers about 1 call at a time: OLLAMA_NUM_PARALLEL=8 ollama serve"


def lines_of(capsys: pytest.CaptureFixture[str], argv: Sequence[str], *, code: int = 0) -> dict[str, list[str]]:
    assert main(["doctor", *argv]) == code
    lines: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        name, _, finding = line.partition(":")
        lines.setdefault(name, []).append(finding.strip())
    return lines


def slots_of(lines: dict[str, list[str]]) -> list[str]:
    return [finding.split(";")[0] for finding in lines["slots"]]


def measured_lines(
    capsys: pytest.CaptureFixture[str], slots: Sequence[int], *flags: str, kind: str = "--ollama-url"
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the addresses of servers with these slots, and what doctor prints about them."""

    def measure(latency_ms: float) -> tuple[list[str], dict[str, list[str]]]:
        with ExitStack() as exits:
            servers = [exits.enter_context(start_server({}, num_parallel=n, latency_ms=latency_ms)) for n in slots]
            urls = [server.url for server in servers]
            return urls, lines_of(capsys, [kind, *urls, "--target-model", "echo", *flags])

    return measured(measure, lambda found: slots_of(found[1]) == [f"about {n}" for n in slots])


def test_a_server_as_it_comes_is_told_to_take_more_slots(capsys: pytest.CaptureFixture[str]) -> None:
    (url,), lines = measured_lines(capsys, [1])
    assert lines["server"] == [f"Ollama 0.1.0+testing at {url}"]
    assert lines["model"][0].startswith("echo:latest: installed, ")
    assert lines["model"][0].endswith("completion")
    assert lines["context"][0].startswith("4096 tokens")
    assert slots_of(lines) == ["about 1"]
    assert lines["advice"][0].startswith(DEFAULT_ADVICE)
    assert "batching cannot help" in lines["advice"][0]


def test_a_server_with_enough_slots_gets_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines = measured_lines(capsys, [8], "--num-ctx", "2048")
    assert slots_of(lines) == ["about 8"]
    assert lines["advice"] == ["ready for --batch-size 8"]
    assert lines["set"][0].startswith("--batch-size 8 --num-processes 16: at most ")
    assert lines["context"][0].startswith("2048 tokens")


def test_a_missing_model_is_named_with_the_command_that_fetches_it(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server({}) as server:
        argv = ["--ollama-url", server.url, "--target-model", "llama3.2:1b", "--mutator-model", "echo", "--no-probe"]
        lines = lines_of(capsys, argv, code=2)
    assert lines["model"][0] == (
        f"{server.url} has no model 'llama3.2:1b': run `ollama pull llama3.2:1b` (installed: echo:latest)"
    )
    assert lines["model"][1].startswith("echo:latest: installed")


def test_an_openai_compatible_server_is_looked_at_too(capsys: pytest.CaptureFixture[str]) -> None:
    (url,), lines = measured_lines(capsys, [2], kind="--openai-url")
    assert lines["server"] == [f"an OpenAI-compatible server at {url}/v1"]
    assert lines["advice"][0].startswith("server answers about 2 calls at a time: start it with 8 slots")


def test_a_probe_that_fails_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server({}, latency_ms=2000) as server:
        lines = lines_of(capsys, ["--ollama-url", server.url, "--target-model", "echo", "--probe-s", "0.3"], code=2)
    assert re.fullmatch(r"unknown, the probe failed \(timeout: .*\): .*--probe-s", lines["slots"][0])


class Few:
    """Answers two questions at once, and rejects others."""

    name, threads = "few", 8

    def __init__(self) -> None:
        self.free = threading.Semaphore(2)

    def __call__(self, request: ChatRequest) -> Completion:
        if request.messages[-1].content == PROBE_TEXT:
            return Completion(text="1000")
        if not self.free.acquire(blocking=False):
            return Completion.failed("rejected", "too many")
        time.sleep(0.6)
        self.free.release()
        return Completion(text="fine")


def test_fewer_calls_are_tried_where_some_fail_and_an_estimate_reads_their_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with start_server({"few": Few()}, num_parallel=8, latency_ms=300) as server:
        named = ["--ollama-url", server.url, "--target-model", "few"]
        lines = lines_of(capsys, named)
        assert main(["plan", *named, "--dry-run"]) == 0
    assert [re.search(r"\d", line)[0] for line in lines["pace"]] == ["8", "4", "2"]  # type: ignore[index]
    assert all(lines[name][0].startswith("--batch-size 2") for name in ("advice", "set"))
    assert "as the newest replies that are kept" in capsys.readouterr().out


def test_a_thread_less_is_advised_for_a_file_if_it_answers_faster(
    tiny_gguf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    file = ["--gguf", str(tiny_gguf), "--batch-size", "2"]
    models: dict[str, Any] = {tiny_gguf.stem: Echo()}
    with start_server(models, latency_ms=600) as four, start_server(models, latency_ms=60) as three:

        def start(self: LlamaBackend, name: str, *, before: object) -> SimpleNamespace:
            url = {"4": four.url, "3": three.url}[os.environ["OMP_NUM_THREADS"]]
            return SimpleNamespace(client=OpenAIBackend(f"{url}/v1"), is_alive=True, close=int)

        monkeypatch.setattr(LlamaBackend, "_start", start)
        lines = lines_of(capsys, file)
        assert main(["plan", *file, "--dry-run"]) == 0
    assert lines["pace"][0].endswith(" s with OMP_NUM_THREADS=3: set it")
    assert re.search(r"by 0\.[0-4]\d* s a call, as the newest", capsys.readouterr().out)


def test_an_embedder_is_not_suggested(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OllamaBackend, "writes_text", lambda self, model: model != "vectors:latest")
    with start_server({"vectors": Echo(), "upper": Upper()}) as server:
        own = lines_of(capsys, ["--ollama-url", server.url, "--no-probe"])
        missing = lines_of(capsys, ["--ollama-url", server.url, "--target-model", "vector", "--no-probe"], code=2)
    assert [finding.split(":")[0] for finding in own["model"]] == ["upper"]
    assert missing["model"][0].endswith("(installed: upper:latest, echo:latest)")


def test_several_servers_are_set_for_together(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines = measured_lines(capsys, [4, 2])
    assert slots_of(lines) == ["about 4", "about 2"]
    assert [finding.split(":")[0] for finding in lines["set"]] == ["--batch-size 6 --num-processes 12"]


def test_context_and_reloads_have_a_sentence_each(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server([Upper()], latency_ms=5) as server:
        lines = lines_of(capsys, ["--ollama-url", server.url])
        quiet = lines_of(capsys, ["--ollama-url", server.url, "--no-probe"])
        small = lines_of(capsys, ["--ollama-url", server.url, "--no-probe", "--num-ctx", "200"])
        assert server.stats()["loads"] == 1
    assert lines["context"] == ["4096 tokens of the model's 32768: a reply of 256 leaves 3840 for a prompt"]
    assert lines["reload"][0].startswith("none now; a call of any client with another num_ctx")
    assert quiet["context"] == lines["context"]
    assert small["context"][0].endswith("too few for a reply of 256; give a larger --num-ctx")
    assert not {"reload", "slots", "set"} & quiet.keys()


def test_two_models_that_push_each_other_out_are_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server([Upper(), OnUpper("short", num_ctx=512)], latency_ms=5, load_ms=400) as server:
        flags = ["--ollama-url", server.url, "--target-model", "upper", "--mutator-model", "short"]
        lines = lines_of(capsys, flags)
    assert re.match(
        r"upper:latest was loaded again \(\d+\.\d s\) after a call to short:latest, and so in every step: use one "
        r"model for both, or OLLAMA_MAX_LOADED_MODELS=2 ollama serve",
        lines["reload"][0],
    )


LONG = "begin " + "word " * 300 + "end"


class Talker:
    """Writes 500 tokens whatever is asked."""

    name = "talker"

    def reply(self, prompt: str) -> str:
        return "I talk. " + "on " * 496


@pytest.fixture(scope="module", params=["0.9", "0.24"])
def server(request: pytest.FixtureRequest) -> Iterator[StubServer]:
    models = [Upper(), Talker(), OnUpper("short", num_ctx=128), OnUpper("plain")]
    with start_server(models, num_parallel=4, behave_as=request.param) as running:
        running.version = request.param  # type: ignore[attr-defined]
        yield running


@pytest.fixture
def ollama(server: StubServer) -> Iterator[OllamaBackend]:
    client = OllamaBackend(server.url, timeout_s=20.0, runner_options={"num_ctx": 128})
    yield client
    client.close()


def test_a_prompt_beyond_the_context_fails_whatever_the_context_comes_from(server: StubServer) -> None:
    with start_server([Upper()], behave_as=server.version) as other:  # type: ignore[attr-defined]
        for url, model, text in ((server.url, "short", LONG), (other.url, "upper", LONG * 14)):
            ours = OllamaBackend(url)
            errors = [ours.complete(ChatRequest.user(text, model=model)).error for _ in range(2)]
            ours.close()
            assert [error and error.kind for error in errors] == ["prompt_too_long"] * 2
            assert all("--num-ctx" in str(error) for error in errors)


def test_a_reply_that_ends_at_a_limit_or_slides_is_marked(ollama: OllamaBackend, server: StubServer) -> None:
    with closing(OpenAIBackend(server.url)) as other:
        for ours in (ollama, other):
            replies = [ours.complete(ChatRequest.user("one two three", model="upper", max_tokens=n)) for n in (2, 20)]
            assert [(reply.ok, reply.hit_limit) for reply in replies] == [(True, True), (True, False)]
    slid = ollama.complete(ChatRequest.user("go", model="talker", max_tokens=1000))
    assert (slid.ok, slid.hit_limit) == (True, True)  # 0.24 ends it at the context, 0.9 slides past it


def test_doctor_says_the_memory_of_the_caches(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server([Upper(), OnUpper("plain")], latency_ms=20) as server:
        chat(server, "a")
        assert lines_of(capsys, ["--ollama-url", server.url, "--target-model", "upper", "--batch-size", "2"])["caches"]


def test_a_server_that_reports_no_context_is_believed_to_have_num_ctx(server: StubServer) -> None:
    request = ChatRequest.user("word " * 5000, model="upper")  # Ollama's OpenAI routes cut it to the default, 4,096
    unaware, aware = OpenAIBackend(server.url), OpenAIBackend(server.url, runner_options={"num_ctx": 4096})
    assert unaware.complete(request).prompt_tokens == 4096
    assert kind_of(aware.complete(request)) == "prompt_too_long"
    assert aware.complete(ChatRequest.user("word", model="upper")).ok
    for ours in (unaware, aware):
        ours.close()


def test_a_prompt_goes_to_the_server_that_has_the_context(server: StubServer) -> None:
    with start_server([OnUpper("upper", num_ctx=128)], behave_as=server.version) as small:  # type: ignore[attr-defined]
        stack = build_client([small.url, server.url], batch_size=2, max_retries=0)
        replies = [stack.client.complete(ChatRequest.user(LONG, model="upper", seed=n)) for n in range(6)]
        stack.close()
        assert small.stats()["routes"]["/api/chat"] >= 2
    assert all(reply.ok and reply.text.startswith("BEGIN") for reply in replies)
