"""The server: `python -m server.app --port 8001` and other flags of `qm env serve`, or `uvicorn server.app:app`."""

from __future__ import annotations

import sys
from typing import Any

from query_mutator.commands.env_serve import application
from query_mutator.commands.main import run


def __getattr__(name: str) -> Any:
    """Return `app` with the settings of ./qm.toml; its models start here."""
    if name != "app":
        raise AttributeError(name)
    return application()


def main(host: str = "0.0.0.0", port: int = 8000) -> None:
    """Run `qm env serve`, with the bounds on clients that uvicorn alone lacks."""
    sys.argv[1:] = ["env", "serve", "--host", host, "--port", str(port), *sys.argv[1:]]
    run()


if __name__ == "__main__":
    main()
