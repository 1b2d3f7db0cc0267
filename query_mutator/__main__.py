"""`python -m query_mutator` is `qm`."""

from query_mutator.commands.main import run

run()
