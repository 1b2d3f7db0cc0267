"""Compare training runs of any trainer: read what they logged, group seeds, test differences, write reports.

`runs` reads run folders (`events`, `tables`), `spec` says which metrics and tags there are, `curves` draws a metric
against an axis, `groups` finds seeds of one setting, `compare` makes an Analysis (`results`), `pages`, `export` and
`figures` show it, and `job.ComparisonJob` does all of that in order. `config` has the flags. Imports stats, cli, files
and registry; never imports torch.
"""

from __future__ import annotations

from query_mutator.lab.analysis.config import AnalyzeFlags, ExtractFlags

__all__ = ["AnalyzeFlags", "ExtractFlags"]
