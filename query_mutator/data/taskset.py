"""A taskset of the package `verifiers` as questions: `verifiers:PACKAGE`, `verifiers:PACKAGE(size=50,num_tasks=9)`.

The prompts of its tasks are the questions and their rewards the score, so tasks must be of a single turn: no tools, no
container, no judge. Opening a taskset imports the package that the user named. A question alone, which may come from
somebody else's file, imports nothing: its taskset must have been opened in this process.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import importlib
import inspect
import itertools
import math
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from query_mutator.data.reasoning_gym import GUESSES
from query_mutator.errors import DatasetError, UsageError, reason_of
from query_mutator.types import VERIFIERS, Question

__all__ = ["PREFIX", "NotScored", "score_of", "taskset_questions"]

PREFIX = f"{VERIFIERS}:"
SIZE = 1000  # most tasks without this option
SCORING_S = 60.0  # for one answer
_FORM = f"{PREFIX}PACKAGE or {PREFIX}PACKAGE(size=50, OPTION=VALUE)"
_SPEC = re.compile(r"(?P<package>\w[\w-]*)\s*(?:\((?P<options>.*)\))?", re.DOTALL)
_PROBED = 8  # tasks whose rewards are tried
_ROUNDING = 1e-6

#: Opened tasksets: written as in the ids of their questions -> their tasks.
_opened: dict[str, list[Any]] = {}


class NotScored(Exception):
    """Raised for an answer that a task's rewards gave no score; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    """A taskset, and the settings that it is loaded with."""

    package: str
    size: int
    options: Mapping[str, Any]

    def __str__(self) -> str:
        options = {"size": self.size, **self.options}
        return f"{self.package}({','.join(f'{key}={value!r}' for key, value in sorted(options.items()))})"


def taskset_questions(spec: str) -> list[Question]:
    """Return the questions of `verifiers:PACKAGE(size=50)`, in the order of the taskset; import the package.

    DatasetError for a package without a taskset, for options that it does not have, for tasks of more than one turn
    and for rewards that accept wrong answers.
    """
    read = _read(spec.removeprefix(PREFIX))
    name = str(read)
    _opened[name] = tasks = list(itertools.islice(_tasks(read), read.size))
    if not tasks:
        raise DatasetError(f"{name}: the taskset has no tasks")
    questions = [_question(f"{name}#{index}", read.package, task) for index, task in enumerate(tasks)]
    _check_rewards(name, questions[:_PROBED])
    return questions


def score_of(question: Question, reply: str) -> float:
    """Return the score in [0, 1] of a reply by the rewards of the question's task.

    It is the mean of the task's rewards by their weights; below 0, as penalties can make it, it counts as 0. NotScored
    for a reward that fails or exceeds 1; DatasetError for a question of a taskset that was not opened.
    """
    task = _task(question)
    if threading.current_thread() is not threading.main_thread():  # there some rewards give 0 to right answers
        raise NotScored(f"{question.id}: rewards of verifiers run in the main thread only")
    try:
        trace = _trace(task, reply)
        asyncio.run(asyncio.wait_for(task.score(trace), SCORING_S))
    except Exception as error:
        raise NotScored(f"{question.id}: its rewards failed ({type(error).__name__}: {reason_of(error)})") from error
    return _mean(question.id, trace.rewards.values())


def _mean(id_: str, rewards: Any) -> float:
    """Return the mean of the rewards by their weights; NotScored for one that is no score."""
    if any(reward is None for reward in rewards):
        raise NotScored(f"{id_}: its rewards gave no score")
    most = float(sum(max(0.0, reward.weight) for reward in rewards))
    total = float(sum(reward.value for reward in rewards))
    if not most:
        raise NotScored(f"{id_}: no reward has a weight above 0")
    if not math.isfinite(total) or total > most + _ROUNDING or any(reward.score > 1 + _ROUNDING for reward in rewards):
        raise NotScored(f"{id_}: a reward exceeds 1; a score must be from 0 to 1")
    return min(1.0, max(0.0, total / most))


# --- opening a taskset -----------------------------------------------------------------------------------------------


def _read(text: str) -> _Spec:
    found = _SPEC.fullmatch(text.strip())
    try:
        call = ast.parse(f"_({found['options'] or ''})", mode="eval").body if found else None
        if found is None or not isinstance(call, ast.Call) or call.args or not all(one.arg for one in call.keywords):
            raise ValueError
        options = {str(option.arg): ast.literal_eval(option.value) for option in call.keywords}
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise DatasetError(f"{PREFIX}{text[:200]}: not {_FORM}") from None
    size = options.pop("size", SIZE)
    if type(size) is not int or size < 1:
        raise DatasetError(f"{PREFIX}{text[:200]}: size={size!r} must be a whole number from 1")
    return _Spec(package=found["package"], size=size, options=options)


