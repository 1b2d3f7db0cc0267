"""The models that the embedded server offers by default."""

from __future__ import annotations

from query_mutator.embedded.assistant import PydocAssistant
from query_mutator.embedded.corpus import Corpus, load_corpus
from query_mutator.embedded.models import Echo, EmbeddedModel
from query_mutator.embedded.reference_assistant import ReferenceAssistant
from query_mutator.embedded.rewriter import RuleRewriter
from query_mutator.embedded.rule_judge import RuleJudge
from query_mutator.encoder import Encoder

__all__ = ["default_models"]


def default_models(encoder: Encoder, *, corpus: Corpus | None = None) -> dict[str, EmbeddedModel]:
    """Return two assistants, a rewriter, a judge and `echo` by name; `corpus` defaults to this interpreter's."""
    corpus = corpus or load_corpus()
    rewriter = RuleRewriter(corpus.vocabulary(), encoder=encoder)
    answering: list[EmbeddedModel] = [PydocAssistant(encoder, corpus), ReferenceAssistant(encoder)]
    models = [*answering, rewriter, RuleJudge(), Echo()]
    return {model.name: model for model in models}
