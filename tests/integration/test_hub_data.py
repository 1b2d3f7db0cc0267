"""A set of the hub as questions: a small hub, names, splits and caches."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import pyarrow
import pytest
from pyarrow import parquet

from query_mutator.data.hub import CONVERTED, choose

SHARDS = [f"default/dev/000{number}.parquet" for number in range(2)]
ROOT = Path(__file__).resolve().parents[2]
LOAD = """
import json, sys
from query_mutator.errors import DatasetError
from query_mutator.session.task import read_dataset
from query_mutator.settings import TaskSettings
for name in sys.argv[1:]:
    try:
        found = read_dataset(TaskSettings(dataset=name))
        texts = [question.text for question in found.questions]
        print(json.dumps({"texts": texts, "guard": len(found.guard), "source": found.source}))
    except DatasetError as error:
        print(json.dumps({"error": str(error)}))
"""


def table(*rows: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), buffer)
    return buffer.getvalue()


def gsm8k(number: int) -> dict[str, Any]:
    return {"question": f"question {number}", "answer": f"work\n#### {number}"}


FILES = {
    ("openai/gsm8k", CONVERTED): {
        "main/train/0000.parquet": table(gsm8k(1), gsm8k(2)),
        "main/train/0001.parquet": table(gsm8k(3)),
        "main/test/0000.parquet": table(gsm8k(4)),
        "socratic/train/0000.parquet": table(gsm8k(5)),
    },
    ("some/pictures", "main"): {"cat.png": b"png"},
}


def load(name: str, cache: Path, **settings: Any) -> dict[str, Any]:
    return load_all([name], cache, **settings)[0]


def load_all(
    names: Sequence[str], cache: Path, *, endpoint: str = "http://127.0.0.1:9", offline: bool = False
) -> list[dict[str, Any]]:
    """Load the sets one after the other in a process whose environment names the hub."""
    environ = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": str(int(offline))}
    environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *names],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) | {"stderr": done.stderr} for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_set_is_downloaded_once_and_then_read_without_the_hub(tmp_path: Path) -> None:
    with HubServer() as hub:
        first = load("hf:openai/gsm8k:main", tmp_path, endpoint=hub.url)
        assert any("/resolve/" in path for path in hub.requests)
        hub.requests.clear()
        again = load("hf:openai/gsm8k:main", tmp_path, endpoint=hub.url)
        assert hub.requests == []  # a resumed run has the same questions, whatever the hub has by then
    offline = load("hf:openai/gsm8k:main", tmp_path, offline=True)
    assert first["texts"] == again["texts"] == offline["texts"] == ["question 1", "question 2", "question 3"]
    assert first["source"] == offline["source"]
    shards = [f"main/train/{number:04}.parquet" for number in range(2)]
    files = FILES["openai/gsm8k", CONVERTED]
    assert first["source"] == {
        "name": "openai/gsm8k", "config": "main", "split": "train", "revision": CONVERTED,
        "commit": commit_of("openai/gsm8k", CONVERTED),
        "files": [{"path": path, "sha256": hashlib.sha256(files[path]).hexdigest()} for path in shards],
    }  # fmt: skip
    assert "hf:openai/gsm8k:main: read as GSM8K; 3 questions" in first["stderr"]
    other = load("hf:openai/gsm8k:main@test", tmp_path)["error"]
    assert "is not in the cache" in other
    assert "run it once online, or give a file" in other


@pytest.mark.slow
def test_what_the_hub_does_not_have_is_one_line_that_lists_what_it_has(tmp_path: Path) -> None:
    names = (
        "hf:openai/gsm8k", "hf:openai/gsm8k:man", "hf:openai/gsm8k:main@dev", "hf:no/such", "hf:closed/set",
        "hf:some/pictures",
    )  # fmt: skip
    with HubServer() as hub:
        found = load_all(names, tmp_path, endpoint=hub.url)
    said = {name: one["error"] for name, one in zip(names, found, strict=True)}
    offline = load("hf:openai/gsm8k:main", tmp_path, offline=True)["error"]
    assert said["hf:openai/gsm8k"].endswith("has several configurations: name one of main, socratic after ':'")
    assert "has no configuration 'man': name one of main, socratic" in said["hf:openai/gsm8k:man"]
    assert "has no split 'dev': name one of test, train after '@'" in said["hf:openai/gsm8k:main@dev"]
    assert "the hub has no such set" in said["hf:no/such"]
    assert "`hf auth login`" in said["hf:closed/set"]
    assert "the hub has no refs/convert/parquet of it; download it" in said["hf:some/pictures"]
    assert "run it once online, or give a file" in offline
    assert all("\n" not in line for line in (*said.values(), offline))


@pytest.mark.parametrize(
    ("files", "place"),
    [
        (["a/train/0000.parquet", "a/test/0000.parquet"], ("a", "train", ["a/train/0000.parquet"])),
        (SHARDS, ("default", "dev", SHARDS)),
    ],
)
def test_the_usual_or_the_only_configuration_and_split_are_taken(
    files: list[str], place: tuple[str, str, list[str]]
) -> None:
    assert choose("hf:a/b", [*files, "README.md", ".gitattributes"], None, None) == place


Reply = tuple[int, bytes, dict[str, str]]


def commit_of(name: str, revision: str) -> str:
    """Return a commit hash for what a revision holds."""
    return hashlib.sha1(repr((name, revision, sorted(FILES[name, revision].items()))).encode()).hexdigest()


def replies_of(name: str, revision: str) -> Iterator[tuple[str, Reply]]:
    """Yield what the hub has of a revision, under its name and its commit: path -> status, body and headers."""
    files, commit, types = FILES[name, revision], commit_of(name, revision), {"Content-Type": "application/json"}
    rows = [
        {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for path, content in files.items()
    ]
    siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
    about = {"id": name, "sha": commit, "private": False, "tags": [], "siblings": siblings}
    for known in (revision, commit):
        yield f"/api/datasets/{name}/revision/{known}", (200, json.dumps(about).encode(), types)
        yield f"/api/datasets/{name}/tree/{known}", (200, json.dumps(rows).encode(), types)
        for path, content in files.items():
            headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
            yield f"/datasets/{name}/resolve/{known}/{path}", (200, content, headers)


class HubServer:
    """Serves FILES, and a set that is closed; `requests` has the paths that were asked for."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        replies = {path: reply for place in FILES for path, reply in replies_of(*place)}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                hub.requests.append(path)
                status, body, headers = replies.get(path) or hub.refusal(path)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @staticmethod
    def refusal(path: str) -> Reply:
        """Return the reply where there is nothing."""
        if path.startswith("/datasets/"):
            return 404, b"{}", {"X-Error-Code": "EntryNotFound"}
        if path.startswith("/api/datasets/closed/set/"):
            return 403, b"{}", {"X-Error-Code": "GatedRepo"}
        is_known = any(path.startswith(f"/api/datasets/{name}/") for name, _ in FILES)
        return 404, b"{}", {"X-Error-Code": "RevisionNotFound" if is_known else "RepoNotFound"}
