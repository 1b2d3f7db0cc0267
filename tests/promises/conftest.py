"""A model server for tests that only read what it answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.promises import helpers


@pytest.fixture(scope="session")
def server() -> Iterator[helpers.ModelServer]:
    """A model server without latency or faults, started by a command; its counts are everybody's."""
    with helpers.model_server() as started:
        yield started


@pytest.fixture
def own_server() -> Iterator[helpers.ModelServer]:
    """A model server for one test, which may read and reset its counts."""
    with helpers.model_server() as started:
        yield started


@pytest.fixture(scope="session")
def trained(server: helpers.ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of some steps, for tests that only read it."""
    return helpers.train(server, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def upstream() -> Iterator[helpers.ModelServer]:
    """The server behind proxies, which each test may set and reset."""
    with helpers.model_server() as started:
        yield started


@pytest.fixture(scope="session")
def plan(upstream: helpers.ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a plan, which always rewrites, for proxies; two folders above is the home of who made it."""
    home = tmp_path_factory.mktemp("plan")
    flags = [*helpers.server_flags(upstream), "--dataset", helpers.write_questions(home / "questions.jsonl")]
    flags += ["--operators", "neutral,filler", "--forms", "none", "--answer", "searched", "--reward", "right=1"]
    flags += ["--max-calls", "200", "--budget", "2", "--cache", "off", "--save-dir", home / "runs"]
    helpers.good(helpers.run([*helpers.QM, "plan", *flags], cwd=home))
    return helpers.latest(home)
