"""What `package.module:name` on a command line names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError


def load_target(name: str) -> Any:
    """Return what `package.module:name` names, looked for in the working folder too; UsageError without it."""
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # an installed command has its own folder there instead
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{name}: {error}; give package.module:function") from None
