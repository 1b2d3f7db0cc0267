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

import itertools
import math
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from ppo.fields import Ge, Le
from query_mutator.bounds import Million, Seconds, Sigma, Wait
from query_mutator.cli.console import closing_on_interrupt, note, run_cli, table
from query_mutator.cli.flags import parse_flags
from query_mutator.cli.outputs import JsonTo, OutputFlags, show
from query_mutator.data import general
from query_mutator.encoder import resolve_encoder
from query_mutator.env.scheduling import Call, Flow, PooledScheduler
from query_mutator.env.task import CallSettings
from query_mutator.errors import BackendError
from query_mutator.lab.sizing.collecting import CALLS_PER_STEP, ENVIRONMENTS_PER_CALL
from query_mutator.llm.backends import DEFAULT_BACKEND, ServerFlags, resolve_backend
from query_mutator.llm.probe import PROBE_WIDTH, measure_calls, slots_advice
from query_mutator.llm.stack import ClientStack, build_client
from query_mutator.operators import OPERATORS, OperatorContext, clean_rewrite
from query_mutator.settings import ADDRESS_FLAGS
from query_mutator.types import Completion

PROG = "benchmark_batching"
OPERATOR = "spelling"
ECHO = "echo"  # the model that the test server always has
Mode = Literal["sequential", "phase", "pipelined", "async"]
Case = tuple[Mode, int]  # mode, batch size
Row = dict[str, Any]  # of the table: a value for each of COLUMNS, medians over several runs
ALONE: Case = ("sequential", 1)
COLUMNS = {
    "mode": ("mode", ""), "batch_size": ("batch", ""), "calls": ("calls", ""), "wall_s": ("wall s", ".2f"),
    "calls_per_s": ("calls/s", ".1f"), "speedup": ("speed-up", ".2f"), "efficiency": ("efficiency", ".2f"),
    "p50_s": ("p50 s", ".3f"), "p95_s": ("p95 s", ".3f"), "queue_wait_s": ("queue wait s", ".3f"),
    "failed": ("failed", ""),
}  # fmt: skip
PROGRESS = "{mode}, batch size {batch_size}: {calls_per_s:.1f} calls/s, speed-up {speedup:.2f}, {failed} failed"
WORTHWHILE = 0.95  # of the best rate: a larger batch that gains less is not recommended
CALLS_PER_QUERY = 2  # a rewrite, then an answer
SIMULATED = ("num_parallel", "latency_ms", "latency_sigma")  # flags of the test server


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(OutputFlags, ServerFlags):
    """Compare sequential, phase-batched, pipelined and asynchronous calls over several batch sizes.

    Without a server, a test server is started in its own process. It answers with words of the prompt after a fixed
    time, so this measures scheduling, not a language model.
    """

    mutator_model: str | None = None
    """The model that carries out rewrites; by default the target model."""
    latency_ms: Wait = 100.0
    """Mean time the test server takes for a call."""
    latency_sigma: Sigma = 0.0
    """Log-normal spread of that time."""
    num_parallel: Annotated[int, Ge(1), Le(4096)] = 64
    """Slots of the test server."""
    batch_sizes: str = "1,2,4,8,16,32"
    """Batch sizes to compare, with commas."""
    num_queries: Million = 64
    """Maximum queries per measurement; each takes two calls."""
    repeats: Annotated[int, Ge(1), Le(4096)] = 1
    """Measurements per row, interleaved; the table has their medians."""
    budget_s: Seconds = 120.0
    """Time limit in seconds for all measurements after models are loaded; partial measurements count."""
    json: JsonTo = None
    """Write table, slots and recommendation as JSON to FILE; without FILE, or with -, print them in place of text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", self.batch_sizes):
            raise ValueError(f"batch_sizes={self.batch_sizes} must be whole numbers from 1 with commas, as 1,2,4,8")
        kind, other = "a server that runs already", {*ADDRESS_FLAGS, "target_model", "mutator_model", "num_ctx"}
        if self.names_server:
            kind, other = "the test server", {*SIMULATED}
        if wrong := sorted(other & self.given):
            raise ValueError(f"--{wrong[0].replace('_', '-')} is for {kind}, and this run uses another; leave one out")

    @property
    def sizes(self) -> list[int]:
        """Return the batch sizes in increasing order, without duplicates."""
        return sorted({int(size) for size in self.batch_sizes.split(",")})

    @property
    def probe_width(self) -> int:
        """Return how many calls to send at once to count the server's slots."""
        return max(PROBE_WIDTH, *self.sizes)

    @property
    def simulated(self) -> dict[str, Any]:
        """Return how the test server behaves, as its flags."""
        return {name: getattr(self, name) for name in SIMULATED}


