"""Choosing a form is an action: it costs no call, stays while the wording changes, and undo takes it back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pytest

from query_mutator import forms
from query_mutator.confidence import ConfidenceModel
from query_mutator.data import general, general_bank, target_key
from query_mutator.encoder import Encoder
from query_mutator.env.episode import Episode
from query_mutator.env.task import NUM_EXAMPLES, Task, bank_of, rewrite_settings
from query_mutator.forms import Form
from query_mutator.llm.client import Client
from query_mutator.types import ChatRequest, Completion, Message, Question, StepRecord
from rl_query_mutator_env import QueryMutationEnv
from tests.fake_client import FakeClient
from tests.unit.confidence.arithmetic_world import graded_sums

MakeTask = Callable[..., Task]
SPELLING, NEUTRAL, FILLER, FRAME, STEPS, ASK, UNDO, SUBMIT = range(8)
CHOSEN = "question_answer,steps"
EXPERT = Form.of("expert", "", "Q: {question}", system="Answer as an expert.")


@pytest.fixture
def task(tiny_task: MakeTask) -> Task:
    return tiny_task(forms=forms.select(CHOSEN), ask="form", max_episode_steps=6)


def test_forms_and_rewrites_keep_the_context_of_a_question_and_the_system_prompt(task: Task) -> None:
    own, turn = Message(role="system", content="You are a clerk."), Message(role="user", content="We open at 9.")
    questions = [Question(id="a", text="When?", context=(own, turn)), Question(id="b", text="Why?", context=(turn,))]
    task = replace(task, calls=replace(task.calls, system="Be brief.\n"), forms=(*task.forms, EXPERT))
    asked = [task.on(questions).target(row, "now?", form) for row in (0, 1) for form in ("as_is", "expert")]
    prompts = [(one.messages[0].content, [message.content for message in one.messages[1:]]) for one in asked]
    assert prompts == [
        ("You are a clerk.", ["We open at 9.", "now?"]),
        ("You are a clerk.\n\nAnswer as an expert.", ["We open at 9.", "Q: now?"]),
        ("Be brief.", ["We open at 9.", "now?"]),
        ("Be brief.\n\nAnswer as an expert.", ["We open at 9.", "Q: now?"]),
    ]
    assert {message.role for one in asked for message in one.messages[:1]} == {"system"}


def test_forms_are_actions_between_operators_and_controls(task: Task) -> None:
    assert task.actions == ("spelling", "neutral", "filler", "question_answer", "steps", "ask", "undo", "submit")
    assert rewrite_settings(task.actions) == {"operators": "spelling,neutral,filler", "forms": CHOSEN, "samples": 1}
    assert rewrite_settings(("steps", "ask", "undo", "submit")) == {"operators": "none", "forms": "steps", "samples": 1}


def test_a_form_is_kept_while_the_wording_changes_and_undone_with_it(task: Task, tiny_client: Client) -> None:
    client, records = FakeClient(tiny_client.complete), list[StepRecord]()
    env = QueryMutationEnv(task, client=client, on_record=records.append)
    obs, _ = env.reset(seed=0, options={"question": 1})
    used = task.observer.slices["used"]
    obs, _, _, _, info = env.step(FRAME)
    assert (info["calls"], obs[used].tolist()) == (1, [0, 0, 0, 1, 0])
    assert env.action_masks()[[FRAME, STEPS]].tolist() == [False, True]
    env.step(NEUTRAL)
    env.step(ASK)
    assert client.prompts("target") == [f"Question: how do i {word} the process\nAnswer:" for word in ("kill", "stop")]
    assert (env.episode.text, env.episode.form) == ("how do i stop the process", "question_answer")
    env.step(STEPS)
    obs, *_ = env.step(UNDO)
    assert (env.episode.text, env.episode.form) == (env.episode.original, "as_is")
    assert obs[used].tolist() == [0, 1, 0, 0, 0]
    assert [record.form for record in records] == ["question_answer"] * 3 + ["steps", "as_is"]


def test_every_step_asks_in_the_form_once(tiny_task: MakeTask, tiny_client: Client) -> None:
    client = FakeClient(tiny_client.complete)
    env = QueryMutationEnv(tiny_task(forms=forms.select(CHOSEN), max_episode_steps=5), client=client)
    env.reset(seed=0, options={"question": 0})
    *_, info = env.step(FRAME)
    assert client.prompts("target") == ["plz sort my list", "Question: plz sort my list\nAnswer:"]
    assert (info["calls"], info["asks"]) == (2, 2)
    assert not env.action_masks()[FRAME]
    again = Episode.from_state(asdict(env.episode))
    assert (again.asked, list(again.known), again.best.asked) == (
        env.episode.asked,
        list(env.episode.known),
        env.episode.best.asked,
    )


def test_what_a_form_reads_is_scored(tiny_task: MakeTask, tiny_client: Client) -> None:
    shelf = Form(
        name="shelf", summary="Reads nothing.", function=lambda text, context: text, read=lambda reply: "no idea"
    )
    task = tiny_task(forms=[shelf])
    env = QueryMutationEnv(task, client=tiny_client)
    _, info = env.reset(seed=0, options={"question": 0})
    assert info["success"] == 1
    env.step(task.actions.index("shelf"))
    current = env.episode.current
    assert current.answer == env.episode.first.answer
    assert current.reward.success == 0


def test_examples_are_the_nearest_of_the_bank_and_never_of_the_same_target(hash_encoder: Encoder) -> None:
    questions, bank = general()[:200], general_bank()
    shown = bank_of([*bank, *questions], hash_encoder)
    vectors = hash_encoder.encode([question.text for question in questions])
    chosen = shown.nearest(questions, vectors)
    of_text = {question.text: question for question in [*bank, *questions]}
    for question, examples in zip(questions, chosen, strict=True):
        assert len(examples) == NUM_EXAMPLES
        others = [of_text[example.question] for example in examples]
        assert target_key(question) not in {target_key(other) for other in others}
        assert question.text not in {other.text for other in others}
        assert all(example.answer == other.accept[0] for example, other in zip(examples, others, strict=True))
    first = np.argsort(-(vectors[0] @ shown.vectors.T), kind="stable")
    nearest = next(shown.questions[at] for at in first if target_key(shown.questions[at]) != target_key(questions[0]))
    assert chosen[0][-1].question == nearest.text


def test_choosing_a_form_asks_where_forms_ask(tiny_task: MakeTask, tiny_client: Client) -> None:
    client = FakeClient(tiny_client.complete)
    task = tiny_task(forms=forms.select(CHOSEN), ask="form", max_asks=3, max_episode_steps=6)
    env = QueryMutationEnv(task, client=client)
    env.reset(seed=0, options={"question": 0})
    *_, info = env.step(NEUTRAL)
    assert (info["asks"], client.prompts("target")) == (0, [])
    *_, info = env.step(FRAME)
    assert (info["asks"], info["step_calls"], client.prompts("target")) == (1, 1, ["Question: sort my list\nAnswer:"])
    assert env.action_masks()[[FRAME, STEPS, ASK]].tolist() == [False, True, False]  # another form asks again
    env.step(SPELLING)
    assert env.action_masks()[STEPS]  # also before an answer to the new wording
    assert task.max_episode_calls == 7


@pytest.mark.parametrize(("answers", "submitted"), [("abb", 1), ("aba", 0), ("abc", 0)])
def test_a_vote_submits_the_most_frequent_answer(
    answers: str, submitted: int, tiny_task: MakeTask, tiny_client: Client
) -> None:
    replies = iter([{"a": "Paris", "b": "Rome", "c": "Oslo"}[answer] for answer in answers])
    task = tiny_task(forms=forms.select(CHOSEN), ask="form", answer="vote", max_episode_steps=6)
    env = QueryMutationEnv(task, client=FakeClient(lambda _: Completion(text=next(replies), model="m")))
    env.reset(seed=0, options={"question": 0})
    for action in (ASK, FRAME, STEPS):
        env.step(action)
    known = list(env.episode.known.values())
    assert env.engine is not None
    assert known.index(env.engine.submitted) == submitted  # type: ignore[arg-type]
    assert env.engine.why() == "the most frequent of 3 answers"


def add(request: ChatRequest) -> Completion:
    """Answer a sum: wrong arithmetic, but right after "Question:"."""
    prompt = request.messages[-1].content
    one, two = [int(word) for word in prompt.split() if word.isdigit()][::2]
    told = one + two + (not prompt.startswith("Question:"))
    return Completion(text=f"She has {one} + {two} = {told} pens. So Ann has {told} pens.")


def test_the_reward_is_what_an_answer_adds_to_p_right(tiny_task: MakeTask, tiny_client: Client) -> None:
    model = ConfidenceModel.fit(graded_sums(300))
    questions = [Question(id=row.question, text=row.question, accept=(row.gold,)) for row in graded_sums(4, seed=1)]
    rules = {"ask": "form", "answer": "learned", "max_asks": 4, "max_episode_steps": 6, "call_price": (0.05,)}
    task = replace(tiny_task(questions, forms=forms.select(CHOSEN), **rules), confidence=model)
    env = QueryMutationEnv(task, client=FakeClient(add))
    env.reset(seed=0, options={"question": 1})
    p_right, rewards = [0.0], []
    for action in (ASK, FRAME, SUBMIT):
        _, reward, *_ = env.step(action)
        p_right.append(max(env.episode.p_right))
        rewards.append(float(reward))
    assert p_right[1] < 0.3 < 0.6 < p_right[2]
    assert rewards == pytest.approx((np.diff(p_right) - [0.05, 0.05, 0.0]).tolist())
