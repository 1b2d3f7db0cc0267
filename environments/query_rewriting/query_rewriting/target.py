"""The models that are asked, shared by all rollouts of a run, and what a rollout asked them."""

from __future__ import annotations

import atexit
import hashlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

from query_mutator.apply import Rewriter
from query_mutator.data import Split
from query_mutator.env.async_flow import run_flow_async
from query_mutator.env.flow import Flow
from query_mutator.env.task import Task
from query_mutator.llm.cancellation import complete_in_thread
from query_mutator.rewards import NoReward
from query_mutator.session.dataset import split_dataset
from query_mutator.session.loading import load_saved
from query_mutator.session.models import OpenModels, open_models
from query_mutator.session.task import make_task
from query_mutator.settings.episode import TaskSettings
from query_mutator.settings.models import ModelSettings
from query_mutator.types import ChatRequest, Completion, ErrorInfo, Question

__all__ = ["CallFailed", "Target", "Usage"]


class CallFailed(Exception):
    """Raised in a rollout when a call to the target or the rewriter failed for good: an error, never a reward."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class Usage:
    """What one rollout asked the target and the rewriter, with every failed attempt, also one that a retry mended."""

    requests: Counter[str] = field(default_factory=Counter)  # by purpose: target, mutate
    tokens: Counter[str] = field(default_factory=Counter)  # prompt, completion
    failed: list[dict[str, Any]] = field(default_factory=list)

    def add(self, request: ChatRequest, completion: Completion) -> None:
        """Count one attempt at a call."""
        self.requests[request.purpose] += 1
        self.tokens += Counter(prompt=completion.prompt_tokens, completion=completion.completion_tokens)
        if completion.error is not None:
            about = {name: value for name, value in asdict(completion.error).items() if value is not None}
            self.failed.append({"purpose": request.purpose, "attempt": request.attempt, **about})


class Target:
    """The open models with the task on a set of questions, without gold; opened at the first use."""

    def __init__(self, config: Any) -> None:
        """Take a QueryRewritingConfig."""
        self._config = config
        self._requests = 0
        self._lock = threading.Lock()  # guards the opening of policies
        self._policies: dict[str, Rewriter] = {}
        self._threads: ThreadPoolExecutor | None = None

    @cached_property
    def models(self) -> OpenModels:
        """Return the models; the first use opens them, in a thread: the embedded server has its own event loop."""
        atexit.register(self.close)
        settings = ModelSettings(**self._config.models.model_dump())
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(open_models, settings, light=True).result()

    @cached_property
    def settings(self) -> TaskSettings:
        """Return the settings of the task; where none are given, operators and forms are those that suit the target."""
        names = [one.name for one in fields(TaskSettings) if one.name in type(self._config).model_fields]
        given = TaskSettings(**{name: getattr(self._config, name) for name in names})
        rules: dict[str, Any] = {"ask": "form", "max_asks": None}
        return replace(given, **rules, max_episode_steps=self._config.max_steps)

    @cached_property
    def split(self) -> Split:
        """Return the questions with gold: train, validation and test."""
        return split_dataset(self.settings)

    @cached_property
    def task(self) -> Task:
        """Return the task without gold: what a policy learns must come from its reward."""
        train = [Question(id=question.id, text=question.text) for question in self.split.train]
        return make_task(self.models, self.settings, train, reward=NoReward(), bank=self.split.train)

    @cached_property
    def identity(self) -> str:
        """Return a digest of the weights that answer and rewrite, so that a resumed run mixes no two models."""
        names = (self.models.target_model, self.models.mutator_model)
        told = " ".join(self.models.calls.identity(name) for name in dict.fromkeys(names))
        return f"{self.models.target_model} {hashlib.sha256(told.encode()).hexdigest()[:12]}"

    def task_on(self, id_: str, text: str) -> Task:
        """Return the task on one question."""
        return self.task.on([Question(id=id_, text=text)])

    def policy(self, path: str) -> Rewriter:
        """Return the policy of a run folder or file on these models; CheckpointError for an unusable one."""
        with self._lock:
            if path not in self._policies:
                self._policies[path] = Rewriter(load_saved(path), self.models)
            return self._policies[path]

    async def run(self, flow: Flow, usage: Usage) -> Any:
        """Return the result of a flow, whose calls go through the one client and are counted in `usage`."""
        return await run_flow_async(
            flow,
            complete=partial(self._complete, usage),
            encoder=self.models.encoder,
            retry_policy=self.models.retry_policy,
        )

    async def _complete(self, usage: Usage, request: ChatRequest) -> Completion:
        """Make one attempt at a call, unless the run has made as many requests as it may."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.models.settings.batch_size, thread_name_prefix="qm-target")
        most = self._config.max_requests
        if most is not None and self._requests >= most:
            completion = Completion.failed("not_asked", f"the run has made {most} requests (max_requests)")
        else:
            self._requests += 1
            completion = await complete_in_thread(self.models.calls.eval_client, request, self._threads)
            usage.add(request, completion)
        return completion

    def close(self) -> None:
        """End calls in flight and stop what was opened, which a later use opens again; idempotent."""
        atexit.unregister(self.close)
        if (models := self.__dict__.get("models")) is not None:
            models.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
        self._threads = None
        self._policies.clear()
        for name in ("models", "settings", "split", "task", "identity"):
            self.__dict__.pop(name, None)
