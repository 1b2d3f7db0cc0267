"""Other libraries on the registered environment: gymnasium's, Stable-Baselines3's and torchrl's own checks."""

from __future__ import annotations

import warnings

import pytest

from scripts.check_peers import PEERS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("peer", PEERS)
def test_peer(peer: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*A Box observation space m.*")  # embeddings have no bounds
        PEERS[peer][1]()
