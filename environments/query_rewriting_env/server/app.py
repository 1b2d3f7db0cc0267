"""The server: `python -m query_rewriting_env.server.app --port 8000 --set target_model=llama3.2:3b`.

`uvicorn query_rewriting_env.server.app:app` serves the settings in the JSON of the variable QUERY_REWRITING.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.types import ConcurrencyConfig

from query_rewriting_env.models import QueryRewritingAction, QueryRewritingObservation
from query_rewriting_env.server.environment import Environments, QueryRewritingEnvironment

__all__ = ["main", "make_app"]


def make_app(*, max_sessions: int = 256, session_timeout_s: float = 1800.0, **settings: Any) -> Any:
    """Return the ASGI application; `settings` are keywords of `rl_query_mutator_env.make_env`."""
    environments = Environments(**settings)
    atexit.register(environments.close)
    return create_fastapi_app(
        partial(QueryRewritingEnvironment, environments),
        QueryRewritingAction,
        QueryRewritingObservation,
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=max_sessions, session_timeout=session_timeout_s),
    )


def __getattr__(name: str) -> Any:
    """Return `app` with the settings of the environment; its models start here."""
    if name != "app":
        raise AttributeError(name)
    return make_app(**json.loads(os.environ.get("QUERY_REWRITING", "{}")))


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until Ctrl-C."""
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="keywords of make_app and make_env")
    flags = parser.parse_args(argv)
    settings = {name: _value(text) for name, _, text in (one.partition("=") for one in flags.set)}
    uvicorn.run(make_app(**settings), host=flags.host, port=flags.port, ws_max_size=200_000)


def _value(text: str) -> Any:
    """Return a number, a truth value or a list as JSON has it, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
