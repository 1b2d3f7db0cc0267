"""Refusals are left at their first sentence, and every verdict is that of the full text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from query_mutator.llm.client import ModelServer
from query_mutator.llm.early_stop import EarlyStop, first_sentence
from query_mutator.llm.http_server import HttpServer
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.rewards.matching import is_refusal
from query_mutator.testing import FaultPlan, StubServer, start_server
from query_mutator.types import ChatRequest

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


class Labelled:
    name = "labelled"

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        return [LABELLED[int(prompt)][0] for prompt in prompts]


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with start_server([Labelled()], latency_ms=20) as running:
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
    ("fault", "kind"),
    [("500", "server"), ("503", "busy"), ("reset", "connect"), ("stall", "timeout"), ("cut", "malformed"),
     ("empty", "empty"), ("incomplete", "incomplete")],
)  # fmt: skip
def test_a_faulty_stream_is_an_error_of_its_kind(fault: str, kind: str) -> None:
    with start_server([Labelled()], faults=FaultPlan(1.0, kinds=(fault,))) as faulty:
        backend = OllamaBackend(faulty.url, timeout_s=0.5 if fault == "stall" else 20.0)
        reply = EarlyStop(backend, is_refusal=is_refusal).complete(ask(11))
        backend.close()
    assert reply.error is not None
    assert (reply.error.kind, reply.text) == (kind, "")


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


def test_a_missing_model_has_the_same_error_streamed_or_not(backend: ModelServer) -> None:
    request = ChatRequest.user("0", model="nowhere")
    errors = [backend.complete(request).error, backend.complete_until(request, lambda text: False).error]
    assert [error.kind for error in errors if error] == ["model_missing"] * 2


def test_a_reply_whose_log_probability_is_asked_for_is_read_whole(backend: ModelServer) -> None:
    early = EarlyStop(backend, is_refusal=is_refusal)
    assert early.complete(ask(0, logprobs=True)).text == LABELLED[0][0].strip()
    assert early.cut_replies == 0
