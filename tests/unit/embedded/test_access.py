"""Which hosts are this machine, and who may call a server that listens on one of its addresses."""

from __future__ import annotations

import socket

import pytest

from query_mutator.embedded.access import Access, is_local


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        *[(host, True) for host in ("", "localhost", "LOCALHOST.:1", "127.0.0.1:80", "[::1]:80", "192.168.1.2")],
        *[(host, True) for host in (socket.gethostname(), "box.local:11434", "host.docker.internal", "a.localhost")],
        *[(host, False) for host in ("evil.example", "8.8.8.8", "localhost.evil.example", "127.0.0.1.nip.io", "a, b")],
    ],
)  # fmt: skip
def test_names_and_addresses_of_this_machine_and_its_network(host: str, allowed: bool) -> None:
    assert is_local(host) is allowed


def test_a_server_bound_to_another_address_takes_any_host() -> None:
    headers = {"host": "models.example"}
    assert Access(bound=["127.0.0.1", "::1"]).refusal(headers) is not None
    assert Access(bound=["0.0.0.0"]).refusal(headers) is None


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        *[(origin, True) for origin in ("http://localhost", "https://localhost:3000", "http://127.0.0.1:8080")],
        *[(origin, True) for origin in ("app://obsidian.md", "vscode-webview://x")],
        *[(origin, False) for origin in ("https://evil.example", "null", "http://localhost.evil.example", "")],
    ],
)
def test_pages_of_this_machine_may_call(origin: str, allowed: bool) -> None:
    access = Access(bound=["127.0.0.1"])
    assert (access.refusal({"host": "localhost", "origin": origin}) is None) is allowed
