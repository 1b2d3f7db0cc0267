"""The page, figures and tables of training runs, evaluations and benchmarks. Its import loads no torch.

`page` is the HTML page of a run; `table` has the result tables of an evaluation and of `qm compare`; `benchmark` has
the settings, the plan and the rows of `benchmark_batching.py`.
Imports lab (readers, figures) and the rooms below.
"""

from __future__ import annotations

__all__ = ["benchmark", "page", "table"]
