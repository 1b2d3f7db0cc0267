"""`python -m query_mutator.learners.iqn`: train IQN on any gymnasium environment."""

from query_mutator.cli.console import run_cli
from query_mutator.commands.iqn import PROG, main

run_cli(main, prog=PROG)
