"""`qm doctor`: inspect a model server, whether it can serve a run, what to set, and what would make it faster.

qm doctor --target-model llama3.2                     the server at OLLAMA_HOST, else http://127.0.0.1:11434
qm doctor --ollama-url http://gpu-box --batch-size 16 another server, for runs with --batch-size 16
qm doctor --gguf model.gguf                           a file that llama.cpp runs, without a server
qm doctor --backend openai --openai-url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Annotated, Any

from ppo.fields import Ge, Le
from query_mutator.bounds import Seconds, group_of
from query_mutator.env.task import CallSettings
from query_mutator.errors import EXIT_USAGE, ModelMissingError
from query_mutator.lab.sizing.collecting import cache_line, size_calls
from query_mutator.llm.backends import BACKENDS, ServerAddressFlags, choose_backend
from query_mutator.llm.cache import request_key
from query_mutator.llm.client import ModelServer
from query_mutator.llm.probe import (
    PROBE_TEXT,
    PROBE_TOKENS,
    PROBE_WIDTH,
    Probe,
    context_sentence,
    measure_calls,
    reload_sentence,
    slots_advice,
    together,
)  # fmt: skip
from query_mutator.llm.stack import identity_of
from query_mutator.llm.store import Store, default_cache_path
from query_mutator.session.task import split_dataset
from query_mutator.settings import Questions, Sampling, TaskSettings
from query_mutator.types import ChatRequest, Completion, Question


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(ServerAddressFlags, Questions, Sampling):
    """Inspect a model server: version, models, context, slots, and the flags to set for a run.

    A few short calls count slots and reloads; then one question of the run per slot is answered, all at once. Their
    replies are kept, and `--dry-run` of qm train and qm plan uses their time. Exit code 2 if the server or a model is
    missing.
    """

    target_model: tuple[str, ...] = ()
    """The model to inspect; by default the first one installed."""
    mutator_model: str | None = None
    """The model that rewrites; by default the one that training takes."""
    batch_size: Annotated[int, Ge(2), Le(1024)] = 8
    """Calls in flight in the planned runs."""
    probe: bool = True
    """Make short calls that show how many the server answers at once."""
    probe_s: Seconds = 60.0
    """Seconds after which the probe starts no more calls; also the time limit of a call."""

    @property
    def probe_width(self) -> int:
        """Return how many calls to send at once to count the server's slots."""
        return max(PROBE_WIDTH, self.batch_size)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report, and whether a run could start with it; with what was measured for it."""

    name: str
    text: str
    is_fine: bool = field(default=True, kw_only=True)
    probe: Probe | None = field(default=None, kw_only=True)  # of the slots
    rate: float | None = field(default=None, kw_only=True)  # calls per second


def doctor(config: DoctorConfig) -> int:
    """Print the findings, one line each, and return the exit code."""
    backend, urls = choose_backend(config.backend, config.urls)
    options = {} if config.num_ctx is None else {"num_ctx": config.num_ctx}
    found: list[list[Finding]] = []  # of each server
    slots = config.batch_size if BACKENDS.get(backend).runs_files else config.probe_width
    for server in BACKENDS.get(backend).open(urls, timeout_s=config.probe_s, pool_size=slots, runner_options=options):
        with closing(server):
            found.append([])
            for finding in examine(server, config):
                print(_line(finding), flush=True)
                found[-1].append(finding)
    rates = [finding.rate for findings in found for finding in findings if finding.rate]
    probes = [[one.probe for one in findings if one.probe][-1:] for findings in found]
    for finding in _settings([probe for last in probes for probe in last], rates):
        print(_line(finding))
    return 0 if all(finding.is_fine for findings in found for finding in findings) else EXIT_USAGE


def examine(server: ModelServer, config: DoctorConfig) -> Iterator[Finding]:
    """Yield the findings about one server; BackendError when nothing answers."""
    version = server.version()
    yield Finding("server", f"{f'{server.title} {version}'.strip()} at {server.url}")
    target = config.first_model or next(iter(server.text_models() or ()), None)
    if target is None:
        advice = f"none installed: {server.more_models}, or name one with --target-model"
        yield Finding("models", advice, is_fine=False)
        return
    mutator = config.mutator_model or target
    present = []
    for name in dict.fromkeys((target, mutator)):
        try:
            present.append(server.require_model(name))
            yield Finding("model", f"{present[-1]}: {server.describe_model(present[-1])}")
        except ModelMissingError as error:
            yield Finding("model", str(error), is_fine=False)
    probe = (yield from _calls(server, present, config)) if present else None
    if probe is not None:
        working = at_once = min(probe.slots or config.batch_size, config.probe_width)
        if len(present) == len({target, mutator}):
            working = yield from _pace(server, present, config, probe, at_once=at_once)
        yield Finding("advice", _advice(server, config, probe, working=working, at_once=at_once))


def _calls(server: ModelServer, models: Sequence[str], config: DoctorConfig) -> Generator[Finding, None, Probe | None]:
    """Yield what calls find out, without a probe what the server reports; return a probe that succeeded."""
    probe = None
    if config.probe:
        probe = measure_calls(server, [server], models[0], width=config.probe_width, budget_s=config.probe_s)
    yield Finding("context", context_sentence(server, models[0], reply_tokens=config.target_max_tokens))
    if probe is None:
        return None
    if probe.error is not None:
        advice = f": {server.more_speed}" if probe.error.kind == "timeout" else ""
        yield Finding("slots", f"unknown, the probe failed ({probe.error}){advice}", is_fine=False)
        return None
    yield Finding("reload", reload_sentence(server, models))
    yield Finding("slots", _slots(probe), probe=probe)
    if info := server.model_info(models[0]):
        num_ctx = config.num_ctx or server.context(models[0])
        yield Finding("caches", cache_line(info, num_ctx=num_ctx, slots=probe.slots or config.batch_size))
    return probe


def _advice(server: ModelServer, config: DoctorConfig, probe: Probe, *, working: int, at_once: int) -> str:
    """Return what to set; `working` of `at_once` calls of a run succeeded together."""
    if working < at_once:
        return f"--batch-size {working}: calls fail with more at once" if working else "calls of a run fail"
    advice = slots_advice(probe.slots, config.batch_size, server=server, is_reported=probe.width is None)
    usual = f"ready for --batch-size {config.batch_size}"
    return advice or (usual if probe.slots else "benchmark_batching.py compares batch sizes")


def _pace(
    server: ModelServer, models: Sequence[str], config: DoctorConfig, probe: Probe, *, at_once: int
) -> Generator[Finding, None, int]:
    """Yield how long the answers of a run take, as many at once as slots, or the half while one fails.

    Return how many succeeded together. The replies are kept for runs, whose estimates read their times.
    """
    questions = split_dataset(group_of(TaskSettings, config, validation_fold="none")).train or [
        Question(id="probe", text=PROBE_TEXT)
    ]
    calls = group_of(CallSettings, config, target_model=models[0], mutator_model=models[-1])
    limit = config.target_max_tokens
    while True:
        requests = [calls.target(one.text) for one in itertools.islice(itertools.cycle(questions), at_once)]
        answers = together(server, requests)
        beside = f"{at_once} calls at once" if at_once > 1 else "one call at a time"
        errors = [reply.error for reply in answers if reply.error is not None and reply.error.kind != "empty"]
        if not errors:
            break
        advice = f"{server.more_speed}, or fewer tokens with --target-max-tokens"
        text = f"unknown, with {beside} a call fails ({errors[0]}): {advice if at_once == 1 else 'half as many:'}"
        yield Finding("pace", text, is_fine=at_once > 1 or errors[0].kind == "timeout")
        at_once //= 2
        if not at_once:
            return 0
    if not server.is_instant:
        _keep(server, config, requests, answers)
    answer_s = fmean(reply.latency_s for reply in answers)
    took = f"an answer of at most {limit} tokens takes {answer_s:.3g} s"
    faster, answer_s = _on_fewer_threads(server, config, requests, answer_s)
    seen = replace(probe, slots=at_once, width=None) if at_once < (probe.slots or at_once) else probe
    yield Finding("pace", f"{beside}: {took}{faster}", rate=at_once / max(1e-9, answer_s), probe=seen)
    return at_once


def _on_fewer_threads(
    server: ModelServer, config: DoctorConfig, requests: Sequence[ChatRequest], answer_s: float
) -> tuple[str, float]:
    """Return the advice to run files on one thread less and the seconds of an answer then, if that is faster."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = (int(given) if given.isdecimal() else os.cpu_count() or 1) - 1
    if server.runs_files and threads > 0:
        server.close()
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of processes that start from now on
        settings: Any = {"pool_size": config.batch_size, "runner_options": {"num_ctx": config.num_ctx}}
        with closing(type(server).open(server.addresses(), timeout_s=config.probe_s, **settings)[0]) as fewer:
            fewer.digest(requests[0].model)  # loads it
            replies = together(fewer, requests)
            fewer_s = fmean(reply.latency_s for reply in replies)
            if 1.1 * fewer_s < answer_s and all(reply.ok for reply in replies):
                _keep(fewer, config, requests, replies)
                return f"; {fewer_s:.3g} s with OMP_NUM_THREADS={threads}: set it", fewer_s
    return "", answer_s


