"""Runs as they are compared and listed: provenance, lists of runs, evaluations paired question by question.

`listing` lists the runs in a folder, `pairs` compares evaluations question by question, `provenance` has versions,
commit and hardware.
"""

__all__ = ["listing", "pairs", "provenance"]
