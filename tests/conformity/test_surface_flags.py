"""The flags of every command are frozen: a change of one is a change of flags.txt, which a review sees.

`python tests/conformity/test_surface_flags.py` writes the file again.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FROZEN = Path(__file__).with_name("flags.txt")


def surface() -> str:
    """Return one line per flag: the command, then every spelling; a positional by its name."""
    from benchmark_batching import BenchmarkConfig
    from ppo.__main__ import Args as PPOArgs
    from query_mutator.analysis.config import ExtractFlags
    from query_mutator.cli.flags import flags_of
    from query_mutator.commands import COMMANDS
    from query_mutator.commands.embedded import EmbeddedFlags
    from query_mutator.commands.iqn import Args as IQNArgs
    from query_mutator.training.config import TrainConfig

    programs = {
        "train_query_mutator.py": TrainConfig,
        "benchmark_batching.py": BenchmarkConfig,
        "extract_tensorboard_data.py": ExtractFlags,
        "python -m ppo": PPOArgs,
        "python -m query_mutator.iqn": IQNArgs,
        "python -m query_mutator.embedded": EmbeddedFlags,
        **{f"qm {name}": command.flags for name, command in COMMANDS.items() if not command.takes_words},
    }
    lines = [
        f"{program}: {' '.join(flag.spellings) or flag.field}"
        for program, flags in programs.items()
        for flag in flags_of(flags).values()
    ]
    return "\n".join(sorted(lines)) + "\n"


def test_flags_are_those_of_the_file() -> None:
    frozen = FROZEN.read_text(encoding="utf-8")
    assert surface() == frozen, f"flags changed; if that is meant, run python {Path(__file__).relative_to(ROOT)}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    FROZEN.write_text(surface(), encoding="utf-8")
