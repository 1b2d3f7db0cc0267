"""The flags of every command and the keys of metrics are frozen: a review sees a change of flags.txt or metrics.txt.

`python tests/conformity/test_surface_flags.py` writes flags.txt again.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from query_mutator.files.run_dir import METRICS
from scripts.docs_hook import on_page_markdown

ROOT = Path(__file__).resolve().parents[2]
FROZEN = Path(__file__).with_name("flags.txt")
KEYS = Path(__file__).with_name("metrics.txt")
DOCS = ROOT / "docs" / "reference" / "metrics.md"


def surface() -> str:
    """Return one line per flag: the command, then every spelling; a positional by its name."""
    from benchmark_batching import BenchmarkConfig
    from ppo.__main__ import Args as PPOArgs
    from query_mutator.cli.flags import flags_of
    from query_mutator.commands import COMMANDS
    from query_mutator.commands.analyze import ExtractFlags
    from query_mutator.training.config import TrainConfig

    programs = {
        "train_query_mutator.py": TrainConfig,
        "benchmark_batching.py": BenchmarkConfig,
        "extract_tensorboard_data.py": ExtractFlags,
        "python -m ppo": PPOArgs,
        **{f"qm {name}": command.flags for name, command in COMMANDS.items() if not command.takes_words},
    }
    lines = [
        f"{program}: {' '.join(flag.names) if flag.index is None else field}"
        for program, flags in programs.items()
        for field, flag in flags_of(flags).items()
    ]
    return "\n".join(sorted(lines)) + "\n"


def test_flags_are_those_of_the_file() -> None:
    frozen = FROZEN.read_text(encoding="utf-8")
    assert surface() == frozen, f"flags changed; if that is meant, run python {Path(__file__).relative_to(ROOT)}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    FROZEN.write_text(surface(), encoding="utf-8")


def test_keys_are_frozen() -> None:
    assert list(METRICS) == KEYS.read_text(encoding="utf-8").splitlines()


def test_every_key_has_a_row_in_the_docs_and_every_row_a_key() -> None:
    page = on_page_markdown(DOCS.read_text(encoding="utf-8"))
    rows = re.findall(r"^\| `([a-z]+/[^`]+)` \|(.+)\|$", page, re.M)
    documented = {key: tuple(cell.strip() for cell in cells.split("|")) for key, cells in rows}
    assert documented == {
        key: tuple(metric[name] for name in ("unit", "better", "meaning", "watch")) for key, metric in METRICS.items()
    }


def test_keys_are_two_words() -> None:
    assert all(re.fullmatch(r"[a-z]+/[A-Za-z_]+", key) for key in METRICS)
