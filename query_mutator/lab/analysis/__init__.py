"""Compare training runs of any trainer: read what they logged, group seeds, test differences, write reports.

`runs` reads run folders (`events`, tables), `spec` says which metrics and tags there are, `curves` draws a metric
against an axis and watches it, `groups` finds seeds of one setting, `compare` makes an Analysis, `report` shows it.
Imports stats, cli, files and registry; never imports torch.
"""

__all__: list[str] = []
