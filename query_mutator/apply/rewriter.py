"""`Rewriter`: a trained policy with its models, for programs; and its decisions as a generator, for the proxy, asyncio.

flow = rewriter.flow(question)
need = flow.send(None)                # a Call (to mutator or target) or an Encode; send its result, and so on
...                                   # StopIteration.value is the Rewrite
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median_low
from types import SimpleNamespace
from typing import Any, Literal, Self

from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.scheduling import Flow, run_flow, run_flow_async
from query_mutator.errors import BackendError, UsageError
from query_mutator.forms import Framed
from query_mutator.llm.client import complete_in_thread
from query_mutator.registry import check_known
from query_mutator.session.models import OpenModels, open_models
from query_mutator.session.play import Limits, Played, Step, Stopped, greedy, in_pool, play
from query_mutator.session.policy_file import SavedPolicy, acting_settings, acting_task, load_policy, load_saved
from query_mutator.settings import DIRECT, ModelSettings
from query_mutator.types import AS_IS, ChatRequest, Completion, ErrorInfo, Message, Question

_REASONS: dict[Stopped, str] = {
    "max_calls": "max_calls was reached", "deadline": "the deadline was reached", "error": "a call failed"
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A question as rewritten by the policy, and the submitted answer."""

    question: str
    text: str  # the wording whose answer was submitted; the last wording if there is no answer
    form: str = AS_IS  # in which it was asked
    model: str = ""  # that was asked
    messages: tuple[Message, ...] = ()  # of that request: the wording in its form
    options: Mapping[str, Any] = field(default_factory=dict)  # of that request, such as {"stop": ["\n"]}
    temperature: float = 0.0  # of that request
    answer: str | None  # None if the target was not asked, or no call to it succeeded
    p_right: float | None = None  # of the answer; None where it was not learned
    steps: tuple[Step, ...]
    calls: int  # to both models
    seconds: float
    why: str = ""  # the rule that chose the answer, with the numbers it compared
    stopped: Stopped | Literal["policy"] = "policy"  # what ended it
    error: ErrorInfo | None = None  # the failed call that ended it, if one did

    @property
    def operators(self) -> tuple[str, ...]:
        """Return the actions in order."""
        return tuple(step.operator for step in self.steps)

    @property
    def rejected(self) -> tuple[tuple[str, str], ...]:
        """Return operator and guard of each rejected rewrite."""
        return tuple((step.operator, step.guard) for step in self.steps if step.guard is not None)

    @property
    def changes(self) -> tuple[Step, ...]:
        """Return the steps that led to a new pair of wording and form, each pair once."""
        start = (self.question, AS_IS)
        first = {step.asked: step for step in reversed(self.steps) if step.asked != start}
        return tuple(step for step in self.steps if first.get(step.asked) is step)


def _rewrite(engine: EpisodeEngine, episode: Flow) -> Flow:
    """Yield the needs of an episode; return the Rewrite."""
    started = time.monotonic()
    played: Played = yield from episode
    chosen, why = engine.submitted, engine.why()
    text, form = engine.episode.asked if chosen is None else chosen.asked
    request = engine.task.target(0, text, form)
    return Rewrite(
        question=engine.episode.original,
        text=text,
        form=form,
        model=request.model,
        messages=request.messages,
        options=request.options,
        temperature=request.temperature,
        answer=None if chosen is None else chosen.answer,
        p_right=max(engine.episode.p_right, default=None),
        steps=tuple(played.steps),
        calls=engine.episode.calls,
        seconds=time.monotonic() - started,
        why=f"{why}; {_REASONS[played.stopped]}" if why and played.stopped else why,
        stopped=played.stopped or "policy",
        error=played.error,
    )


