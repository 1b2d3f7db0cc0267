"""The page of training runs, and the tables of evaluations. Its import loads no torch.

`page` is the HTML page of a run; `table` has the result tables of an evaluation and of `qm compare`.
Imports lab (readers, figures) and the rooms below.
"""

__all__ = ["page", "table"]
