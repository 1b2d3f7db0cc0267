"""The commands of `qm`: one thin module each, that declares flags, calls the library and prints.

A module imports light rooms at its top; whatever loads torch, pydantic, scipy or matplotlib it imports inside the
function that needs it. `main` dispatches; `policy` has the flags that several commands share.
"""

from query_mutator.cli.registry import COMMANDS, GROUPS, Command

__all__ = ["COMMANDS", "GROUPS", "Command"]
