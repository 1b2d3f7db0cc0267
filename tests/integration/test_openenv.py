"""`qm env serve` with the published OpenEnv, in an environment of its own over the packages of this one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from query_mutator.cli.console import exit_code
from query_mutator.commands.main import main as qm_main
from scripts.check_peers import PEERS

ROOT = Path(__file__).resolve().parents[2]
(PACKAGE,) = PEERS["openenv"][0]


def test_without_openenv_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openenv", None)
    assert exit_code(qm_main, ["env", "serve"], prog="qm") == 2
    assert capsys.readouterr().err == "qm: qm env serve needs openenv: pip install 'query-mutator[openenv]'\n"


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the interpreter of an environment with OpenEnv, which is kept for the next run."""
    folder = ROOT / "build" / "peers" / PACKAGE
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        uv = [str(Path(sys.executable).with_name("uv")), "--quiet"]
        environ = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""), **os.environ}
        for words in (
            ["venv", "--clear", "--python", sys.executable, folder],
            ["pip", "install", "--python", python, PACKAGE],
        ):
            made = subprocess.run([*uv, *map(str, words)], env=environ, capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"{PACKAGE} cannot be installed: {made.stderr.strip().splitlines()[-1]}")
        packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        (packages / "development.pth").write_text(sysconfig.get_path("purelib"))
        done.touch()
    return python


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_openenvs_clients_and_validator(python: Path) -> None:
    command = [python, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "tests/integration/openenv_sessions.py"]
    path = f"{python.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
