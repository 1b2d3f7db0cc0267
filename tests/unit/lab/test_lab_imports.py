"""What a plain install runs."""

from __future__ import annotations

import subprocess
import sys

from query_mutator.cli.registry import COMMANDS

#: Commands that need the extra `toolkits`.
EXTRA = {"analyze", "bench", "sweep", "gym run", "gym info", "train sft"} | {
    name for name in COMMANDS if name.startswith("data ") and name != "data export"
}


def test_a_plain_install_has_every_command_but_those_of_the_toolkits() -> None:
    code = """
import sys
sys.modules |= {"pydantic": None, "websockets": None}
from query_mutator.cli.registry import COMMANDS
from query_mutator.errors import UsageError
import query_mutator.report.curve, query_mutator.report.benchmark, query_mutator.lab.analysis.runs
for name, command in COMMANDS.items():
    try:
        command.run
    except UsageError as error:
        print(name, error, sep=": ")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    hints = dict(line.split(": ", 1) for line in found.stdout.splitlines())
    assert (hints.keys(), found.stderr) == (EXTRA, "")
    assert {hint.partition(": ")[2] for hint in hints.values()} == {"pip install 'query-mutator[toolkits]'"}
