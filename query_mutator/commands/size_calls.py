"""`qm size calls`: probe a server for the --batch-size and --num-processes that it can use."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from query_mutator.cli.common import check_values
from query_mutator.errors import BackendError, UsageError
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.probe import probe_server, slots_advice
from query_mutator.sizing.collecting import cache_line, size_calls

__all__ = ["SizeCallsFlags", "size_server"]


@dataclass(frozen=True, kw_only=True)
class SizeCallsFlags:
    """Probe a model server with a few short calls, and print the --batch-size and --num-processes that it can use."""

    ollama_url: str | None = None
    """Address of the server; else OLLAMA_HOST, else http://127.0.0.1:11434."""
    target_model: str | None = None
    """The model to call; by default the first one installed."""
    width: int = 16
    """Calls to send at once; more slots than that cannot be seen."""
    max_tokens: int = 64
    """Longest reply of a probe call; give what runs use, as a call's time grows with it."""
    num_ctx: int | None = None
    """Context of a call in tokens, for the memory of the caches; by default that of the loaded model."""

    def __post_init__(self) -> None:
        if not 2 <= self.width <= 1024:
            raise ValueError(f"--width {self.width} must be between 2 and 1024; the usual value is 16")
        check_values(self, "max_tokens num_ctx", low=1)


def size_server(flags: SizeCallsFlags) -> None:
    """Print slots, time of a call and flags; BackendError if the server does not answer."""
    with closing(OllamaBackend(OllamaBackend.address(flags.ollama_url), timeout_s=60, pool_size=flags.width)) as server:
        models = server.models()
        if not (flags.target_model or models):
            raise UsageError(f"{server.url} has no model; {server.more_models}, or name one with --target-model")
        model = server.require_model(flags.target_model or models[0])
        found = probe_server(server, model, width=flags.width, max_tokens=flags.max_tokens)
        info, num_ctx = server.model_info(model), flags.num_ctx or server.loaded_context(model)
    if found.error is not None:
        raise BackendError(f"the probe of {model} failed ({found.error}); check the server with qm doctor")
    advice = size_calls(found.slots, width=found.width, service_s=found.service_s)
    if advice is None:
        print(f"{model}: calls are too short to count slots; benchmark_batching.py compares batch sizes")
        return
    print(f"{model}: {advice}")
    if (
        found.slots is not None
        and found.slots < flags.width
        and (line := slots_advice(found.slots, flags.width, server=server))
    ):
        print(line)
    print(cache_line(info, num_ctx=num_ctx, slots=advice.batch_size))
    print("calls beyond the slots only wait; benchmark_batching.py shows the same as a table")
