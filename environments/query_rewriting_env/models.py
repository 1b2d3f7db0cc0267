"""Action, observation and state."""

from query_mutator.adapters.openenv.models import QueryRewritingAction, QueryRewritingObservation, QueryRewritingState

__all__ = ["QueryRewritingAction", "QueryRewritingObservation", "QueryRewritingState"]