def _keep(
    server: ModelServer, config: DoctorConfig, requests: Sequence[ChatRequest], replies: Sequence[Completion]
) -> None:
    """Write replies where those of all runs are kept."""
    with closing(Store(default_cache_path(), is_cache=True)) as store:
        identity = identity_of(requests[0].model, [server], num_ctx=config.num_ctx)
        for request, reply in zip(requests, replies, strict=True):
            store.put(request_key(request, identity=identity), request, reply)


def _slots(probe: Probe) -> str:
    took = "" if probe.service_s is None else f"; a call of at most {PROBE_TOKENS} tokens takes {probe.service_s:.3g} s"
    if probe.slots is None:
        return f"unknown, calls are too {'short' if (probe.service_s or 0) < 1 else 'slow'}{took}"
    if probe.width is None:
        return f"{probe.slots}, as the server reports{took}"
    return f"{probe.slots} or more{took}" if probe.slots == probe.width else f"about {probe.slots}{took}"


def _settings(probes: Sequence[Probe], rates: Sequence[float]) -> list[Finding]:
    """Return the line about what to set for a run on all the servers, if their slots are known."""
    known = [probe for probe in probes if probe.slots and probe.service_s]
    if not known or len(known) < len(probes):
        return []
    slots = sum(probe.slots or 0 for probe in known)
    rate = sum((probe.slots or 0) / (probe.service_s or 1) for probe in known)  # calls per second
    if len(rates) == len(known):
        rate = sum(rates)
    is_open = any(probe.slots == probe.width for probe in known)
    return [Finding("set", size_calls(slots, width=slots if is_open else None, service_s=slots / rate))]


def _line(finding: Finding) -> str:
    return f"{finding.name + ':':<9}{finding.text}"
