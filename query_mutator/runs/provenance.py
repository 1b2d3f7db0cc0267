"""Provenance of a run: versions, commit, hardware, command line. Nothing here loads the packages it names."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from query_mutator.cli.settings import files_read
from query_mutator.errors import hide_credentials
from query_mutator.version import __version__

PACKAGES = ("torch", "numpy", "gymnasium", "sentence-transformers", "transformers", "tokenizers")


def describe_run(flags: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    """Return the content of config.json: all that is needed to understand and repeat a run; `parts` are added."""
    return {
        "flags": dict(flags),
        "command_line": command_line(),
        "settings_files": files_read(),
        **parts,
        "versions": versions(),
        "commit": commit(),
        "hardware": hardware(),
    }


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Return the versions of the product, Python and the packages that can move a result."""
    found = {"query-mutator": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Return processor, cores this process may use, memory in GiB, and GPUs if torch is loaded and sees any."""
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpus": _gpus(),
    }


def command_line() -> str:
    """Return how this process was started, ready to be pasted into a shell, without credentials in URLs."""
    words = [Path(sys.executable).name, *sys.orig_argv[1:]]
    return shlex.join(map(hide_credentials, words))


def commit() -> str | None:
    """Return the commit of the checkout the package runs from ("-dirty" when changed), None outside one."""
    package = Path(__file__).resolve().parent
    if not _git(package, "ls-files", "--error-unmatch", Path(__file__).name):
        return None
    head = _git(package, "rev-parse", "HEAD")
    return f"{head}-dirty" if head and _git(package, "status", "--porcelain", "--untracked-files=no") else head


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
