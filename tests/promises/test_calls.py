"""Model calls: how many are in flight, what they do not change, and what a failed one is worth."""

from __future__ import annotations

from pathlib import Path

from tests.promises.helpers import ModelServer, train


def test_in_flight_never_above_batch_size(own_server: ModelServer, tmp_path: Path) -> None:
    """Calls in flight, of mutator and target together, never exceed --batch-size, as the server counts them."""
    own_server.set(latency_ms=15, latency_sigma=1)
    train(own_server, tmp_path, "--num-processes", "8", "--batch-size", "3", "--evaluate", "--plan-calls", "0")
    seen = own_server.counts()
    assert seen["peak_in_flight"] == 3
    assert min(seen["answered"][model] for model in ("librarian", "softener")) > 10
