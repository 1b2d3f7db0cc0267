"""The typed client, which AutoEnv looks for here."""

from query_mutator.adapters.openenv.client import (
    QueryRewritingAction,
    QueryRewritingEnv,
    QueryRewritingObservation,
    QueryRewritingState,
)

__all__ = ["QueryRewritingAction", "QueryRewritingEnv", "QueryRewritingObservation", "QueryRewritingState"]
