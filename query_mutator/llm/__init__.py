"""Calls to language models: backends by name, the wrappers around them, and the client of a run.

`stack.build_client` composes the client; `backends.resolve_backend` chooses the server; `client` has the protocols
`Client` and `ModelServer`, addresses, the one retry policy and cancellation; `probe` what a server can do at once.
Import the modules: this package loads none of them. It imports `types`, `errors`, `registry` and `files`.
"""

__all__ = ["backends", "cache", "client", "http_server", "ollama", "openai", "probe", "stack", "store"]
