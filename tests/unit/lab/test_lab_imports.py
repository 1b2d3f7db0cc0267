"""The toolkit loads neither torch nor gymnasium where it is imported from outside, and what a plain install runs."""

from __future__ import annotations

import subprocess
import sys

from query_mutator.cli.registry import COMMANDS

MODULES = (
    *("lab", "lab.sizing", "lab.analysis", "lab.sweep"),
    *("lab.sizing.budget", "lab.sizing.cards", "lab.sizing.collecting", "lab.sizing.lerobot", "lab.sizing.loading"),
    *("lab.sizing.real_steps", "lab.sizing.workers", "lab.sizing.workers_report", "lab.sizing.workload"),
    *("lab.analysis.job", "lab.analysis.runs", "lab.sweep.job", "lab.sweep.processes"),
)


def test_no_module_that_others_import_at_their_top_loads_torch_or_gymnasium() -> None:
    imports = "\n".join(f"import query_mutator.{name}" for name in MODULES)
    check = "import sys\nsys.exit(' '.join({'torch', 'gymnasium'} & set(sys.modules)) or 0)"
    found = subprocess.run([sys.executable, "-c", f"{imports}\n{check}"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


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
