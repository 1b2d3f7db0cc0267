"""The models of the embedded server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from query_mutator.embedded.assistant import PydocAssistant
from query_mutator.embedded.corpus import Corpus, load_corpus
from query_mutator.embedded.echo import Echo
from query_mutator.encoder.sentence import Encoder


class EmbeddedModel(Protocol):
    """A model that answers several prompts at once; a prompt is the text of the last user message."""

    name: str

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        """Return one reply per prompt, in order."""
        ...


def default_models(encoder: Encoder, *, corpus: Corpus | None = None) -> dict[str, EmbeddedModel]:
    """Return the assistant, the rewriter and `echo` by name; the corpus is this interpreter's unless given."""
    from query_mutator.embedded.rewriter import RuleRewriter

    corpus = corpus or load_corpus()
    rewriter = RuleRewriter(corpus.vocabulary(), encoder=encoder)
    models: list[EmbeddedModel] = [PydocAssistant(encoder, corpus), rewriter, Echo()]
    return {model.name: model for model in models}
