"""`qm size calls`: probe a server for the --batch-size and --num-processes that it can use."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from query_mutator.bounds import Tokens
from query_mutator.errors import BackendError, UsageError
from query_mutator.lab.sizing.collecting import cache_line, size_calls
from query_mutator.llm.backends import ServerFlags, choose_backend
from query_mutator.llm.probe import PROBE_TOKENS, PROBE_WIDTH, measure_calls, slots_advice
from query_mutator.llm.stack import build_client


@dataclass(frozen=True, kw_only=True)
class SizeCallsFlags(ServerFlags):
    """Probe model servers with a few short calls, and print the --batch-size and --num-processes that they can use."""

    target_model: str | None = None
    """The model to call; by default the first one installed."""
    width: Annotated[int, Ge(2), Le(1024)] = PROBE_WIDTH
    """Calls to send at once; more slots than that cannot be seen."""
    max_tokens: Tokens = PROBE_TOKENS
    """Longest reply of a probe call; give what runs use, as a call's time grows with it."""


def size_server(flags: SizeCallsFlags) -> None:
    """Print slots, time of a call and flags; BackendError if the server does not answer."""
    backend, urls = choose_backend(flags.backend, flags.urls)
    with closing(build_client(urls, flags.client_settings(batch_size=flags.width), backend=backend)) as stack:
        model = flags.target_model or next(iter(stack.text_models()), None)
        if model is None:
            more = stack.backend_class.more_models
            raise UsageError(f"{stack.backend.url} has no model; {more}, or name one with --target-model")
        stack.require_models([model])
        found = measure_calls(stack.limit, stack.servers, model, width=flags.width, max_tokens=flags.max_tokens)
        info, num_ctx = stack.model_info(model), flags.num_ctx or stack.context(model)
    if found.error is not None:
        raise BackendError(f"the probe of {model} failed ({found.error}); check the server with qm doctor")
    advice = size_calls(found.slots, width=found.width, service_s=found.service_s)
    if advice is None:
        print(f"{model}: calls are too short to count slots; benchmark_batching.py compares batch sizes")
        return
    print(f"{model}: {advice}")
    if line := slots_advice(found.slots, flags.width, server=stack.backend_class, is_reported=found.width is None):
        print(line)
    print(cache_line(info, num_ctx=num_ctx, slots=advice.batch_size))
    print("calls beyond the slots only wait; benchmark_batching.py shows the same as a table")
