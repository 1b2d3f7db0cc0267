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
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from ollama_utils import CallOptions, batch_mutate_queries, batch_query_target_model
from query_mutator import operators
from query_mutator.bounds import Million, Seconds, Sigma, Wait
from query_mutator.cli.console import closing_on_interrupt, note, run_cli, table
from query_mutator.cli.flags import parse_flags
from query_mutator.cli.outputs import JsonTo, OutputFlags, show
from query_mutator.data.loaders import general
from query_mutator.encoder import resolve_encoder
from query_mutator.env.scheduling import Call, Flow, make_scheduler
from query_mutator.env.task import CallSettings
from query_mutator.errors import BackendError
from query_mutator.lab.sizing.collecting import CALLS_PER_STEP, ENVIRONMENTS_PER_CALL
from query_mutator.llm.backends import DEFAULT_BACKEND, ServerFlags, resolve_backend
from query_mutator.llm.probe import PROBE_WIDTH, Recorder, measure_calls, slots_advice
from query_mutator.llm.retry import RetryPolicy
from query_mutator.llm.stack import ClientStack, build_client
from query_mutator.operators import OperatorContext
from query_mutator.operators.base import clean_rewrite
from query_mutator.settings.models import ADDRESS_FLAGS
from query_mutator.types import Completion

PROG = "benchmark_batching"
OPERATOR = "spelling"
ECHO = "echo"  # the model that the test server always has
NO_RETRIES = RetryPolicy(max_retries=0)
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
WORTHWHILE = 0.95  # of the best rate: a larger batch that gains less is not recommended
CALLS_PER_QUERY = 2  # a rewrite, then an answer
BATCH_SIZES = "1,2,4,8,16,32"
LATENCY_MS, NUM_PARALLEL = 100.0, 64  # of the test server


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(OutputFlags, ServerFlags):
    """Compare sequential, phase-batched, pipelined and asynchronous calls over several batch sizes.

    Without a server the test server is started in its own process; it answers with words of the prompt after a fixed
    time, which measures the scheduling and not a language model.
    """

    mutator_model: str | None = None
    """The model that carries out rewrites; by default the target model."""
    latency_ms: Wait | None = None
    """Mean time the test server takes for a call; by default 100."""
    latency_sigma: Sigma | None = None
    """Log-normal spread of that time; by default 0."""
    num_parallel: Annotated[int, Ge(1), Le(4096)] | None = None
    """Slots of the test server; by default 64."""
    batch_sizes: str | None = None
    """Batch sizes to compare, with commas; by default 1,2,4,8,16,32 and the slots that the probe finds."""
    num_queries: Million = 64
    """Queries of each measurement; each takes two calls."""
    repeats: Annotated[int, Ge(1), Le(4096)] = 3
    """Measurements of each row, in turns; the table has their medians."""
    budget_s: Seconds = 120.0
    """Seconds for all measurements, once models are loaded; the plan that is printed first says what is left out."""
    json: JsonTo = None
    """Write table, slots and recommendation as JSON to FILE; without FILE, or with -, print them in place of text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_sizes()
        self._check_server()

    @property
    def sizes(self) -> list[int]:
        """Return the batch sizes in increasing order, without duplicates."""
        text = BATCH_SIZES if self.batch_sizes is None else self.batch_sizes
        return sorted({int(size) for size in text.split(",")})

    def sizes_with(self, slots: int | None) -> list[int]:
        """Return the batch sizes, by default with the server's slots among them, which is what `qm doctor` sets."""
        found = {slots} if slots and self.batch_sizes is None and slots <= max(self.sizes) else set()
        return sorted({*self.sizes, *found})

    @property
    def probe_width(self) -> int:
        """Return how many calls to send at once to count the server's slots."""
        return max(PROBE_WIDTH, *self.sizes)

    @property
    def simulated(self) -> dict[str, Any]:
        """Return how the test server behaves, as its flags."""
        latency_ms = LATENCY_MS if self.latency_ms is None else self.latency_ms
        return {
            "num_parallel": self.num_parallel or NUM_PARALLEL,
            "latency_ms": latency_ms,
            "latency_sigma": self.latency_sigma or 0.0,
        }

    def _check_sizes(self) -> None:
        try:
            in_range = all(1 <= size <= 1024 for size in self.sizes)
        except ValueError:
            in_range = False
        if not in_range:
            raise ValueError(
                f"batch_sizes={self.batch_sizes} must be whole numbers from 1 to 1024 with commas, as 1,2,4,8"
            )

    def _check_server(self) -> None:
        simulated_only = ("latency_ms", "latency_sigma", "num_parallel")
        running_only = (*ADDRESS_FLAGS, "target_model", "mutator_model", "num_ctx")
        wrong: tuple[str, ...] = running_only
        kind = "an Ollama server or another that runs already"
        if self.names_server:
            wrong, kind = simulated_only, "the test server"
        given = [f"--{name.replace('_', '-')}" for name in wrong if getattr(self, name) not in (None, ())]
        if given:
            used = "a running one" if self.names_server else "the test server"
            raise ValueError(f"{given[0]} is for {kind}, and this run uses {used}; leave one of them out")


