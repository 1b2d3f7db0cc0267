"""The HTTP/1.1 server layer of the embedded server, the rewriting proxy and the live page.

    bytes -> RequestReader -> Request -> handler (a task) -> Response, or a Stream that it wrote

One set of limits holds for all of them: heads of 64 KiB and 100 headers (431), bodies (413) and their memory together
(503), deadlines for heads and bodies (408). uvicorn takes more than twice the CPU time per call, does not cancel calls
whose client has left and has none of these limits (docs/log.md, 2026-11-22). Imports nothing but `httptools`.
"""

from query_mutator.embedded.http.body import BodyBudget, HttpError, IncomingBody
from query_mutator.embedded.http.connection import Clients, Connection
from query_mutator.embedded.http.listening import (
    BACKLOG,
    detect_vanished_clients,
    listen,
    most_open_files,
    why_not_listening,
)
from query_mutator.embedded.http.reader import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    Header,
    Request,
    RequestReader,
)
from query_mutator.embedded.http.replies import JSON_TYPE, TEXT_TYPE, Response, Stream

__all__ = [
    "BACKLOG", "JSON_TYPE", "MAX_BODY_BYTES", "MAX_HEADERS", "MAX_HEAD_BYTES", "TEXT_TYPE", "BodyBudget", "Clients",
    "Connection", "Header", "HttpError", "IncomingBody", "Request", "RequestReader", "Response", "Stream",
    "detect_vanished_clients", "listen", "most_open_files", "why_not_listening",
]  # fmt: skip
