"""Run many cases in separate processes: watched for hangs and memory, resumable, counted by area."""

from __future__ import annotations

import collections
import importlib
import json
import multiprocessing
import random
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from benchmarks.attack.harness import Attack, Outcome

AREAS = ("servers", "datasets", "policies", "flags")
HANG_S = 30.0
MEMORY_BYTES = 300 << 20  # by which one case may raise the process's peak
CASES_PER_PROCESS = 400  # a fresh process after that, so that leaks of many cases do not add up
SPAWN = multiprocessing.get_context("spawn")


def run_case(area: str, index: int, seed: int) -> Outcome:
    """Run case `index` of an area in this process, in a folder that is removed afterwards."""
    attack: Attack = importlib.import_module(f"benchmarks.attack.{area}").attack
    folder = Path(tempfile.mkdtemp(prefix=f"attack-{area}-"))
    try:
        return attack(random.Random(f"{seed}:{area}:{index}"), folder)
    except BaseException:
        return Outcome(case=f"{area}:{index}", verdict="traceback", detail=traceback.format_exc()[-4000:])
    finally:
        for path in folder.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)


def _serve(pipe: Connection) -> None:
    """Run the cases that come through the pipe; send each outcome with the bytes by which it raised the peak."""
    while (case := pipe.recv()) is not None:
        before = _memory_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak of resident memory
        outcome = run_case(*case)
        pipe.send((outcome, _memory_bytes("VmHWM") - before))


def _memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


class _Worker:
    """A process that runs one case at a time."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_serve, args=(theirs,))
        self.process.start()
        self.done, self.begun = 0, set[str]()

    def run(self, area: str, index: int, seed: int) -> Outcome:
        if self.done >= CASES_PER_PROCESS:
            self.close()
            self._start()
        outcome, peak = self._once(area, index, seed)
        if peak > MEMORY_BYTES:  # once more: the first case of a kind also loads modules
            outcome, peak = self._once(area, index, seed)
        if peak > MEMORY_BYTES and outcome.verdict == "ok":
            return Outcome(case=outcome.case, verdict="memory", detail=f"{peak >> 20} MiB")
        return outcome

    def _once(self, area: str, index: int, seed: int) -> tuple[Outcome, int]:
        is_first = area not in self.begun
        self.done += 1
        self.begun.add(area)
        self.pipe.send((area, index, seed))
        try:
            if self.pipe.poll(HANG_S * (3 if is_first else 1)):  # the first of an area also loads modules, makes inputs
                result: tuple[Outcome, int] = self.pipe.recv()
                return result
            verdict, detail = Outcome(case=f"{area}:{index}", verdict="hang", detail=f"over {HANG_S:.0f} s"), 0
        except EOFError:
            verdict, detail = Outcome(case=f"{area}:{index}", verdict="traceback", detail="the process died"), 0
        self.process.kill()
        self.process.join()
        self._start()
        return verdict, detail

    def close(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
            self.process.join(10)
        self.process.kill()


def run_campaign(
    areas: Sequence[str], *, cases: int, seed: int, jobs: int, journal: Path, report: Callable[[str], None]
) -> collections.Counter[tuple[str, str]]:
    """Run `cases` cases, equally many of each area, and append each outcome to `journal`.

    Cases that the journal has are not run again. Returns the number of cases by (area, verdict).
    """
    known = _read(journal, seed)
    counts = collections.Counter((area, outcome["verdict"]) for (area, _), outcome in known.items())
    share = -(-cases // len(areas))
    left: SimpleQueue[tuple[str, int]] = SimpleQueue()
    for index in range(share):
        for area in areas:
            if (area, index) not in known:
                left.put((area, index))
    lock = threading.Lock()
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a", encoding="utf-8") as file:

        def record(area: str, index: int, outcome: Outcome, took_s: float) -> None:
            row = {"seed": seed, "area": area, "index": index, "seconds": round(took_s, 3), **asdict(outcome)}
            with lock:
                counts[area, outcome.verdict] += 1
                file.write(json.dumps(row) + "\n")
                file.flush()
                if outcome.verdict != "ok":
                    report(f"{area}:{index} {outcome.verdict}: {outcome.case}\n{outcome.detail}")

        _in_threads(jobs, lambda: _work(left, seed, record))
    return counts


def _work(left: SimpleQueue[tuple[str, int]], seed: int, record: Callable[[str, int, Outcome, float], None]) -> None:
    worker = _Worker()
    try:
        while True:
            area, index = left.get_nowait()
            begun = time.monotonic()
            record(area, index, worker.run(area, index, seed), time.monotonic() - begun)
    except Empty:
        pass
    finally:
        worker.close()


def _in_threads(count: int, work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _read(journal: Path, seed: int) -> dict[tuple[str, int], dict[str, Any]]:
    lines: Iterable[str] = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else ()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {(row["area"], row["index"]): row for row in rows if row["seed"] == seed}
