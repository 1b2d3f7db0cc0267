"""The query rewriting environment, as OpenEnv's tools find it."""

from .client import QueryRewritingAction, QueryRewritingEnv, QueryRewritingObservation

__all__ = ["QueryRewritingAction", "QueryRewritingEnv", "QueryRewritingObservation"]
