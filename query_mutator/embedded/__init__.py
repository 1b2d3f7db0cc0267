"""The HTTP/1.1 layer and the checks of Host and Origin that the proxy, the live page and OpenEnv's server use."""

__all__: list[str] = []
