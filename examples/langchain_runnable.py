"""A trained policy in a LangChain pipeline: a Runnable from a question to its rewrite, or to the answer.

    pip install langchain-core
    python examples/langchain_runnable.py runs/latest "plz sort my lisst"

`rewriting(rewriter) | prompt | model` asks your model the rewritten question; `answering(rewriter)` takes the
answer that the policy submits. Both have `invoke`, `batch` and `ainvoke`.
"""

from __future__ import annotations

import sys

from langchain_core.runnables import RunnableLambda

from query_mutator import Rewriter

__all__ = ["answering", "rewriting"]


def rewriting(rewriter: Rewriter) -> RunnableLambda[str, str]:
    """Return a Runnable from a question to the wording that the policy submits."""

    async def arewritten(question: str) -> str:
        return (await rewriter.arewrite(question)).text

    return RunnableLambda(lambda question: rewriter.rewrite(question).text, afunc=arewritten, name="query_mutator")


def answering(rewriter: Rewriter) -> RunnableLambda[str, str]:
    """Return a Runnable from a question to the answer that the policy submits."""

    async def aanswered(question: str) -> str:
        return (await rewriter.arewrite(question)).answer or ""

    return RunnableLambda(
        lambda question: rewriter.rewrite(question).answer or "", afunc=aanswered, name="query_mutator"
    )


if __name__ == "__main__":
    with Rewriter.load(sys.argv[1]) as loaded:
        print(answering(loaded).invoke(sys.argv[2]))
