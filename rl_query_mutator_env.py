"""The environment: an episode rewrites one question, step by step, until its answer is submitted.

    reset   draw a question, ask the target the original
    step    an operator: the mutator rewrites the current question, the target answers it
            undo:        return to the original question
            submit:      the episode terminates, as it does after `max_episode_steps` steps
    reward  change in the score of the answer that would be submitted now, minus the price of the step's calls,
            so the return is final score - baseline score - prices; with `answer="learned"` the change in its
            P(right), which varies less and has the same mean

With `ask="form"` rewriting and asking are separate: reset asks nothing, an operator only rewrites, and a form or the
action *ask* asks the target the current question. If an episode would end without an answer, it asks the current
question. Before the first answer the score is 0, so the return is final score - prices.

`QueryMutationEnv` is one environment, a plain `gymnasium.Env`. `BatchedQueryMutationEnv` is a
`gymnasium.vector.VectorEnv` over N of them that makes all their calls through one ThreadPoolExecutor.
Both run the same generators (`reset_flow`, `step_flow`), so they give the same data.

`on_failure` selects how to handle a step with a call that failed after all retries; its reward is 0, and its
`info["valid"]` is False:

    "mask"      the episode continues; the caller masks the step out of loss and returns, as `qm train` does
    "truncate"  the episode is truncated; its last observation is the one before the step, so that a learner that
                bootstraps has an error of (gamma - 1) V(s), near zero. Default of `gymnasium.make` and `make_vec`
    "raise"     BackendError; for a learner that neither masks nor bootstraps

Every info has the same keys (`EpisodeEngine.info`): arrays, and texts in `_text`, which torchrl's reader skips.
"""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, SupportsIndex, get_args

import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, InvalidAction, ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from query_mutator.env import vector
from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.episode import Episode
from query_mutator.env.scheduling import Flow, PooledScheduler, run_flow
from query_mutator.env.task import Task
from query_mutator.env.vector import StepResult, VectorStep, as_arrays, infos_of
from query_mutator.errors import BackendError
from query_mutator.llm.client import DEFAULT_POLICY, Client, RetryPolicy
from query_mutator.registry import check_known
from query_mutator.session.task import SharedModels
from query_mutator.types import CONTROLS, SUBMIT, ErrorInfo, FloatArray, StepRecord

OnFailure = Literal["mask", "truncate", "raise"]

RESET_QUESTIONS = 15  # questions whose first answer may fail before the run stops
MAX_FAILED_STEPS = 20  # in a row that are truncated; more, and nothing is left to learn from


