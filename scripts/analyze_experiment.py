"""Compare runs: `python scripts/analyze_experiment.py RUN... [--logdir tensorboard]`, the same as `qm analyze`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout it works without being installed

from query_mutator.commands.analyze import run

if __name__ == "__main__":
    run()
