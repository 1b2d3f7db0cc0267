"""Points of chosen tags as CSV: `python scripts/extract_tensorboard_data.py RUN... --tag 'Gradients/norm_*'`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout it works without being installed

from query_mutator.commands.analyze import run_extract

if __name__ == "__main__":
    run_extract()