def main(argv: Sequence[str]) -> int:
    """Plan, measure within the budget, print table and recommendation, write the requested file; return 0."""
    config = parse_flags(BenchmarkConfig, argv, prog=PROG, table="benchmark")
    with connect(config) as system:
        note(system.about)
        results = prepare(system, config)
        try:
            measure(system, results, config)
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
    lines = [table(title, [name for name, _ in COLUMNS.values()], [*map(_cells, rows)]), results.advice]
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
    calls: CallSettings
    about: str  # one line for the title
    completions: list[Completion] = field(default_factory=list)  # of the current run


@contextmanager
def _test_server(**settings: float) -> Iterator[str]:
    """Yield the address of a test server in a separate process; BackendError if it does not start."""
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
            models = {"target_model": config.first_model, "mutator_model": config.mutator_model}
            choice = resolve_backend(config.backend, **models, **config.urls)
            target = config.first_model or (choice.default_models or [""])[0]  # resolve_backend requires one
            backend, urls = choice.kind, choice.urls
            about = f"{choice.reason.removeprefix('backend: ')}, {target}"
        # one client for all rows, so that the connections of the warm-up are kept
        settings = config.client_settings(batch_size=config.probe_width)
        stack = exits.enter_context(closing(build_client(urls, settings, backend=backend)))
        exits.enter_context(closing_on_interrupt(stack.close))
        mutator = config.mutator_model or target
        calls = CallSettings(target_model=target, mutator_model=mutator)
        stack.require_models(list(dict.fromkeys((calls.target_model, calls.mutator_model))))
        yield System(stack=stack, calls=calls, about=about)


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
    groups = {"sequential": 1, "phase": 2 * batch_size, "pipelined": 2 * batch_size}
    size = groups.get(mode, len(queries))
    scheduler = PooledScheduler(
        client=system.stack.limit,
        encoder=resolve_encoder("hash"),
        retry_policy=system.stack.retry.policy,  # none
        batch_size=1 if mode == "sequential" else batch_size,
    )
    with closing(scheduler):
        for start in range(0, len(queries), size):
            group = queries[start : start + size]
            if mode == "phase":
                rewrites = _finish(scheduler, [_rewrite(system, query) for query in group])
                _finish(scheduler, [_ask(system, rewrite) for rewrite in rewrites])
            else:
                _finish(scheduler, [_rewrite_and_ask(system, query) for query in group])


def _finish(scheduler: PooledScheduler, flows: Sequence[Flow]) -> list[Any]:
    """Return the results of flows that run together, in their order."""
    for number, flow in enumerate(flows):
        scheduler.start(number, flow)
    results = dict(scheduler.finished() for _ in flows)
    return [results[number] for number in range(len(flows))]


def _rewrite(system: System, query: str) -> Flow:
    request = system.calls.rewrite(OPERATORS.get(OPERATOR), query, context=OperatorContext())
    rewrite: Completion = yield Call(request)
    system.completions.append(rewrite)
    return clean_rewrite(rewrite.text) or query


def _ask(system: System, query: str) -> Flow:
    system.completions.append((yield Call(system.calls.target(query))))


def _rewrite_and_ask(system: System, query: str) -> Flow:
    yield from _ask(system, (yield from _rewrite(system, query)))


