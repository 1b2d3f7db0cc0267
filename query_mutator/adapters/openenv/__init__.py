"""The environment as an OpenEnv server, which `qm env serve` runs, and its typed client.

    models.py       QueryRewritingAction, QueryRewritingObservation, QueryRewritingState
    client.py       QueryRewritingEnv: plays episodes of a server
    shared.py       Shared: what sessions have in common
    environment.py  QueryRewritingEnvironment: one session of the server
    app.py          make_app: OpenEnv's FastAPI application, with bounds on what a client may send
    server.py       make_server: uvicorn, with bounds on how long a client may take

All but `shared` need `pip install openenv-core`.
"""

from __future__ import annotations

__all__: list[str] = []
