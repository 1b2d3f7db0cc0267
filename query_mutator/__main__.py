"""`python -m query_mutator` is `qm`."""

from query_mutator.cli import run

run()