def main(argv: Sequence[str]) -> int:
    """Plan, measure within the budget, print table and recommendation, write the requested file; return 0."""
    config = parse_flags(BenchmarkConfig, argv, prog=PROG, table="benchmark")
    with connect(config) as system:
        note(system.about)
        results = prepare(system, config)
        note(str(results.plan))
        try:
            measure(system, results, budget_s=config.budget_s)
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
    title = f"{results.plan.num_queries} queries; {results.about}"
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
    shared: CallOptions = {"batch_size": batch_size, "client": system.recorder, "seed": calls.seed}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Cases in the order in which they are measured, queries of each run, and how often all cases are measured."""

    cases: tuple[Case, ...]
    num_queries: int
    repeats: int
    seconds: float  # expected for all runs
    left_out: str = ""  # what the budget leaves out, in words

    @property
    def calls(self) -> int:
        """Return the calls of each run."""
        return CALLS_PER_QUERY * self.num_queries

    def __str__(self) -> str:
        line = f"plan: {len(self.cases) * self.repeats} runs of {self.calls} calls, about {self.seconds:.0f} s"
        return line + (f"; the budget leaves out {self.left_out}" if self.left_out else "")


def make_plan(
    sizes: Sequence[int], *, num_queries: int, repeats: int, budget_s: float, query_s: float, slots: int | None
) -> Plan:
    """Return what fits into `budget_s` when one query takes `query_s` alone and the server has this many slots.

    What does not fit goes in this order: repeats; queries, as long as the largest batch is full; all modes but
    sequential and async; then further queries.
    """
    every: tuple[Mode, ...] = ("async", "pipelined", "phase")
    for modes in (every, every[:1]):
        cases = (ALONE, *((mode, size) for mode in modes for size in sizes))
        round_s = query_s * sum(1 / min(size, slots or size) for _, size in cases)  # all cases, with one query
        queries = int(min(num_queries, budget_s / round_s))
        if queries >= min(num_queries, max(sizes)):
            break
    queries = max(1, queries)
    times = max(1, int(min(repeats, budget_s / (queries * round_s))))
    left_out = [
        f"{repeats - times} of {repeats} repeats" if times < repeats else "",
        f"{num_queries - queries} queries of each run" if queries < num_queries else "",
        "the modes phase and pipelined" if modes != every else "",
    ]
    return Plan(
        cases=cases,
        num_queries=queries,
        repeats=times,
        seconds=times * queries * round_s,
        left_out=", ".join(filter(None, left_out)),
    )


@dataclass(kw_only=True)
class Results:
    """The runs measured so far, by case."""

    plan: Plan
    about: str
    slots: int | None  # None when unknown
    advice: str | None
    runs: dict[Case, list[Measurement]] = field(default_factory=dict)

    def add(self, case: Case, run: Measurement) -> None:
        """Keep a run; one that the end of the budget cut short counts only if it is the case's first."""
        if run.calls == self.plan.calls or (run.calls and case not in self.runs):
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

    def line(self, case: Case) -> str:
        """Return the row of one case on one line."""
        name = f"{case[0]}, batch size {case[1]}"
        if case not in self.runs:
            return f"{name}: no call was made"
        row = self.row(case)
        took = "{calls} calls in {wall_s:.2f} s, {calls_per_s:.1f} calls/s, speed-up {speedup:.2f}".format_map(row)
        return f"{name}: {took}" + (f", {row['failed']} failed" if row["failed"] else "")


def prepare(system: System, config: BenchmarkConfig) -> Results:
    """Load the models, open the connections, count slots, time one query; return the plan, without a run yet."""
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
    return Results(plan=plan, about=system.about, slots=slots, advice=advice)


def measure(system: System, results: Results, *, budget_s: float) -> None:
    """Add the planned runs to `results` until the budget ends, and print each; repeats interleave the cases.

    So a slow minute affects all cases. An interrupted run is added as far as it got.
    """
    plan, ends_at = results.plan, time.perf_counter() + budget_s
    queries = make_queries(plan.num_queries)
    timer = threading.Timer(budget_s, system.stack.close)  # ends the calls in flight
    timer.daemon = True
    timer.start()
    try:
        for case in plan.repeats * plan.cases:
            try:
                run_once(system, queries, case, seconds=ends_at - time.perf_counter())
            finally:
                results.add(case, system.measurement())
            note(results.line(case))
            if timer.finished.is_set():
                return
            if results.runs and not results.rows():
                raise BackendError(f"all calls failed ({system.recorder.completions[-1].error}); see qm doctor")
    finally:
        timer.cancel()


def run_once(system: System, queries: Sequence[str], case: Case = ALONE, *, seconds: float = math.inf) -> Measurement:
    """Return the measurement of one run; no call starts after `seconds`."""
    system.recorder.start(seconds)
    run_mode(system, queries, mode=case[0], batch_size=case[1])
    return system.measurement()


if __name__ == "__main__":
    run_cli(main, prog=PROG)
