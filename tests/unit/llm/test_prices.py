"""Prices of models, and which key goes to which address."""

from __future__ import annotations

from pathlib import Path

import pytest

from query_mutator.errors import UsageError
from query_mutator.llm.openai import OpenAIBackend, key_of
from query_mutator.llm.prices import Price, in_words, read_prices
from query_mutator.settings import Address
from query_mutator.types import Completion

MODELS = ("small", "large")
REPLY = Completion(text="a", prompt_tokens=100, cached_tokens=40, completion_tokens=20, reasoning_tokens=5)


def test_prices_of_calls_and_of_tokens(tmp_path: Path) -> None:
    assert read_prices("", MODELS) == dict.fromkeys(MODELS, Price(call=1.0))
    assert read_prices("small=1, large=8", MODELS)["large"].of(REPLY) == 8
    path = tmp_path / "prices.toml"
    path.write_text("[small]\noutput = 1\n[large]\ncall = 2\nprompt = 0.5\ncached = 0.25\noutput = 3\nreasoning = 4\n")
    found = read_prices(str(path), MODELS)
    assert [found[name].of(REPLY) for name in MODELS] == [20, 2 + 30 + 10 + 45 + 20]
    for prices in (found, read_prices("small=1,large=8", MODELS)):
        assert read_prices(in_words(prices), MODELS) == prices


@pytest.mark.parametrize("spec", ["small=1", "small=-1,large=2", "small=x,large=2", "small=0,large=0", "none.toml"])
def test_a_price_that_cannot_be_used_is_one_line(spec: str) -> None:
    with pytest.raises(UsageError, match="--price"):
        read_prices(spec, MODELS)


def test_a_key_goes_to_its_own_address_only() -> None:
    environ = {"QM_KEYS": "http://127.0.0.1:8000=one https://api.example.com/v1=two", "OPENAI_API_KEY": "three"}
    addresses = {
        "http://127.0.0.1:8000/v1": "one",
        "https://api.example.com:443": "two",
        "http://api.example.com": "",
        "https://api.example.com:8443": "",
        "https://api.openai.com/v1": "three",
    }
    assert {url: key_of(url, environ) for url in addresses} == addresses
    headers = OpenAIBackend("http://127.0.0.1:9000", environ=environ).http_headers("m")
    assert headers == {}
    moved = {**environ, "OPENAI_BASE_URL": "http://127.0.0.1:9000/v1"}
    assert key_of("http://127.0.0.1:9000", moved) == "three"
    assert key_of("https://api.openai.com/v1", moved) == ""


def test_a_model_with_an_address() -> None:
    both = Address(target_model=("small@http://127.0.0.1:1/v1", "large@http://127.0.0.1:2", "third"))
    assert (both.openai_url, both.ollama_url, both.first_model) == ("http://127.0.0.1:1/v1", (), "small")
    assert both.targets == {"small": "", "large": "http://127.0.0.1:2", "third": ""}
    assert Address(target_model="name@sha").targets == {"name@sha": ""}  # type: ignore[arg-type]
    for models, url in ((("a", "a@http://127.0.0.1:2"), None), (("a@http://127.0.0.1:2",), "http://127.0.0.1:3")):
        with pytest.raises(ValueError, match="--target-model a"):
            Address(target_model=models, openai_url=url)