class Rewriter:
    """Rewrites questions with a trained policy and returns the answers it submits; thread-safe.

        with Rewriter.load("runs/latest", ollama_url="http://127.0.0.1:11434") as rewriter:
            print(rewriter.rewrite("plz sort my lisst").answer)

    A context manager: `close` ends calls in flight and stops what `load` started.
    """

    _threads: ThreadPoolExecutor | None = None
    _threads_of = 0  # the process that started them
    _is_closed = False

    def __init__(self, saved: SavedPolicy, models: OpenModels, *, call_price: float | None = None) -> None:
        """Take a policy and its open models, which `close` closes; `load` is the usual way."""
        self.saved, self.models = saved, models
        self.call_price = call_price
        self.task = acting_task(saved, models)  # the rules of its episodes, with operators and calls
        self.policy = load_policy(saved, self.task)
        self._ids = {question.text: question.id for question in self.task.train_questions}

    @classmethod
    def load(
        cls,
        path: str | Path = "runs/latest",
        *,
        plugins: Sequence[str] = (),
        call_price: float | None = None,
        **settings: Any,
    ) -> Self:
        """Load what won in a run folder, or a `.qm` file, with its models, by default those of the training.

        `settings` are fields of ModelSettings: `ollama_url`, `openai_url`, `gguf`, `backend`, `target_model`,
        `mutator_model`, `batch_size` (calls in flight), `timeout_s` and others. `plugins` are loaded first and replace
        those with the same file name in training; `call_price` is the price of a call that the policy sees. By default
        nothing is cached on disk, and calls to a server that is down fail (`cache`, `wait_for_server_s`). Raises
        CheckpointError, EncoderError, UsageError or BackendError with one line that says what to do: UsageError for a
        server, encoder or plugin of the training that was not named again; none is taken from the policy's file.
        """
        for name in settings:
            check_known("setting", name, [field.name for field in fields(ModelSettings)])
        saved = load_saved(path, plugins, best=True)
        given = {"cache": DIRECT.cache, "wait_for_server_s": DIRECT.wait_for_server_s, **settings}
        given = {name: value for name, value in given.items() if value is not None}
        models = open_models(acting_settings(saved.system, given, saved=saved))
        try:
            return cls(saved, models, call_price=call_price)
        except BaseException:
            models.close()
            raise

    @property
    def target_model(self) -> str:
        """Return the name of the model that answers."""
        return self.models.target_model

    @property
    def asks_once(self) -> bool:
        """Return whether the policy makes all rewrites before it asks, without seeing an answer."""
        rules = self.task.rules
        return rules.policy_asks and (rules.max_asks == 1 or bool(getattr(self.policy, "asks_once", False)))

    def rewrite(self, question: str, *, max_calls: int | None = None, deadline_s: float | None = None) -> Rewrite:
        """Rewrite a question with sequential calls in this thread; BackendError if no answer was received.

        When `max_calls` or `deadline_s` (seconds) is reached, the best answer so far is submitted.
        """
        flow = self.flow(question, limits=Limits(max_calls=max_calls, deadline_s=deadline_s))
        return _answered(
            run_flow(
                flow,
                client=self.models.calls.eval_client,
                encoder=self.models.encoder,
                retry_policy=self.models.retry_policy,
            )
        )

    def rewrite_many(
        self,
        questions: Sequence[str],
        *,
        batch_size: int | None = None,
        max_calls: int | None = None,
        deadline_s: float | None = None,
    ) -> list[Rewrite]:
        """Rewrite questions with up to `batch_size` calls in flight; the `batch_size` of `load` is default and maximum.

        A question without an answer, such as an empty one, has `answer` None and an `error`.
        """
        most = self.models.settings.batch_size
        size = most if batch_size is None else min(batch_size, most)
        limits = Limits(max_calls=max_calls, deadline_s=deadline_s)
        found = {index: _failed(question, why) for index, question in enumerate(questions) if (why := _fault(question))}
        flows = ((index, self.flow(one, limits=limits)) for index, one in enumerate(questions) if index not in found)
        caller: Any = SimpleNamespace(
            client=self.models.calls.eval_client, retry_policy=self.models.retry_policy, batch_size=size
        )
        with closing(in_pool(caller, self.models.encoder, lambda: next(flows, None), at_once=2 * size)) as finished:
            found |= finished
        return [found[index] for index in range(len(questions))]

    async def arewrite(
        self, question: str, *, max_calls: int | None = None, deadline_s: float | None = None
    ) -> Rewrite:
        """Rewrite a question without blocking the event loop; see `rewrite`.

        Cancelling the task cancels its call in flight, so that the server stops working on it.
        """
        limits = Limits(max_calls=max_calls, deadline_s=deadline_s)
        return _answered(
            await run_flow_async(
                await asyncio.to_thread(self.flow, question, limits=limits),  # it encodes the question
                complete=self.complete,
                encoder=self.models.encoder,
                retry_policy=self.models.retry_policy,
            )
        )

    def flow(
        self,
        question: str,
        *,
        limits: Limits | None = None,
        first_answer: str | None = None,
        asks_at_end: bool = True,
        usable: Callable[[Framed], bool] | None = None,
    ) -> Flow:
        """Return the decisions on a question as a flow, for your own driver; its result is the Rewrite.

        `first_answer` is the target's answer to the original question, if it is known. Without `asks_at_end` a policy
        that asks once leaves the call to the caller: the Rewrite has the wording to ask, no answer, and does not count
        the call; UsageError for a policy that reads answers. A form whose request is not `usable` leaves the question
        unchanged. Making a flow encodes the question; UsageError for an empty one.
        """
        self._check(question)
        if not asks_at_end and not self.asks_once:
            raise UsageError(
                "asks_at_end=False needs a policy that rewrites without an answer: one trained with --ask form "
                "--max-asks 1, or a plan with one answer"
            )
        task = self.task.on([Question(id=self._ids.get(question, ""), text=question)])
        if usable is not None:
            task = replace(task, forms=tuple(form.where(usable) for form in task.forms))
        player = greedy(self.policy)
        engine = EpisodeEngine.open(task, 0, observes=player.observes)
        engine.episode.call_price = median_low(task.rules.call_price) if self.call_price is None else self.call_price
        asks: dict[str, Any] = {"asks_at_end": asks_at_end, "asks_when_stopped": asks_at_end}
        return _rewrite(engine, play(player, engine, limits=limits, first_answer=first_answer, **asks))

    def close(self) -> None:
        """End calls in flight and stop what was started; idempotent."""
        self._is_closed = True
        self.models.calls.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)  # calls that wait there fail, as the client is closed
        self.models.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def complete(self, request: ChatRequest) -> Completion:
        """Make a call in a thread of this process; threads started before a fork are gone."""
        if self._is_closed:
            return Completion.failed("cancelled", "the Rewriter was closed")
        if self._threads is None or self._threads_of != os.getpid():
            self._threads_of = os.getpid()
            self._threads = ThreadPoolExecutor(self.models.settings.batch_size, thread_name_prefix="qm-rewrite")
        return await complete_in_thread(self.models.calls.eval_client, request, self._threads)

    def _check(self, question: str) -> None:
        if self._is_closed:
            raise UsageError("this Rewriter was closed; load the policy again")
        if fault := _fault(question):
            raise UsageError(fault)


def _fault(question: str) -> str:
    """Return why a question cannot be asked, "" if it can."""
    if not question.strip():
        return "the question is empty; give a text"
    is_broken = any("\ud800" <= letter <= "\udfff" for letter in question)
    return "the question has half a character (a lone surrogate); decode it as UTF-8" if is_broken else ""


def _failed(question: str, why: str) -> Rewrite:
    """Return the Rewrite of a question that cannot be asked."""
    error = ErrorInfo(kind="request", message=why)
    return Rewrite(question=question, text=question, answer=None, steps=(), calls=0, seconds=0.0, error=error)


def _answered(rewrite: Rewrite) -> Rewrite:
    """Return a rewrite with an answer; BackendError for one without."""
    if rewrite.answer is None:
        reason = rewrite.error
        raise BackendError(
            f"no answer: {reason or 'the deadline was reached'}", kind=reason.kind if reason else "timeout"
        )
    return rewrite
