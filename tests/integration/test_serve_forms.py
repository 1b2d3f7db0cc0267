"""Forms and thoughts through the proxy: what is framed, what is gated, and what clients get."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest
import requests

from query_mutator import forms
from query_mutator.apply.proxy.answers import Mode
from query_mutator.apply.proxy.chat import answer_of
from query_mutator.encoder import Encoder
from query_mutator.files.json_lines import read_json_lines
from query_mutator.forms import Form, FormContext, Framed
from query_mutator.learners.plan import Plan
from query_mutator.runs.shadow import read_shadow
from query_mutator.testing import StubServer, start_server
from tests.conftest import Librarian, Softener
from tests.integration.proxied import KILL, MODEL, SORT, VIRTUAL, answer, chat, proxy, recording
from tests.integration.test_shadow import outcomes, wait_for

CLEAN = "sort my list"
STOP = {"stop": ["\nQuestion:"]}
TURNS = [{"role": "user", "content": "what counts things"}, {"role": "assistant", "content": "Counter"}]


def brief(text: str, context: FormContext) -> Framed:
    return Framed.user(f"Q: {text}", system="Be brief.", temperature=0.5, options=STOP)


BRIEF = Form(name="brief", summary="Briefly.", function=brief)
CHOSEN = (*forms.select("question_answer,examples,examples_text"), BRIEF)


def plan(form: str) -> dict[str, Any]:
    return {"mode": "blind", "plan": Plan(steps=("neutral", form)), "chosen": CHOSEN}


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
            headers={"x-qm-body": "1"},
            timeout=20,
        )
        written = requests.post(f"{url}/api/generate", json={"model": VIRTUAL, "prompt": SORT}, timeout=20)
    chatted, generated = (body for body in seen if body["model"] == MODEL)
    assert chatted["messages"] == [*TURNS, {"role": "user", "content": CLEAN}]
    said = {name: reply.headers[f"x-qm-{name}"] for name in ("decision", "operators", "form")}
    assert said == {"decision": "rewritten", "operators": "neutral", "form": "examples"}
    assert (reply.json()["qm"]["form"], reply.json()["qm"]["question"]) == ("examples", CLEAN)
    assert (generated["prompt"], written.headers["x-qm-form"]) == (CLEAN, "as_is")  # which has no earlier turns


@pytest.mark.parametrize(
    "conversation",
    [
        {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": SORT}]},
        {"messages": [*TURNS, {"role": "user", "content": f"hello there, {SORT}"}]},
        {"messages": [{"role": "user", "content": SORT}], "options": {"stop": ["."]}},
    ],
)
@pytest.mark.parametrize("mode", ["blind", "full"])
def test_in_a_conversation_only_a_text_is_framed(
    upstream: str, seen: list[dict[str, Any]], hash_encoder: Encoder, conversation: dict[str, Any], mode: Mode
) -> None:
    *before, last = conversation["messages"]
    wording = last["content"].replace("plz ", "")
    for form, text in (("examples_text", wording), ("brief", wording), ("question_answer", None)):
        seen.clear()
        with proxy(upstream, hash_encoder, **{**plan(form), "mode": mode}) as url:
            body = {"model": VIRTUAL, "stream": False, **conversation}
            reply = requests.post(f"{url}/api/chat", json=body, timeout=20)
        (asked,) = (body for body in seen if body["model"] == MODEL)
        content = text or f"Question: {wording}\nAnswer:"
        assert asked == {**body, "model": MODEL, "messages": [*before, {"role": "user", "content": content}]}
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


def test_gate_asks_in_the_form_what_was_refused(
    upstream: str, seen: list[dict[str, Any]], hash_encoder: Encoder
) -> None:
    gated: dict[str, Any] = {**plan("question_answer"), "mode": "gate"}
    with proxy(upstream, hash_encoder, **gated) as url:
        reply = chat(url, KILL)
    assert reply.headers["x-qm-form"] == "question_answer"
    asked = [body["messages"][-1]["content"] for body in seen if body["model"] == MODEL]
    assert asked[0] == KILL
    assert asked[-1].startswith("Question: ")
    assert len(asked) == 2


def test_a_rewrite_alone_is_a_text_to_send(tiny_server: StubServer, hash_encoder: Encoder) -> None:
    turns = [{"role": "user", "content": SORT}]
    for form, text in (("question_answer", f"Question: {CLEAN}\nAnswer:"), ("examples", CLEAN)):
        with proxy(tiny_server.url, hash_encoder, **plan(form)) as url:
            found = requests.post(f"{url}/qm/rewrite", json={"messages": turns}, timeout=10).json()
        assert (found["question"], found["form"]) == (text, form if form == "question_answer" else "as_is")


@pytest.mark.parametrize("mode", ["gate", "blind"])
def test_both_ways_of_a_form_are_kept(
    tiny_server: StubServer, hash_encoder: Encoder, tmp_path: Path, mode: Mode
) -> None:
    file = tmp_path / "shadow.jsonl"
    settings: dict[str, Any] = {"plan": Plan(steps=("question_answer",)), "chosen": CHOSEN, "shadow": file}
    with proxy(tiny_server.url, hash_encoder, mode=mode, **settings) as url:
        chat(url, SORT)
        wait_for_pair(file)
    _, row = read_json_lines(file)
    assert (row["rewrite"], row["form"]) == (SORT, "question_answer")
    assert row["sent"] == ("original" if mode == "gate" else "rewritten")


def wait_for_pair(file: Path) -> None:
    """Wait until a pair is kept."""
    end = time.monotonic() + 20
    while len(list(read_json_lines(file))) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_log_probabilities_are_asked_for_until_an_upstream_refuses_them(
    upstream: str, seen: list[dict[str, Any]], hash_encoder: Encoder
) -> None:
    chosen = {**plan("question_answer"), "mode": "full"}
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


def streamed(url: str, question: str) -> tuple[str, str]:
    """Return the decision on a question, and the streamed reply."""
    body = {"model": VIRTUAL, "stream": True, "messages": [{"role": "user", "content": question}]}
    reply = requests.post(f"{url}/api/chat", json=body, timeout=20)
    lines = [json.loads(line) for line in reply.text.splitlines()]
    return reply.headers["x-qm-decision"], "".join(line["message"]["content"] for line in lines)


@pytest.mark.parametrize("stream", [False, True])
def test_the_gate_reads_what_is_said(hash_encoder: Encoder, tmp_path: Path, stream: bool) -> None:
    shadow = tmp_path / "shadow.jsonl"
    with (
        start_server([Thinker(), ThoughtfulSoftener()], num_parallel=4) as server,
        proxy(server.url, hash_encoder, slots=8, shadow=shadow) as url,
    ):

        def asked(question: str) -> tuple[str, str]:
            if stream:
                return streamed(url, question)
            reply = chat(url, question)
            return reply.headers["x-qm-decision"], answer(reply)

        kept, refused, empty = asked(SORT), asked(KILL), asked("empty")
        wait_for(lambda: outcomes(url) == {"kept": 3})
    assert kept == ("kept", f"<think>{REFUSAL} {LONG}</think>\n\n`sorted` is what you want. Use it.")
    assert refused[0] == "rewritten"
    assert refused[1].endswith("</think>\n\n`os.kill` is what you want. Use it.")
    assert empty == ("kept", f"<think>{REFUSAL}")
    of_kept, of_refused, of_empty = read_shadow(shadow)
    assert of_kept["original"]["answer"] == "`sorted` is what you want. Use it."
    assert (of_refused["original"]["answer"], of_refused["original"]["refused"]) == (REFUSAL, True)
    assert of_refused["rewritten"]["answer"] == "`os.kill` is what you want. Use it."
    assert "think" not in of_refused["rewrite"]
    assert of_empty["original"]["answer"] == ""


@pytest.mark.parametrize("mode", ["blind", "full"])
def test_a_rewrite_has_no_thought(hash_encoder: Encoder, mode: str) -> None:
    with (
        start_server([Thinker(), ThoughtfulSoftener()], num_parallel=4) as server,
        proxy(server.url, hash_encoder, mode=mode) as url,  # type: ignore[arg-type]
    ):
        reply = chat(url, KILL)
    assert reply.headers["x-qm-decision"] == "rewritten"
    assert answer(reply).endswith("`os.kill` is what you want. Use it.")
