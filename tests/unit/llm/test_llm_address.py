"""Every way to write a server's address, and the way there."""

from __future__ import annotations

import pytest

from query_mutator.errors import UsageError
from query_mutator.llm.address import is_loopback, proxy_for, route_to, server_url


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:11434"),
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        (":8080", "http://127.0.0.1:8080"),
        ("gpu-box", "http://gpu-box:11434"),
        ("gpu-box:1", "http://gpu-box:1"),
        (" gpu-box ", "http://gpu-box:11434"),
        ("http://gpu-box", "http://gpu-box:80"),
        ("https://gpu-box", "https://gpu-box:443"),
        ("https://gpu-box:11434/", "https://gpu-box:11434"),
        ("http://gpu-box/ollama/", "http://gpu-box:80/ollama"),
        ("gpu-box/ollama", "http://gpu-box:11434/ollama"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("http://0.0.0.0:5000", "http://127.0.0.1:5000"),
        ("::1", "http://[::1]:11434"),
        ("[::1]", "http://[::1]:11434"),
        ("[::1]:99", "http://[::1]:99"),
        ("[::]:99", "http://[::1]:99"),
    ],
)
def test_every_form_that_ollama_accepts_becomes_a_url(typed: str, url: str) -> None:
    assert server_url(typed) == url
    assert server_url(url) == url


@pytest.mark.parametrize(
    "typed",
    ["ftp://gpu-box", "gpu-box:port", "gpu-box:99999", "my box", "http://..", "gpu-bóx", "http://me:secret@gpu-box"],
)
def test_what_is_no_address_is_a_usage_error_in_one_line(typed: str) -> None:
    with pytest.raises(UsageError) as caught:
        server_url(typed)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_loopback_is_known_by_name_and_by_number() -> None:
    assert all(map(is_loopback, ["localhost", "LOCALHOST", "a.localhost", "127.0.0.1", "127.9.9.9", "::1"]))
    assert not any(map(is_loopback, ["gpu-box", "10.0.0.1", "localhost.example.org", "::2"]))


def test_a_proxy_is_taken_from_the_environment_unless_no_proxy_names_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "proxy.test:3128")
    monkeypatch.setenv("no_proxy", "inside.test,10.0.0.0/8")
    assert route_to("http://outside.test").host == "proxy.test"
    assert route_to("http://inside.test").host == "inside.test"
    assert route_to("http://10.1.2.3").host == "10.1.2.3"
    assert route_to("localhost").host == "localhost"


def test_a_proxy_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "socks5://proxy.test:1080")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(UsageError, match="socks5 proxy is not supported"):
        proxy_for("http://outside.test")
