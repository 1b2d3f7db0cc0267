"""Which requests to a virtual model are rewritten, and lines of streams and batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from query_mutator.apply.batch_files import parse_line
from query_mutator.apply.proxy.chat import (
    MAX_PARSED_BYTES,
    MAX_PARSED_VALUES,
    ChatCall,
    as_stream,
    is_small,
    read_call,
    read_lines,
    renamed,
    skip_reason,
)
from query_mutator.apply.rewriter import Rewrite, Step

QUESTION = "how do i sort a list of names in place"
#: The beginnings of the prompts that Open WebUI sends to the chat's model for itself.
UI_TASKS = (
    "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n### Guidelines:\n",
    "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history, along with 1-3 more specific",
    "### Task:\nSuggest 3-5 relevant follow-up questions or prompts that the user might naturally ask next in this",
    "### Task:\nAnalyze the chat history to determine the necessity of generating search queries, in the given",
    "### Task:\nYou are an autocompletion system. Continue the text in `<text>` based on the **completion type**",
    "### Task:\nRespond to the user query using the provided context, incorporating inline citations in",
    "Your task is to reflect the speaker's likely facial expression through a fitting emoji.",
    "You have been provided with a set of responses from various models to the latest user query:",
    "Create a concise, 3-5 word title with an emoji as a title for the chat history",
    "Based on the chat history, determine whether a search is necessary.\nChat History:\nUSER: hello",
)


def chat(*turns: str, path: str = "/api/chat", **fields: Any) -> ChatCall:
    """Return a chat request; the last turn is the user's, the ones before alternate."""
    roles = ["user" if (len(turns) - place) % 2 else "assistant" for place in range(len(turns))]
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    call = read_call(path, {"model": "llama3.2:3b+qm", "messages": messages} | fields)
    assert call is not None
    return call


def test_a_request_to_an_upstream_model_is_not_read() -> None:
    assert read_call("/api/chat", {"model": "llama3.2:3b", "messages": []}) is None
    assert read_call("/api/embed", {"model": "llama3.2:3b+qm", "input": "a"}) is None
    assert read_call("/api/chat", ["llama3.2:3b+qm"]) is None


@pytest.mark.parametrize(
    ("name", "upstream"),
    [("llama3.2:3b+qm", "llama3.2:3b"), ("llama3.2+qm:latest", "llama3.2:latest"), ("org/model+qm", "org/model")],
)
def test_the_suffix_is_stripped_for_the_upstream(name: str, upstream: str) -> None:
    call = read_call("/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": QUESTION}]})
    assert call is not None
    assert (call.upstream_model, call.model, call.question, call.streams) == (upstream, name, QUESTION, False)


def test_parts_of_text_are_a_question_and_other_parts_are_none() -> None:
    text = {"type": "text", "text": QUESTION}
    for content, expected in (([text], QUESTION), ([text, text], None), ([{"type": "image_url"}], None), (None, None)):
        call = chat(path="/v1/chat/completions", messages=[{"role": "user", "content": content}])
        assert call.question == expected
        assert skip_reason(call) == (None if expected else "content")


