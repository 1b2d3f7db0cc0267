"""The environment: an episode rewrites one question, step by step, until its answer is submitted.

    reset   draw a question, ask the target the original
    step    an operator: the mutator rewrites the present question, the target answers it
            undo:        return to the original question
            submit:      the episode terminates, as it does after `max_episode_steps` steps
    reward  change of the score of what would be submitted now, minus the price of the step's calls;
            so the return is final score - baseline score - prices

With `ask="policy"` rewriting and asking are separate: reset asks nothing, an operator only rewrites, and the action
*ask* asks the target the present question. An episode that ends without an answer asks the present question then.
Before the first answer the score is 0, so the return is final score - prices.

`QueryMutationEnv` is one environment, a plain `gymnasium.Env`. `BatchedQueryMutationEnv` is a
`gymnasium.vector.VectorEnv` over N of them that fans all their calls out through one ThreadPoolExecutor.
Both run the same generators (`reset_flow`, `step_flow`), so they give the same data.

`on_failure` says what becomes of a step whose call failed for good, after all retries; its reward is 0, and its
`info["valid"]` is False:

    "mask"      the episode continues; the caller masks the step out of loss and returns, as our learners do
    "truncate"  the episode is truncated; its last observation is the one before the step, so that a learner that
                bootstraps has an error of (gamma - 1) V(s), near zero. Default of `gymnasium.make` and `make_vec`
    "raise"     BackendError; for a learner that neither masks nor bootstraps

Every info has the same keys (`QueryMutationEnv._info`): arrays, and texts in `_text`, which torchrl's reader skips.
"""

from __future__ import annotations

import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, SupportsIndex, get_args

import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, InvalidAction, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.episode import Episode
from query_mutator.env.flow import Call, CallJournal, CallSite, Flow
from query_mutator.env.infos import as_arrays, infos_of
from query_mutator.env.scheduling import PooledScheduler, Scheduler, SequentialScheduler, run_flow
from query_mutator.env.task import Task
from query_mutator.errors import BackendError, KeywordError
from query_mutator.llm.client import Client
from query_mutator.llm.retry import DEFAULT_POLICY, RetryPolicy, is_transient
from query_mutator.registry import check_known, nearest
from query_mutator.rewards import is_refusal
from query_mutator.training.dataset import split_dataset
from query_mutator.training.system import System, SystemSettings, TaskSettings, make_task
from query_mutator.types import SUBMIT, ChatRequest, ErrorInfo, Question, StepRecord

FloatArray = NDArray[np.float32]
StepResult = tuple[FloatArray, float, bool, bool, dict[str, Any]]
OnFailure = Literal["mask", "truncate", "raise"]

