"""An embedded model's digest follows what its replies depend on, and nothing else."""

from __future__ import annotations

from query_mutator.embedded.assistant import PydocAssistant
from query_mutator.embedded.corpus import Corpus, Entry
from query_mutator.embedded.rewriter import RuleRewriter
from query_mutator.embedded.server import start_server
from query_mutator.encoder import Encoder
from query_mutator.llm.ollama import OllamaBackend


def entry(summary: str) -> Entry:
    return Entry(name="len", signature="len(obj)", summary=summary)


def test_digest_follows_the_corpus(hash_encoder: Encoder) -> None:
    def digest(summary: str) -> str:
        return PydocAssistant(hash_encoder, Corpus([entry(summary)])).digest

    assert digest("Return the number of items.") == digest("Return the number of items.")
    assert digest("Return the number of items.") != digest("Return the length.")


def test_digest_follows_the_words_of_the_rules() -> None:
    assert RuleRewriter({"len"}, {"the"}).digest == RuleRewriter({"len"}, {"the"}).digest
    assert RuleRewriter({"len"}, {"the"}).digest != RuleRewriter({"len", "list"}, {"the"}).digest


def test_the_server_reports_it_as_the_digest_of_the_weights(hash_encoder: Encoder) -> None:
    assistant = PydocAssistant(hash_encoder, Corpus([entry("Return the number of items.")]))
    with start_server([assistant]) as server:
        backend = OllamaBackend(server.url)
        assert backend.digest("pydoc-assistant") == assistant.digest
        backend.close()
