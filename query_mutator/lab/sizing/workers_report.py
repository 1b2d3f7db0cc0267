"""Put the search for worker processes into words: the cost of items, the trials, the advice, command lines."""

from __future__ import annotations

from collections.abc import Sequence

from query_mutator.cli.console import table
from query_mutator.lab.sizing.cards import MIB
from query_mutator.lab.sizing.lerobot import train_line
from query_mutator.lab.sizing.workers import Tried, WorkersAdvice

__all__ = ["advice_lines", "items_text", "known_line", "trials_table"]

_HELPS = {
    "computing": "they compute, so workers help up to the number of processors",
    "waiting": "they wait, so workers help beyond the number of processors",
    "both": "they compute and wait",
}
_CURES = {
    "computing": "make items cheaper (smaller images, faster decoding, a cache of decoded items)",
    "waiting": "bring data nearer (local disk, larger files, a cache in memory)",
    "both": "make items cheaper, or bring data nearer",
}


def items_text(advice: WorkersAdvice) -> str:
    """Return what items, batches and steps cost."""
    profile = advice.profile
    times = sorted(profile.item_s)
    mean, p95 = sum(times) / len(times), times[int(0.95 * (len(times) - 1))]
    return (
        f"items: {1e3 * mean:.3g} ms each, 95 % within {1e3 * p95:.3g} ms, the longest {1e3 * times[-1]:.3g} ms; "
        f"processor time {profile.cpu_share:.0%}: {_HELPS[advice.bound]}\n"
        f"a batch of {profile.batch_size}: {1e3 * (mean * profile.batch_size + profile.collate_s):.3g} ms to make, "
        f"{profile.batch_bytes / MIB:.3g} MiB; a step takes {1e3 * advice.step_s:.3g} ms, "
        f"and waits {1e3 * advice.handover_s:.2g} ms for a batch that is ready"
    )


def trials_table(tried: Sequence[Tried]) -> str:
    """Return the trials as a table."""
    rows = [
        (
            str(t.workers),
            *((str(t.prefetch), t.start_method) if t.workers else ("", "")),
            *(f"{share:.1%}" for share in (t.loaded.stall, t.for_data, t.predicted)),
            f"{1e3 * t.loaded.wait_p95_s:.1f}",
            f"{t.loaded.samples_per_s:,.0f}",
            f"{t.loaded.startup_s:.2f}",
            f"{t.loaded.worker_bytes / MIB:,.0f}",
        )
        for t in sorted(tried, key=lambda t: (t.workers, t.prefetch, t.start_method))
    ]
    header = ("workers", "ahead", "start", "wait", "for data", "predicted", "p95 ms", "samples/s", "first s", "MiB")
    title = "wait: share of the time that steps wait; for data: without the transfer; MiB: of all workers together"
    return table(title, header, rows)


def advice_lines(advice: WorkersAdvice) -> list[str]:
    """Return the number of workers, the reasons for it, and lines for PyTorch and LeRobot."""
    best = advice.chosen
    seen = f"steps wait {best.loaded.stall:.1%} of the time"
    fewer = [t for t in advice.tried if t.workers < best.workers and not t.enough]
    if fewer and advice.enough:
        least = min(fewer, key=lambda t: (-t.workers, t.loaded.stall))
        seen += f", with {least.workers} {least.loaded.stall:.1%}"
    ahead = f" prefetch_factor={best.prefetch}" if best.workers else ""
    lines = [f"num_workers={best.workers}{ahead}: {seen} (measured)"]
    if best.hidden:
        lines.append(
            f"{best.for_data:.1%} of {best.loaded.stall:.1%} is waiting for data: the transfer from workers is slow on "
            f"this machine now. From the items' times it is {best.predicted:.1%} (estimated), and that decided"
        )
    if not advice.enough:
        lines.append(_data_bound(advice))
    methods = [t for t in advice.tried if (t.workers, t.prefetch) == (best.workers, best.prefetch) and t.workers]
    if len(methods) > 1:
        times = ", ".join(f"{t.start_method} {t.loaded.startup_s:.2g} s" for t in methods)
        lines.append(f"first batch after: {times} (measured); persistent workers pay once. spawn is safe with threads")
    more = ""
    if best.workers:
        more = f", prefetch_factor={best.prefetch}, persistent_workers=True"
        more += f', multiprocessing_context="{best.start_method}"'
    size, workers = advice.profile.batch_size, best.workers
    lines.append(f"DataLoader(..., batch_size={size}, num_workers={workers}{more})")
    line = train_line(batch_size=size, workers=workers, prefetch=best.prefetch, start_method=best.start_method)
    return [*lines, line]


def _data_bound(advice: WorkersAdvice) -> str:
    """Return why no number of workers is enough, and what to do."""
    if not advice.step_s:
        return "no step time was given: this is the smallest number that loads nearly as fast as any"
    if not advice.complete:
        return "time ran out before enough workers were found: give more with --time-s"
    if advice.chosen.by_queue:
        return (
            "from the items' times alone steps would not wait: the rest is the transfer of batches, or other programs "
            "on this machine; try larger batches, or a quiet machine"
        )
    limit = f", and {advice.limited_by} allow no more than {advice.most}" if advice.workers == advice.most else ""
    works = 1 - advice.chosen.loaded.stall
    faster = f"; up to {1 / works:.2g} times as fast" if works > 0 else ""
    return f"no number of workers is enough{limit}: {_CURES[advice.bound]}{faster}"


def known_line(advice: WorkersAdvice, dataset: str, *, cpus: float) -> str:
    """Return the known answer for a synthetic data set, and whether it was found."""
    from query_mutator.lab.sizing.datasets import known_answer

    known = known_answer(dataset, batch_size=advice.profile.batch_size, step_s=advice.step_s, cpus=cpus)
    found = "found"
    if known.workers != advice.workers:
        found = f"NOT found ({advice.workers} came out)"
    elif known.workers and known.prefetch != advice.prefetch:
        found = f"num_workers found, with prefetch_factor={advice.prefetch}"
    ahead = f" prefetch_factor={known.prefetch}" if known.workers else ""
    ahead += "" if known.enough else ", which is not enough"
    step_ms = 1e3 * advice.step_s
    return f"known answer for {dataset} at {step_ms:g} ms a step: num_workers={known.workers}{ahead}; {found}"