class QuestionOrder:
    """Draws the indices of `count` questions in random order, each once per pass; skips `left_out` unless all are."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.waiting: list[int] = []  # the next is the last
        self.left_out: set[int] = set()

    def draw(self, rng: np.random.Generator) -> int:
        """Return the next index."""
        while True:
            if not self.waiting:
                self.waiting = [int(index) for index in rng.permutation(self._count)]
            index = self.waiting.pop()
            if index not in self.left_out or len(self.left_out) == self._count:
                return index

    def chosen(self, options: Mapping[str, Any] | None) -> int | None:
        """Return `options["question"]`, None if it is absent; ValueError for an index out of range."""
        index = (options or {}).get("question")
        if index is None:
            return None
        if not 0 <= operator.index(index) < self._count:
            raise ValueError(f"options['question']={index} must be from 0 to {self._count - 1}")
        return operator.index(index)


def register() -> None:
    """Register `QueryMutation-v0` with gymnasium; as it is also the `gymnasium.envs` entry point, it may run twice."""
    if "QueryMutation-v0" not in gym.registry:
        gym.register(
            id="QueryMutation-v0",
            entry_point="rl_query_mutator_env:make_env",
            vector_entry_point="rl_query_mutator_env:make_vector_env",
        )


register()


class QueryMutationEnv(gym.Env[FloatArray, np.int64]):
    """One environment; `reset` and `step` make calls one by one in the calling thread."""

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - as gymnasium has it

    def __init__(
        self,
        task: Task,
        *,
        client: Client,
        retry_policy: RetryPolicy = DEFAULT_POLICY,
        env_id: int = 0,
        on_record: Callable[[StepRecord], None] | None = None,
        on_close: Callable[[], None] | None = None,
        render_mode: str | None = None,
        on_failure: OnFailure = "mask",
    ) -> None:
        check_known("on_failure", on_failure, get_args(OnFailure))
        self.on_failure = on_failure
        self.task = task
        self.client = client
        self.retry_policy = retry_policy
        self.env_id = env_id
        self.on_record = on_record
        self.on_close = on_close
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, shape=(task.observer.size,), dtype=np.float32)
        self.action_space = gym.spaces.Discrete(len(task.actions))
        self.engine: EpisodeEngine | None = None  # of the current episode
        self.last_error: ErrorInfo | None = None  # why the last reset or step failed
        self.total_steps = 0
        self.total_episodes = 0
        self.invalid_steps = 0
        self._failed_in_a_row = 0
        self.prompts_too_long: Counter[str] = Counter()  # by the question's id
        self._questions = QuestionOrder(len(task.questions))

    @property
    def episode(self) -> Episode | None:
        """Return the current episode, None before the first reset."""
        return None if self.engine is None else self.engine.episode

    # --- gymnasium's interface -------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Draw a question (or take `options["question"]`, an index) and return the observation [O] and info."""
        obs, info = self._run(self.reset_flow(seed=seed, options=options))
        return obs, as_arrays(info)

    def step(self, action: SupportsIndex) -> StepResult:
        """Take one action and return observation [O], reward, terminated, truncated, info.

        Raises ResetNeeded outside an episode, InvalidAction for an action that does not exist.
        """
        obs, reward, terminated, truncated, info = self._run(self.step_flow(self.check_action(action)))
        return obs, reward, terminated, truncated, as_arrays(info)

    def action_masks(self) -> NDArray[np.bool_]:
        """Return the mask of allowed actions [A], as sb3-contrib's MaskablePPO expects it."""
        if self.engine is None:
            raise ResetNeeded("call reset() before action_masks()")
        return np.array(self.engine.action_mask(), dtype=np.bool_)

    @property
    def has_ended(self) -> bool:
        """Return whether the episode is over, so that only a reset may follow."""
        return self.episode is not None and self.episode.ended

    def check_action(self, action: SupportsIndex) -> int:
        """Return the action as an int; ResetNeeded outside an episode, InvalidAction if it does not exist."""
        if self.episode is None:
            raise ResetNeeded("call reset() before step()")
        if self.has_ended:
            raise ResetNeeded("the episode has ended; call reset() before the next step()")
        last = len(self.task.actions) - 1
        try:
            number = operator.index(action)
        except TypeError:
            number = -1
        if not 0 <= number <= last:
            raise InvalidAction(f"action {action} must be a whole number from 0 to {last} ({self.task.actions[-1]})")
        return number

    def render(self) -> str:
        """Return the episode so far as text."""
        return "(not reset)" if self.episode is None else self.episode.describe()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain types and arrays."""
        return {
            "rng": self.np_random.bit_generator.state,
            "order": list(self._questions.waiting),
            "left_out": sorted(self._questions.left_out),
            "episode": None if self.episode is None else asdict(self.episode),
            "steps": self.total_steps,
            "episodes": self.total_episodes,
            "invalid_steps": self.invalid_steps,
            "prompts_too_long": dict(self.prompts_too_long),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> FloatArray | None:
        """Restore `state_dict`; return the observation [O], None before the first reset."""
        self.np_random.bit_generator.state = state["rng"]
        self._questions.waiting, self._questions.left_out = list(state["order"]), set(state["left_out"])
        self.total_steps, self.total_episodes = state["steps"], state["episodes"]
        self.invalid_steps = state["invalid_steps"]
        self.prompts_too_long = Counter(state["prompts_too_long"])
        saved = state["episode"]
        self.engine = None if saved is None else EpisodeEngine(self.task, Episode.from_state(saved))
        return None if self.engine is None else self.engine.observe()

    def close(self) -> None:
        """Release what was created for this environment; idempotent."""
        if self.on_close is not None:
            self.on_close()
            self.on_close = None

    def _run(self, flow: Flow) -> Any:
        return run_flow(flow, client=self.client, encoder=self.task.encoder, retry_policy=self.retry_policy)

    # --- the state machine -----------------------------------------------------------------------------------------

    def reset_flow(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Flow:
        """Yield the calls of a reset; return (observation, info)."""
        super().reset(seed=seed)
        if seed is not None:
            self._questions.waiting = []
        if self.episode is not None:
            self.episode.ended = True  # also if no question can be answered
        fixed, rules = self._questions.chosen(options), self.task.rules
        error: ErrorInfo | None = None
        for number in range(1 if fixed is not None else RESET_QUESTIONS):
            question = self._questions.draw(self.np_random) if fixed is None else fixed
            engine = EpisodeEngine.open(self.task, question)
            engine.turn = (self.env_id, self.total_steps)
            if not rules.policy_asks:
                error = yield from engine.ask_original(1 + number)
            self._note_error(engine.episode, error)
            if error is None:
                break
        else:
            raise BackendError(f"{self.task.calls.target_model} answered no question: {error}; check the server")
        prices = rules.call_price
        engine.episode.call_price = prices[0] if len(prices) == 1 else float(self.np_random.choice(prices))
        self.engine = engine
        return engine.observe(), engine.info(valid=True)

    def step_flow(self, action: int) -> Flow:
        """Yield the calls of one step with a checked action; return gymnasium's 5-tuple.

        With `on_failure="raise"`, BackendError for a failed step; with "truncate", after MAX_FAILED_STEPS in a row.
        """
        assert self.engine is not None
        engine, episode = self.engine, self.engine.episode
        worth, since = engine.worth, (episode.calls, engine.cost)
        before = engine.observe() if self.on_failure == "truncate" else None
        engine.turn = (self.env_id, self.total_steps)
        started = time.perf_counter()
        error = yield from engine.act(action)
        engine.timing["step_s"] = time.perf_counter() - started
        self._note_error(episode, error)
        reward = 0.0 if error else engine.worth - worth - episode.call_price * (engine.cost - since[1])
        name = self.task.actions[action]
        result = self._end_step(engine, name, reward, error, since=since)
        self._failed_in_a_row = 0 if error is None else self._failed_in_a_row + 1
        if error is None or self.on_failure == "mask":
            return result
        if before is None or self._failed_in_a_row >= MAX_FAILED_STEPS:
            count = f" ({self._failed_in_a_row} in a row)" if before is not None else ""
            raise BackendError(f"step {name} failed for good{count}: {error}; check the server", kind=error.kind)
        return (before, *result[1:])

    def _note_error(self, episode: Episode, error: ErrorInfo | None) -> None:
        """Record why a reset or step failed, if it did; leave out a question that is too long without a rewrite."""
        self.last_error = error
        if error is None or error.kind != "prompt_too_long":
            return
        self.prompts_too_long[self.task.questions[episode.index].id] += 1
        shorter = {form.name for form in self.task.forms if not form.uses_examples} | {*CONTROLS}
        if shorter.issuperset(episode.names):
            self._questions.left_out.add(episode.index)

    def _end_step(
        self,
        engine: EpisodeEngine,
        name: str,
        reward: float,
        error: ErrorInfo | None,
        *,
        since: tuple[int, float],
    ) -> StepResult:
        episode = engine.episode
        episode.total_reward += reward
        cut_off = error is not None and self.on_failure != "mask"
        # The observation shows how many steps are left, so the limit is a state that ends the episode. The result of a
        # step that failed there is unknown.
        terminated = engine.is_over and not cut_off and (error is None or name == SUBMIT)
        truncated = (engine.is_over or cut_off) and not terminated
        episode.ended = terminated or truncated
        if self.on_record is not None:
            numbers = {"env": self.env_id, "step": self.total_steps, "episode": self.total_episodes}
            calls = episode.calls - since[0]
            self.on_record(engine.record(reward=reward, error=error, calls=calls, **numbers))
        self.total_steps += 1
        self.total_episodes += episode.ended
        self.invalid_steps += error is not None
        info = engine.info(valid=error is None, since=since)
        return engine.observe(), reward, terminated, truncated, info


class BatchedQueryMutationEnv(SyncVectorEnv[FloatArray, NDArray[np.int64]]):
    """N environments, each going rewrite -> answer -> score at its own pace, with `batch_size` calls in flight.

    An environment is reset in the step that ends its episode (SAME_STEP), in the next one (NEXT_STEP), or by
    `reset(options={"reset_mask": ...})` (DISABLED).
    """

    envs: list[QueryMutationEnv]  # type: ignore[assignment]

    def __init__(
        self,
        envs: Iterable[QueryMutationEnv],
        batch_size: int = 8,
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
    ) -> None:
        makers = [lambda env=env: env for env in envs]
        if not makers:
            raise ValueError("envs must hold at least one QueryMutationEnv")
        super().__init__(makers, autoreset_mode=vector.parse_autoreset_mode(autoreset_mode))
        first = self.envs[0]
        self._scheduler = PooledScheduler(
            client=first.client, encoder=first.task.encoder, retry_policy=first.retry_policy, batch_size=batch_size
        )
        self._in_flight: set[int] = set()  # environments in the middle of a step or reset

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Reset all environments, or those in `options["reset_mask"]` [N]; env i gets `seed + i`."""
        self._check_idle("reset")
        chosen = np.flatnonzero(vector.reset_mask(options, self.num_envs)).tolist()
        seeds = vector.env_seeds(seed, self.num_envs)
        passed_on = {key: value for key, value in (options or {}).items() if key != "reset_mask"} or None
        for index in chosen:
            self._start(index, self.envs[index].reset_flow(seed=seeds[index], options=passed_on))
        results = dict(self._next() for _ in chosen)
        infos: list[dict[str, Any]] = [{} for _ in self.envs]
        for index in chosen:
            self._observations[index], infos[index] = results[index]
        return self._observations.copy(), infos_of(infos)

    def step(self, actions: NDArray[np.int64]) -> VectorStep:
        """Step all environments with `actions` [N]; under SAME_STEP `final_obs` is the last one of an episode."""
        self._check_idle("step")
        if len(actions) != self.num_envs:
            raise ValueError(f"{len(actions)} actions for {self.num_envs} environments")
        every = range(self.num_envs)
        self.send(actions, every)
        found = self._gather(dict(self._next() for _ in every))
        del found[4]["env_id"]
        return found

    def send(self, actions: Iterable[SupportsIndex], env_ids: Iterable[SupportsIndex]) -> None:
        """Start a step in each of `env_ids` without waiting for it. All actions are checked before one starts."""
        indices = [operator.index(env_id) for env_id in env_ids]
        for place, index in enumerate(indices):
            if index in self._in_flight or index in indices[:place]:
                what = f"environment {index} is in the middle of a step; recv() it first"
                raise AlreadyPendingCallError(what, "send")
        pairs = zip(indices, actions, strict=True)
        flows = [self._step_flow(self.envs[i], action) for i, action in pairs]
        for index, flow in zip(indices, flows, strict=True):
            self._start(index, flow)

    def step_ids(self, env_ids: Iterable[SupportsIndex]) -> list[tuple[int, int]]:
        """Return each environment's number in the run and the steps it has taken."""
        return [(env.env_id, env.total_steps) for env in (self.envs[index] for index in env_ids)]

    def send_reset(self, *, seed: int | Sequence[int | None] | None = None) -> None:
        """Start a reset of every environment; `recv` returns it as a step with reward 0 and `infos["reset"]`."""
        self._check_idle("send_reset")
        for index, env_seed in enumerate(vector.env_seeds(seed, self.num_envs)):
            self._start(index, vector.reset_as_step(self.envs[index], seed=env_seed, reset=True))

    def recv(self, *, max_envs: int | None = None, waits: bool = True) -> VectorStep:
        """Return gymnasium's 5-tuple for the environments that are ready [n]; `infos["env_id"]` [n] names them.

        Waits for at least one if `waits`. Returns at most `max_envs`; the rest stay ready for the next call.
        """
        results: dict[int, StepResult] = {}
        while self._scheduler.in_progress and len(results) != max_envs:
            try:
                index, result = self._next(waits=waits and not results)
            except TimeoutError:
                break
            results[index] = result
        return self._gather(results)

    def _gather(self, results: Mapping[int, StepResult]) -> VectorStep:
        """Return the steps as arrays [n], and keep the observations."""
        found = vector.gather(results, self._observations.shape[1])
        self._observations[found[4]["env_id"]] = found[0]
        return found

    def _step_flow(self, env: QueryMutationEnv, action: SupportsIndex) -> Flow:
        """Return the flow of a step in this autoreset mode; raise ResetNeeded or InvalidAction before it starts."""
        if self.autoreset_mode is AutoresetMode.NEXT_STEP and env.has_ended:
            return vector.reset_as_step(env)
        number = env.check_action(action)
        return (
            vector.step_and_reset(env, number)
            if self.autoreset_mode is AutoresetMode.SAME_STEP
            else env.step_flow(number)
        )

    batch_reset = reset
    batch_step = step

    def _start(self, index: int, flow: Flow) -> None:
        self._in_flight.add(index)
        self._scheduler.start(index, flow, done=self.envs[index].total_steps)

    def _next(self, *, waits: bool = True) -> tuple[int, Any]:
        """Return index and result of the next environment that is ready; TimeoutError if it `waits` for none."""
        index, result = self._scheduler.finished(waits=waits)
        assert isinstance(index, int)
        self._in_flight.discard(index)
        return index, result

    def _check_idle(self, name: str) -> None:
        """Raise AlreadyPendingCallError while steps are in flight: their results would be taken for others."""
        if self._in_flight:
            raise AlreadyPendingCallError(
                f"{name}() while {len(self._in_flight)} environments are in the middle of a step; recv() them first, "
                "or after an error close() this environment and make another",
                name,
            )

    def action_masks(self) -> NDArray[np.bool_]:
        """Return which actions [N, A] are allowed."""
        return np.stack([env.action_masks() for env in self.envs])

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of all environments; none may be in the middle of a step."""
        return [env.state_dict() for env in self.envs]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> FloatArray | None:
        """Restore `state_dict`; return the observations [N, O], None before the first reset."""
        seen = [env.load_state_dict(state) for env, state in zip(self.envs, states, strict=True)]
        if any(obs is None for obs in seen):
            return None
        self._observations[:] = seen
        return self._observations.copy()

    def close_extras(self, **kwargs: Any) -> None:
        """Stop the workers and close the environments; called once by `close()`."""
        self._scheduler.close()
        for env in self.envs:
            env.close()


# --- gymnasium.make ---------------------------------------------------------------------------------------------------


def make_env(*, env_id: int = 0, **kwargs: Any) -> QueryMutationEnv:
    """Return one environment on training questions.

    Keywords are `render_mode`, `on_failure` (default "truncate") and the fields of ModelSettings and TaskSettings.
    """
    return _make_envs([env_id], **kwargs)[0][0]


def make_vector_env(
    num_envs: int, *, autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP, env_id: int = 0, **kwargs: Any
) -> BatchedQueryMutationEnv:
    """Return N environments that share one task and one pool of `batch_size` workers; see `make_env` for `kwargs`."""
    autoreset_mode = vector.parse_autoreset_mode(autoreset_mode)
    if num_envs < 1:
        raise ValueError(f"num_envs={num_envs} must be at least 1")
    envs, batch_size = _make_envs([env_id, *range(1, num_envs)], **kwargs)
    return BatchedQueryMutationEnv(envs, batch_size, autoreset_mode=autoreset_mode)


def _make_envs(
    env_ids: Sequence[int], *, render_mode: str | None = None, on_failure: OnFailure = "truncate", **settings: Any
) -> tuple[list[QueryMutationEnv], int]:
    """Return environments that share models and task (the first one closes them), and the calls in flight."""
    check_known("on_failure", on_failure, get_args(OnFailure))  # before anything is started
    shared = SharedModels(settings, others=("render_mode", "env_id", "on_failure"))
    envs = [
        QueryMutationEnv(
            shared.task,
            client=shared.models.calls.client,
            retry_policy=shared.models.retry_policy,
            env_id=env_id,
            render_mode=render_mode,
            on_failure=on_failure,
        )
        for env_id in env_ids
    ]
    envs[0].on_close = shared.close
    return envs, shared.settings.calls_in_flight
