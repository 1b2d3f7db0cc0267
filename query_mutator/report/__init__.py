"""The page, figures and tables of training runs, evaluations and benchmarks. Its import loads no torch.

`page` is the HTML page of a run, `curve` its learning curve, and `plots` the callback that writes both; `table` has the
result table of an evaluation, `paired_runs` and `traffic` those of `qm compare`; `benchmark_config`, `benchmark_plan`
and `speedup` are the settings, the plan and the rows of `benchmark_batching.py`. Imports lab (readers, figures), the
callbacks of training, and the rooms below.
"""

from __future__ import annotations

__all__ = ["curve", "speedup", "table"]
