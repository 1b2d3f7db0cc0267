"""An Ollama-compatible server whose models are Python functions, for tests: `start_server` runs it in a thread."""

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
