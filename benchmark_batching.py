"""Measure the speed-up from batching on a server: four ways to make the same calls, at several batch sizes.

    python benchmark_batching.py                                       the test server, 100 ms a call, 64 slots
    python benchmark_batching.py --latency-sigma 1.0
    python benchmark_batching.py --ollama-url http://gpu-box:11434 --target-model llama3.2 --batch-sizes 1,4,8

Each query is one rewrite and then one answer:

    sequential   one call at a time
    phase        groups of 2 x batch size queries: all rewrites, wait, all answers, wait
    pipelined    the same groups; each query goes from rewrite to answer without waiting, the group waits at its end
    async        each query goes from rewrite to answer without waiting; the only barrier is the end
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules load ends the process without a traceback

import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ollama_utils import BatchOptions, batch_mutate_queries, batch_query_target_model
from query_mutator import operators
from query_mutator.cli.console import closing_on_interrupt, note, run_cli, table
from query_mutator.cli.flags import parse_flags
from query_mutator.cli.outputs import show
from query_mutator.data.loaders import general
from query_mutator.encoder import resolve_encoder
from query_mutator.env.flow import Call, Flow
from query_mutator.env.scheduling import make_scheduler
from query_mutator.env.task import CallSettings
from query_mutator.errors import BackendError
from query_mutator.llm.backends import DEFAULT_BACKEND, resolve_backend
from query_mutator.llm.probe import Recorder, measure_calls, slots_advice
from query_mutator.llm.retry import RetryPolicy
from query_mutator.llm.stack import ClientStack, build_client
from query_mutator.operators import OperatorContext
from query_mutator.operators.base import clean_rewrite
from query_mutator.report.benchmark import (
    COLUMNS,
    BenchmarkConfig,
    BenchmarkPlan,
    Case,
    Measurement,
    Mode,
    Results,
    cells,
    make_plan,
    recommend,
)
from query_mutator.types import Completion

PROG = "benchmark_batching"
OPERATOR = "spelling"
ECHO = "echo"  # the model that the test server always has
NO_RETRIES = RetryPolicy(max_retries=0)


def main(argv: Sequence[str]) -> int:
    """Plan, measure within the budget, print table and recommendation, write the requested file; return 0."""
    config = parse_flags(BenchmarkConfig, argv, prog=PROG, table="benchmark")
    with connect(config) as system:
        note(system.about)
        results, plan = prepare(system, config)
        note(str(plan))
        try:
            measure(system, plan, results, budget_s=config.budget_s)
        except KeyboardInterrupt:
            report(config, results)
            raise
    report(config, results)
    return 0


def report(config: BenchmarkConfig, results: Results) -> None:
    """Print what was measured and write the requested file."""
    rows = results.rows()
    if not rows:
        raise BackendError(f"no call was answered within --budget-s {config.budget_s:g}; see qm doctor")
    recommended = recommend(rows, slots=results.slots)
    title = f"{results.num_queries} queries; {results.about}"
    lines = [table(title, [name for name, _ in COLUMNS.values()], [*map(cells, rows)]), results.advice, results.remark]
    if recommended is None:
        lines.append("no recommendation, as no asynchronous run was measured")
    else:
        flags = "--batch-size {batch_size} --num-processes {num_processes}: {steps_per_s:.3g} steps/s ({why})"
        lines.append(f"recommended: {flags.format_map(recommended)}")
    data = {"rows": rows, "inferred_slots": results.slots, "recommended": recommended}
    show(config, data, "\n".join(filter(None, lines)))
    if config.json not in (None, "-"):
        print(config.json)


# ---------------------------------------------------------------- the server and the calls


@dataclass(frozen=True, kw_only=True)
class System:
    """A server, the client for it and the models to call."""

    stack: ClientStack
    recorder: Recorder
    calls: CallSettings
    about: str  # one line for the title

    def measurement(self) -> Measurement:
        """Return the figures of the calls since the recorder started."""
        return Measurement.of(self.recorder.completions, wall_s=self.recorder.elapsed_s)


@contextmanager
def _test_server(**settings: float) -> Iterator[str]:
    """Yield the address of a test server in a process of its own; BackendError if it does not start."""
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "query_mutator", "test-server", *flags]
    paths = filter(None, (str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        try:
            greeting = process.stdout.readline().split()
            if not greeting:
                raise BackendError("the test server did not start")
            yield greeting[-1]
        finally:
            process.terminate()


@contextmanager
def connect(config: BenchmarkConfig) -> Iterator[System]:
    """Yield the system to measure; cancels its calls and stops the server that was started for it."""
    with ExitStack() as exits:
        if not config.names_server:
            url = exits.enter_context(_test_server(**config.simulated))
            backend, target, urls = DEFAULT_BACKEND, ECHO, (url,)
            delays = "{latency_ms:g} ms a call, sigma {latency_sigma:g}, {num_parallel} slots"
            about = f"test server (no language model), {delays.format(**config.simulated)}"
        else:
            models = {"target_model": config.target_model, "mutator_model": config.mutator_model}
            choice = resolve_backend(config.backend, **models, **config.urls)
            target = config.target_model or (choice.default_models or [""])[0]  # resolve_backend requires one
            backend, urls = choice.kind, choice.urls
            about = f"{choice.reason.removeprefix('backend: ')}, {target}"
        # one client for all rows, so that the connections of the warm-up are kept
        settings = config.client_settings(batch_size=config.probe_width)
        stack = exits.enter_context(closing(build_client(urls, settings, backend=backend)))
        exits.enter_context(closing_on_interrupt(stack.close))
        mutator = config.mutator_model or target
        calls = CallSettings(target_model=target, mutator_model=mutator)
        stack.require_models(list(dict.fromkeys((calls.target_model, calls.mutator_model))))
        yield System(stack=stack, recorder=Recorder(stack.retry), calls=calls, about=about)


def make_queries(count: int) -> list[str]:
    """Return `count` different queries: the bundled ones, then the same with a number."""
    texts = [question.text for question in general()]
    return [
        texts[index % len(texts)] + (f" ({index // len(texts) + 1})" if index >= len(texts) else "")
        for index in range(count)
    ]


# ---------------------------------------------------------------- the four ways


def run_mode(system: System, queries: Sequence[str], *, mode: Mode, batch_size: int) -> None:
    """Make all calls of the queries in one of the four ways."""
    if mode == "phase":
        for group in _groups(queries, 2 * batch_size):
            _run_phases(system, group, batch_size)
        return
    at_once = None if mode == "sequential" else batch_size  # the client tries again, as for the batch functions
    with closing(make_scheduler(at_once, system.recorder, resolve_encoder("hash"), NO_RETRIES)) as scheduler:
        for group in _groups(queries, 2 * batch_size if mode == "pipelined" else len(queries)):
            for query in group:
                scheduler.start(query, _rewrite_and_ask(system, query))
            while scheduler.in_progress:
                scheduler.finished()


def _run_phases(system: System, queries: Sequence[str], batch_size: int) -> None:
    calls = system.calls
    shared: BatchOptions = {"batch_size": batch_size, "client": system.recorder, "seed": calls.seed}
    rewrites = batch_mutate_queries(
        queries,
        OPERATOR,
        model=calls.mutator_model,
        max_tokens=calls.mutator_max_tokens,
        **shared,
    )
    batch_query_target_model(rewrites, model=calls.target_model, max_tokens=calls.target_max_tokens, **shared)


def _rewrite_and_ask(system: System, query: str) -> Flow:
    request = system.calls.rewrite(operators.get(OPERATOR), query, context=OperatorContext())
    rewrite: Completion = yield Call(request)
    yield Call(system.calls.target(clean_rewrite(rewrite.text) or query))


def _groups(queries: Sequence[str], size: int) -> Iterator[list[str]]:
    rest = iter(queries)
    return iter(lambda: list(islice(rest, size)), [])


# ---------------------------------------------------------------- measuring


def prepare(system: System, config: BenchmarkConfig) -> tuple[Results, BenchmarkPlan]:
    """Load the models, open the connections, count slots, time one query; return empty results and the plan."""
    model = system.calls.target_model
    found = measure_calls(system.stack.limit, system.stack.servers, model, width=config.probe_width)
    slots, sizes = found.slots, config.sizes_with(found.slots)
    _, *timed = [run_once(system, [query]).wall_s for query in make_queries(3)]  # the first loads the mutator
    plan = make_plan(
        sizes,
        num_queries=config.num_queries,
        repeats=config.repeats,
        budget_s=config.budget_s,
        query_s=statistics.fmean(timed),
        slots=slots,
    )
    is_reported = found.width is None and slots is not None
    advice = slots_advice(slots, max(sizes), server=system.stack.backend_class, is_reported=is_reported)
    results = Results(about=system.about, slots=slots, advice=advice, num_queries=plan.num_queries)
    return results, plan


def measure(system: System, plan: BenchmarkPlan, results: Results, *, budget_s: float) -> None:
    """Add the planned runs to `results` until the budget ends, and print each; repeats interleave the cases.

    So a slow minute affects all cases. An interrupted run is added as far as it got.
    """
    queries = make_queries(plan.num_queries)
    timer = threading.Timer(budget_s, system.stack.close)  # ends the calls in flight
    timer.daemon = True
    timer.start()
    try:
        for case, seconds in plan.runs(ends_at=time.perf_counter() + budget_s):
            try:
                run_once(system, queries, case, seconds=seconds)
            finally:
                results.add(case, system.measurement())
            note(results.line(case))
            if timer.finished.is_set():
                return
            if results.runs and not results.rows():
                raise BackendError(f"all calls failed ({system.recorder.completions[-1].error}); see qm doctor")
    finally:
        timer.cancel()


def run_once(
    system: System, queries: Sequence[str], case: Case = ("sequential", 1), *, seconds: float = math.inf
) -> Measurement:
    """Return the measurement of one run; no call starts after `seconds`."""
    system.recorder.start(seconds)
    run_mode(system, queries, mode=case[0], batch_size=case[1])
    return system.measurement()


if __name__ == "__main__":
    run_cli(main, prog=PROG)
