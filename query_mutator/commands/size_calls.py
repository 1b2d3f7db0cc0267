"""`qm size calls`: probe a server, and say which --batch-size and --num-processes it can use."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from query_mutator.errors import BackendError, UsageError
from query_mutator.llm.build import ollama_url
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.probe import probe_server, slots_advice
from query_mutator.sizing.calls import cache_line, size_calls


@dataclass(frozen=True, kw_only=True)
class SizeCallsFlags:
    """Probe a model server with a few short calls, and say which --batch-size and --num-processes it can use."""

    ollama_url: str | None = None
    """Address of the server; else OLLAMA_HOST, else http://127.0.0.1:11434."""
    target_model: str | None = None
    """The model to ask; by default the first one installed."""
    width: int = 16
    """Calls that go out together; more slots than that cannot be seen."""
    max_tokens: int = 64
    """Longest reply of a probe's call; give what runs use, as the time of a call grows with it."""
    num_ctx: int | None = None
    """Context of a call in tokens, for the memory of the caches; by default that of the loaded model."""

    def __post_init__(self) -> None:
        if not 2 <= self.width <= 1024:
            raise ValueError(f"width={self.width} must be between 2 and 1024; the usual value is 16")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1; the usual value is 64")
        if self.num_ctx is not None and self.num_ctx < 1:
            raise ValueError(f"num_ctx={self.num_ctx} must be at least 1; the usual value is 4096")


def size_server(flags: SizeCallsFlags) -> None:
    """Print slots, time of a call and flags; BackendError when the server does not answer."""
    with closing(OllamaBackend(ollama_url(flags.ollama_url), timeout_s=60, pool_size=flags.width)) as server:
        models = server.models()
        if not (flags.target_model or models):
            raise UsageError(f"{server.url} has no model; ollama pull one, or name it with --target-model")
        model = server.require_model(flags.target_model or models[0])
        found = probe_server(server, model, width=flags.width, max_tokens=flags.max_tokens)
        info, num_ctx = server.model_info(model), flags.num_ctx or server.loaded_context(model)
    if found.error is not None:
        raise BackendError(f"the probe of {model} failed ({found.error})")
    advice = size_calls(found.slots, width=found.width, service_s=found.service_s)
    if advice is None:
        print(f"{model}: calls are too short to tell slots from; benchmark_batching.py compares batch sizes")
        return
    print(f"{model}: {advice}")
    if found.slots is not None and found.slots < flags.width and (line := slots_advice(found.slots, flags.width)):
        print(line)
    print(cache_line(info, num_ctx=num_ctx, slots=advice.batch_size))
    print("beyond the slots calls only wait; benchmark_batching.py shows the same as a table")
