"""The proxy that rewrites questions on their way to a model server.

`requests` reads chat requests of Ollama's and OpenAI's APIs, `eligibility` says which are rewritten, `guards` what a
rewrite must keep, `upstream` forwards byte for byte, `episodes` runs the policy, `answers` asks in one of three modes,
`status` counts, `app` puts them behind the routes, `server` runs it. Imports `rewriter` and what is below it, the
embedded server's checks of Host and Origin, and uvicorn and aiohttp of the extra `serve`.
"""

from __future__ import annotations

__all__: list[str] = []
