"""The page of a run: what it learned, as one self-contained HTML file. Never imports torch.

`run_reader` reads a run folder, `build` writes the page from the jinja2 templates in `assets`, and `watch` serves the
pages of a folder of runs. The parts: `results` (the comparison with the baselines), `usage` (what the policy does),
`figures` (learning and calls), `questions` (what was said), and `charts` (numbers as text, geometry of the charts).

Imports stats, files, runs, and the pure functions of evaluation.
"""

__all__ = ["build", "run_reader", "watch"]
