"""Resources of this machine for workers: processors, memory, shared memory; and objects of a user's modules."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError

__all__ = ["GIB", "MIB", "Budget", "load_target", "machine_budget"]

MIB, GIB = 2**20, 2**30


def load_target(name: str) -> Any:
    """Return the object `package.module:name`, looked up in the working directory too; UsageError if there is none."""
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # an installed command has its own directory there instead
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{name}: {error}; give package.module:function") from None


# --- the budget -------------------------------------------------------------------------------------------------------


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
    quota = min(filter(None, map(_quota, groups)), default=None)
    limit = min(filter(None, map(_memory_limit, groups)), default=None)
    words = _text(root / "proc/meminfo").partition("MemAvailable:")[2].split()
    free = int(words[0]) * 1024 if words else None
    shm = None
    with contextlib.suppress(OSError):
        shared = os.statvfs(root / "dev/shm")
        shm = shared.f_bavail * shared.f_frsize
    why = [f"affinity {visible}", f"cgroup {quota:.3g} processors" if quota else "no cgroup limit of processors"]
    return Budget(
        cpus=min(visible, quota or visible),
        memory_bytes=min(filter(None, (limit, free)), default=None),
        shm_bytes=shm,
        why=", ".join([*why, *([f"cgroup {limit / GIB:.3g} GiB"] if limit else [])]),
    )


def _groups(root: Path) -> list[Path]:
    """Return the folders of this process' control groups and their parents, version 2 and 1."""
    mounted = root / "sys/fs/cgroup"
    found = [mounted, mounted / "cpu", mounted / "memory"]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        group = mounted / controllers / path.lstrip("/")
        found += [one for one in (group, *group.parents) if mounted in one.parents]
    return found


def _quota(group: Path) -> float | None:
    """Return the processors a group may use: its quota by its period, in microseconds."""
    words = _text(group / "cpu.max").split()
    words = words or [_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    known = len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0
    return int(words[0]) / int(words[1]) if known else None


def _memory_limit(group: Path) -> int | None:
    text = (_text(group / "memory.max") or _text(group / "memory.limit_in_bytes")).strip()
    return int(text) if text.isdigit() and int(text) < 2**60 else None  # version 1 writes a huge number for no limit


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
