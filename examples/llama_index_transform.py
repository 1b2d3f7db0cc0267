"""A trained policy as a LlamaIndex query transform: what is retrieved and answered is the rewritten question.

    pip install llama-index-core
    from llama_index.core.query_engine import TransformQueryEngine
    engine = TransformQueryEngine(index.as_query_engine(), QueryMutatorTransform(Rewriter.load("runs/latest")))

The embedding is that of the rewritten question; the original one is in the bundle's `query_str` before the transform.
"""

from __future__ import annotations

from typing import Any

from llama_index.core.indices.query.query_transform.base import BaseQueryTransform
from llama_index.core.schema import QueryBundle

from query_mutator import Rewriter

__all__ = ["QueryMutatorTransform"]


class QueryMutatorTransform(BaseQueryTransform):
    """Replaces the text of a query by the wording that the policy submits."""

    def __init__(self, rewriter: Rewriter) -> None:
        super().__init__()
        self.rewriter = rewriter

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        """Do nothing: the operators have the prompts."""

    def _run(self, query_bundle: QueryBundle, metadata: dict[str, Any]) -> QueryBundle:
        return QueryBundle(self.rewriter.rewrite(query_bundle.query_str).text)