# ---------------------------------------------------------------- rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run of one mode; times in seconds, over the calls that were answered (NaN without any)."""

    calls: int  # answered or failed
    wall_s: float
    service_s: float  # sum over the calls, as reported by the server
    p50_s: float  # latency of a call, measured by the client
    p95_s: float
    queue_wait_s: float  # mean over the calls
    failed: int = 0

    @classmethod
    def of(cls, completions: Sequence[Completion], *, wall_s: float) -> Measurement:
        """Return the figures of a run's calls; cancelled ones do not count."""
        made = [one for one in completions if one.error is None or one.error.kind != "cancelled"]
        answered = [completion for completion in made if completion.ok]
        waits_s = [completion.latency_s for completion in answered] or [math.nan]
        timed = [completion for completion in answered if completion.total_s > 0]  # else the server reports no times
        return cls(
            calls=len(made),
            wall_s=wall_s,
            service_s=sum(completion.total_s - completion.queue_wait_s for completion in timed) or math.nan,
            p50_s=statistics.median(waits_s),
            p95_s=statistics.quantiles(waits_s * 2 if len(waits_s) == 1 else waits_s, n=20, method="inclusive")[-1],
            queue_wait_s=statistics.fmean(completion.queue_wait_s for completion in timed) if timed else math.nan,
            failed=len(made) - len(answered),
        )

    @property
    def calls_per_s(self) -> float:
        """Return the answered calls per second."""
        return (self.calls - self.failed) / self.wall_s


def row_of(runs: Sequence[Measurement], case: Case, *, slots: int, sequential: float) -> Row:
    """Return the row of the runs of a case; `sequential` is the calls/s to compare with.

    Its efficiency is the shortest possible wall time with this many slots over the measured one.
    """
    (mode, size), names = case, ("wall_s", "calls_per_s", "p50_s", "p95_s", "queue_wait_s")
    found = {name: median(getattr(run, name) for run in runs) for name in names}
    found |= {"mode": mode, "batch_size": size, "calls": runs[0].calls, "failed": sum(run.failed for run in runs)}
    found["speedup"] = found["calls_per_s"] / sequential if sequential else math.nan
    found["efficiency"] = median(run.service_s / min(size, slots) / run.wall_s for run in runs)
    return {name: found[name] for name in COLUMNS}


def _cells(row: Row) -> list[str]:
    """Return a row as the table shows it."""
    return ["-" if row[name] != row[name] else format(row[name], form) for name, (_, form) in COLUMNS.items()]


def recommend(rows: Sequence[Row], *, slots: int | None) -> dict[str, Any] | None:
    """Recommend the smallest batch size whose asynchronous rate is within 5 % of the best, and twice the environments.

    With two environments per call in flight, one is nearly always ready when a reply arrives. `slots` is the number of
    calls that the server processes at the same time, None when unknown. None without an asynchronous row.
    """
    candidates = sorted((row for row in rows if row["mode"] == "async"), key=lambda row: row["batch_size"])
    if not candidates:
        return None
    best = max(row["calls_per_s"] for row in candidates)
    chosen = next(row for row in candidates if row["calls_per_s"] >= WORTHWHILE * best)
    if slots is not None and slots < candidates[-1]["batch_size"]:
        reason = f"the server answers about {slots} call{'s' if slots > 1 else ''} at a time"
    elif chosen is candidates[-1]:
        reason = "the largest size measured; a larger one may be faster still"
    else:
        reason = f"larger sizes gain less than {1 - WORTHWHILE:.0%}"
    return {
        "batch_size": chosen["batch_size"],
        "num_processes": ENVIRONMENTS_PER_CALL * chosen["batch_size"],
        "steps_per_s": chosen["calls_per_s"] / CALLS_PER_STEP,
        "why": f"{chosen['calls_per_s']:.1f} calls/s, {chosen['speedup']:.1f} times sequential; {reason}",
    }


# ---------------------------------------------------------------- measuring


def queries_within(
    budget_s: float, cases: Sequence[Case], *, most: int, repeats: int, query_s: float, slots: int | None
) -> int:
    """Return the largest number of queries per run that fits the budget, if one query takes `query_s`; at least 1."""
    round_s = repeats * query_s * sum(1 / min(size, slots or size) for _, size in cases)  # all runs, with one query
    return max(1, min(most, int(budget_s / round_s)))


