"""How many calls a server really works on at once, and how long one takes: inferred from a short probe.

One call warms the model up, one is measured alone, then `width` more go out together, all with the same words so that
they take the same time. Those that got a slot at once were not held back; the others waited for a whole call or more.
The server's own durations tell which is which; a server that reports none is judged by what its calls took beyond the
one that was alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

from query_mutator.llm.client import Client
from query_mutator.llm.counted import CallTotals
from query_mutator.types import ChatRequest, Completion, ErrorInfo

PROBE_WIDTH = 8
PROBE_TOKENS = 16
PROBE_TEXT = "Count slowly upwards from 1000, one number a line."
TELLING_SERVICE_S = 0.002  # calls shorter than that are over before the next one comes


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a probe found; `slots` is None when it could not tell, `width` when there may be more."""

    slots: int | None
    width: int  # calls that went out together
    service_s: float | None  # median time a call was worked on
    error: ErrorInfo | None = None  # why nothing was found


def probe_server(
    client: Client, model: str, *, width: int = PROBE_WIDTH, budget_s: float = 30.0, max_tokens: int = PROBE_TOKENS
) -> Probe:
    """Return slots and service time of a server; no further calls begin once `budget_s` is spent.

    `client` must let `width` calls through at once, share none and try none again, as `ClientStack.limit` does; its
    time-out bounds the last calls.
    """
    began = time.monotonic()
    request = ChatRequest.user(PROBE_TEXT, model=model, purpose="judge", max_tokens=max_tokens, seed=0)
    for _ in ("loads the model", "is alone"):
        alone = client.complete(request)
        if alone.error is not None:
            return Probe(slots=None, width=width, service_s=None, error=alone.error)
    if time.monotonic() - began > budget_s / 2:
        return Probe(slots=None, width=width, service_s=_service_s(alone))
    together = _together(client, request, width)
    failed = next((completion.error for completion in together if completion.error is not None), None)
    if failed is not None:
        return Probe(slots=None, width=width, service_s=_service_s(alone), error=failed)
    service_s = median(map(_service_s, together)) if _has_times(alone) else alone.latency_s
    return Probe(slots=infer_slots(together, alone=alone), width=width, service_s=service_s)


def infer_slots(together: Sequence[Completion], *, alone: Completion) -> int | None:
    """Return how many of the calls that went out together were worked on at once; None when calls are too short.

    A call counts as held back when it waited for more than half of what a call takes.
    """
    service_s = median(map(_service_s, together)) if _has_times(alone) else alone.latency_s
    if service_s < TELLING_SERVICE_S:
        return None
    waits_s = [
        completion.queue_wait_s if _has_times(completion) else completion.latency_s - service_s
        for completion in together
    ]
    return max(1, sum(wait_s < service_s / 2 for wait_s in waits_s))


def slots_advice(slots: int | None, batch_size: int, *, kind: str = "ollama") -> str | None:
    """Return one line for a user whose server works on fewer calls at once than are sent, else None."""
    if slots is None or slots >= batch_size:
        return None
    calls = "1 call" if slots == 1 else f"{slots} calls"
    fix = f"OLLAMA_NUM_PARALLEL={batch_size} ollama serve"
    if kind == "openai":
        fix = f"start it with {batch_size} slots (vLLM --max-num-seqs, llama-server --parallel)"
    lost = "batching cannot help" if slots == 1 else f"more than {slots} at once only wait"
    return f"server answers about {calls} at a time: {fix} (until then {lost})"


def slots_under_load(totals: CallTotals, *, in_flight: int) -> int | None:
    """Return how many calls a server works on at once while `in_flight` are kept there; None when it does not tell.

    Of n calls on s slots, n - s wait: wait / work = n / s - 1.
    """
    if totals.service_s < TELLING_SERVICE_S * max(1, totals.calls):
        return None
    return max(1, round(in_flight / (1 + totals.queue_wait_s / totals.service_s)))


def _together(client: Client, request: ChatRequest, width: int) -> list[Completion]:
    start = threading.Barrier(width)

    def call(_: int) -> Completion:
        start.wait()
        return client.complete(request)

    with ThreadPoolExecutor(width, thread_name_prefix="qm-probe") as pool:
        return list(pool.map(call, range(width)))


def _has_times(completion: Completion) -> bool:
    return completion.total_s > 0


def _service_s(completion: Completion) -> float:
    """Return the seconds the server worked on a call; what the client waited where the server does not tell."""
    worked_s = completion.prompt_eval_s + completion.eval_s
    return worked_s if _has_times(completion) else completion.latency_s
