"""tests/peers: libraries whose pins conflict with ours, in an environment of their own over this one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("QM_PEERS_PYTHON") or ROOT / ".venv-peers" / "bin" / "python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_libraries_in_an_environment_of_their_own() -> None:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing: `make install-peers` could not install requirements-peers.txt")
    command = [PYTHON, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/peers"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " skipped" not in done.stdout, done.stdout
