"""gymnasium's ways to make and wrap environments, other libraries' checks, and random cases of benchmarks.attack."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import warnings
from functools import partial
from pathlib import Path

import gymnasium as gym
import pytest

from benchmarks.attack.campaign import AREAS, run_case
from scripts.check_peers import PEERS

ID = "rl_query_mutator_env:QueryMutation-v0"


@pytest.mark.parametrize("error", [ValueError, TypeError])  # the latter is what torchrl's GymEnv expects
def test_an_unknown_keyword_names_the_nearest_one(error: type[Exception]) -> None:
    for make in (gym.make, partial(gym.make_vec, num_envs=2)):
        with pytest.raises(error, match=r"unexpected keyword argument 'encodr', did you mean 'encoder'\?; known: "):
            make(ID, encodr="hash")


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_peer(peer: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*A Box observation space m.*")  # embeddings have no bounds
        PEERS[peer][1]()


SEED = 20_26


@pytest.mark.slow
@pytest.mark.parametrize("index", range(25))
@pytest.mark.parametrize("area", AREAS)
def test_a_random_case_is_answered_in_order(area: str, index: int) -> None:
    outcome = run_case(area, index, SEED)
    assert outcome.verdict == "ok", f"{outcome.case}\n{outcome.detail}"


# --- the packages under environments/, in Python environments that have their libraries -------------------------------

ROOT = Path(__file__).resolve().parents[2]
OPENENV = "openenv-core==0.3.0"
PEERS_PYTHON = Path(os.environ.get("QM_PEERS_PYTHON") or ROOT / ".venv-peers" / "bin" / "python")


def python_with(package: str) -> Path:
    """Return the interpreter of an environment with a package, which is kept in build/; skip the test without one."""
    folder = ROOT / "build" / "peers" / package
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        uv = [str(Path(sys.executable).with_name("uv")), "--quiet"]
        environ = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""), **os.environ}
        for words in (
            ["venv", "--clear", "--python", sys.executable, folder],
            ["pip", "install", "--python", python, package],
        ):
            made = subprocess.run([*uv, *map(str, words)], env=environ, capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"{package} cannot be installed: {made.stderr.strip().splitlines()[-1]}")
        packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        (packages / "development.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        done.touch()
    return python


def run_tests(python: Path, folder: Path, *, importing: Path) -> None:
    """Run the tests of a package with an interpreter, whose commands are found first."""
    command = [python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", folder / "tests"]
    path = os.pathsep.join([str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, importing))), "PATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_openenv() -> None:
    folder = ROOT / "environments" / "query_rewriting_env"
    run_tests(python_with(OPENENV), folder, importing=folder.parent)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_verifiers() -> None:
    if not PEERS_PYTHON.exists():
        pytest.skip(f"{PEERS_PYTHON} is missing: `make install-peers` could not install requirements-peers.txt")
    folder = ROOT / "environments" / "query_rewriting"
    run_tests(PEERS_PYTHON, folder, importing=folder)
