"""The page of training runs, and the tables of evaluations. Its import loads no torch.

`table` has the result tables of an evaluation and of `qm compare`. The page is one self-contained HTML file:
`run_reader` reads a run folder and the comparison with the baselines, `build` writes the page from the jinja2 templates
in `assets`, and serves the pages of a folder of runs; `charts` has numbers as text and the geometry of the charts.
"""

__all__ = ["build", "charts", "run_reader", "table"]
