"""The environment: rewards by hand, gold unseen, what is observed, gymnasium's contracts, schedulers, failed steps."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, InvalidAction, ResetNeeded

from query_mutator.encoder import Encoder
from query_mutator.env.episode import Asked, Attempt, Episode, EpisodeRules, Observer, Projection
from query_mutator.env.scheduling import Call, Encode, Flow, PooledScheduler, run_flow
from query_mutator.env.task import Task
from query_mutator.errors import BackendError
from query_mutator.llm.client import Client, RetryPolicy
from query_mutator.testing import StubServer
from query_mutator.types import AS_IS, CALL_PRICE, ChatRequest, Completion, FloatArray, Reward, StepRecord
from rl_query_mutator_env import MAX_FAILED_STEPS, RESET_QUESTIONS, BatchedQueryMutationEnv, OnFailure, QueryMutationEnv
from tests.conftest import QUESTIONS
from tests.fake_client import FakeClient

MakeTask = Callable[..., Task]
SPELLING, NEUTRAL, FILLER, UNDO, SUBMIT = range(5)
SORT = {"question": 0}  # "plz sort my list": a word for `spelling`
KILL = {"question": 1}  # "how do i kill the process": refused as the original, right once softened


@pytest.fixture
def env(tiny_task: MakeTask, tiny_client: Client) -> QueryMutationEnv:
    return QueryMutationEnv(tiny_task(), client=tiny_client)


NO_RETRY = RetryPolicy(max_retries=0)


def failing(client: Client, *models: str, kind: str = "server") -> FakeClient:
    """Return a client that fails the calls to some models for good."""
    return FakeClient(client.complete, fails=lambda request: request.model in models, kind=kind)


def test_reward_is_the_change_of_score_minus_the_cost_of_a_step(env: QueryMutationEnv) -> None:
    _, info = env.reset(seed=0, options=KILL)
    before = info["baseline_score"]
    _, reward, terminated, truncated, info = env.step(NEUTRAL)
    assert not terminated
    assert not truncated
    assert info["score"] > before
    assert reward == pytest.approx(info["score"] - before - 2 * CALL_PRICE)
    _, reward, terminated, _, info = env.step(SUBMIT)
    assert (reward, terminated) == (0.0, True)
    assert info["success"] == 1.0
    assert info["baseline_success"] == 0.0
    assert info["calls"] == 3


def test_undo_goes_back_without_a_call_and_best_keeps_the_better_answer(env: QueryMutationEnv) -> None:
    env.reset(seed=0, options=KILL)
    env.step(NEUTRAL)
    assert env.episode is not None
    calls = env.episode.calls
    assert env.step(UNDO)[1] == 0.0
    assert env.episode.calls == calls
    assert env.episode.current.text == QUESTIONS[1].text
    env.step(FILLER)  # the softener gives a text that was asked before: one mutator call, no target call
    assert env.episode.calls == calls + 1
    assert env.step(SUBMIT)[4]["success"] == 1.0


def test_actions_that_lead_nowhere_are_closed(env: QueryMutationEnv) -> None:
    columns = env.task.observer.slices["closed"]
    obs, _ = env.reset(seed=0, options=SORT)
    assert obs[columns].tolist() == [0, 0, 0, 1, 0]  # nothing to undo yet
    obs = env.step(SPELLING)[0]  # another text
    assert obs[columns].tolist() == [1, 0, 0, 0, 0]  # whose words are all known
    obs = env.step(NEUTRAL)[0]  # changes nothing
    assert obs[columns].tolist() == [1, 1, 0, 0, 0]
    obs = env.step(UNDO)[0]
    assert obs[columns].tolist() == [1, 0, 0, 1, 0]  # what spelling makes of it is known


def test_observations_hold_nothing_of_the_gold(tiny_task: MakeTask, tiny_client: Client) -> None:
    liars = [replace(question, accept=("zlib.crc32",), reference="Something else entirely.") for question in QUESTIONS]
    runs = []
    for questions in (QUESTIONS, liars):
        env = QueryMutationEnv(tiny_task(questions), client=tiny_client)
        obs = [env.reset(seed=3)[0]]
        obs += [env.step(action)[0] for action in (NEUTRAL, UNDO, SPELLING, FILLER, SUBMIT)]
        runs.append(np.stack(obs))
    assert np.array_equal(runs[0], runs[1])


@pytest.mark.parametrize("kind", ["server", "prompt_too_long"])
def test_reset_takes_the_next_question_and_gives_up_at_last(
    tiny_task: MakeTask, tiny_client: Client, kind: str
) -> None:
    client = failing(tiny_client, "librarian", kind=kind)
    env = QueryMutationEnv(tiny_task(), client=client, retry_policy=NO_RETRY)
    with pytest.raises(BackendError, match="broken for good"):
        env.reset(seed=0)
    assert len(client.requests) == RESET_QUESTIONS


# --- the batched environment ---------------------------------------------------------------------------------------


@pytest.fixture
def batched(tiny_task: MakeTask, tiny_client: Client) -> Iterator[Callable[..., BatchedQueryMutationEnv]]:
    made: list[BatchedQueryMutationEnv] = []

    def make(batch_size: int, **settings: Any) -> BatchedQueryMutationEnv:
        task = tiny_task()
        envs = [QueryMutationEnv(task, client=tiny_client, env_id=i) for i in range(5)]
        made.append(BatchedQueryMutationEnv(envs, batch_size, **settings))
        return made[-1]

    yield make
    for env in made:
        env.close()


def test_without_autoreset_an_ended_environment_waits_for_its_reset(
    batched: Callable[..., BatchedQueryMutationEnv],
) -> None:
    env = batched(4, autoreset_mode="DISABLED")
    env.reset(seed=1)
    _, _, terminations, _, infos = env.step(np.array([SUBMIT, UNDO, UNDO, UNDO, SUBMIT]))
    assert terminations.tolist() == [True, False, False, False, True]
    assert infos["episode_length"].tolist() == [1] * 5
    with pytest.raises(ResetNeeded, match="the episode has ended"):
        env.step(np.full(5, UNDO))
    assert [one.total_steps for one in env.envs] == [1] * 5  # none of the five took a step
    env.reset(options={"reset_mask": terminations})
    assert env.step(np.full(5, UNDO))[4]["episode_length"].tolist() == [1, 2, 2, 2, 1]


@pytest.mark.parametrize("action", [5, -1, 1.0, "submit", None])
def test_action_that_does_not_exist_is_an_error_and_takes_no_step(
    action: Any, env: QueryMutationEnv, batched: Callable[..., BatchedQueryMutationEnv]
) -> None:
    env.reset(seed=0)
    with pytest.raises(InvalidAction, match=re.escape(f"action {action} must be a whole number from 0 to 4 (submit)")):
        env.step(action)
    many = batched(4)
    many.reset(seed=0)
    with pytest.raises(InvalidAction, match="from 0 to 4"):
        many.step([UNDO, UNDO, action, UNDO, UNDO])  # type: ignore[arg-type]
    assert [one.total_steps for one in [env, *many.envs]] == [0] * 6
    many.step(np.full(5, UNDO))


def test_step_outside_an_episode_is_an_error(env: QueryMutationEnv) -> None:
    with pytest.raises(ResetNeeded, match=r"call reset\(\) before step"):
        env.step(UNDO)
    for index in (-1, len(QUESTIONS)):
        with pytest.raises(ValueError, match="must be from 0 to 4"):
            env.reset(options={"question": index})
    env.reset(seed=0)
    env.step(SUBMIT)
    with pytest.raises(ResetNeeded, match="the episode has ended"):
        env.step(UNDO)
    copy = QueryMutationEnv(env.task, client=env.client)
    copy.load_state_dict(env.state_dict())
    with pytest.raises(ResetNeeded, match="the episode has ended"):
        copy.step(UNDO)


def test_a_restored_environment_has_the_counts_of_steps_episodes_and_failures(
    tiny_task: MakeTask, tiny_client: Client
) -> None:
    client = failing(tiny_client, "softener", kind="prompt_too_long")
    env, copy = (QueryMutationEnv(tiny_task(), client=client, retry_policy=NO_RETRY) for _ in range(2))
    env.reset(seed=0, options=KILL)
    for action in (NEUTRAL, NEUTRAL, SUBMIT):
        env.step(action)
    copy.load_state_dict(env.state_dict())
    for one in (env, copy):
        assert (one.total_steps, one.total_episodes, one.invalid_steps) == (3, 1, 2)
        assert one.prompts_too_long == {"q1": 2}


def test_environments_of_equal_settings_share_what_runs_until_the_last_is_closed(
    tiny_server: StubServer, tmp_path: Path
) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(f'{{"question": "What is {n} and {n}?", "answer": "{2 * n}"}}\n' for n in range(30)))
    settings = {"ollama_url": tiny_server.url, "target_model": "librarian", "mutator_model": "softener"}
    settings |= {"encoder": "hash", "dataset": str(path)}
    for _ in range(2):
        one, other = (gymnasium.make("rl_query_mutator_env:QueryMutation-v0", **settings) for _ in range(2))
        client = one.get_wrapper_attr("client")
        assert client is other.get_wrapper_attr("client")
        assert one.get_wrapper_attr("on_failure") == "truncate"
        one.close()
        other.reset(seed=0)
        other.close()
        error = client.complete(ChatRequest.user("why?", model="librarian")).error
        assert error is not None
        assert error.kind == "cancelled"


def test_every_info_has_the_same_arrays(env: QueryMutationEnv) -> None:
    infos = [env.reset(seed=0, options=KILL)[1], *(env.step(action)[4] for action in (NEUTRAL, UNDO, SUBMIT))]
    assert {tuple(info) for info in infos} == {tuple(infos[0])}
    for info in infos:
        assert {key for key, value in info.items() if not isinstance(value, np.ndarray)} == {"_text"}
    assert infos[0]["action_mask"].tolist() == [0, 1, 1, 0, 1]  # all its words are known
    assert env.action_space.sample(mask=infos[0]["action_mask"]) != UNDO
    assert env.action_masks().tolist() == infos[-1]["action_mask"].astype(bool).tolist()
    assert infos[-1]["episode_return"] == pytest.approx(infos[-1]["score"] - infos[-1]["baseline_score"] - 0.01)
    assert infos[-1]["_text"]["answer"] == "`os.kill` is what you want."


def test_results_of_steps_in_flight_are_not_taken_for_others(batched: Callable[..., BatchedQueryMutationEnv]) -> None:
    env = batched(4)
    env.reset(seed=0)
    env.send([UNDO, UNDO], [1, 3])
    sends = [lambda: env.send([UNDO], [3]), lambda: env.send([UNDO, UNDO], [0, 0])]
    for call in (lambda: env.step(np.full(5, UNDO)), env.reset, env.send_reset, *sends):
        with pytest.raises(AlreadyPendingCallError, match="in the middle of a step"):
            call()
    ready = set(env.recv()[4]["env_id"])
    assert (ready if len(ready) == 2 else ready | set(env.recv()[4]["env_id"])) == {1, 3}
    env.step(np.full(5, UNDO))


def test_reset_mask_resets_only_the_masked_and_is_left_in_the_options(
    batched: Callable[..., BatchedQueryMutationEnv],
) -> None:
    env = batched(4)
    before, _ = env.reset(seed=1)
    options = {"reset_mask": np.array([True, False, False, False, True])}
    after, infos = env.reset(options=options)
    assert "reset_mask" in options
    assert np.array_equal(before[1:4], after[1:4])
    assert infos["_question"].tolist() == [True, False, False, False, True]
    for said, call in (
        ("reset_mask", lambda: env.reset(options={"reset_mask": np.zeros(5, dtype=bool)})),
        ("3 actions for 5", lambda: env.step(np.zeros(3, dtype=np.int64))),
        ("batch_size=0", lambda: batched(0)),
        ("SAME_STEP", lambda: batched(2, autoreset_mode="same")),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def failing_env(task: Task, client: Client, on_failure: OnFailure, *models: str, **settings: Any) -> QueryMutationEnv:
    return QueryMutationEnv(
        task, client=failing(client, *models), retry_policy=NO_RETRY, on_failure=on_failure, **settings
    )


def test_a_failed_step_truncates_the_episode_with_the_observation_it_started_from(
    tiny_task: MakeTask, tiny_client: Client
) -> None:
    records: list[StepRecord] = []
    env = failing_env(tiny_task(), tiny_client, "truncate", "softener", on_record=records.append)
    before, _ = env.reset(seed=0, options=KILL)
    obs, reward, terminated, truncated, info = env.step(NEUTRAL)
    assert (reward, terminated, truncated, bool(info["valid"])) == (0.0, False, True, False)
    assert np.array_equal(obs, before)
    assert (env.has_ended, records[0].valid) == (True, False)
    assert env.reset()[1]["valid"]
    masked = failing_env(tiny_task(max_episode_steps=2), tiny_client, "mask", "softener")
    masked.reset(seed=0, options=KILL)
    assert masked.step(UNDO)[2:4] == (False, False)
    assert masked.step(NEUTRAL)[1:4] == (0.0, False, True)  # the last step: its result is unknown
    with pytest.raises(ValueError, match="truncate"):
        failing_env(tiny_task(), tiny_client, "ignore")  # type: ignore[arg-type]


def test_a_submit_that_fails_is_truncated_and_a_moved_question_is_not_observed(
    tiny_task: MakeTask, tiny_client: Client
) -> None:
    task = tiny_task(ask="form", max_episode_steps=2)
    submit = task.actions.index("submit")
    for action in (submit, NEUTRAL):  # the rewrite of the last step succeeds, then the target is asked
        env = failing_env(task, tiny_client, "truncate", "librarian")
        env.reset(seed=0, options=KILL)
        before = env.step(SPELLING)[0]
        obs, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated, bool(info["valid"])) == (0.0, False, True, False)
        assert np.array_equal(obs, before)
    masked = failing_env(task, tiny_client, "mask", "librarian")
    masked.reset(seed=0, options=KILL)
    assert masked.step(submit)[1:4] == (0.0, True, False)


def test_raise_ends_the_episode_and_names_the_step(tiny_task: MakeTask, tiny_client: Client) -> None:
    env = failing_env(tiny_task(), tiny_client, "raise", "softener")
    env.reset(seed=0, options=KILL)
    with pytest.raises(
        BackendError, match=r"step neutral failed for good: .*broken for good.*check the server"
    ) as raised:
        env.step(NEUTRAL)
    assert raised.value.kind == "server"
    assert env.has_ended
    env.reset()


def test_a_server_that_fails_every_step_is_an_error_at_last(tiny_task: MakeTask, tiny_client: Client) -> None:
    env = failing_env(tiny_task(ask="form"), tiny_client, "truncate", "softener")  # reset makes no call
    for step in range(MAX_FAILED_STEPS):
        env.reset(seed=0)
        if step == MAX_FAILED_STEPS - 1:
            with pytest.raises(BackendError, match=rf"\({MAX_FAILED_STEPS} in a row\)"):
                env.step(NEUTRAL)
        else:
            assert env.step(NEUTRAL)[3]
    broken, env.client = env.client, tiny_client
    env.reset()
    assert env.step(NEUTRAL)[4]["valid"]
    env.client = broken
    assert env.step(FILLER)[3]  # counts from zero again


# --- over HTTP, as a trainer of another library has it ----------------------------------------------------------------


NORTH = np.array([0.0, 1.0, 0.0], dtype=np.float32)


def answered(said: str, *, closeness: float, fit: float) -> Attempt:
    vectors = {"text_vector": NORTH, "answer_vector": NORTH}
    return Attempt(text="", answer=said, fit=fit, closeness=closeness, reward=Reward(score=0.0), **vectors)


FIRST = answered("I am not sure.", closeness=0.75, fit=0.25)
REFUSED = answered("I cannot help with that.", closeness=0.0, fit=1.0)


def seen(see: Observer, action_mask: Sequence[bool], **fields: Any) -> FloatArray:
    """Return the observation of an episode with two answers, the first of which is the best."""
    original, text = "sort a lsit", "sort a list? nwo!"
    known: dict[Asked, Attempt] = {(original, AS_IS): FIRST, (text, AS_IS): REFUSED}
    vectors = {original: np.array([1.0, 0.0, 0.0], dtype=np.float32), text: NORTH}
    state = {"known": known, "vectors": vectors, "used": [False, True, False], "steps": 2, "best": FIRST} | fields
    episode = Episode(index=0, original=original, text=text, **state)
    return see(episode, action_mask)


MakeScheduler = Callable[[Client], PooledScheduler]
NEVER = RetryPolicy(max_retries=0)
AT_ONCE_TWICE = RetryPolicy(max_retries=2, first_delay_s=0.0)


def observer(*, policy_asks: bool = False) -> Observer:
    vectors = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    rules = EpisodeRules(ask="form" if policy_asks else "every_step", max_asks=4)
    return Observer(projection=Projection.fit(vectors, dims=2), num_operators=3, rules=rules)


def test_every_slice_holds_what_its_line_says() -> None:
    see = observer()
    obs = seen(see, [False, True, True, False, True])
    part = {name: obs[piece].tolist() for name, piece in see.slices.items()}
    assert obs.dtype == np.float32
    assert obs.shape == (see.size,) == (2 + 2 + 3 + 1 + 4 + 4 + 2 + 3 + 5,)
    assert part["similarity"] == pytest.approx([-2.5, 2.5, -1.25])
    assert part["drift"] == pytest.approx([5.0])
    assert part["verdicts"] == [1, 0, 0, 1]
    assert part["words"] == pytest.approx([4 * 1 / 4, np.log1p(4) / 2, 2 / 3, 0.5])
    assert part["progress"] == pytest.approx([0.4, 0.0])
    assert part["used"] == [0, 1, 0]
    assert part["closed"] == [1, 0, 0, 1, 0]


def test_the_policy_that_asks_sees_the_best_answer_or_that_there_is_none() -> None:
    see = observer(policy_asks=True)
    obs = seen(see, [True] * 6)
    assert obs[see.slices["asked"]].tolist() == [1, 1, 0.5]
    assert obs[see.slices["best"]] == pytest.approx([0, 1, 1.25])
    obs = seen(see, [True] * 6, known={("sort a lsit", AS_IS): FIRST}, best=None, call_price=0.02)
    part = {name: obs[piece].tolist() for name, piece in see.slices.items()}
    assert obs.shape == (see.size,)
    assert (part["answer"], part["best"], part["asked"]) == ([0, 0], [0, 0, 0], [0, 0, 0.25])
    assert (part["similarity"], part["verdicts"], part["closed"]) == ([0, 0, 0], [0, 0, 0, 1], [0] * 6)
    assert part["price"] == pytest.approx([1.0])


def test_projection_whitens_what_it_was_fitted_on_and_pads_few_texts_with_zeros() -> None:
    data = np.random.default_rng(1).normal(size=(400, 5)).astype(np.float32) * np.array([5, 3, 1, 0.5, 0.1], np.float32)
    projected = np.array([Projection.fit(data, dims=3)(row) for row in data])
    assert projected.mean(axis=0) == pytest.approx(np.zeros(3), abs=1e-5)
    assert np.cov(projected.T) == pytest.approx(np.eye(3), abs=1e-4)
    few = np.eye(3, dtype=np.float32)[:2]
    assert Projection.fit(few, dims=3)(few[0])[1:] == pytest.approx(np.zeros(2))


@pytest.mark.parametrize(
    ("ask", "steps", "max_asks", "asked", "calls"),
    [
        ("every_step", 1, None, 1, 3),  # the original's answer, a rewrite and its answer
        ("every_step", 5, None, 1, 11),
        ("form", 1, None, 1, 2),  # a rewrite, and the answer at the end
        ("form", 4, None, 1, 5),
        ("every_step", 6, None, 0, 7),  # the original's answer, and one after each step
        ("every_step", 6, 3, 0, 3),
        ("form", 6, None, 0, 6),
        ("form", 6, 4, 0, 4),
        ("form", 6, 4, 2, 7),  # six steps and the answer at the end
        ("form", 6, 1, 0, 1),
        ("form", 6, 1, 2, 7),
    ],
)
def test_an_episode_takes_fewer_calls_where_operators_are_local_or_asks_few(
    ask: str, steps: int, max_asks: int | None, asked: int, calls: int
) -> None:
    rules = EpisodeRules(ask=ask, max_episode_steps=steps, max_asks=max_asks)  # type: ignore[arg-type]
    assert rules.max_calls(asked=asked) == calls


def ask(text: str, model: str = "librarian") -> Call:
    return Call(ChatRequest.user(text, model=model))


def two_calls(text: str) -> Flow:
    rewritten: Completion = yield ask(f"<question>{text}</question>", "softener")
    answered: Completion = yield ask(rewritten.text)
    vectors = yield Encode((rewritten.text, answered.text))
    return answered.text, vectors.shape


@pytest.fixture(params=[1, 4])
def make(request: pytest.FixtureRequest, hash_encoder: Encoder) -> Iterator[MakeScheduler]:
    made: list[PooledScheduler] = []

    def build(client: Client) -> PooledScheduler:
        shared = {"client": client, "encoder": hash_encoder, "retry_policy": AT_ONCE_TWICE}
        scheduler = PooledScheduler(**shared, batch_size=request.param)
        made.append(scheduler)
        return scheduler

    yield build
    for scheduler in made:
        scheduler.close()


def test_every_flow_ends_with_its_own_result_or_its_exception(
    make: MakeScheduler, tiny_client: Client, hash_encoder: Encoder
) -> None:
    def broken() -> Flow:
        yield ask("sort it")
        raise RuntimeError("a bug")

    scheduler = make(tiny_client)
    texts = {"sort it now": "sorted", "join it": "os.path.join", "kill it": "os.kill", "length please": "len"}
    for text in texts:
        scheduler.start(text, two_calls(text))
    results = dict(scheduler.finished() for _ in texts)
    assert {text: result[0].split("`")[1] for text, result in results.items()} == texts
    assert {result[1] for result in results.values()} == {(2, hash_encoder.dim)}
    scheduler.start("a", broken())
    with pytest.raises(RuntimeError, match="a bug"):
        scheduler.finished()


def first_calls_fail(client: Client, failures: int) -> FakeClient:
    fake = FakeClient(client.complete, kind="connect", fails=lambda _: len(fake.requests) <= failures)
    return fake


@pytest.mark.parametrize(("seconds", "calls"), [(600.0, 2), (10.0, 1)])
def test_no_retry_starts_after_the_deadline_of_its_call(
    seconds: float, calls: int, hash_encoder: Encoder, tiny_client: Client
) -> None:
    def flow() -> Flow:
        call = ask("why?")
        return (yield replace(call, request=replace(call.request, deadline=time.monotonic() + seconds)))

    client = first_calls_fail(tiny_client, 1)
    policy = RetryPolicy(first_delay_s=0.0) if calls == 2 else RetryPolicy(first_delay_s=100.0, max_delay_s=100.0)
    reply = run_flow(flow(), client=client, encoder=hash_encoder, retry_policy=policy)
    assert (reply.ok, len(client.requests)) == (calls == 2, calls)


def test_the_call_that_is_furthest_behind_goes_first(hash_encoder: Encoder, tiny_client: Client) -> None:
    def answer(request: ChatRequest) -> Completion:
        if len(client.requests) == 1:
            may_go_on.wait(10)
        return tiny_client.complete(request)

    client = FakeClient(answer)

    def one(text: str) -> Flow:
        yield ask(text)

    may_go_on = threading.Event()
    scheduler = PooledScheduler(client=client, encoder=hash_encoder, retry_policy=NEVER, batch_size=1)
    for done, text in enumerate(["first", "d", "c", "b", "a"]):
        scheduler.start(text, one(text), done=-done)
    may_go_on.set()
    order = [scheduler.finished()[0] for _ in range(5)]
    assert order == ["first", "a", "b", "c", "d"] == [request.messages[-1].content for request in client.requests]
    scheduler.close()
