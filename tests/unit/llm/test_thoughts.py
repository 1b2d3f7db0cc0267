"""A model's thought is never its answer, wherever the reply comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import ollama_utils
from query_mutator.confidence import Attempt
from query_mutator.files.replies import RepliesHead, read_replies, write_replies
from query_mutator.llm.client import ModelServer
from query_mutator.llm.early_stop import EarlyStop
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend, completion_of
from query_mutator.rewards import is_refusal
from query_mutator.testing import StubServer, start_server
from query_mutator.types import ChatRequest, Completion, said_in, without_thought

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


def test_recorded_replies_have_no_thought(tmp_path: Path) -> None:
    head = RepliesHead(model="m", model_sha256="", made_with="", command="", date="2026-01-01")
    path = tmp_path / "replies.jsonl.xz"
    write_replies(path, head, {"0" * 16: [Completion(text="TAGRome?/TAGParis.")], "1" * 16: [Completion(text="TAGhm")]})
    import lzma

    path.write_bytes(
        lzma.compress(lzma.decompress(path.read_bytes()).replace(b"/TAG", b"</think>").replace(b"TAG", b"<think>"))
    )
    _, replies = read_replies(path)
    [paris], [empty] = replies.values()
    assert (paris.text, paris.error) == ("Paris.", None)
    assert empty.error is not None
    assert (empty.text, empty.error.kind) == ("", "empty")


def test_logged_answers_are_read_without_their_thought() -> None:
    assert Attempt(text="<think>7</think>The answer is 4.").text == "The answer is 4."


# --- streams ---------------------------------------------------------------------------------------------------------

THOUGHTS = [
    (f"<think>{REFUSAL} So I refuse.{MORE}</think>It is Paris.{MORE}", False),
    (f"<think>It is Paris. Sure.{MORE}</think>\n\n{REFUSAL}{MORE}", True),
    (f"<think>{MORE}</think><think>{MORE}</think>{REFUSAL}{MORE}", True),
    (f"{REFUSAL}\n<think>It is Paris.{MORE}", True),
    (f"so, well, {REFUSAL[:-1]} </think>It is Paris.{MORE}", False),
    (f"<think>{REFUSAL}{MORE}", False),
]


class Thinker:
    name = "thinker"

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        return [THOUGHTS[int(prompt)][0] for prompt in prompts]


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with start_server([Thinker()], latency_ms=5) as running:
        yield running


@pytest.fixture(params=[OllamaBackend, OpenAIBackend])
def backend(request: pytest.FixtureRequest, server: StubServer) -> Iterator[ModelServer]:
    made = request.param(server.url, timeout_s=20.0)
    yield made
    made.close()


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


def test_a_growing_thought_is_told_from_its_end() -> None:
    assert said_in("So <think>Rome") == ("So ", True)
    assert said_in("So <think>Rome</think>") == ("So  ", False)


# --- scripts ---------------------------------------------------------------------------------------------------------


def test_scripts_get_answers_and_rewrites_without_thoughts() -> None:
    class Script:
        def __init__(self, text: str) -> None:
            self.text = text

        def complete(self, request: ChatRequest) -> Completion:
            return Completion(text=self.text, model=request.model)

        def close(self) -> None: ...

    settings: Any = {"model": "m", "return_errors": True}
    thoughtful = Script("<think>Sort what?</think>How do I sort a list?")
    assert ollama_utils.query_target_model("q", client=thoughtful, **settings) == ("How do I sort a list?", None)
    assert ollama_utils.mutate_query("sort list how", "keywords", client=thoughtful, **settings) == (
        "How do I sort a list?",
        None,
    )
    text, error = ollama_utils.query_target_model("q", client=Script("<think>Sort what?"), **settings)
    assert (text, error and error.kind) == (ollama_utils.DEFAULT_REFUSAL, "empty")
    text, error = ollama_utils.mutate_query("sort list how", "keywords", client=Script("Sort?</think>"), **settings)
    assert (text, error and error.kind) == ("sort list how", "empty")
