"""Query Mutator's environment for OpenEnv, as its tools find it."""

from .client import QueryRewritingAction, QueryRewritingEnv, QueryRewritingObservation

__all__ = ["QueryRewritingAction", "QueryRewritingEnv", "QueryRewritingObservation"]
