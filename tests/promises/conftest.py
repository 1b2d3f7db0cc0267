"""A model server for tests that only read what it answers."""

from __future__ import annotations

from collections.abc import Iterator

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
