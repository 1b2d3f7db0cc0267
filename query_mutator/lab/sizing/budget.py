"""Read what worker processes may use of this machine: processors, memory, shared memory, container limits included."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from query_mutator.lab.sizing.cards import GIB

__all__ = ["Budget", "machine_budget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Processors (may be a fraction), bytes, and the source of each figure; None if no limit can be read."""

    cpus: float
    memory_bytes: int | None
    shm_bytes: int | None
    why: str

    def __str__(self) -> str:
        memory = "" if self.memory_bytes is None else f", {self.memory_bytes / GIB:.3g} GiB memory"
        shared = "" if self.shm_bytes is None else f", {self.shm_bytes / GIB:.3g} GiB shared memory"
        return f"{self.cpus:.3g} processors{memory}{shared} ({self.why})"


def machine_budget(root: Path = Path("/")) -> Budget:
    """Return the smallest of what affinity, control groups and the machine allow; `root` holds proc, sys and dev."""
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    groups = _groups(root)
    quota = min((found for group in groups if (found := _quota(group)) is not None), default=None)
    limit = min((found for group in groups if (found := _memory_limit(group)) is not None), default=None)
    free = _available(root)
    why = [f"affinity {visible}", f"cgroup {quota:.3g} processors" if quota else "no cgroup limit of processors"]
    if limit is not None:
        why.append(f"cgroup {limit / GIB:.3g} GiB")
    return Budget(
        cpus=min(visible, quota) if quota else visible,
        memory_bytes=min((value for value in (limit, free) if value is not None), default=None),
        shm_bytes=_free(root / "dev/shm"),
        why=", ".join(why),
    )


def _groups(root: Path) -> list[Path]:
    """Return the folders of this process' control groups and their parents, version 2 and 1."""
    mounted = root / "sys/fs/cgroup"
    found = [mounted, mounted / "cpu", mounted / "memory"]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        group = mounted / controllers / path.lstrip("/")
        while group != mounted and mounted in group.parents:
            found.append(group)
            group = group.parent
    return found


def _quota(group: Path) -> float | None:
    """Return the processors a group may use: its quota by its period, in microseconds."""
    words = _text(group / "cpu.max").split()
    if not words:
        words = [_text(group / "cpu.cfs_quota_us").strip(), _text(group / "cpu.cfs_period_us").strip()]
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
        return int(words[0]) / int(words[1])
    return None


def _memory_limit(group: Path) -> int | None:
    text = (_text(group / "memory.max") or _text(group / "memory.limit_in_bytes")).strip()
    return int(text) if text.isdigit() and int(text) < 2**60 else None  # version 1 writes a huge number for no limit


def _available(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free(folder: Path) -> int | None:
    try:
        at = os.statvfs(folder)
    except OSError:
        return None
    return at.f_bavail * at.f_frsize


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
