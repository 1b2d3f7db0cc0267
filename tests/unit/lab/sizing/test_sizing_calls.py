"""Flags for a server: from a probe's numbers, and from a probe of a real server."""

from __future__ import annotations

import re

import pytest

from query_mutator.commands.main import main
from query_mutator.lab.sizing.collecting import cache_bytes, cache_line, size_calls
from query_mutator.testing import Echo, StubServer, start_server


def test_calls_and_environments_follow_from_slots_and_time() -> None:
    advice = size_calls(4, width=16, service_s=0.5)
    assert advice is not None
    assert (advice.batch_size, advice.num_processes, advice.steps_per_s) == (4, 8, 4.0)
    assert "4 slots, 0.5 s a call" in str(advice)
    assert "or more" in str(size_calls(16, width=16, service_s=0.5))
    assert size_calls(None, width=16, service_s=0.5) is None


def test_memory_of_attention_caches() -> None:
    llama = {
        "llama.block_count": 32, "llama.attention.head_count": 32, "llama.attention.head_count_kv": 8,
        "llama.embedding_length": 4096,
    }  # fmt: skip
    assert cache_bytes(llama, num_ctx=4096, slots=4) == 4 * 512 * 2**20  # 128 KiB a token
    assert cache_bytes({}, num_ctx=4096, slots=4) is None
    assert cache_line(llama, num_ctx=4096, slots=4).startswith("attention caches: 2,048 MiB for 4 slots of 4096 tokens")


def test_a_server_with_three_slots(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server([Echo()], num_parallel=3, latency_ms=100) as server:
        assert main(["size", "calls", "--ollama-url", server.url, "--width", "6"]) == 0
    said = capsys.readouterr().out
    found = re.search(r"--batch-size (\d+) --num-processes (\d+): at most (\S+) steps/s", said)
    assert found is not None
    assert (found[1], found[2]) == ("3", "6")
    assert "OLLAMA_NUM_PARALLEL=6" in said
    assert "the memory of its caches is unknown" in said  # the test server has no such model


def test_two_servers_share_the_calls(capsys: pytest.CaptureFixture[str]) -> None:
    def two_slots() -> StubServer:
        return start_server([Echo()], num_parallel=2, latency_ms=100)

    with two_slots() as one, two_slots() as other:
        assert main(["size", "calls", "--ollama-url", one.url, other.url, "--width", "8"]) == 0
    assert "--batch-size 4 --num-processes 8" in capsys.readouterr().out
