"""A server that refuses log probabilities gives replies without them, and is asked once."""

from __future__ import annotations

import logging

import pytest

from query_mutator.llm.ollama import OllamaBackend
from query_mutator.testing import start_server
from query_mutator.types import ChatRequest
from tests.conftest import Librarian


def test_replies_of_a_server_that_refuses_log_probabilities_have_none(caplog: pytest.LogCaptureFixture) -> None:
    with start_server([Librarian()]) as server, caplog.at_level(logging.INFO):
        backend = OllamaBackend(server.url)
        requests = [ChatRequest.user(f"How do I sort {n} lists?", model="librarian", logprobs=True) for n in range(3)]
        replies = [backend.complete(request) for request in requests]
        backend.close()
        assert [reply.error for reply in replies] == [None] * 3
        assert {reply.logprob for reply in replies} == {None}
        assert server.stats()["calls"] == 3  # a refused request does not reach the model
    assert caplog.text.count("no log probabilities") == 1
