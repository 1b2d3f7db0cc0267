"""`qm doctor`: what the model server is, whether it can serve a run, and the one thing that would make it faster.

qm doctor --target-model llama3.2                     the server at OLLAMA_HOST, else http://127.0.0.1:11434
qm doctor --ollama-url gpu-box --batch-size 16        another server, for runs with --batch-size 16
qm doctor --backend openai --openai-url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from query_mutator.errors import EXIT_USAGE, ModelMissingError, UsageError
from query_mutator.llm.build import ollama_url, openai_server_url
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.llm.probe import Probe, probe_server, slots_advice
from query_mutator.llm.same_models import ModelServer


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Look at a model server: version, models, runner options, and how many calls it really answers at once.

    The last takes a probe of a few short calls. Exit code 2 when the server or a model is not there.
    """

    backend: Literal["ollama", "openai"] = "ollama"
    """What the server speaks."""
    ollama_url: tuple[str, ...] = ()
    """Address of the server, or of several; else OLLAMA_HOST, else http://127.0.0.1:11434."""
    openai_url: str | None = None
    """Address of an OpenAI-compatible server; else OPENAI_BASE_URL. The key is taken from OPENAI_API_KEY."""
    target_model: str | None = None
    """The model to look at; by default the first one installed."""
    mutator_model: str | None = None
    """The model that carries out rewrites, when it is another."""
    batch_size: int = 8
    """Calls in flight at once that runs are to have."""
    num_ctx: int | None = None
    """Context length that runs ask for; by default the server's own."""
    probe: bool = True
    """Make the short calls that tell how many the server answers at once."""
    probe_s: float = 30.0
    """Seconds after which the probe begins no more calls."""

    def __post_init__(self) -> None:
        if not 2 <= self.batch_size <= 1024:
            raise ValueError(f"batch_size={self.batch_size} must be between 2 and 1024; the usual value is 8")
        if not self.probe_s > 0:
            raise ValueError(f"probe_s={self.probe_s} must be above 0; the usual value is 30")


def doctor(config: DoctorConfig) -> int:
    """Print the findings, one line each, and return the exit code."""
    is_fit = True
    for server in _servers(config):
        with closing(server):
            for line, is_fine in examine(server, config):
                print(line, flush=True)
                is_fit = is_fit and is_fine
    return 0 if is_fit else EXIT_USAGE


def examine(server: ModelServer, config: DoctorConfig) -> Iterator[tuple[str, bool]]:
    """Yield the findings about one server, each with whether a run could begin; BackendError when nothing answers."""
    version = server.version()
    speaks = f"Ollama {version}" if isinstance(server, OllamaBackend) else "OpenAI-compatible"
    yield _line("server", f"{speaks} at {server.url}"), True
    installed = server.models()
    wanted = dict.fromkeys(name for name in (config.target_model, config.mutator_model) if name) or installed[:1]
    if not wanted:
        yield _line("models", "none installed: ollama pull qwen2.5:3b"), False
        return
    present = []
    for name in wanted:
        try:
            present.append(server.require_model(name))
            yield _line("model", f"{present[-1]}: {_abilities(server, present[-1])}"), True
        except ModelMissingError as error:
            yield _line("model", f"{name} is missing: {_how_to_get(server, name, str(error))}"), False
    if present:
        yield from _calls(server, present[0], config)


def _calls(server: ModelServer, model: str, config: DoctorConfig) -> Iterator[tuple[str, bool]]:
    if not config.probe:
        yield _line("options", _runner_options(server, model, config)), True
        return
    probe = probe_server(server, model, width=config.batch_size, budget_s=config.probe_s)
    yield _line("options", _runner_options(server, model, config)), True
    if probe.error is not None:
        yield _line("slots", f"unknown, the probe failed ({probe.error})"), False
        return
    yield _line("slots", _slots(probe)), True
    kind = "ollama" if isinstance(server, OllamaBackend) else "openai"
    advice = slots_advice(probe.slots, config.batch_size, kind=kind)
    yield _line("advice", advice or _no_advice(probe, config.batch_size)), True


def _servers(config: DoctorConfig) -> list[ModelServer]:
    if config.backend == "openai" or config.openai_url:
        if config.ollama_url:
            raise UsageError("--ollama-url and --openai-url name servers of two kinds; leave one of them out")
        return [
            OpenAIBackend(openai_server_url(config.openai_url), timeout_s=config.probe_s, pool_size=config.batch_size)
        ]
    options = {} if config.num_ctx is None else {"num_ctx": config.num_ctx}
    return [
        OllamaBackend(ollama_url(url), timeout_s=config.probe_s, pool_size=config.batch_size, runner_options=options)
        for url in config.ollama_url or (None,)
    ]


def _abilities(server: ModelServer, model: str) -> str:
    if isinstance(server, OpenAIBackend):
        return "on offer"
    abilities = ", ".join(server.capabilities(model)) or "abilities unknown"
    return f"installed, {server.digest(model)[:12]}, {abilities}"


def _how_to_get(server: ModelServer, name: str, message: str) -> str:
    return f"ollama pull {name}" if isinstance(server, OllamaBackend) else message


def _runner_options(server: ModelServer, model: str, config: DoctorConfig) -> str:
    """Return the options that every call of a run carries, and the context length they lead to."""
    if isinstance(server, OpenAIBackend):
        return "the server's own"
    asked = "the server's own num_ctx" if config.num_ctx is None else f"num_ctx={config.num_ctx}"
    loaded = server.loaded_context(model)
    found = f" (loaded with num_ctx={loaded})" if loaded else ""
    return f"{asked}{found}, keep_alive={server.keep_alive}, think=false; the same for every call"


def _slots(probe: Probe) -> str:
    took = "" if probe.service_s is None else f"; a call of a few words takes {probe.service_s:.3g} s"
    if probe.slots is None:
        return f"cannot be told, calls are too {'short' if (probe.service_s or 0) < 1 else 'slow'}{took}"
    most = " or more" if probe.slots == probe.width else ""
    return f"about {probe.slots}{most}{took}"


def _no_advice(probe: Probe, batch_size: int) -> str:
    if probe.slots is None:
        return "benchmark_batching.py compares batch sizes on this server"
    return f"nothing stands in the way of --batch-size {batch_size}"


def _line(what: str, finding: str) -> str:
    return f"{what + ':':<9}{finding}"
