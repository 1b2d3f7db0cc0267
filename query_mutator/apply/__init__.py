"""Use a trained policy in a program: `Rewriter.load(RUN)`, then `rewrite`, `rewrite_many` or `await arewrite`.

    rewriter.py       Rewriter, the sync, threaded and async drivers of its flow: the policy's decisions without I/O,
                      within bounds of calls and time; Rewrite, what a rewritten question is
    batch_files.py    a file of questions answered, for `qm batch`
    proxy/            the proxy of `qm serve`

Loads no torch. It may import `training` and all below it.
"""

from query_mutator.apply.rewriter import Rewrite, Rewriter
from query_mutator.session.play import Limits, Step

__all__ = ["Limits", "Rewrite", "Rewriter", "Step"]
