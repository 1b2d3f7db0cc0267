"""The rewriting proxy over real HTTP, with a plan as the policy: answers, forms and thoughts."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest
import requests

from query_mutator import forms
from query_mutator.apply.proxy import feedback
from query_mutator.apply.proxy.answers import Mode
from query_mutator.apply.proxy.chat import answer_of
from query_mutator.apply.proxy.server import ClientLimits
from query_mutator.encoder import Encoder
from query_mutator.errors import UsageError
from query_mutator.forms import Form, FormContext, Framed
from query_mutator.learners import Plan
from query_mutator.testing import StubServer, start_server
from tests.conftest import Librarian, Softener
from tests.integration.proxied import KILL, MODEL, SORT, VIRTUAL, answer, answering, chat, proxy, recording
from tests.scripted_server import CLOSE, ScriptedServer

# --- what passes ------------------------------------------------------------------------------------------------------


def without_times(content: bytes) -> list[Any]:
    """Return the lines of a reply without what depends on the clock."""
    rows = [
        json.loads(line.removeprefix("data: "))
        for line in content.decode().splitlines()
        if line.startswith(("{", "data: {"))
    ]
    for row in rows:
        for name in [name for name in row if name.endswith("_duration") or name in ("created_at", "created", "id")]:
            row[name] = None
    return rows


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": SORT}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": SORT}], "stream": False, "options": {"num_ctx": 512}}),
        ("/api/generate", {"prompt": SORT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SORT}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SORT}], "stream": True}),
        ("/api/chat", {"messages": "not a list"}),
        ("/api/show", {}),
        ("/v1/responses", {"input": "hello"}),
        ("/api/embed", {"input": ["a", "b"]}),
        ("/no/such/path", {"a": 1}),
    ],
)
def test_an_upstream_model_is_answered_as_by_the_upstream(
    gate: str, tiny_server: StubServer, path: str, body: dict[str, Any]
) -> None:
    ours, theirs = (
        requests.post(url + path, json={"model": MODEL, **body}, timeout=20) for url in (gate, tiny_server.url)
    )
    assert ours.status_code == theirs.status_code
    assert without_times(ours.content) == without_times(theirs.content)
    names = [{name.lower() for name in reply.headers} - {"connection", "server"} for reply in (ours, theirs)]
    assert names[0] == names[1]


def test_each_part_is_forwarded_on_arrival_with_its_bytes(hash_encoder: Encoder) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nX-Own: Some Value\r\nContent-Length: 30\r\n\r\n"
    first, second = b'{"a": 1.0}   \n', b'\xff\xfe{"b":2}\n'.ljust(16, b"\n")
    first_is_read = threading.Event()
    with (
        closing(ScriptedServer((head + first, first_is_read, second))) as upstream,
        proxy(upstream.url, hash_encoder) as ours,
        requests.get(f"{ours}/api/pull", stream=True, timeout=10) as reply,
    ):
        assert reply.headers["X-Own"] == "Some Value"
        assert reply.raw.read(len(first)) == first  # which did not wait for the second
        first_is_read.set()
        assert reply.raw.read() == second


def test_an_error_in_the_middle_of_a_stream_comes_as_it_is(hash_encoder: Encoder) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n"
    first = b'{"model":"m","message":{"role":"assistant","content":"Use `sorted`. "},"done":false}\n'
    error = b'{"error":"an error was encountered while running the model"}\n'
    with closing(ScriptedServer((head, first, error, CLOSE))) as upstream, proxy(upstream.url, hash_encoder) as ours:
        lines = chat(ours, SORT, model="m+qm", stream=True).content.splitlines(keepends=True)
    assert json.loads(lines[0])["model"] == "m+qm"
    assert lines[1:] == [error]


def test_an_upload_is_forwarded_in_parts_and_larger_than_a_request_may_be(hash_encoder: Encoder) -> None:
    with (
        start_server([Librarian()]) as server,
        proxy(server.url, hash_encoder, limits=ClientLimits(body_bytes=1000)) as url,
    ):
        assert requests.post(f"{url}/api/blobs/sha256:0", data=b"x" * 5000, timeout=10).status_code == 404
        reply = requests.post(f"{url}/api/chat", data=b"x" * 5000, timeout=10)
    assert reply.status_code == 413
    assert "1000" in reply.json()["error"]


def test_an_error_of_the_upstream_comes_as_it_is(gate: str, tiny_server: StubServer) -> None:
    theirs, ours = (chat(url, SORT, model="no-such-model") for url in (tiny_server.url, gate))
    assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content)
    virtual = chat(gate, SORT, model="no-such-model+qm")
    assert virtual.status_code == 404
    assert {"'no-such-model+qm'", "'librarian+qm'"} <= set(re.findall("'[^']*'", virtual.json()["error"]))


def test_a_server_that_takes_any_name_rewrites_only_for_its_model(hash_encoder: Encoder) -> None:
    with start_server([Librarian()]) as server, proxy(server.url, hash_encoder, is_own=True) as url:
        for name, status in (("librarian+qm", 200), ("echo+qm", 404), ("echo", 200)):
            assert chat(url, SORT, model=name).status_code == status


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_every_reply_has_the_model_name_that_the_client_sent(gate: str, stream: bool) -> None:
    turns = [{"role": "user", "content": SORT}]
    for path, body in (
        ("/api/chat", {"messages": turns}),
        ("/api/chat", {"messages": turns, "format": "json"}),
        ("/api/generate", {"prompt": SORT}),
        ("/v1/chat/completions", {"messages": turns}),
        ("/v1/completions", {"prompt": SORT}),
    ):
        with requests.post(f"{gate}{path}", json={"model": VIRTUAL, "stream": stream, **body}, timeout=20) as reply:
            if reply.status_code == 404:  # not every upstream has every path
                continue
            rows = without_times(reply.content)
        assert {row["model"] for row in rows if "model" in row} == {VIRTUAL}


# --- the modes --------------------------------------------------------------------------------------------------------


def test_after_the_deadline_the_original_is_asked(hash_encoder: Encoder) -> None:
    class Slow(Softener):
        def reply(self, prompt: str) -> str:
            time.sleep(1.5)
            return super().reply(prompt)

    with (
        start_server([Librarian(), Slow()], num_parallel=4) as server,
        proxy(server.url, hash_encoder, mode="full", seconds=0.3) as url,
    ):
        reply = chat(url, SORT)
    assert reply.headers["x-qm-decision"] == "kept"
    assert answer(reply) == "`sorted` is what you want."


def test_a_rewrite_that_answers_is_not_asked_and_is_counted(hash_encoder: Encoder) -> None:
    class Answering(Softener):
        def reply(self, prompt: str) -> str:
            return "The answer is to call sorted."

    with start_server([Librarian(), Answering()]) as server, proxy(server.url, hash_encoder, mode="full") as url:
        reply, counted = chat(url, SORT), requests.get(f"{url}/metrics", timeout=10).text
    assert reply.headers["x-qm-decision"] == "guarded; answer"
    assert answer(reply) == "`sorted` is what you want."
    assert 'qm_rejected_rewrites_total{guard="answer",operator="neutral"} 1' in counted


def test_what_is_not_a_plain_question_passes_under_the_upstreams_name(gate: str) -> None:
    task = "### Task:\nGenerate 1-3 broad tags for kill\n<chat_history>\n</chat_history>"
    for reply, reason in (
        (chat(gate, task), "ui-task"),
        (chat(gate, KILL, format="json"), "format"),
        (requests.post(f"{gate}/api/generate", json={"model": VIRTUAL, "stream": False}, timeout=10), "empty"),
        (requests.post(f"{gate}/api/chat", json={"model": VIRTUAL, "stream": False}, timeout=10), "empty"),
        (requests.post(f"{gate}/api/chat", json={"model": VIRTUAL, "messages": []}, timeout=10), "empty"),
    ):
        assert reply.headers["x-qm-decision"] == f"passed; {reason}"
        assert reply.json()["model"] == VIRTUAL


def test_options_and_earlier_turns_reach_the_upstream_unchanged(hash_encoder: Encoder) -> None:
    seen: list[dict[str, Any]] = []
    with recording(seen) as upstream, proxy(upstream, hash_encoder, mode="full") as url:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SORT}]
        body = {
            "model": VIRTUAL,
            "stream": False,
            "messages": messages,
            "options": {"num_ctx": 512},
            "keep_alive": "1h",
        }
        requests.post(f"{url}/api/chat", json=body, timeout=10)
    final = seen[-1]
    turns = [messages[0], {"role": "user", "content": "sort my list"}]
    assert final == {**body, "model": MODEL, "messages": turns, "options": {"num_ctx": 512, "temperature": 0.0}}


def test_calls_of_the_clients_model_have_its_runner_options(hash_encoder: Encoder) -> None:
    seen: list[dict[str, Any]] = []
    with recording(seen) as upstream, proxy(upstream, hash_encoder, mode="full", asks_once=False) as url:
        chat(url, SORT, model="softener+qm", options={"num_ctx": 512, "temperature": 0.5})  # which is the mutator too
        chat(url, SORT, options={"num_ctx": 512})
    same, other = seen[:2], seen[2:4]
    assert [body["model"].partition(":")[0] for body in seen] == ["softener", "softener", "softener", "librarian"]
    assert [body["options"]["num_ctx"] for body in same] == [512, 512]
    assert same[0]["options"]["temperature"] == 0.0
    assert ["num_ctx" in body["options"] for body in other] == [False, True]


# --- who may call, and what is counted --------------------------------------------------------------------------------


def test_a_key_may_have_any_letters(tiny_server: StubServer, hash_encoder: Encoder) -> None:
    with proxy(tiny_server.url, hash_encoder, api_key="schlüssel") as url:
        for key, status in (("schlüssel", 200), ("schlussel", 401)):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert requests.get(f"{url}/api/tags", headers=headers, timeout=10).status_code == status


@pytest.mark.parametrize("origin", ["http://localhost:3000", "same"])
def test_an_allowed_page_can_read_every_reply(gate: str, origin: str) -> None:
    headers = {"Origin": gate if origin == "same" else origin}
    body = {"model": VIRTUAL, "messages": [{"role": "user", "content": KILL}]}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,x-qm-skip"}
    preflight = requests.options(f"{gate}/api/chat", headers={**headers, **asked}, timeout=10)
    assert preflight.status_code == 204
    assert preflight.headers["Access-Control-Allow-Headers"] == "content-type,x-qm-skip"
    replies = [
        requests.post(f"{gate}/api/chat", json={**body, "stream": stream}, headers=headers, timeout=10)
        for stream in (False, True)
    ]
    replies += [requests.get(f"{gate}{path}", headers=headers, timeout=10) for path in ("/api/tags", "/healthz")]
    for reply in replies:
        assert reply.status_code == 200
        assert reply.headers["Access-Control-Allow-Origin"] == headers["Origin"]  # once
        assert "x-qm-decision" in reply.headers["Access-Control-Expose-Headers"]
    assert "Access-Control-Allow-Origin" not in requests.get(f"{gate}/api/tags", timeout=10).headers


def test_the_upstream_does_not_see_the_origin_that_the_proxy_has_allowed(hash_encoder: Encoder) -> None:
    headers: list[dict[str, str]] = []
    with recording([], headers) as upstream, proxy(upstream, hash_encoder) as url:
        for model in (MODEL, VIRTUAL):
            sent = {"model": model, "messages": [{"role": "user", "content": SORT}]}
            assert requests.post(f"{url}/api/chat", json=sent, headers={"Origin": url}, timeout=10).status_code == 200
    assert len(headers) == 2
    assert all("origin" not in found for found in headers)


def test_metrics_and_health(gate: str) -> None:
    chat(gate, KILL)
    text = requests.get(f"{gate}/metrics", timeout=10).text
    assert 'qm_decisions_total{decision="rewritten",mode="gate"}' in text
    assert 'qm_rewrites_total{operator="neutral"}' in text
    assert requests.get(f"{gate}/healthz", timeout=10).json() == {"status": "ok"}
    assert requests.get(gate, timeout=10).text == "Ollama is running"
    assert requests.head(gate, timeout=10).status_code == 200


def test_the_filter_of_open_webui_shows_the_rewrite_and_sends_it(gate: str) -> None:
    from examples.open_webui_filter import Filter

    shown: list[str] = []

    async def emit(event: dict[str, Any]) -> None:
        shown.append(event["data"]["description"])

    found = Filter()
    found.valves.url = gate
    body = {"model": "any", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": SORT}]}
    sent = asyncio.run(found.inlet(body, __event_emitter__=emit))
    assert sent["messages"][-1]["content"] == "sort my list"
    assert sent["messages"][:-1] == body["messages"][:-1]
    assert shown == ["Asking: sort my list"]
    assert asyncio.run(found.inlet(body, __metadata__={"task": "title_generation"})) == body
    found.valves.url = "http://127.0.0.1:9"
    assert asyncio.run(found.inlet(body, __event_emitter__=emit)) == body
    assert shown[-1].startswith("Not rewritten")


def test_a_rewrite_alone_is_asked_for_without_an_answer(gate: str) -> None:
    turns = [{"role": "user", "content": SORT}]
    found = requests.post(f"{gate}/qm/rewrite", json={"messages": turns}, timeout=10).json()
    assert found == {"question": "sort my list", "operators": ["neutral"], "form": "as_is", "calls": 1, "problem": None}
    more = [*turns, {"role": "assistant", "content": "sorted"}, {"role": "user", "content": "plz explain it"}]
    assert requests.post(f"{gate}/qm/rewrite", json={"messages": more}, timeout=10).json()["problem"] == "context"
    assert requests.post(f"{gate}/qm/rewrite", json={"question": SORT}, timeout=10).status_code == 400


@pytest.mark.parametrize(("sent", "got"), [(None, "Bearer upstream"), ("Bearer mine", "Bearer mine")])
def test_the_key_of_the_upstream_goes_where_a_client_sends_none(
    hash_encoder: Encoder, sent: str | None, got: str
) -> None:
    seen: list[dict[str, str]] = []
    with (
        recording([], seen) as upstream,
        proxy(upstream, hash_encoder, upstream_headers={"authorization": "Bearer upstream"}) as url,
    ):
        for model in (MODEL, VIRTUAL):
            requests.post(
                f"{url}/v1/chat/completions",
                json={"model": model, "messages": [{"role": "user", "content": SORT}]},
                headers={} if sent is None else {"Authorization": sent},
                timeout=10,
            )
    assert [headers.get("authorization") for headers in seen] == [got, got]


@pytest.mark.parametrize(("mode", "text"), [("gate", SORT), ("full", SORT)])
def test_the_overhead_is_what_passed_before_the_request_that_answers(
    mode: Mode, text: str, hash_encoder: Encoder
) -> None:
    slow = 400.0  # ms of every call
    with (
        start_server([Librarian(), Softener()], num_parallel=4, latency_ms=slow) as server,
        proxy(server.url, hash_encoder, mode=mode) as url,
    ):
        started = time.perf_counter()
        reply = chat(url, text)
        took = 1000 * (time.perf_counter() - started)
    calls = int(reply.headers["x-qm-calls"])
    overhead = float(reply.headers["x-qm-overhead-ms"])
    assert (calls - 1) * slow <= overhead <= took - slow


CLEAN = "sort my list"
STOP = {"stop": ["\nQuestion:"]}
TURNS = [{"role": "user", "content": "what counts things"}, {"role": "assistant", "content": "Counter"}]


def brief(text: str, context: FormContext) -> Framed:
    return Framed.user(f"Q: {text}", system="Be brief.", temperature=0.5, options=STOP)


BRIEF = Form(name="brief", summary="Briefly.", function=brief)
CHOSEN = (*forms.select("question_answer,examples,examples_text"), BRIEF)


def plan(form: str) -> dict[str, Any]:
    return {"mode": "full", "plan": Plan(steps=("neutral", form)), "chosen": CHOSEN}


@pytest.fixture
def seen() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def upstream(seen: list[dict[str, Any]]) -> Iterator[str]:
    with recording(seen) as url:
        yield url


@pytest.mark.parametrize("stream", [False, True])
def test_official_clients_get_the_answer_to_the_whole_request(
    upstream: str, seen: list[dict[str, Any]], hash_encoder: Encoder, stream: bool
) -> None:
    ask: Any = [{"role": "user", "content": SORT}]
    with proxy(upstream, hash_encoder, **plan("brief")) as url:
        theirs, ours = ollama.Client(url), openai.OpenAI(base_url=f"{url}/v1", api_key="x").chat.completions
        calls: tuple[Callable[[], Any], ...] = (
            lambda: theirs.chat(VIRTUAL, ask, stream=stream, options={"temperature": 0.9, "num_ctx": 512}),
            lambda: theirs.generate(VIRTUAL, SORT, stream=stream),
            lambda: ours.create(model=VIRTUAL, messages=ask, stream=stream, temperature=0.1),
        )
        assert all(list(call()) for call in calls)
    chatted, generated, created = (body for body in seen if body["model"] == MODEL)
    framed = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Q: {CLEAN}"}]
    assert chatted["messages"] == created["messages"] == framed
    assert chatted["options"] == {**STOP, "temperature": 0.9, "num_ctx": 512}
    assert (generated["system"], generated["prompt"]) == ("Be brief.", f"Q: {CLEAN}")
    assert generated["options"] == {**STOP, "temperature": 0.5}
    assert (created["stop"], created["temperature"]) == (STOP["stop"], 0.1)


def test_examples_are_turns_before_the_question_and_a_header_names_the_form(
    upstream: str, seen: list[dict[str, Any]], hash_encoder: Encoder
) -> None:
    with proxy(upstream, hash_encoder, **plan("examples")) as url:
        reply = requests.post(
            f"{url}/api/chat",
            json={"model": VIRTUAL, "stream": False, "messages": [{"role": "user", "content": SORT}]},
            timeout=20,
        )
        written = requests.post(f"{url}/api/generate", json={"model": VIRTUAL, "prompt": SORT}, timeout=20)
    chatted, generated = (body for body in seen if body["model"] == MODEL)
    assert chatted["messages"] == [*TURNS, {"role": "user", "content": CLEAN}]
    said = {name: reply.headers[f"x-qm-{name}"] for name in ("decision", "operators", "form")}
    assert said == {"decision": "rewritten", "operators": "neutral", "form": "examples"}
    assert (generated["prompt"], written.headers["x-qm-form"]) == (CLEAN, "as_is")  # which has no earlier turns


@pytest.mark.parametrize(
    "conversation",
    [
        {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": SORT}]},
        {"messages": [{"role": "user", "content": SORT}], "options": {"stop": ["."]}},
    ],
)
@pytest.mark.parametrize("asks_once", [True, False])
def test_in_a_conversation_only_a_text_is_framed(
    upstream: str, seen: list[dict[str, Any]], hash_encoder: Encoder, conversation: dict[str, Any], asks_once: bool
) -> None:
    *before, last = conversation["messages"]
    wording = last["content"].replace("plz ", "")
    for form, text in (("examples_text", wording), ("brief", wording), ("question_answer", None)):
        seen.clear()
        with proxy(upstream, hash_encoder, **plan(form), asks_once=asks_once) as url:
            body = {"model": VIRTUAL, "stream": False, **conversation}
            reply = requests.post(f"{url}/api/chat", json=body, timeout=20)
        (asked,) = (body for body in seen if body["model"] == MODEL)
        content = text or f"Question: {wording}\nAnswer:"
        options = {"temperature": 0.0, **body.get("options", {})}
        turns = [*before, {"role": "user", "content": content}]
        assert asked == {**body, "model": MODEL, "messages": turns, "options": options}
        assert reply.headers["x-qm-form"] == ("as_is" if text else form)
        assert reply.headers["x-qm-operators"] == "neutral"


def test_a_form_alone_is_a_rewrite_and_one_that_is_not_used_is_none(
    upstream: str, seen: list[dict[str, Any]], hash_encoder: Encoder
) -> None:
    alone: dict[str, Any] = {"mode": "full", "plan": Plan(steps=("examples",)), "chosen": CHOSEN}
    with proxy(upstream, hash_encoder, **alone) as url:
        assert chat(url, SORT).headers["x-qm-decision"] == "rewritten"
        kept = chat(url, SORT, options={"stop": ["."]}).headers
    assert (kept["x-qm-decision"], kept["x-qm-form"], kept["x-qm-calls"]) == ("kept", "as_is", "1")
    assert [len(body["messages"]) for body in seen] == [3, 1]


def test_log_probabilities_are_asked_for_until_an_upstream_refuses_them(
    upstream: str, seen: list[dict[str, Any]], hash_encoder: Encoder
) -> None:
    chosen = {**plan("question_answer"), "asks_once": False}
    with proxy(upstream, hash_encoder, logprobs=True, **chosen) as url:
        for _ in range(2):
            assert chat(url, SORT).status_code == 200
    asked = [body.get("logprobs") for body in seen if body["model"] == MODEL]
    assert asked == [True, None, None]


def test_a_policy_reads_the_log_probability_of_a_reply_and_the_client_does_not_get_it() -> None:
    rows = [{"token": "a", "logprob": -0.2}, {"token": "b", "logprob": -0.4}]
    ollamas = {"model": "m", "message": {"content": "Paris"}, "logprobs": rows, "done": True, "done_reason": "length"}
    openais = {
        "model": "m",
        "choices": [{"message": {"content": "Paris"}, "logprobs": {"content": rows}, "finish_reason": "stop"}],
    }
    for api, reply, cut in (("ollama_chat", ollamas, True), ("openai_chat", openais, False)):
        read = answer_of(api, reply)  # type: ignore[arg-type]
        assert (read.text, read.logprob, read.hit_limit, bool(read.model)) == ("Paris", pytest.approx(-0.3), cut, True)
        assert "logprob" not in str(reply)


REFUSAL = "I'm sorry, but I can't help with that. Ask something else."
LONG = "It goes on and on. " * 40


class Thinker(Librarian):
    """Thinks of a refusal and answers, or thinks of an answer and refuses; at "empty" it only thinks."""

    def reply(self, prompt: str) -> str:
        said = super().reply(prompt)
        if "empty" in prompt:
            return f"<think>{REFUSAL}"
        if "sorry" in said:
            return f"<think>`os.kill` is it. {LONG}</think>\n\n{REFUSAL}"
        return f"<think>{REFUSAL} {LONG}</think>\n\n{said} Use it."


class ThoughtfulSoftener(Softener):
    def reply(self, prompt: str) -> str:
        return f"<think>Perhaps: how to kill?</think>{super().reply(prompt)}"


def test_the_gate_reads_what_is_said(hash_encoder: Encoder) -> None:
    with (
        start_server([Thinker(), ThoughtfulSoftener()], num_parallel=4) as server,
        proxy(server.url, hash_encoder) as url,
    ):
        replies = [chat(url, question) for question in (SORT, KILL, "empty")]
    kept, refused, empty = ((reply.headers["x-qm-decision"], answer(reply)) for reply in replies)
    assert kept == ("kept", f"<think>{REFUSAL} {LONG}</think>\n\n`sorted` is what you want. Use it.")
    assert refused[0] == "rewritten"
    assert refused[1].endswith("</think>\n\n`os.kill` is what you want. Use it.")
    assert empty == ("kept", f"<think>{REFUSAL}")


@pytest.mark.parametrize("asks_once", [True, False])
def test_a_rewrite_has_no_thought(hash_encoder: Encoder, asks_once: bool) -> None:
    with (
        start_server([Thinker(), ThoughtfulSoftener()], num_parallel=4) as server,
        proxy(server.url, hash_encoder, mode="full", asks_once=asks_once) as url,
    ):
        reply = chat(url, KILL)
    assert reply.headers["x-qm-decision"] == "rewritten"
    assert answer(reply).endswith("`os.kill` is what you want. Use it.")


# --- thoughts in streams ---------------------------------------------------------------------------------------------

ROUTES = ("/api/chat", "/api/generate", "/v1/chat/completions")


@contextmanager
def thinking(style: str) -> Iterator[str]:
    """Serve a model that thinks of a refusal and answers, or thinks of an answer and refuses, on all routes.

    `style` says where the thought is: in tags, without the first of them, or in a field of that name.
    """

    def line(path: str, text: str, thought: str) -> str:
        field = {style: thought} if thought else {}
        message = {"role": "assistant", "content": text, **field}
        if path == "/v1/chat/completions":
            return f"data: {json.dumps({'model': 'm', 'choices': [{'index': 0, 'delta': message}]})}\n\n"
        said = {"response": text, **field} if path == "/api/generate" else {"message": message}
        return json.dumps({"model": "m", **said, "done": True}) + "\n"

    def reply(path: str, _: dict[str, str], body: Any) -> tuple[int, str, bytes]:
        asked = body.get("prompt") or body["messages"][-1]["content"]
        thought, said = (
            ("`os.kill` is it. ", REFUSAL) if "kill" in asked else (f"{REFUSAL} ", "`sorted` is it. Use it.")
        )
        if body["model"] == "softener":
            pieces = [("how do i stop it", "")]
        elif style in ("tags", "unopened"):
            pieces = [(f"{'<think>' * (style == 'tags')}{thought}", ""), ("</thi", ""), ("nk>", ""), (said, "")]
        else:
            pieces = [("", thought), (said, "")]
        if not body.get("stream", True):
            pieces = [("".join(text for text, _ in pieces), "")]
        return 200, "application/json", "".join(line(path, *piece) for piece in pieces).encode()

    with answering(reply) as url:
        yield url


@pytest.mark.parametrize("style", ["tags", "unopened", "reasoning_content", "reasoning", "thinking"])
def test_no_thought_passes_the_gate_in_a_stream(hash_encoder: Encoder, style: str) -> None:
    with thinking(style) as upstream, proxy(upstream, hash_encoder) as url:

        def decision(path: str, question: str) -> str:
            asked = {"prompt": question, "messages": [{"role": "user", "content": question}]}
            reply = requests.post(f"{url}{path}", json={"model": VIRTUAL, "stream": True, **asked}, timeout=20)
            assert reply.status_code == 200
            return reply.headers["x-qm-decision"]

        if style == "unopened":  # the first reply of a model shows that its prompt has the tag
            assert decision("/api/chat", "what is it") in ("kept", "rewritten")
        for path in ROUTES:
            assert (path, decision(path, SORT)) == (path, "kept")
            assert (path, decision(path, KILL)) == (path, "rewritten")


# --- feedback --------------------------------------------------------------------------------------------------------


def test_feedback_works_once_and_with_the_key_that_got_the_reply(
    tiny_server: StubServer, hash_encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback, "MAX_WAITING", 2)
    with proxy(tiny_server.url, hash_encoder) as url:

        def send(body: Any, key: str = "mine", **headers: str) -> int:
            sent = {"Authorization": f"Bearer {key}", **headers}
            reply = requests.post(f"{url}/qm/feedback", json=body, headers=sent, timeout=10)
            assert "zanzibar" not in reply.text
            return reply.status_code

        def name(key: str = "mine", question: str = SORT) -> str:
            body = {"model": VIRTUAL, "stream": False, "messages": [{"role": "user", "content": question}]}
            reply = requests.post(f"{url}/api/chat", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=10)
            return reply.headers["X-QM-Id"]

        assert "x-qm-id" not in chat(url, SORT, format="json").headers  # which passed
        first = name()
        assert re.fullmatch("[0-9a-f]{32}", first)
        assert [send({"id": first, "right": True}, key) for key in ("other", "mine", "mine")] == [404, 200, 404]
        for wrong in ({"id": first}, {"id": 5, "right": True}, {"id": first, "right": "zanzibar"}, ["zanzibar"]):
            assert send(wrong) == 400
        assert send({"id": "zanzibar", "right": True}) == 404
        names = [name() for _ in range(3)]  # of which the first one is forgotten, but not that of another key
        theirs = name("other")
        assert [send({"id": each, "right": False}) for each in names] == [404, 200, 200]
        assert send({"id": theirs, "right": True}, "other", Origin="https://evil.example") == 403
        assert send({"id": theirs, "right": True}, "other") == 200
        counted = requests.get(f"{url}/metrics", timeout=10).text
    assert "qm_feedback_right_sum{} 2\nqm_feedback_right_count{} 4\n" in counted
    assert "qm_feedback_p_right_count" not in counted  # this plan knows no P(right)


def test_a_log_of_traffic_is_bounded_by_size_and_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "MAX_LOG_BYTES", 1000)
    path = tmp_path / "log.jsonl"
    with pytest.MonkeyPatch.context() as clock:
        clock.setattr(time, "time", lambda: 1e9)
        log = feedback.TrafficLog(path)
        old = log.add({"question": "old"}, None)
        with pytest.raises(UsageError, match="another qm serve"):
            feedback.TrafficLog(path)
    places = [log.add({"question": f"{at:050}"}, None) for at in range(20)]
    assert path.stat().st_size <= 1000
    for place in (old, *places):
        log.grade(place, True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert 5 <= len(rows) < 20
    assert {row["right"] for row in rows} == {True}
    assert rows[-1]["question"] == f"{19:050}"
    feedback.delete_traffic(str(path))
    log.grade(places[-1], False)
    assert path.read_bytes() == b""
