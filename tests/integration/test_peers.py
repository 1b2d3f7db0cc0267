"""gymnasium's ways to make and wrap environments, other libraries' checks, and random cases of benchmarks.attack."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import vector as wrappers

from benchmarks.attack.campaign import AREAS, run_case
from query_mutator.testing import StubServer
from scripts.check_peers import PEERS
from tests.integration.conftest import ROWS, write_dataset

ID = "rl_query_mutator_env:QueryMutation-v0"
SAME_STEP, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
NUM_ENVS, NUM_ACTIONS = 3, 5
Envs = VectorEnv[Any, Any, Any]


@pytest.fixture(scope="module")
def settings(tiny_server: StubServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("gymnasium") / "questions.jsonl"
    write_dataset(path, ROWS)
    return {
        "ollama_url": tiny_server.url, "target_model": "librarian", "mutator_model": "softener", "encoder": "hash",
        "dataset": str(path), "operators": "spelling,neutral,filler",
    }  # fmt: skip


@pytest.fixture
def envs(settings: dict[str, Any]) -> Iterator[Callable[[AutoresetMode], Envs]]:
    """Ours, made for a mode."""
    made: list[Envs] = []

    def make(mode: AutoresetMode) -> Envs:
        made.append(gym.make_vec(ID, num_envs=NUM_ENVS, autoreset_mode=mode, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def play(envs: Envs, *, seed: int = 7, steps: int = 15) -> list[Any]:
    """Return all that a seeded sequence of actions gives; where nothing resets, ended environments are reset."""
    rng, found = np.random.default_rng(seed), [envs.reset(seed=seed)]
    for _ in range(steps):
        found.append(envs.step(rng.integers(NUM_ACTIONS, size=NUM_ENVS)))  # type: ignore[arg-type]
        ended = np.logical_or(found[-1][2], found[-1][3])  # type: ignore[misc]
        if envs.metadata["autoreset_mode"] is DISABLED and ended.any():
            found.append(envs.reset(options={"reset_mask": ended}))
    return found


@pytest.mark.parametrize("error", [ValueError, TypeError])  # the latter is what torchrl's GymEnv expects
def test_an_unknown_keyword_names_the_nearest_one(error: type[Exception]) -> None:
    for make in (gym.make, partial(gym.make_vec, num_envs=2)):
        with pytest.raises(error, match=r"unexpected keyword argument 'encodr', did you mean 'encoder'\?; known: "):
            make(ID, encodr="hash")


def test_episode_statistics_without_autoreset_are_those_of_the_environment(
    envs: Callable[[AutoresetMode], Envs],
) -> None:
    ended = 0
    for step in play(wrappers.RecordEpisodeStatistics(envs(DISABLED)))[1:]:
        if len(step) == 5 and "episode" in step[4]:
            rows = step[2] | step[3]
            assert step[4]["episode"]["l"][rows].tolist() == step[4]["episode_length"][rows].tolist()
            assert np.allclose(step[4]["episode"]["r"][rows], step[4]["episode_return"][rows])
            ended += int(rows.sum())
    assert ended > 3


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
