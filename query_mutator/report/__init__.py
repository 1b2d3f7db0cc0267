"""Figures and tables of training runs, evaluations and benchmarks; never imports torch.

`curve` draws the learning curve of a run, `table` prints the result table of an evaluation, `speedup` holds the rows,
recommendation and figure of `benchmark_batching.py`. Imports analysis (readers, figures), cli and files.
"""

from __future__ import annotations

__all__ = ["curve", "speedup", "table"]
