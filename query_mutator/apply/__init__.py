"""Use a trained policy in a program: `Rewriter.load(RUN)`, then `rewrite`, `rewrite_many` or `await arewrite`.

    records.py     Rewrite and Step: what a rewritten question is
    deciding.py    rewrite_flow: the policy's decisions as a flow without I/O, within bounds of calls and time
    loading.py     from a run folder or a policy file to a task against running models
    rewriter.py    Rewriter: the sync, threaded and async drivers of the flow

Loads no torch. It may import `training` and all below it.
"""

from query_mutator.apply.deciding import Limits, Mode, rewrite_flow
from query_mutator.apply.records import Rewrite, Step
from query_mutator.apply.rewriter import Rewriter

__all__ = ["Limits", "Mode", "Rewrite", "Rewriter", "Step", "rewrite_flow"]
