"""`qm size calls`: probe a server for the --batch-size and --num-processes that it can use."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from query_mutator.cli.common import check_values
from query_mutator.errors import BackendError, UsageError
from query_mutator.llm.backends import AUTO, EMBEDDED, check_backend, choose_backend, open_servers
from query_mutator.llm.probe import probe_server, reported_slots, slots_advice
from query_mutator.plugins import load_plugins
from query_mutator.sizing.collecting import cache_line, size_calls

__all__ = ["SizeCallsFlags", "size_server"]


@dataclass(frozen=True, kw_only=True)
class SizeCallsFlags:
    """Probe a model server with a few short calls, and print the --batch-size and --num-processes that it can use."""

    plugin: tuple[str, ...] = ()
    """Modules or .py files to load first, which register backends of yours."""
    backend: str = AUTO
    """The kind of server: ollama, openai or a plugin's; by default the one whose address is given, else ollama."""
    ollama_url: str | None = None
    """Address of the server; else OLLAMA_HOST, else http://127.0.0.1:11434."""
    openai_url: str | None = None
    """Address of an OpenAI-compatible server; else OPENAI_BASE_URL. The key is read from OPENAI_API_KEY."""
    target_model: str | None = None
    """The model to call; by default the first one installed."""
    width: int = 16
    """Calls to send at once; more slots than that cannot be seen."""
    max_tokens: int = 64
    """Longest reply of a probe call; give what runs use, as a call's time grows with it."""
    num_ctx: int | None = None
    """Context of a call in tokens, for the memory of the caches; by default that of the loaded model."""

    def __post_init__(self) -> None:
        load_plugins(self.plugin)  # first: they may register the backend
        check_backend(self.backend)
        if self.backend == EMBEDDED:
            raise UsageError("--backend embedded has as many slots as --batch-size; name the kind of a running server")
        if not 2 <= self.width <= 1024:
            raise ValueError(f"--width {self.width} must be between 2 and 1024; the usual value is 16")
        check_values(self, "max_tokens num_ctx", low=1)


def size_server(flags: SizeCallsFlags) -> None:
    """Print slots, time of a call and flags; BackendError if the server does not answer."""
    backend, urls = choose_backend(flags.backend, {"ollama_url": flags.ollama_url, "openai_url": flags.openai_url})
    [server] = open_servers(backend, urls, timeout_s=60, pool_size=flags.width)
    with closing(server):
        names = [flags.target_model] if flags.target_model else [*(server.models() or ())]
        if not names:
            raise UsageError(f"{server.url} has no model; {server.more_models}, or name one with --target-model")
        model = server.require_model(names[0])
        reported = reported_slots([server], model)
        found = probe_server(server, model, reported=reported, width=flags.width, max_tokens=flags.max_tokens)
        info, num_ctx = server.model_info(model), flags.num_ctx or server.context(model)
    if found.error is not None:
        raise BackendError(f"the probe of {model} failed ({found.error}); check the server with qm doctor")
    advice = size_calls(found.slots, width=found.width, service_s=found.service_s)
    if advice is None:
        print(f"{model}: calls are too short to count slots; benchmark_batching.py compares batch sizes")
        return
    print(f"{model}: {advice}")
    if line := slots_advice(found.slots, flags.width, server=server, is_reported=found.width is None):
        print(line)
    print(cache_line(info, num_ctx=num_ctx, slots=advice.batch_size))
    print("calls beyond the slots only wait; benchmark_batching.py shows the same as a table")
