"""Query Mutator: learn which rewrite makes an ordinary question get a better answer.

    from query_mutator import Rewriter
    with Rewriter.load("runs/latest") as rewriter:
        print(rewriter.rewrite("plz sort my lisst").answer)

Importing the package is fast: it loads no torch, gymnasium or encoder. `Rewriter` is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from query_mutator.version import __version__

if TYPE_CHECKING:
    from query_mutator.apply import Rewrite, Rewriter, Step

__all__ = ["Rewrite", "Rewriter", "Step", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the public names on first use."""
    if name not in ("Rewrite", "Rewriter", "Step"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from query_mutator import apply

    return getattr(apply, name)
