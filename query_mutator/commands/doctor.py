"""`qm doctor`: inspect a model server, whether it can serve a run, and the one change that would make it faster.

qm doctor --target-model llama3.2                     the server at OLLAMA_HOST, else http://127.0.0.1:11434
qm doctor --ollama-url http://gpu-box --batch-size 16 another server, for runs with --batch-size 16
qm doctor --backend openai --openai-url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

from query_mutator import operators
from query_mutator.cli.bounds import Bounds
from query_mutator.errors import EXIT_USAGE, ModelMissingError, UsageError
from query_mutator.llm.backends import EMBEDDED, EMBEDDED_VERSION, choose_backend, open_servers
from query_mutator.llm.client import ModelServer
from query_mutator.llm.flags import ServerAddressFlags
from query_mutator.llm.probe import Probe, probe_server, reported_slots, slots_advice
from query_mutator.training.system import default_mutator, missing_operators

__all__ = ["DoctorConfig", "doctor", "examine"]


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(ServerAddressFlags):
    """Inspect a model server: version, models, runner options, and how many calls it really answers at once.

    The last takes a probe of a few short calls. Exit code 2 when the server or a model is missing.
    """

    BOUNDS: ClassVar[Bounds] = {"batch_size": (2, 1024)}

    target_model: str | None = None
    """The model to inspect; by default the first one installed."""
    mutator_model: str | None = None
    """The model that rewrites; by default the one that training takes."""
    batch_size: int = 8
    """Calls in flight at once in the planned runs."""
    probe: bool = True
    """Make the short calls that show how many the server answers at once."""
    probe_s: float = 30.0
    """Seconds after which the probe starts no more calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend == EMBEDDED:
            raise UsageError("--backend embedded needs no doctor; name the kind of a server that runs already")


def doctor(config: DoctorConfig) -> int:
    """Print the findings, one line each, and return the exit code."""
    backend, urls = choose_backend(config.backend, config.urls)
    options = {} if config.num_ctx is None else {"num_ctx": config.num_ctx}
    servers = open_servers(backend, urls, timeout_s=config.probe_s, pool_size=config.batch_size, runner_options=options)
    is_fit = True
    for server in servers:
        with closing(server):
            for line, is_fine in examine(server, config):
                print(line, flush=True)
                is_fit = is_fit and is_fine
    return 0 if is_fit else EXIT_USAGE


def examine(server: ModelServer, config: DoctorConfig) -> Iterator[tuple[str, bool]]:
    """Yield the findings about one server, each with whether a run could start; BackendError when nothing answers."""
    version = server.version()
    yield _line("server", f"{f'{server.title} {version}'.strip()} at {server.url}"), True
    target = config.target_model or next(iter(server.text_models() or ()), None)
    if target is None:
        yield _line("models", f"none installed: {server.more_models}, or name one with --target-model"), False
        return
    mutator = config.mutator_model or default_mutator(target, embedded=version.endswith(EMBEDDED_VERSION))
    present = []
    for name in dict.fromkeys((target, mutator)):
        try:
            present.append(server.require_text_model(name))
            yield _line("model", f"{present[-1]}: {server.describe_model(present[-1])}"), True
        except ModelMissingError as error:
            yield _line("model", str(error)), False
    if present:
        asked = [operator.name for operator in operators.select("") if operators.local_rewrite(operator) is None]
        reason = missing_operators(server, present[-1], asked)
        if reason is not None:
            yield _line("model", reason), False
        yield from _calls(server, present[0], config)


def _calls(server: ModelServer, model: str, config: DoctorConfig) -> Iterator[tuple[str, bool]]:
    if not config.probe:
        yield _line("options", server.describe_options(model)), True
        return
    reported = reported_slots([server], model)
    probe = probe_server(server, model, reported=reported, width=config.batch_size, budget_s=config.probe_s)
    yield _line("options", server.describe_options(model)), True
    if probe.error is not None:
        yield _line("slots", f"unknown, the probe failed ({probe.error})"), False
        return
    yield _line("slots", _slots(probe)), True
    advice = slots_advice(probe.slots, config.batch_size, server=server, is_reported=probe.width is None)
    yield _line("advice", advice or _no_advice(probe, config.batch_size)), True


def _slots(probe: Probe) -> str:
    took = "" if probe.service_s is None else f"; a call of a few words takes {probe.service_s:.3g} s"
    if probe.slots is None:
        return f"unknown, calls are too {'short' if (probe.service_s or 0) < 1 else 'slow'}{took}"
    if probe.width is None:
        return f"{probe.slots}, as the server reports{took}"
    return f"about {probe.slots}{' or more' if probe.slots == probe.width else ''}{took}"


def _no_advice(probe: Probe, batch_size: int) -> str:
    if probe.slots is None:
        return "benchmark_batching.py compares batch sizes on this server"
    return f"ready for --batch-size {batch_size}"


def _line(what: str, finding: str) -> str:
    return f"{what + ':':<9}{finding}"
