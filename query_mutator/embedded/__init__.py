"""The default on a fresh machine: a question-answering assistant and a rewriter behind an Ollama-compatible server.

`start_server(models)` starts the server in a thread; what it needs is offered here and loads no numpy. The models that
need an encoder are in their own modules: `default_models.default_models`, `assistant.PydocAssistant`,
`reference_assistant.ReferenceAssistant`, `rewriter.RuleRewriter`, and `corpus.load_corpus` for the documentation they
know. This package imports only `encoder`, `files`, `errors` and `registry`.
"""

from query_mutator.embedded.faults import KINDS, FaultPlan
from query_mutator.embedded.latency import Latency
from query_mutator.embedded.models import Babble, Echo, EmbeddedModel, PromptError
from query_mutator.embedded.server import EmbeddedServer, ServerSettings, start_server

__all__ = [
    "KINDS",
    "Babble",
    "Echo",
    "EmbeddedModel",
    "EmbeddedServer",
    "FaultPlan",
    "Latency",
    "PromptError",
    "ServerSettings",
    "start_server",
]
