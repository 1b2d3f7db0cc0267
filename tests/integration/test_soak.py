"""Many clients at once: every reply belongs to its request. `make soak` does it for longer, and watches memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.attack.soak import Held, growth, mixed_up
from tests.integration.killing import ServerProcess

pytestmark = pytest.mark.slow


def test_every_reply_belongs_to_its_request(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, num_parallel=40)
    replies, wrong = mixed_up(server.url, clients=40, seconds=2)
    server.kill()
    assert replies > 40
    assert wrong == []


def test_growth_is_that_of_the_last_quarter_over_the_first_after_the_warm_up() -> None:
    flat = [Held(memory_bytes=9 if n < 4 else 100, descriptors=n % 2, threads=3) for n in range(20)]
    assert growth(flat).memory_bytes == 0
    rising = [Held(memory_bytes=n, descriptors=n, threads=3) for n in range(20)]
    assert growth(rising) == Held(memory_bytes=12, descriptors=12, threads=0)
