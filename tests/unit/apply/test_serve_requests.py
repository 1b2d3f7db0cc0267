"""Which requests to a virtual model are rewritten, and what a rewrite must keep."""

from __future__ import annotations

import json
from typing import Any

import pytest

from query_mutator.apply.proxy.app import with_virtual
from query_mutator.apply.proxy.chat import (
    ChatCall,
    as_stream,
    depends_on_earlier_turns,
    read_call,
    skip_reason,
    text_of,
)
from query_mutator.apply.proxy.upstream import UpstreamGone
from query_mutator.forms import Framed

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
    call = read_call(path, {"model": "llama3.2:3b+qm", "messages": messages, **fields})
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


def test_another_question_changes_nothing_else() -> None:
    call = chat("first", "reply", QUESTION, options={"num_ctx": 512}, keep_alive="5m")
    asked = call.asking(Framed.user("sort a list"), stream=False)
    assert asked["messages"][-1] == {"role": "user", "content": "sort a list"}
    assert asked["messages"][:-1] == call.body["messages"][:-1]
    assert {**asked, "messages": None} == {**call.body, "messages": None, "stream": False}


def test_a_prompt_of_generate_is_a_question_and_streams_unless_said_otherwise() -> None:
    call = read_call("/api/generate", {"model": "m+qm", "prompt": QUESTION})
    assert call is not None
    assert call.streams
    assert call.asking(Framed.user("x"))["prompt"] == "x"


def test_parts_of_text_are_a_question_and_other_parts_are_none() -> None:
    text = {"type": "text", "text": QUESTION}
    for content, expected in (([text], QUESTION), ([text, text], None), ([{"type": "image_url"}], None), (None, None)):
        body = {"model": "m+qm", "messages": [{"role": "user", "content": content}]}
        call = read_call("/v1/chat/completions", body)
        assert call is not None
        assert call.question == expected
        assert skip_reason(call) == (None if expected else "content")


@pytest.mark.parametrize("prompt", UI_TASKS)
def test_tasks_of_a_chat_page_pass_untouched(prompt: str) -> None:
    assert skip_reason(chat(prompt)) == "ui-task"


def test_a_task_in_the_metadata_passes_untouched() -> None:
    assert skip_reason(chat(QUESTION, metadata={"task": "title_generation"})) == "ui-task"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (chat(QUESTION), None),
        (chat("hello", "hi", QUESTION), None),
        (chat("hello", "hi", "and how do i sort it"), "context"),
        (chat("hello", "hi", "why?"), "context"),
        (chat(" \n"), "empty"),
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


def test_images_of_a_message_pass_untouched() -> None:
    body = {"model": "m+qm", "messages": [{"role": "user", "content": QUESTION, "images": ["aGk="]}]}
    call = read_call("/api/chat", body)
    assert call is not None
    assert skip_reason(call) == "images"


@pytest.mark.parametrize(
    ("text", "depends"),
    [
        ("how do i join two paths that have different separators", False),
        ("which function returns the length of a list", False),
        ("is it possible to sort a list of names", False),
        ("what about tuples and sets then", True),
        ("explain your answer in more detail", True),
        ("yes please do", True),
    ],
)
def test_a_question_that_points_at_earlier_turns_depends_on_them(text: str, depends: bool) -> None:
    assert depends_on_earlier_turns(text) is depends


def test_lists_have_each_model_twice_but_those_that_write_no_text() -> None:
    rows = [
        {"name": "a:1", "model": "a:1"},
        {"name": "nomic-embed-text:latest"},
        {"name": "b", "capabilities": ["embedding"]},
    ]
    listed = with_virtual("/api/tags", [{"models": rows}])["models"]
    assert [row["name"] for row in listed] == ["a:1", "a:1+qm", "nomic-embed-text:latest", "b"]
    assert listed[1]["model"] == "a:1+qm"
    models = with_virtual("/v1/models", [{"object": "list", "data": [{"id": "a"}]}])
    assert [row["id"] for row in models["data"]] == ["a", "a+qm"]


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


@pytest.mark.parametrize("reply", [{"message": "text"}, {"message": [1]}, {"choices": 5}, {"choices": [{"delta": 5}]}])
def test_a_reply_of_another_shape_has_no_text(reply: dict[str, Any]) -> None:
    with pytest.raises(UpstreamGone, match="not one of a chat"):
        text_of("ollama_chat" if "message" in reply else "openai_chat", reply)
    assert text_of("openai_chat", {"choices": [], "usage": {}}) == ""
    assert text_of("ollama_chat", {"message": None}) == ""
