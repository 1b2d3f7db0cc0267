"""Probe a server with a few short calls: slots, speed, context, reloads.

How many calls it works on at once, and how long one takes: what it reports, else inferred from a short probe.

One call warms the model up, one is measured alone, then `width` more go out together (as many as slots where the server
reports them), all with the same words so that they take the same time; where one slot would need more than the budget
for them, they are shortened. Calls that got a slot at once did not wait; the others waited for a whole call or more.
The server's own durations separate the two; without them, the time beyond that of the call alone does.

reload_sentence, context_sentence     a sentence each, for `qm doctor`
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median

from query_mutator.llm.cache import CallTotals
from query_mutator.llm.client import Client, ModelServer
from query_mutator.settings import Sampling
from query_mutator.types import ChatRequest, Completion, ErrorInfo

PROBE_WIDTH = 16
PROBE_TOKENS = 64
FEWEST_TOKENS = 8  # of the calls that are sent together
PROBE_TEXT = "Count slowly upwards from 1000, one number a line."
MIN_SERVICE_S = 0.002  # shorter calls are over before the next one arrives

_LOAD_S = 0.3  # a call to a loaded model reports some milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The result of a probe; `slots` is None when it was inconclusive, `width` when there may be more."""

    slots: int | None
    width: int | None  # calls that went out together; None when the server reports its slots
    service_s: float | None  # median time the server worked on a call
    error: ErrorInfo | None = None  # why there is no result


def reported_slots(servers: Sequence[ModelServer], model: str) -> int | None:
    """Return the slots of all servers together, None unless each reports its own."""
    counts = [server.slots(model) for server in servers]
    return None if None in counts else sum(filter(None, counts))


def measure_calls(
    client: Client,
    servers: Sequence[ModelServer],
    model: str,
    *,
    width: int = PROBE_WIDTH,
    budget_s: float = 30.0,
) -> Probe:
    """Return slots and service time of servers: what they report, else what `width` calls at once show.

    `client` must let `width` calls through at once, share none and retry none, as `ClientStack.limit` does; its timeout
    bounds the last calls, and none starts once `budget_s` is spent. The time of a call is that next to the others. `qm
    doctor` and `benchmark_batching.py` both measure with it.
    """
    reported = reported_slots(servers, model)
    request = ChatRequest.user(PROBE_TEXT, model=model, max_tokens=PROBE_TOKENS, seed=0)
    for _ in ("loads the model", "is alone"):
        alone = client.complete(request)
        if alone.error is not None:
            return Probe(slots=None, width=width, service_s=None, error=alone.error)
    at_once, seen = (width, width) if reported is None else (min(reported, width), None)
    left_s = budget_s - 2 * alone.latency_s
    if left_s < budget_s / 2:
        return Probe(slots=reported, width=seen, service_s=_service_s(alone))
    # Calls that would take longer than the budget on one slot are shortened.
    share = min(1.0, left_s / max(1e-9, at_once * alone.latency_s))
    shorter = replace(request, max_tokens=max(FEWEST_TOKENS, int(share * PROBE_TOKENS)))
    basis = alone if share == 1 else client.complete(shorter)
    replies = together(client, [shorter] * at_once) if basis.ok else [basis]
    failed = next((completion.error for completion in replies if completion.error is not None), None)
    if failed is not None:
        return Probe(slots=None, width=width, service_s=_service_s(alone), error=failed)
    busy = 1.0  # how much longer a call takes next to the others
    if reported is not None or _has_times(basis):
        busy = median(map(_service_s, replies)) / max(1e-9, _service_s(basis))
    slots = infer_slots(replies, alone=basis) if reported is None else reported
    return Probe(slots=slots, width=seen, service_s=busy * _service_s(alone))


def infer_slots(replies: Sequence[Completion], *, alone: Completion) -> int | None:
    """Return how many of the calls sent at once the server worked on at once; None when calls are too short.

    A call counts as queued when it waited for more than half of the time that a call takes.
    """
    service_s = median(map(_service_s, replies)) if _has_times(alone) else alone.latency_s
    if service_s < MIN_SERVICE_S:
        return None
    waits_s = [
        completion.queue_wait_s if _has_times(completion) else completion.latency_s - service_s
        for completion in replies
    ]
    return max(1, sum(wait_s < service_s / 2 for wait_s in waits_s))


def slots_advice(
    slots: int | None, batch_size: int, *, server: ModelServer | type[ModelServer], is_reported: bool = False
) -> str | None:
    """Return one line for a user whose server works on fewer calls at once than are sent, else None.

    What batching loses is said only where the server reports its slots, or the time that calls queued.
    """
    if slots is None or slots >= batch_size:
        return None
    calls = "1 call" if slots == 1 else f"{slots} calls"
    advice = f"server answers {'' if is_reported else 'about '}{calls} at a time: {server.more_slots}"
    if is_reported or server.reports_queue:
        lost = "batching cannot help" if slots == 1 else f"more than {slots} at once only wait"
        advice += f" (until then {lost})"
    return advice.format(slots=batch_size)


def slots_under_load(totals: CallTotals, *, in_flight: int) -> int | None:
    """Return how many calls a server works on at once while `in_flight` are kept there; None when calls are too short.

    Of n calls on s slots, n - s wait: wait / work = n / s - 1.
    """
    if totals.service_s < MIN_SERVICE_S * max(1, totals.calls):
        return None
    return max(1, round(in_flight / (1 + totals.queue_wait_s / totals.service_s)))


def together(client: Client, requests: Sequence[ChatRequest]) -> list[Completion]:
    """Return the replies to requests that are sent at the same moment."""
    start = threading.Barrier(len(requests))

    def call(request: ChatRequest) -> Completion:
        start.wait()
        return client.complete(request)

    with ThreadPoolExecutor(len(requests), thread_name_prefix="qm-probe") as pool:
        return list(pool.map(call, requests))


def _has_times(completion: Completion) -> bool:
    return completion.total_s > 0


def _service_s(completion: Completion) -> float:
    """Return the seconds the server worked on a call, or what the client waited if the server reports no times."""
    worked_s = completion.prompt_eval_s + completion.eval_s
    return worked_s if _has_times(completion) else completion.latency_s


def reload_sentence(server: ModelServer, models: Sequence[str]) -> str:
    """Return whether calls to two models in turns load one of them again."""
    first, last = models[0], models[-1]
    if first != last:
        for model in (first, last, first):
            reply = server.complete(ChatRequest.user("Hello", model=model, max_tokens=1))
        if reply.load_s > _LOAD_S:
            return (
                f"{first} was loaded again ({reply.load_s:.1f} s) after a call to {last}, and so in every step: use "
                f"one model for both, or {server.more_loaded}"
            )
    if not server.has_runner_options:
        return "none, calls set no options of the loaded model"
    return "none now; a call of any client with another num_ctx, num_batch or num_gpu loads the model again"


def context_sentence(server: ModelServer, model: str, *, reply_tokens: int = Sampling.target_max_tokens) -> str:
    """Return how many tokens a call has, how many the model could have, and what the longest reply leaves of them."""
    context = server.context(model)
    if context is None:
        return "unknown, so truncated prompts cannot be detected; give --num-ctx"
    info = server.model_info(model).items()
    limit = max((value for key, value in info if key.endswith(".context_length") and isinstance(value, int)), default=0)
    more = f" of the model's {limit}" if limit > context else ""
    if context <= reply_tokens:
        return f"{context} tokens{more}: too few for a reply of {reply_tokens}; {server.more_context}"
    return f"{context} tokens{more}: a reply of {reply_tokens} leaves {context - reply_tokens} for a prompt"
