"""Runs as they are compared and listed: provenance, lists of runs, evaluations paired question by question.

`listing` lists the runs in a folder, `pairs` compares evaluations question by question, `provenance` has versions,
commit and hardware, `shadow` the questions of real traffic that were answered both ways.
"""

__all__ = ["listing", "pairs", "provenance", "shadow"]