@pytest.mark.parametrize("prompt", UI_TASKS)
def test_tasks_of_a_chat_page_pass_untouched(prompt: str) -> None:
    assert skip_reason(chat(prompt)) == "ui-task"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (chat(QUESTION), None),
        (chat("hello", "hi", "and how do i sort it"), "context"),
        (chat(" \n"), "empty"),
        (chat(QUESTION, metadata={"task": "title_generation"}), "ui-task"),
        (chat(QUESTION, messages=[{"role": "user", "content": QUESTION, "images": ["aGk="]}]), "images"),
        (chat(QUESTION, tools=[{"type": "function"}]), "tools"),
        (chat(QUESTION, tools=[]), None),
        (chat(QUESTION, format="json"), "format"),
        (chat(QUESTION, path="/v1/chat/completions", n=2), "n"),
        (chat(QUESTION, path="/v1/chat/completions", n=1), None),
        (chat(), "empty"),
        (chat(QUESTION, path="/v1/chat/completions", response_format={"type": "json_object"}), "response_format"),
        (chat(QUESTION, path="/v1/chat/completions", grammar="root ::= [a-z]+"), "grammar"),
        (chat(QUESTION, path="/v1/chat/completions", guided_json={"type": "object"}), "guided_json"),
        (chat(QUESTION, path="/v1/chat/completions", structured_outputs={"regex": "a"}), "structured_outputs"),
        (chat(QUESTION, path="/v1/chat/completions", json_schema={"type": "object"}), "json_schema"),
        (chat(QUESTION, path="/v1/chat/completions", continue_final_message=True), "continue_final_message"),
        (chat("why does this fail\n```\nx = \n```"), "code"),
        (chat("word " * 400), "length"),
        (read_call("/api/generate", {"model": "m+qm", "prompt": QUESTION, "images": ["aGk="]}), "images"),
        (read_call("/api/generate", {"model": "m+qm"}), "empty"),
    ],
)
def test_only_one_plain_question_that_stands_alone_is_rewritten(call: ChatCall, reason: str | None) -> None:
    assert skip_reason(call) == reason


def test_a_whole_reply_is_streamed_with_its_reasoning() -> None:
    message = {"role": "assistant", "content": "Use `os.kill`.", "reasoning_content": "They mean a process."}
    call = chat(QUESTION, path="/v1/chat/completions", stream=True)
    first, *_ = as_stream(call, {"choices": [{"message": message, "finish_reason": "stop"}]})
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"] == message
    generate = read_call("/api/generate", {"model": "m+qm", "prompt": QUESTION})
    assert generate is not None
    lines = as_stream(generate, {"response": "Use `os.kill`.", "thinking": "They mean a process.", "done": True})
    first, last = map(json.loads, lines)
    assert (first["thinking"], first["response"]) == ("They mean a process.", "Use `os.kill`.")
    assert "thinking" not in last


def test_a_request_of_many_bytes_or_values_is_not_parsed_and_a_line_gets_the_clients_name() -> None:
    assert is_small(b"{}" * 10)
    assert is_small(b'"' + b"x" * (MAX_PARSED_BYTES - 2) + b'"')
    assert not is_small(b"x" * (MAX_PARSED_BYTES + 1))
    assert not is_small(b"[]," * (MAX_PARSED_VALUES // 2 + 1))
    assert renamed(b'data: {"model":"m","n":1}\n', "m+qm") == b'data: {"model":"m+qm","n":1}\n'
    line = b'data: {"model":"m","embeddings":[' + b"[1.50,2e3]," * 20_000 + b"[0]]}\n"
    assert renamed(line, "m+qm") == line
    line = b'{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "hi"}], "stop": "END", "top_p": 0.5}}'
    assert parse_line(1, line).options == {"stop": ["END"], "top_p": 0.5}


async def lines_of(*chunks: bytes) -> list[list[bytes]]:
    async def arriving() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return [lines async for lines in read_lines(arriving())]


@given(st.lists(st.binary(max_size=6) | st.sampled_from([b"\n", b"a\nb", b"\n\n"]), max_size=30))
def test_lines_are_the_same_however_they_arrive(chunks: list[bytes]) -> None:
    *lines, last = [line for together in asyncio.run(lines_of(*chunks, b"end")) for line in together]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    assert b"".join([*lines, last]) == b"".join(chunks) + b"end"


def test_a_line_of_20_mb_is_read_in_small_pieces() -> None:
    lines = asyncio.run(lines_of(*[b"x" * 100] * 200_000, b"\n"))  # minutes, if each copied the line so far
    assert [len(line) for together in lines for line in together] == [20_000_001]


def test_changes_are_the_first_steps_with_a_new_wording() -> None:
    texts = {"spelling": "b", "ask": "b", "undo": "a", "filler": "c", "neutral": "b"}
    steps = tuple(Step(operator=name, text=text, answer=None) for name, text in texts.items())
    found = Rewrite(question="a", text="b", answer="yes", steps=steps, calls=4, seconds=0.0)
    assert [(step.operator, step.text) for step in found.changes] == [("spelling", "b"), ("filler", "c")]
