"""Refusals are left at their first sentence, and thoughts are part of no reply."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from query_mutator.confidence import Attempt
from query_mutator.llm.client import ModelServer
from query_mutator.llm.early_stop import EarlyStop, first_sentence
from query_mutator.llm.http_server import HttpServer
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend, completion_of
from query_mutator.rewards import is_refusal
from query_mutator.testing import StubServer, start_server
from query_mutator.types import ChatRequest, Completion, without_thought

REST = " Here is some more text that nobody needs, and then some." * 6
#: (reply, is it a refusal, is it one that can be cut)
LABELLED = [
    (f"I'm sorry, but I can't help with that.{REST}", True, True),
    (f"I cannot assist with this request!{REST}", True, True),
    (f"  I am unable to answer that.\n\n{REST}", True, True),
    (f"Sorry, I won't be able to do that.{REST}", True, True),
    (f"I must decline.\nUse another tool.{REST}", True, True),
    (f"This is against my guidelines. Ask me something else.{REST}", True, True),
    (f"I’m afraid I can’t help you with that.{REST}", True, True),
    ("I'm sorry, but I can't help with that.", True, False),  # nothing follows that could be saved
    (f"Hello. I can't help with that.{REST}", True, False),  # not in the first sentence: read to the end
    (f"1. I can't help with that.{REST}", True, False),
    (f"That kind of loop can't do it, so use `sorted`.{REST}", False, False),
    (f"Use `os.kill`. It sends a signal.{REST}", False, False),
    (f"I'm not sure what you mean. Could you rephrase?{REST}", False, False),
    (f"A file that can't be opened raises OSError.{REST}", False, False),
    (f"{'word ' * 80}I can't help with that. {REST}", False, False),  # too late to count as one
    (f"Sorry for the wait. `len` returns the length.{REST}", False, False),
    ("`sorted`", False, False),
]
REFUSAL = "I'm sorry, but I can't help with that."
MORE = " There is more to say about it." * 5
REPLIES = [
    ("Paris.", "Paris."),
    ("<think>Is it Rome?</think>\n\nParis.", "Paris."),
    ("<THINKING>Is it Rome?</THINKING>Paris.", "Paris."),
    ("Is it Rome? No.</think>\n\nParis.", "Paris."),
    ("Is it Rome?</think>Or Bonn?</think>Paris.", "Paris."),
    ("Rome.<think>No.</think>Bonn?</think>Paris.", "Paris."),
    ("It is <think>Rome? no</think>Paris.", "It is  Paris."),
    ("It is Paris.<think>Or Rome", "It is Paris."),
    ("<think>I may write <think> too</think>Paris.", "Paris."),
    ("<think>Is it</think> a <think>b</think> c", "a   c"),
    ("<think>Is it Rome?", ""),
    ("<think></think>", ""),
    ("It is Rome</think>", ""),
    ("a <thi<think></think>nk> b", "a <thi nk> b"),
    ("1 < 2, <thinker>", "1 < 2, <thinker>"),
]
# --- streams ---------------------------------------------------------------------------------------------------------

THOUGHTS = [
    (f"<think>{REFUSAL} So I refuse.{MORE}</think>It is Paris.{MORE}", False),
    (f"<think>It is Paris. Sure.{MORE}</think>\n\n{REFUSAL}{MORE}", True),
    (f"<think>{MORE}</think><think>{MORE}</think>{REFUSAL}{MORE}", True),
    (f"{REFUSAL}\n<think>It is Paris.{MORE}", True),
    (f"so, well, {REFUSAL[:-1]} </think>It is Paris.{MORE}", False),
    (f"<think>{REFUSAL}{MORE}", False),
]


class Labelled:
    name = "labelled"

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        return [LABELLED[int(prompt)][0] for prompt in prompts]


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with start_server([Labelled(), Thinker()], latency_ms=20) as running:
        yield running


@pytest.fixture(params=[OllamaBackend, OpenAIBackend])
def backend(request: pytest.FixtureRequest, server: StubServer) -> Iterator[ModelServer]:
    made = request.param(server.url, timeout_s=20.0)
    yield made
    made.close()


def ask(number: int, **fields: object) -> ChatRequest:
    return ChatRequest.user(str(number), model="labelled", max_tokens=400, **fields)


@pytest.mark.parametrize("number", range(len(LABELLED)))
def test_the_verdict_on_what_was_read_is_that_on_the_full_text(backend: ModelServer, number: int) -> None:
    _, refused, _ = LABELLED[number]
    full = backend.complete(ask(number))
    read = EarlyStop(backend, is_refusal=is_refusal).complete(ask(number))
    assert (is_refusal(full.text), is_refusal(read.text)) == (refused, refused)
    assert full.text.startswith(read.text)


def test_refusals_are_cut_and_all_else_is_read_to_its_end(backend: ModelServer) -> None:
    early = EarlyStop(backend, is_refusal=is_refusal)
    for number, (text, _, can_be_cut) in enumerate(LABELLED):
        reply = early.complete(ask(number))
        expected = first_sentence(text) if can_be_cut else text
        assert expected is not None
        assert reply.text == expected.strip()
    assert early.cut_replies == sum(can_be_cut for _, _, can_be_cut in LABELLED)


def test_saved_tokens_are_estimated_from_replies_read_to_their_end(backend: ModelServer) -> None:
    early = EarlyStop(backend, is_refusal=is_refusal)
    cut = early.complete(ask(0))
    assert early.tokens_saved == 400 - cut.completion_tokens  # at most
    whole = early.complete(ask(11))
    assert early.tokens_saved == whole.completion_tokens - cut.completion_tokens > 0


def test_leaving_early_frees_the_servers_slot_and_the_next_call_works() -> None:
    with start_server([Labelled()], num_parallel=1, latency_ms=5000) as server:
        backend = OllamaBackend(server.url, timeout_s=60.0)
        early = EarlyStop(backend, is_refusal=is_refusal)
        assert early.complete(ask(0)).ok
        assert early.complete(ask(1)).ok
        backend.close()
        give_up_at = time.monotonic() + 10.0
        while (stats := server.stats())["cancelled"] < 2 and time.monotonic() < give_up_at:
            pass  # the server learns of a closed connection a moment later
    assert (stats["cancelled"], early.cut_replies) == (2, 2)
    assert stats["service_s"] < 5.0


@pytest.mark.parametrize("kind", [OllamaBackend, OpenAIBackend])
def test_a_deadline_ends_a_reply_that_is_streamed_slowly(kind: type[HttpServer]) -> None:
    seen: list[str] = []
    with start_server([Labelled()], latency_ms=20_000) as slow:
        backend = kind(slow.url, timeout_s=60.0)
        began = time.monotonic()
        request = ask(11, deadline=began + 2.0)
        reply = backend.complete_until(request, lambda text: seen.append(text) is not None)
        took_s = time.monotonic() - began
        late = EarlyStop(backend, is_refusal=is_refusal).complete(request)
        backend.close()
    assert seen
    assert reply.error is not None
    assert (reply.error.kind, reply.text) == ("timeout", "")
    assert 1.0 < took_s < 10.0
    assert late.error is not None
    assert (late.error.kind, late.error.message) == ("timeout", "the deadline passed before the call started")


def test_only_target_replies_are_judged(backend: ModelServer) -> None:
    early = EarlyStop(backend, is_refusal=is_refusal)
    assert early.complete(ask(0, purpose="mutate")).text == LABELLED[0][0]
    assert early.cut_replies == 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("I can't", None),
        ("I can't.", None),  # "3." could become "3.14"
        ("I can't. So", "I can't."),
        ("我不能。So", "我不能。"),
        ("私にはできません", None),
        ("不行！", "不行！"),
        ("pi is 3.14 and so on", None),
        (" \n Title\nText", "Title\n"),
    ],
)
def test_a_first_sentence_is_one_that_something_follows(text: str, sentence: str | None) -> None:
    assert first_sentence(text) == sentence


def test_a_reply_whose_log_probability_is_asked_for_is_read_whole(backend: ModelServer) -> None:
    early = EarlyStop(backend, is_refusal=is_refusal)
    assert early.complete(ask(0, logprobs=True)).text == LABELLED[0][0].strip()
    assert early.cut_replies == 0


def from_ollama(text: str) -> Completion:
    return Completion.from_ollama({"message": {"content": text}, "done": True, "logprobs": [{"logprob": -0.5}]})


def from_generate(text: str) -> Completion:
    return Completion.from_ollama({"response": text, "done": True})


def from_openai(text: str) -> Completion:
    logprobs = {"content": [{"logprob": -0.5}]}
    return completion_of({"choices": [{"message": {"content": text}, "finish_reason": "stop", "logprobs": logprobs}]})


@pytest.mark.parametrize("read", [from_ollama, from_generate, from_openai, lambda text: Completion(text=text)])
@pytest.mark.parametrize(("reply", "said"), REPLIES)
def test_a_thought_is_not_in_the_text_of_a_reply(read: Callable[[str], Completion], reply: str, said: str) -> None:
    found = read(reply)
    assert found.text == said
    assert (found.error and found.error.kind) == (None if said else "empty")
    assert without_thought(said) == said


def test_the_log_probability_of_a_thought_is_not_that_of_the_answer() -> None:
    assert from_ollama("Paris.").logprob == from_openai("Paris.").logprob == -0.5
    assert from_ollama("<think>Rome?</think>Paris.").logprob is None
    assert from_openai("Rome?</think>Paris.").logprob is None


@pytest.mark.parametrize("field", ["thinking", "reasoning_content", "reasoning"])
def test_a_thought_in_a_field_of_its_own_is_not_the_answer(field: str) -> None:
    for text, kind in (("Paris.", None), ("", "empty"), (None, "empty")):
        message = {"content": text, field: "Is it Rome?"}
        replies = [
            Completion.from_ollama({"message": message, "done": True, field: "Is it Bonn?"}),
            Completion.from_ollama({"response": text, field: "Is it Bonn?", "done": True}),
            completion_of({"choices": [{"message": message, "finish_reason": "stop"}]}),
        ]
        assert [(one.text, one.error and one.error.kind) for one in replies] == [(text or "", kind)] * 3


def test_logged_answers_are_read_without_their_thought() -> None:
    assert Attempt(text="<think>7</think>The answer is 4.").text == "The answer is 4."


class Thinker:
    name = "thinker"

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        return [THOUGHTS[int(prompt)][0] for prompt in prompts]


@pytest.mark.parametrize("number", range(len(THOUGHTS)))
def test_a_reply_is_cut_at_a_refusal_that_is_said_and_not_at_one_that_is_thought(
    backend: ModelServer, number: int
) -> None:
    _, is_cut = THOUGHTS[number]
    early = EarlyStop(backend, is_refusal=is_refusal)
    reply = early.complete(ChatRequest.user(str(number), model="thinker", max_tokens=900))
    whole = backend.complete(ChatRequest.user(str(number), model="thinker", max_tokens=900))
    assert early.cut_replies == int(is_cut)
    assert is_refusal(reply.text) == is_refusal(whole.text) == is_cut
    assert reply.text == (REFUSAL if is_cut else whole.text)


# --- scripts ---------------------------------------------------------------------------------------------------------