@dataclass(kw_only=True)
class Results:
    """The runs measured so far, by case."""

    cases: Sequence[Case]  # in the order in which they are measured
    num_queries: int  # of each run
    about: str
    slots: int | None  # None when unknown
    advice: str | None
    runs: dict[Case, list[Measurement]] = field(default_factory=dict)

    def add(self, case: Case, run: Measurement) -> None:
        """Keep a run; a run cut short by the budget counts only if it is the first of its case."""
        if run.calls == CALLS_PER_QUERY * self.num_queries or (run.calls and case not in self.runs):
            self.runs.setdefault(case, []).append(run)

    def rows(self) -> list[Row]:
        """Return the rows of the table, in the order of modes and sizes; none if no call was answered."""
        order: list[Mode] = ["sequential", "phase", "pipelined", "async"]
        if all(run.calls == run.failed for runs in self.runs.values() for run in runs):
            return []
        return [self.row(case) for case in sorted(self.runs, key=lambda case: (order.index(case[0]), case[1]))]

    def row(self, case: Case) -> Row:
        """Return the row of one case, compared with the sequential one."""
        alone = median(run.calls_per_s for run in self.runs.get(ALONE, self.runs[case]))
        return row_of(self.runs[case], case, slots=self.slots or case[1], sequential=alone)


def prepare(system: System, config: BenchmarkConfig) -> Results:
    """Load the models, open the connections, count slots, time one query; return what to measure, without a run yet."""
    model, sizes = system.calls.target_model, config.sizes
    found = measure_calls(system.stack.limit, system.stack.servers, model, width=config.probe_width)
    slots, modes = found.slots, ("async", "pipelined", "phase")
    cases: list[Case] = [ALONE, *itertools.product(modes, sizes)]
    runs: list[Measurement] = []
    for query in make_queries(3):  # the first loads the mutator
        run_once(system, [query], ALONE, done=runs.append)
    query_s, most, repeats = statistics.fmean(run.wall_s for run in runs[1:]), config.num_queries, config.repeats
    queries = queries_within(config.budget_s, cases, most=most, repeats=repeats, query_s=query_s, slots=slots)
    fewer = f"; --budget-s allows {queries} of {most} queries in each" if queries < most else ""
    note(f"plan: {len(cases) * repeats} runs of {CALLS_PER_QUERY * queries} calls{fewer}")
    is_reported = found.width is None and slots is not None
    advice = slots_advice(slots, max(sizes), server=system.stack.backend_class, is_reported=is_reported)
    return Results(cases=cases, num_queries=queries, about=system.about, slots=slots, advice=advice)


def measure(system: System, results: Results, config: BenchmarkConfig) -> None:
    """Add the planned runs to `results` until the budget ends, and print each.

    Repeats interleave the cases, so that a slow minute affects all of them. Partial runs are added too.
    """
    queries = make_queries(results.num_queries)
    timer = threading.Timer(config.budget_s, system.stack.close)  # ends the calls in flight
    timer.daemon = True
    timer.start()
    try:
        for case in config.repeats * [*results.cases]:
            run_once(system, queries, case, done=partial(results.add, case))
            if case in results.runs:
                note(PROGRESS.format_map(results.row(case)))
            if timer.finished.is_set():
                return
            if results.runs and not results.rows():
                raise BackendError(f"all calls failed ({system.completions[-1].error}); see qm doctor")
    finally:
        timer.cancel()


def run_once(system: System, queries: Sequence[str], case: Case, *, done: Callable[[Measurement], None]) -> None:
    """Make one run; `done` gets its measurement, also if it is interrupted."""
    system.completions.clear()
    started = time.perf_counter()
    try:
        run_mode(system, queries, mode=case[0], batch_size=case[1])
    finally:
        done(Measurement.of(system.completions, wall_s=time.perf_counter() - started))


if __name__ == "__main__":
    run_cli(main, prog=PROG)
