"""The proxy that rewrites questions on their way to a model server.

`server` says who may call and runs until a signal, `app` has the routes, `chat` reads requests and replies of
Ollama's and OpenAI's APIs, `answers` asks in one of two modes, `upstream` forwards to the server that has the model,
`metrics` counts.
"""

__all__: list[str] = []
