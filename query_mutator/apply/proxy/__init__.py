"""The proxy that rewrites questions on their way to a model server.

`requests` reads chat requests of Ollama's and OpenAI's APIs, `eligibility` says which are rewritten, `upstream`
forwards byte for byte to the server that has the model, `queue` gives out slots, `episodes` runs the policy, `answers`
asks in one of three modes, `shadow` and `judge` compare both ways in the background, `status` counts, `app` puts them
behind the routes, `cors` lets allowed pages read replies, `server` runs it. Imports `rewriter` and what is below it,
the embedded server's HTTP layer and checks of Host and Origin, and aiohttp of the extra `serve`.
"""

from __future__ import annotations

__all__: list[str] = []