RESET_TRIES_PER_QUESTION = 3  # of a failure that is transient
RESET_QUESTIONS = 5  # questions whose first answer may fail before the run stops
MAX_FAILED_STEPS = 20  # in a row that are truncated; more, and nothing is left to learn from


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
        size = task.observer.size
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, shape=(size,), dtype=np.float32)
        self.action_space = gym.spaces.Discrete(len(task.actions))
        self.engine: EpisodeEngine | None = None  # of the present episode
        self.last_error: ErrorInfo | None = None  # why the last reset or step failed
        self.total_steps = 0
        self.total_episodes = 0
        self.invalid_steps = 0
        self._failed_in_a_row = 0
        self.prompts_too_long: Counter[str] = Counter()  # by the question's id
        self._order: list[int] = []

    @property
    def episode(self) -> Episode | None:
        """Return the present episode, None before the first reset."""
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
        """Return which actions [A] are allowed, as sb3-contrib's MaskablePPO wants it; the others have no effect."""
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
        if self.episode is None:
            return "(not reset)"
        episode, current = self.episode, self.episode.current
        actions = " > ".join(episode.names) or "-"
        answer = "(not asked)" if current is None else current.answer
        return f"{episode.original}\n  {actions}\n{episode.text}\n  {answer}"

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain types and tensors."""
        return {
            "rng": self.np_random.bit_generator.state,
            "order": list(self._order),
            "episode": self.episode.to_state() if self.episode is not None else None,
            "steps": self.total_steps,
            "episodes": self.total_episodes,
            "invalid_steps": self.invalid_steps,
            "prompts_too_long": dict(self.prompts_too_long),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> FloatArray | None:
        """Restore `state_dict`; return the observation [O], None before the first reset."""
        self.np_random.bit_generator.state = state["rng"]
        self._order = list(state["order"])
        self.total_steps, self.total_episodes = state["steps"], state["episodes"]
        self.invalid_steps = state["invalid_steps"]
        self.prompts_too_long = Counter(state.get("prompts_too_long", {}))
        if state["episode"] is None:
            self.engine = None
            return None
        self.engine = EpisodeEngine(self.task, Episode.from_state(state["episode"]), make_call=self._call)
        return self.engine.observe()

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
            self._order = []
        if self.episode is not None:
            self.episode.ended = True  # also if no question can be answered
        fixed = self._fixed_question(options)
        if self.task.ask == "policy":
            self.last_error = None
            return self._begin(self._open(fixed if fixed is not None else self._draw()))
        error: ErrorInfo | None = None
        tries = 0
        for _ in range(1 if fixed is not None else RESET_QUESTIONS):
            index = fixed if fixed is not None else self._draw()
            for _ in range(RESET_TRIES_PER_QUESTION):
                tries += 1
                engine = self._open(index)
                error = yield from engine.ask_original(tries)
                self._note_error(index, error)
                if error is None:
                    return self._begin(engine)
                if not is_transient(error):
                    break
        raise BackendError(f"{self.task.calls.target_model} answered no question: {error}; check the server")

    def step_flow(self, action: int) -> Flow:
        """Yield the calls of one step, whose action was checked; return gymnasium's five.

        With `on_failure="raise"`, BackendError for a failed step; with "truncate", after MAX_FAILED_STEPS in a row.
        """
        assert self.engine is not None
        engine, episode = self.engine, self.engine.episode
        score, calls = engine.score, episode.calls
        before = engine.observe() if self.on_failure == "truncate" else None
        started = time.perf_counter()
        error = yield from engine.act(action)
        engine.timing["step_s"] = time.perf_counter() - started
        self._note_error(episode.index, error)
        calls = episode.calls - calls
        reward = 0.0 if error else engine.score - score - episode.call_price * calls
        name = self.task.actions[action]
        result = self._end_step(name, reward, error, calls=calls, terminated=name == SUBMIT)
        self._failed_in_a_row = 0 if error is None else self._failed_in_a_row + 1
        if error is None or self.on_failure == "mask":
            return result
        if before is None or self._failed_in_a_row >= MAX_FAILED_STEPS:
            count = f" ({self._failed_in_a_row} in a row)" if before is not None else ""
            raise BackendError(f"step {name} failed for good{count}: {error}; check the server", kind=error.kind)
        return (before, *result[1:])

    def _open(self, index: int) -> EpisodeEngine:
        return EpisodeEngine.open(self.task, index, make_call=self._call)

    def _begin(self, engine: EpisodeEngine) -> tuple[FloatArray, dict[str, Any]]:
        """Make an episode the present one; return its first observation and info."""
        prices = self.task.call_price
        engine.episode.call_price = prices[0] if len(prices) == 1 else float(self.np_random.choice(prices))
        self.engine = engine
        return engine.observe(), self._info(valid=True)

    def _fixed_question(self, options: Mapping[str, Any] | None) -> int | None:
        """Return `options["question"]`; ValueError unless the task has a question of this index."""
        fixed, count = (options or {}).get("question"), len(self.task.questions)
        if fixed is None:
            return None
        if not 0 <= operator.index(fixed) < count:
            raise ValueError(f"options['question']={fixed} must be from 0 to {count - 1}")
        return operator.index(fixed)

    def _note_error(self, index: int, error: ErrorInfo | None) -> None:
        """Note why a reset or step on a question failed, if it did."""
        self.last_error = error
        if error is not None and error.kind == "prompt_too_long":
            self.prompts_too_long[self.task.questions[index].id] += 1

    def _draw(self) -> int:
        if not self._order:
            self._order = [int(index) for index in self.np_random.permutation(len(self.task.questions))]
        return self._order.pop()

    def _call(self, request: ChatRequest, phase: str, action: int | None) -> Call:
        return Call(request, CallSite(self.env_id, self.total_steps, phase, action))

    def _end_step(
        self, name: str, reward: float, error: ErrorInfo | None, *, calls: int, terminated: bool
    ) -> StepResult:
        assert self.engine is not None
        episode = self.engine.episode
        episode.total_reward += reward
        cut_off = error is not None and self.on_failure != "mask"
        limit = episode.steps >= self.task.max_episode_steps
        # The observation shows how many steps are left, so the limit is a state that ends the episode. The result of a
        # failed step is unknown.
        terminated = (terminated or (limit and error is None)) and not cut_off
        truncated = cut_off or (limit and not terminated)
        episode.ended = terminated or truncated
        self._record(name, reward, error, calls)
        self.total_steps += 1
        self.total_episodes += episode.ended
        self.invalid_steps += error is not None
        return self.engine.observe(), reward, terminated, truncated, self._info(valid=error is None, step_calls=calls)

    def _info(self, *, valid: bool, step_calls: int | None = None) -> dict[str, Any]:
        """Return the info of the present state: of what would be submitted now, and of the episode so far."""
        assert self.engine is not None
        episode, submitted, first = self.engine.episode, self.engine.submitted, self.engine.episode.first
        return {
            "valid": valid,
            "score": self.engine.score,
            "baseline_score": math.nan if first is None else first.reward.score,
            "success": 0.0 if submitted is None else submitted.reward.success,
            "baseline_success": math.nan if first is None else first.reward.success,
            "refused": submitted is not None and is_refusal(submitted.answer),
            "calls": episode.calls,
            "step_calls": episode.calls if step_calls is None else step_calls,
            "asks": len(episode.known),
            "call_price": episode.call_price,
            "episode_return": episode.total_reward,
            "episode_length": episode.steps,
            "question": episode.index,
            "action_mask": np.array(self.engine.action_mask(), dtype=np.int8),  # int8 is what Discrete.sample takes
            "_text": {
                "question_id": self._question().id,
                "rewrite": episode.text if submitted is None else submitted.text,
                "answer": "" if submitted is None else submitted.answer,
            },
        }

    def _record(self, name: str, reward: float, error: ErrorInfo | None, calls: int) -> None:
        assert self.engine is not None
        if self.on_record is None:
            return
        episode, question = self.engine.episode, self._question()
        first, current = episode.first, episode.current
        self.on_record(
            StepRecord(
                env=self.env_id,
                step=self.total_steps,
                episode=self.total_episodes,
                question_id=question.id,
                operator=name,
                question=question.text,
                rewrite=episode.text,
                answer="" if current is None else current.answer,
                baseline_score=None if first is None else first.reward.score,
                score=self.engine.score,
                parts={} if current is None else dict(current.reward.parts),
                reward=reward,
                valid=error is None,
                error=error,
                calls=calls,
                timing=self.engine.timing,
            )
        )

    def _question(self) -> Question:
        assert self.episode is not None
        return self.task.questions[self.episode.index]


class BatchedQueryMutationEnv(VectorEnv[FloatArray, NDArray[np.int64], NDArray[Any]]):
    """N environments, each of which goes rewrite -> answer -> score at its own pace, with `batch_size` calls in flight.

    `batch_size=None` makes the calls one at a time in the calling thread (`--no-batching`). An environment whose
    episode ended is reset in the same step, in the next one, or (DISABLED) by `reset(options={"reset_mask": ...})`.
    """

    def __init__(
        self,
        envs: Iterable[QueryMutationEnv],
        batch_size: int | None = 8,
        *,
        journal: CallJournal | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
    ) -> None:
        self.envs = list(envs)
        if not self.envs:
            raise ValueError("envs must hold at least one QueryMutationEnv")
        super().__init__()
        first = self.envs[0]
        self.num_envs = len(self.envs)
        self.autoreset_mode = _autoreset_mode(autoreset_mode)
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        self.single_observation_space, self.single_action_space = first.observation_space, first.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._observations = np.zeros(self.observation_space.shape or (), dtype=np.float32)  # [N, O]
        self._scheduler = _scheduler(first, batch_size, journal)
        self._in_flight: set[int] = set()  # environments whose step or reset was not returned yet

    @property
    def batch_size(self) -> int:
        """Return the limit of calls in flight."""
        return self._scheduler.batch_size

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Reset all environments, or those in `options["reset_mask"]` [N]; env i gets `seed + i`."""
        self._check_idle("reset")
        mask = _reset_mask(options, self.num_envs)
        seeds = _seeds(seed, self.num_envs)
        passed_on = {key: value for key, value in (options or {}).items() if key != "reset_mask"} or None
        for index in np.flatnonzero(mask).tolist():
            self._start(index, self.envs[index].reset_flow(seed=seeds[index], options=passed_on))
        results = dict(self._finished() for _ in range(int(mask.sum())))
        infos: list[dict[str, Any]] = [{} for _ in self.envs]
        for index in np.flatnonzero(mask).tolist():
            self._observations[index], infos[index] = results[index]
        return self._observations.copy(), infos_of(infos)

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[FloatArray, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Step all environments with `actions` [N]; under SAME_STEP `final_obs` is the last one of an episode."""
        self._check_idle("step")
        if len(actions) != self.num_envs:
            raise ValueError(f"{len(actions)} actions for {self.num_envs} environments")
        every = range(self.num_envs)
        self.send(actions, every)
        results: dict[int, StepResult] = dict(self._finished() for _ in every)
        return self._gather(results, every)

    def send(self, actions: Iterable[SupportsIndex], env_ids: Iterable[SupportsIndex]) -> None:
        """Start a step in each of `env_ids`; it runs while the caller continues. All are checked before one starts."""
        flows: dict[int, Flow] = {}
        for action, env_id in zip(actions, env_ids, strict=True):
            index = operator.index(env_id)
            if index in self._in_flight or index in flows:
                raise AlreadyPendingCallError(
                    f"environment {index} is in the middle of a step; recv() it first", "send"
                )
            flows[index] = self._step_flow(self.envs[index], action)
        for index, flow in flows.items():
            self._start(index, flow)

    def places(self, env_ids: Iterable[SupportsIndex]) -> list[tuple[int, int]]:
        """Return each environment's number in the run and the steps it has taken."""
        return [(env.env_id, env.total_steps) for env in (self.envs[index] for index in env_ids)]

    def send_reset(self, *, seed: int | Sequence[int | None] | None = None) -> None:
        """Start a reset in every environment; `recv` returns it as a step without reward and with `infos["reset"]`."""
        self._check_idle("send_reset")
        for index, env_seed in enumerate(_seeds(seed, self.num_envs)):
            self._start(index, _reset(self.envs[index], env_seed))

    def recv(
        self, min_envs: int = 1, timeout_s: float | None = None, *, max_envs: int | None = None
    ) -> tuple[FloatArray, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Return gymnasium's five for the environments that are ready [n]; `infos["env_id"]` [n] names them.

        Waits for at least `min_envs` of those in flight; after `timeout_s` seconds it returns those that are ready.
        At most `max_envs` are returned; the others stay ready for the next call.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        results: dict[int, StepResult] = {}
        while self._scheduler.in_progress and len(results) != max_envs:
            waits = deadline_s if len(results) < min_envs else 0.0
            try:
                index, result = self._finished(deadline_s=waits)
            except TimeoutError:
                break
            results[index] = result
        ids = sorted(results)
        obs, rewards, terminations, truncations, infos = self._gather(results, ids)
        return obs, rewards, terminations, truncations, {**infos, "env_id": np.array(ids, dtype=np.int64)}

    def _gather(
        self, results: dict[int, StepResult], env_ids: Sequence[int]
    ) -> tuple[FloatArray, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Return the five as arrays [n] over `env_ids`."""
        columns: Iterable[Any] = zip(*[results[index] for index in env_ids], strict=True) if results else [()] * 5
        seen, rewards, terminations, truncations, infos = columns
        obs = np.array(seen, dtype=np.float32).reshape(-1, self._observations.shape[1])
        self._observations[list(env_ids)] = obs
        return (
            obs,
            np.array(rewards, dtype=np.float64),
            np.array(terminations, dtype=np.bool_),
            np.array(truncations, dtype=np.bool_),
            infos_of(infos),
        )

    batch_reset = reset
    batch_step = step

    def _start(self, index: int, flow: Flow) -> None:
        self._in_flight.add(index)
        self._scheduler.start(index, flow, done=self.envs[index].total_steps)

    def _finished(self, *, deadline_s: float | None = None) -> tuple[int, Any]:
        index, result = self._scheduler.finished(deadline_s=deadline_s)
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

    def _step_flow(self, env: QueryMutationEnv, action: SupportsIndex) -> Flow:
        """Return the flow of a step as the autoreset mode has it; ResetNeeded or InvalidAction before it starts."""
        if self.autoreset_mode is AutoresetMode.NEXT_STEP and env.has_ended:
            return _reset_as_step(env)
        number = env.check_action(action)
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            return _step_and_reset(env, number)
        return env.step_flow(number)

    # --- gymnasium's access to single environments -----------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return what the method `name` of each environment returns, or each environment's attribute of this name."""
        found = [env.get_wrapper_attr(name) for env in self.envs]
        return tuple(value(*args, **kwargs) if callable(value) else value for value in found)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return the attribute `name` of each environment."""
        return tuple(env.get_wrapper_attr(name) for env in self.envs)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each environment: one of a list or tuple of N values each, or the same in all."""
        each = values if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(each) != self.num_envs:
            raise ValueError(f"{len(each)} values for {self.num_envs} environments")
        for env, value in zip(self.envs, each, strict=True):
            env.set_wrapper_attr(name, value)

    def render(self) -> tuple[str, ...]:
        """Return the episodes so far as text."""
        return tuple(env.render() for env in self.envs)

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


def _step_and_reset(env: QueryMutationEnv, action: int) -> Flow:
    """Yield the calls of a step and, if the episode ends, those of the next reset."""
    obs, reward, terminated, truncated, info = yield from env.step_flow(action)
    if terminated or truncated:
        next_obs, next_info = yield from env.reset_flow()
        obs, info = next_obs, {"final_obs": obs, "final_info": info, **next_info}
    return obs, reward, terminated, truncated, info


def _reset(env: QueryMutationEnv, seed: int | None) -> Flow:
    """Yield the calls of a reset; return it in the form of a step."""
    obs, info = yield from env.reset_flow(seed=seed)
    return obs, 0.0, False, False, {"reset": True, **info}


def _reset_as_step(env: QueryMutationEnv) -> Flow:
    """Yield the calls of the reset that takes the place of a step under NEXT_STEP."""
    obs, info = yield from env.reset_flow()
    return obs, 0.0, False, False, info


def _autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    known = {name: one for one in AutoresetMode for name in (one.name, one.value)}
    if isinstance(mode, AutoresetMode):
        return mode
    check_known("autoreset mode", mode, known)
    return known[mode]


def _scheduler(env: QueryMutationEnv, batch_size: int | None, journal: CallJournal | None) -> Scheduler:
    client, encoder, policy = env.client, env.task.encoder, env.retry_policy
    if batch_size is None:
        return SequentialScheduler(client=client, encoder=encoder, retry_policy=policy, journal=journal)
    return PooledScheduler(client=client, encoder=encoder, retry_policy=policy, batch_size=batch_size, journal=journal)


def _seeds(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + index for index in range(num_envs)]
    if len(seed) != num_envs:
        raise ValueError(f"{len(seed)} seeds for {num_envs} environments")
    return list(seed)


def _reset_mask(options: dict[str, Any] | None, num_envs: int) -> NDArray[np.bool_]:
    if not options or "reset_mask" not in options:
        return np.ones(num_envs, dtype=np.bool_)
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (num_envs,) or not mask.any():
        raise ValueError(f"options['reset_mask'] must be a bool array of shape ({num_envs},) with at least one True")
    return mask


# --- gymnasium.make ---------------------------------------------------------------------------------------------------

_shared: dict[SystemSettings, tuple[System, int]] = {}  # running systems of `gymnasium.make` and their number of users


def _share(settings: SystemSettings) -> System:
    system, users = _shared.get(settings) or (System(settings), 0)
    _shared[settings] = (system, users + 1)
    return system


def _release(settings: SystemSettings) -> None:
    system, users = _shared.pop(settings)
    if users > 1:
        _shared[settings] = (system, users - 1)
    else:
        system.close()


def make_env(
    *, render_mode: str | None = None, env_id: int = 0, on_failure: OnFailure = "truncate", **kwargs: Any
) -> QueryMutationEnv:
    """Return one environment on training questions; keywords are the fields of SystemSettings and TaskSettings."""
    check_known("on_failure", on_failure, get_args(OnFailure))  # before anything is started
    system_settings, task_settings = _sort_keywords(kwargs)
    system = _share(system_settings)
    try:
        task = make_task(system, task_settings, split_dataset(task_settings).train)
    except BaseException:
        _release(system_settings)
        raise
    return QueryMutationEnv(
        task,
        client=system.calls.client,
        retry_policy=system.retry_policy,
        env_id=env_id,
        render_mode=render_mode,
        on_failure=on_failure,
        on_close=lambda: _release(system_settings),
    )


def make_vector_env(
    num_envs: int, *, autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP, **kwargs: Any
) -> BatchedQueryMutationEnv:
    """Return N environments that share one task and one pool of `batch_size` workers; see `make_env` for `kwargs`."""
    autoreset_mode = _autoreset_mode(autoreset_mode)
    if num_envs < 1:
        raise ValueError(f"num_envs={num_envs} must be at least 1")
    first = make_env(**kwargs)
    more = [
        QueryMutationEnv(
            first.task,
            client=first.client,
            retry_policy=first.retry_policy,
            env_id=index,
            render_mode=first.render_mode,
            on_failure=first.on_failure,
        )
        for index in range(1, num_envs)
    ]
    batch_size = _sort_keywords(kwargs)[0].batch_size
    return BatchedQueryMutationEnv([first, *more], batch_size, autoreset_mode=autoreset_mode)


def _sort_keywords(kwargs: dict[str, Any]) -> tuple[SystemSettings, TaskSettings]:
    system_names = [field.name for field in fields(SystemSettings)]
    task_names = [field.name for field in fields(TaskSettings)]
    known = [*system_names, *task_names, "render_mode", "env_id", "on_failure"]
    for name in kwargs:
        if name not in known:
            near = nearest(name, known)
            hint = f", did you mean {near!r}?" if near else ""
            raise KeywordError(f"unexpected keyword argument {name!r}{hint}; known: {', '.join(known)}")
    return (
        SystemSettings(**{name: value for name, value in kwargs.items() if name in system_names}),
        TaskSettings(**{name: value for name, value in kwargs.items() if name in task_names}),
    )