def _tasks(spec: _Spec) -> Iterator[Any]:
    """Yield the tasks of a taskset, each checked to be of a single turn."""
    vf, name = _package(), str(spec)
    try:
        config = vf.taskset_config_type(spec.package).model_validate({"id": spec.package, **spec.options})
        taskset = vf.load_taskset(config)
        is_plain = vf.environment_class(spec.package) is vf.SingleAgentEnv
        has_tools = bool(taskset.toolsets(config))
    except ModuleNotFoundError as error:
        raise DatasetError(f"{name}: {reason_of(error)}") from None
    except Exception as error:  # a package's own code
        raise DatasetError(f"{name}: not possible ({_reason(error)}); choose other options") from None
    if not is_plain or has_tools:
        raise DatasetError(f"{name}: has {'tools' if has_tools else 'an environment of its own'}: not a single turn")
    for task in taskset:
        if reason := _more_than_a_turn(vf, task):
            raise DatasetError(f"{name}: task {task.data.idx} {reason}: not a single turn that rewards score offline")
        yield task


def _reason(error: Exception) -> str:
    """Return one line: of pydantic's report, what is wrong with each option."""
    faults = error.errors() if hasattr(error, "errors") else []
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in faults) or reason_of(error)


def _more_than_a_turn(vf: Any, task: Any) -> str:
    """Return why a task is more than a prompt, a reply and rewards that read the reply, "" if it is not."""
    kind = type(task)
    if kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize or kind.NEEDS_CONTAINER:
        return "prepares a runtime"
    if task.data.image or task.toolsets(task.config):
        return "needs a container or tools"
    if task.config.judges:
        return "asks a judge"
    rewards = task.hooks("reward")
    if not rewards or any(_needs_runtime(reward) for reward in rewards):
        return "has no rewards" if not rewards else "has a reward that needs a runtime"
    return "" if _prompt(task.data) else "has no prompt of one message"


def _needs_runtime(reward: Any) -> bool:
    runtime = inspect.signature(reward).parameters.get("runtime")
    return runtime is not None and runtime.default is inspect.Parameter.empty


def _prompt(data: Any) -> str:
    """Return the text of a prompt, after the system prompt as harnesses without one put it; "" for several messages."""
    messages = [data.prompt] if isinstance(data.prompt, str) else [one.content for one in data.prompt or ()]
    roles = [one.role for one in data.prompt or ()] if not isinstance(data.prompt, str) else ["user"]
    if roles not in (["user"], ["system", "user"]) or not all(isinstance(one, str) for one in messages):
        return ""
    return "\n\n".join(filter(None, [data.system_prompt, *messages])).strip()


def _question(id_: str, package: str, task: Any) -> Question:
    text, answer = _prompt(task.data), getattr(task.data, "answer", None)  # by convention the gold
    gold = answer if isinstance(answer, str) and answer else None
    about = f"{package} {hashlib.sha256(text.encode()).hexdigest()[:16]}"  # equal prompts are in one part of the split
    accept = (gold,) if gold else ()
    return Question(id=id_, text=text, accept=accept, reference=gold, tags=(VERIFIERS, package), about=about)


def _check_rewards(name: str, questions: list[Question]) -> None:
    """Raise for rewards that give full marks to one guess for most tasks."""
    for guess in GUESSES:
        asked = [question for question in questions if guess not in question.accept]
        if 2 * sum(_is_right(question, guess) for question in asked) > len(asked):
            raise DatasetError(f"{name}: its rewards give full marks to the guess {guess!r}; choose another taskset")


def _is_right(question: Question, reply: str) -> bool:
    try:
        return score_of(question, reply) >= 1
    except NotScored:
        return False


# --- scoring ---------------------------------------------------------------------------------------------------------


def _task(question: Question) -> Any:
    """Return the task of a question; DatasetError where it was not opened, or is another one now."""
    name, _, index = question.id.rpartition("#")
    tasks = _opened.get(name, [])
    if not index.isdecimal() or int(index) >= len(tasks):
        raise DatasetError(f"question {question.id[:80]}: give --dataset {PREFIX}PACKAGE to score its answers")
    task = tasks[int(index)]
    if _prompt(task.data) != question.text:
        raise DatasetError(f"question {question.id} is another one in the package that is installed; install its")
    return task


def _trace(task: Any, reply: str) -> Any:
    """Return the trace of a finished rollout: the prompt and the reply."""
    vf = _package()
    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    trace = vf.Trace(task=about, agent=vf.AgentInfo(config=vf.AgentConfig()))
    prompt = [vf.UserMessage(content=task.data.prompt)] if isinstance(task.data.prompt, str) else [*task.data.prompt]
    if task.data.system_prompt:
        prompt.insert(0, vf.SystemMessage(content=task.data.system_prompt))
    messages = [*prompt, vf.AssistantMessage(content=reply)]
    for index, message in enumerate(messages):
        is_reply = index == len(prompt)
        trace.nodes.append(vf.MessageNode(parent=index - 1 if index else None, message=message, sampled=is_reply))
    trace.stop("agent_completed")
    trace.ok = True
    return trace


def _package() -> Any:
    """Return the module `verifiers.v1`; UsageError without it."""
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise UsageError(
            f"--dataset {PREFIX}PACKAGE needs verifiers ({error}); pip install 'query-mutator[verifiers]'"
        ) from None
