"""Which requests to a virtual model are rewritten, lines of streams and batches, slots, and what shadow pairs show."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from query_mutator.apply.batch_files import parse_line
from query_mutator.apply.proxy.app import with_virtual
from query_mutator.apply.proxy.chat import (
    MAX_PARSED_BYTES,
    MAX_PARSED_VALUES,
    ChatCall,
    as_stream,
    depends_on_earlier_turns,
    is_small,
    read_call,
    read_lines,
    renamed,
    skip_reason,
    text_of,
)
from query_mutator.apply.proxy.traffic import Queue
from query_mutator.apply.proxy.upstream import UpstreamGone
from query_mutator.apply.rewriter import Rewrite, Step
from query_mutator.errors import UsageError
from query_mutator.files import encode
from query_mutator.forms import Framed
from query_mutator.runs.shadow import HEADER, read_shadow, shadow_result

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
REFUSAL = "I'm sorry, but I can't help with that."


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


def test_a_request_of_many_bytes_or_values_is_not_parsed() -> None:
    assert is_small(b"{}" * 10)
    assert is_small(b'"' + b"x" * (MAX_PARSED_BYTES - 2) + b'"')
    assert not is_small(b"x" * (MAX_PARSED_BYTES + 1))
    assert not is_small(b"[]," * (MAX_PARSED_VALUES // 2 + 1))


def test_a_line_gets_the_clients_name_and_a_long_one_keeps_its_bytes() -> None:
    assert renamed(b'data: {"model":"m","n":1}\n', "m+qm") == b'data: {"model":"m+qm","n":1}\n'
    line = b'data: {"model":"m","embeddings":[' + b"[1.50,2e3]," * 20_000 + b"[0]]}\n"
    assert renamed(line, "m+qm") == line


async def lines_of(*chunks: bytes) -> list[list[bytes]]:
    async def arriving() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return [lines async for lines in read_lines(arriving())]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=6) | st.sampled_from([b"\n", b"a\nb", b"\n\n"]), max_size=30))
def test_lines_are_the_same_however_they_arrive(chunks: list[bytes]) -> None:
    *lines, last = [line for together in asyncio.run(lines_of(*chunks, b"end")) for line in together]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    assert b"".join([*lines, last]) == b"".join(chunks) + b"end"


def test_a_line_of_20_mb_is_read_in_small_pieces() -> None:
    lines = asyncio.run(lines_of(*[b"x" * 100] * 200_000, b"\n"))  # minutes, if each copied the line so far
    assert [len(line) for together in lines for line in together] == [20_000_001]


def test_a_slot_is_held_once_while_names_come_and_go() -> None:
    async def hold(queue: Queue, name: str, rng: random.Random, held: list[str]) -> None:
        async with queue.place(name):
            held.append(name)
            assert held.count(name) <= 2
            try:
                await asyncio.sleep(rng.random() / 1000)
            finally:
                held.remove(name)

    async def run() -> Queue:
        queue, rng, held = Queue(2), random.Random(0), list[str]()
        tasks = [asyncio.create_task(hold(queue, f"m{number % 7}", rng, held)) for number in range(300)]
        for task in rng.sample(tasks, 100):
            await asyncio.sleep(rng.random() / 1000)
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [each for each in found if isinstance(each, AssertionError)]
        return queue

    queue = asyncio.run(run())
    assert queue.counts() == {}
    assert not queue._limits


def test_counts_are_by_model() -> None:
    queue = Queue()
    queue.in_flight.update({"b:1": 1, "a": 2})
    queue.waiting.update({"c": 1})
    assert queue.counts() == {
        "a": {"in_flight": 2, "waiting": 0},
        "b:1": {"in_flight": 1, "waiting": 0},
        "c": {"in_flight": 0, "waiting": 1},
    }


def way(answer: str = "Use sorted.", **more: Any) -> dict[str, Any]:
    refused = answer == REFUSAL
    fields = {"fit": 0.5, "chars": len(answer), "tokens": 3, "calls": 1, "seconds": 0.5, "not_sure": False}
    return {"answer": answer, "refused": refused, **fields, **more}


def pair(number: int, original: dict[str, Any], rewritten: dict[str, Any], **more: Any) -> dict[str, Any]:
    question = f"question {number}"
    about = {"time": f"2026-01-01T00:00:{number % 60:02}", "model": "m+qm", "mode": "gate", "decision": "rewritten"}
    row = {**about, "sent": "rewritten", "operators": ["neutral"], "question": question, "rewrite": f"{question}?"}
    return {**row, "original": original, "rewritten": rewritten, "judge": None, **more}


def rows(*, refused: int, both: int, neither: int) -> list[dict[str, Any]]:
    kinds = [(REFUSAL, "fine")] * refused + [(REFUSAL, REFUSAL)] * both + [("fine", "fine")] * neither
    return [pair(number, way(one), way(other)) for number, (one, other) in enumerate(kinds)]


def row_of(result: dict[str, Any], metric: str, comparison: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in result["comparisons"][comparison]["rows"] if row["metric"] == metric)
    return found


def test_fewer_refusals_are_counted_and_tested() -> None:
    result = shadow_result(rows(refused=20, both=10, neither=30))
    found = row_of(result, "refused")
    assert (found["theirs"], found["ours"], found["difference"]) == (0.5, pytest.approx(1 / 6), pytest.approx(-1 / 3))
    assert (found["more"], found["less"], found["verdict"]) == (0, 20, "less")
    assert found["p"] == pytest.approx(2 * 0.5**20)
    low, high = found["ci"]
    assert low < -1 / 3 < high < 0
    assert result["sentence"].startswith(
        "With rewriting, on 60 questions of real traffic: refused less often (-33.3 points"
    )
    assert '"not sure" inconclusive (+0.0 points' in result["sentence"]


def test_an_interval_that_includes_0_is_inconclusive() -> None:
    result = shadow_result(rows(refused=2, both=1, neither=30))
    assert row_of(result, "refused")["verdict"] == "inconclusive"
    assert "refused inconclusive (-6.1 points" in result["sentence"]


def test_a_question_asked_again_counts_once() -> None:
    said = ("the same", "The  SAME ")
    again = [{**row, "question": said[n % 2]} for n, row in enumerate(rows(refused=30, both=0, neither=0))]
    result = shadow_result([*again, *rows(refused=0, both=0, neither=3)])
    assert result["questions"] == 4
    assert row_of(result, "refused")["verdict"] == "inconclusive"
    mean = row_of(result, "chars")
    assert mean["less"] == 1
    assert mean["difference"] == pytest.approx((4 - len(REFUSAL)) / 4)


def test_what_was_sent_is_compared_where_it_is_another_way() -> None:
    kept = [pair(n, way("fine"), way("finer"), sent="original") for n in range(100, 110)]
    result = shadow_result([*rows(refused=10, both=0, neither=0), *kept])
    assert [found["ours"] for found in result["comparisons"]] == ["rewritten", "sent"]
    assert row_of(result, "chars")["difference"] == pytest.approx((10 * (4 - len(REFUSAL)) + 10) / 20)
    assert row_of(result, "chars", 1)["difference"] == pytest.approx(10 * (4 - len(REFUSAL)) / 20)
    assert len(shadow_result(rows(refused=1, both=0, neither=0))["comparisons"]) == 1


def test_the_judge_has_an_exact_sign_test() -> None:
    choices = ["rewritten"] * 9 + ["original"] + ["tie"] * 5
    judged = [pair(n, way("a"), way("b"), judge={"model": "j", "choice": one}) for n, one in enumerate(choices)]
    found = shadow_result(judged)["comparisons"][0]["judge"]
    assert (found["wins"], found["losses"], found["ties"], found["models"]) == (9, 1, 5, ["j"])
    assert found["p"] == pytest.approx(2 * (1 + 10) / 2**10)
    assert found["verdict"] == "more"
    even = [
        {**row, "judge": {"model": "j", "choice": ("original", "rewritten")[n % 2]}} for n, row in enumerate(judged)
    ]
    assert shadow_result(even)["comparisons"][0]["judge"]["verdict"] == "inconclusive"


def test_figures_that_a_server_does_not_report_are_left_out() -> None:
    result = shadow_result([pair(0, way(tokens=None), way()), pair(1, way(tokens=2), way())])
    assert row_of(result, "tokens")["pairs"] == 1
    result = shadow_result([pair(0, way(tokens=None), way())])
    assert "tokens" not in [row["metric"] for row in result["comparisons"][0]["rows"]]


def test_no_pair_is_no_verdict() -> None:
    assert shadow_result([])["sentence"] == "No question was answered both ways yet."


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    good = pair(0, way(), way())
    for name, lines in (
        ("other", [good]),
        ("empty", []),
        ("lacks", [HEADER, {**good, "original": {}}]),
        ("newer", [{**HEADER, "version": 2}, good]),
    ):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(b"".join(encode(line) + b"\n" for line in lines))
        with pytest.raises(UsageError, match=name):
            read_shadow(path)


def test_one_stop_is_sent_as_a_list() -> None:
    line = b'{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "hi"}], "stop": "END", "top_p": 0.5}}'
    assert parse_line(1, line).options == {"stop": ["END"], "top_p": 0.5}


def test_changes_are_the_first_steps_with_a_new_wording() -> None:
    texts = {"spelling": "b", "ask": "b", "undo": "a", "filler": "c", "neutral": "b"}
    steps = tuple(Step(operator=name, text=text, answer=None) for name, text in texts.items())
    found = Rewrite(question="a", text="b", answer="yes", steps=steps, calls=4, seconds=0.0)
    assert [(step.operator, step.text) for step in found.changes] == [("spelling", "b"), ("filler", "c")]
