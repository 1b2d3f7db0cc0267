"""The benchmark of prompt optimizers, without them: plain prompts, what is asked and counted, the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plain_prompts
from benchmarks.plain_prompts import SEED, Asker, Spent, messages_of
from benchmarks.prompt_optimizers import grade
from benchmarks.prompt_rows import Played, Row, in_words, report
from query_mutator.cli.console import exit_code
from query_mutator.files.replies import RepliesHead, write_replies
from query_mutator.llm.recorded import Recording, reply_key
from query_mutator.types import ChatRequest, Completion, Message, Question

MODEL = "small"
RECORDED = messages_of(SEED, [], "What is the capital of Peru?")
QUESTION = Question(id="1", text="capital of peru pls", accept=("Lima",), tags=("family:capital",), about="Peru")


class Live:
    """A model that says how often it was asked, nothing to an empty question, and fails when it is told to."""

    def __init__(self) -> None:
        self.asked: list[ChatRequest] = []

    def complete(self, request: ChatRequest) -> Completion:
        self.asked.append(request)
        if request.messages[-1].content in ("empty", "server", "prompt_too_long"):
            return Completion.failed(request.messages[-1].content, "no reply")
        return Completion(text=f"reply {len(self.asked)}", model=MODEL, prompt_tokens=5, completion_tokens=2)

    def close(self) -> None: ...


@pytest.fixture
def live() -> Live:
    return Live()


@pytest.fixture
def asker(live: Live, tmp_path: Path) -> Asker:
    path = tmp_path / "own.jsonl.xz"
    request = ChatRequest(model=MODEL, messages=tuple(RECORDED), max_tokens=32)
    reply = Completion(text="Lima.", model=MODEL, prompt_tokens=20, completion_tokens=3)
    head = RepliesHead(model=MODEL, model_sha256="ab" * 32, made_with="hand", command="x", date="2026-11-25")
    write_replies(path, head, {reply_key(request): [reply]})
    return Asker(live, MODEL, Recording(path))


def texts(messages: list[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


def test_an_instruction_with_a_place_frames_examples_and_question() -> None:
    assert texts(messages_of("Q: {question}\nA:", [("1 + 1?", "2")], "2 + 2?")) == [
        ("user", "Q: 1 + 1?\nA:"), ("assistant", "2"), ("user", "Q: 2 + 2?\nA:"),
    ]  # fmt: skip


def test_any_other_instruction_stands_once_before_the_seed_sentence() -> None:
    first, _, last = texts(messages_of("Be brief.", [("1 + 1?", "2")], "2 + 2?"))
    assert first == ("user", 'Be brief.\nThe answer to the question "1 + 1?" is')
    assert last == ("user", 'The answer to the question "2 + 2?" is')


def test_candidates_have_a_place_and_the_seed_is_among_the_forms() -> None:
    assert SEED in plain_prompts.TEMPLATES
    assert all("{question}" in one for one in plain_prompts.TEMPLATES)
    assert len({*plain_prompts.BY_HAND}) == 12
    assert not {*plain_prompts.BY_HAND} & {*plain_prompts.TEMPLATES}


def test_a_recorded_reply_is_not_asked_but_counts(asker: Asker, live: Live) -> None:
    assert asker.ask(RECORDED, max_tokens=32, temperature=0).text == "Lima."
    assert not live.asked
    assert asker.spent == Spent(calls=1, tokens=23)


def test_a_request_counts_once_in_a_part(asker: Asker, live: Live) -> None:
    request = messages_of("{question}", [], "other")
    replies = {asker.ask(request, max_tokens=32, temperature=0).text for _ in range(3)}
    assert replies == {"reply 1"}
    assert asker.spent == Spent(calls=1, tokens=7)
    asker.begin()
    asker.ask(request, max_tokens=32, temperature=0)
    assert asker.spent.calls == 1
    assert len(live.asked) == 2  # the cache of the client answers it in a run


def test_random_replies_are_drawn_in_order_in_every_part(asker: Asker, live: Live) -> None:
    for _ in range(2):
        asker.begin()
        for _ in range(3):
            asker.ask(RECORDED, max_tokens=32, temperature=1)
        assert asker.spent.calls == 3
    assert [request.sample for request in live.asked] == [0, 1, 2, 0, 1, 2]
    assert [request.seed for request in live.asked] == [1, 2, 3, 1, 2, 3]


def test_an_empty_reply_is_an_answer_and_a_failed_call_is_none(asker: Asker) -> None:
    replies = {
        kind: asker.ask(messages_of("{question}", [], kind), max_tokens=32, temperature=0)
        for kind in ("empty", "server", "prompt_too_long")
    }
    assert [kind for kind, reply in replies.items() if plain_prompts.has_no_reply(reply)] == [
        "server",
        "prompt_too_long",
    ]
    assert (asker.spent.empty, asker.spent.failed, asker.spent.too_long) == (1, 1, 1)


def test_the_grader_is_that_of_the_product() -> None:
    assert grade(QUESTION, "It is Lima.") == 1
    assert grade(QUESTION, "Lima or Quito.") == 0
    assert grade(QUESTION, "") == 0


def row(name: str, right: list[float], *, calls: float, validation: float) -> Row:
    shown = Played(right=right, calls=calls, tokens=40.0, empty=1)
    kept = Played(right=[validation], calls=calls, tokens=40.0)
    return Row(name=name, setting="k 2", validation=kept, shown=shown, search=Spent(calls=1234), all_calls=2345)


def test_a_rival_is_compared_with_our_best_row_of_at_most_as_many_calls() -> None:
    questions = [Question(id=str(at), text="x", about=str(at)) for at in range(4)]
    rows = [
        row("ours: one call", [1, 1, 0, 0], calls=1.0, validation=0.3),
        row("ours: two calls", [1, 1, 1, 0], calls=2.0, validation=0.5),
        row("cheap", [1, 0, 0, 0], calls=1.0, validation=0.2),
        row("expensive", [1, 0, 0, 0], calls=2.0, validation=0.2),
    ]
    found = {one["name"]: one for one in report(rows, questions)}
    assert "lead" not in found["ours: one call"]
    assert (found["cheap"]["against"], found["cheap"]["lead"]) == ("ours: one call", -0.25)
    assert (found["expensive"]["against"], found["expensive"]["lead"]) == ("ours: two calls", -0.5)
    said = in_words([*found.values()], "the title")
    assert "the title" in said
    assert "25.0" in said
    assert "1,234" in said
    assert "2,345" in said
    assert "cheap: k 2" in said


@pytest.mark.parametrize("flags", [["--questions", "30", "--held-out"], ["--calls", "many"], ["--questions", "3"]])
def test_bad_flags_are_usage_errors(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import prompt_optimizers

    with pytest.raises(SystemExit) as stopped:
        exit_code(prompt_optimizers.main, flags, prog="prompt_optimizers")
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err
