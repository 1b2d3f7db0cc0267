"""The backend that replays a model's recorded replies: `--backend recorded`, or `--recording FILE`.

A recording maps requests to replies (`files.replies`, made by scripts/record_replies.py), so an experiment needs no
model and repeats exactly.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import replace
from importlib import resources
from pathlib import Path

from query_mutator.errors import UsageError
from query_mutator.files.gguf_file import PACKAGED
from query_mutator.files.replies import Recording
from query_mutator.llm.client import INFO_TIMEOUT_S, ModelServer
from query_mutator.types import ChatRequest, Completion

__all__ = ["BUNDLED_RECORDINGS", "RecordedBackend", "recording_address"]

_FOLDER = Path(str(resources.files("query_mutator"))) / "data" / "recorded"
_ENDING = ".jsonl.xz"
#: The recordings that come with the product, which `--recording` takes by name; the first is the default.
BUNDLED_RECORDINGS = ("smollm2-135m",)


def recording_address(given: str | None) -> str:
    """Return the name of a bundled recording, the default one if none is given, or the absolute path of a file."""
    if given is None or given in BUNDLED_RECORDINGS:
        return given or BUNDLED_RECORDINGS[0]
    return str(Path(given).expanduser().absolute())


@functools.lru_cache(maxsize=2)
def _loaded(path: Path, _size_bytes: int, _changed_ns: int) -> Recording:
    return Recording(path)


class RecordedBackend(ModelServer):
    """The replies of one recording; a request that is not in it is a UsageError."""

    title = "recorded replies"
    url_flag = "recording"
    default_url = BUNDLED_RECORDINGS[0]
    runs_files = True
    is_instant = True
    more_models = "a recording has the replies of one"

    @functools.cached_property
    def recording(self) -> Recording:
        """Return the recording, read at its first use; UsageError for a file that cannot be read."""
        path = Path(self.url) if os.path.isabs(self.url) else _FOLDER / f"{self.url}{_ENDING}"
        try:
            stat = path.stat()
            return _loaded(path, stat.st_size, stat.st_mtime_ns)
        except OSError as error:
            advice = "give a file that scripts/record_replies.py made"
            raise UsageError(f"--recording {self.url}: {path}: {error.strerror}; {advice}") from None

    @classmethod
    def address(cls, given: str | None = None) -> str:
        """Return the name of a bundled recording or the absolute path of a file."""
        return recording_address(given)

    def http_url(self, model: str) -> str:
        """Raise a UsageError: clients ask what is not recorded."""
        raise UsageError(f"recorded replies cannot be served; give a server, or {self._live()}")

    def default_models(self) -> tuple[str, str]:
        """Return the recorded model, as target and as mutator."""
        return self.recording.head.model, self.recording.head.model

    def file_digests(self) -> tuple[str, ...]:
        """Return the sha256 of the recording."""
        return (self.recording.sha256,)

    def version(self, *, timeout_s: float = INFO_TIMEOUT_S) -> str:
        """Return whose replies these are."""
        head = self.recording.head
        return f"(of {head.model}, {head.date})"

    def models(self, *, timeout_s: float = INFO_TIMEOUT_S) -> tuple[str, ...]:
        """Return the name of the recorded model."""
        return (self.recording.head.model,)

    def digest(self, model: str) -> str:
        """Return the sha256 of the recording: the model's own would stand for its live replies."""
        self.require_model(model)
        return self.recording.sha256

    def complete(self, request: ChatRequest) -> Completion:
        """Return the recorded reply with the times of the recording; `latency_s` is that of the lookup.

        UsageError for a request that is not recorded.
        """
        started = time.perf_counter()
        found = self.recording.find(request)
        if found is None:
            said = request.messages[-1].content[:60] if request.messages else ""
            raise UsageError(
                f"no reply of {request.model} to {said!r} with {request.max_tokens} tokens at temperature "
                f"{request.temperature:g} is recorded; use the settings of the recording, or ask the model: "
                f"{self._live()}"
            )
        return replace(found, latency_s=time.perf_counter() - started)

    def close(self) -> None:
        """Release nothing: the recording stays in memory for the next run."""

    def _live(self) -> str:
        """Return the flag that asks the recorded model itself."""
        model = self.recording.head.model
        return f"--gguf {next((name for name, one in PACKAGED.items() if one.model == model), 'FILE')}"
