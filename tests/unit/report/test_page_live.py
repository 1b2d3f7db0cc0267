"""The live page's server over real HTTP: who may call, what a stream sends, slow and many clients."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from query_mutator.errors import DatasetError, UsageError
from query_mutator.report.page import live as live_module
from query_mutator.report.page.live import LivePage, serve_live
from query_mutator.report.page.messages import TextTable
from query_mutator.report.page.questions import Evaluation
from tests.event_stream import Page

PAGE = b"<!doctype html><title>run</title>"


class Lines:
    """A reader whose messages are the lines of `config.json` that were not read yet."""

    name, evaluation = "lines", Evaluation(TextTable(0, str))

    def __init__(self, folder: Path, run: int) -> None:
        self._path, self._run, self._done = folder / "config.json", run, 0

    def poll(self) -> list[dict[str, Any]]:
        text = self._path.read_text(encoding="utf-8")
        lines = text[: text.rfind("\n") + 1].splitlines()  # a line may be read while it is being written
        new, self._done = lines[self._done :], len(lines)
        if "damaged" in new:
            raise DatasetError("config.json: damaged")
        return [{**json.loads(line), "run": self._run} for line in new]


class Server:
    """`serve_live` in a thread."""

    def __init__(self, *folders: Path, port: int = 0) -> None:
        self.live = LivePage(folders, page=PAGE, open_reader=Lines)
        self._listens = threading.Event()
        self._failure: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(port,))
        self._thread.start()
        self._listens.wait(20)
        if self._failure:
            self._thread.join()
            raise self._failure[0]

    def _run(self, port: int) -> None:
        try:
            asyncio.run(self._serve(port))
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._failure.append(error)
            self._listens.set()

    async def _serve(self, port: int) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        await serve_live(self.live, port=port, on_listening=self._is_up)

    def _is_up(self, url: str) -> None:
        self.url, self.port = url, int(url.rsplit(":")[-1].strip("/"))
        self._listens.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()


def metrics(step: int, *, reset: bool = False, text: str = "") -> str:
    return json.dumps({"kind": "metrics", "run": 0, "reset": reset, "steps": [step], "columns": {}, "text": text})


def section(name: str, value: int) -> str:
    return json.dumps({"kind": "section", "run": 0, "name": name, "data": {"value": value}})


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "POLL_S", 0.01)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return write(tmp_path / "run", section("answer", 1), metrics(1))


def write(folder: Path, *lines: str) -> Path:
    with (folder / "config.json").open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
    return folder


def ask(server: Server, path: str = "/", *, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        reply = connection.getresponse()
        return reply.status, reply.read(), {name.lower(): value for name, value in reply.getheaders()}


def until(condition: Callable[[], bool]) -> None:
    event = threading.Event()
    for _ in range(2000):
        if condition():
            return
        event.wait(0.01)
    pytest.fail("the condition was not met in 20 s")


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    with Server(run) as running:
        yield running


# --- who may call, and what ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/events", "/nothing"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "rebound.example"},
        {"Host": "127.0.0.1.nip.io:80"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},  # another server of this machine
    ],
)
def test_other_sites_get_nothing(server: Server, path: str, headers: dict[str, str]) -> None:
    status, body, replied = ask(server, path, **headers)
    assert (status, PAGE in body) == (403, False)
    assert "access-control-allow-origin" not in replied


def test_the_page_itself_is_served_to_this_machine(server: Server) -> None:
    for headers in ({}, {"Host": f"localhost:{server.port}"}, {"Origin": server.url.rstrip("/")}):
        status, body, replied = ask(server, **headers)
        assert (status, body) == (200, PAGE)
        assert "frame-ancestors 'none'" in replied["content-security-policy"]
        assert replied["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in replied


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_it_is_read_only(server: Server, method: str) -> None:
    for path in ("/", "/events"):
        status, _, headers = ask(server, path, method=method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/events", 200), ("/config.json", 404), ("/../x", 404)])
def test_head_sends_no_body(server: Server, path: str, status: int) -> None:
    assert ask(server, path, method="HEAD")[:2] == (status, b"")


def test_it_listens_on_the_loopback_address_only(server: Server) -> None:
    own = socket.gethostbyname(socket.gethostname())
    if own.startswith("127."):
        own = "127.0.0.2"
    with pytest.raises(OSError):  # noqa: PT011
        socket.create_connection((own, server.port), timeout=2)


def test_a_port_in_use_is_one_clear_line(server: Server, run: Path) -> None:
    with pytest.raises(UsageError, match=f"port {server.port} on 127.0.0.1 is in use"):
        Server(run, port=server.port)


# --- what a stream sends ---------------------------------------------------------------------------------------------


def test_a_late_page_gets_what_was_before_and_then_what_is_new(server: Server, run: Path) -> None:
    first = Page(server.port)
    assert [message["kind"] for _, _, message in first.take(2)] == ["section", "metrics"]
    write(run, metrics(2))
    assert first.take(1)[0][2]["steps"] == [2]
    late = Page(server.port)
    assert [message.get("steps") for _, _, message in late.take(3)] == [None, [1], [2]]
    write(run, metrics(3))
    assert first.take(1) == late.take(1)


def test_a_page_continues_after_the_last_event_it_saw(server: Server, run: Path) -> None:
    page = Page(server.port)
    (_, _, _), (last, _, _) = page.take(2)
    page.close()
    again = Page(server.port, last)
    write(run, metrics(2))
    assert [message["steps"] for _, _, message in again.take(1)] == [[2]]


def test_a_page_of_an_earlier_server_starts_again(server: Server) -> None:
    for last in ("1234abcd-2", "x", "-", "1234abcd-x", f"{Page(server.port).take(1)[0][0]}99"):
        assert Page(server.port, last).take(1) == [("", "restart", None)]


def test_what_was_replaced_is_not_sent_to_a_late_page(server: Server, run: Path) -> None:
    page = Page(server.port)
    page.take(2)
    write(run, metrics(2), section("answer", 2), section("calls", 1), metrics(7, reset=True), metrics(8))
    page.take(4)
    late = [message for _, _, message in Page(server.port).take(4)]
    assert [(message.get("name"), message.get("steps")) for message in late] == [
        ("answer", None), ("calls", None), (None, [7]), (None, [8]),
    ]  # fmt: skip
    assert late[0]["data"] == {"value": 2}


def test_several_runs_have_their_numbers(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", metrics(5), metrics(6, reset=True))
    with Server(run, other) as server:
        got = [message for _, _, message in Page(server.port).take(3)]
    assert [(message["run"], message.get("steps")) for message in got] == [(0, None), (0, [1]), (1, [6])]


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_that_does_not_exist_yet_is_waited_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "later"
    with Server(folder) as server:
        page = Page(server.port)
        status = page.take(1)[0][2]
        assert status["data"] == {"status": f"waiting for {folder}: there is no config.json yet"}
        folder.mkdir()
        write(folder, metrics(1))
        assert [message.get("steps") for _, _, message in page.take(2)] == [[1], None]
        assert [message["data"] for _, _, message in Page(server.port).take(2) if "data" in message] == [{"status": ""}]
    assert capfd.readouterr().err == f"waiting for {folder}: there is no config.json yet\n"


def test_pages_start_again_when_latest_becomes_another_run(run: Path, tmp_path: Path) -> None:
    latest, other = tmp_path / "latest", tmp_path / "other"
    latest.symlink_to(run)
    with Server(latest) as server:
        page = Page(server.port)
        page.take(2)
        other.mkdir()
        latest.unlink()
        latest.symlink_to(other)
        write(other, metrics(9))
        assert page.take(1) == [("", "restart", None)]
        assert page.lines.read() == b""
        assert Page(server.port).take(1)[0][2]["steps"] == [9]


def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_still_sent(run: Path, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    with Server(write(tmp_path / "bad", "damaged"), run) as server:
        got = [message for _, _, message in Page(server.port).take(3)]
    assert [message["run"] for message in got] == [1, 1, -1]
    assert got[2]["data"]["status"] == f"{tmp_path / 'bad'}: config.json: damaged"


# --- clients ---------------------------------------------------------------------------------------------------------


def test_a_page_that_does_not_read_holds_little_memory_and_delays_nobody(server: Server, run: Path) -> None:
    slow, quick = Page(server.port, receive_bytes=4096), Page(server.port)
    quick.take(2)
    noise = [base64.b64encode(random.Random(number).randbytes(500_000)).decode() for number in range(24)]
    for number, text in enumerate(noise):  # 24 x 0.5 MB that does not compress
        write(run, metrics(number, text=text))
    assert [message["text"] for _, _, message in quick.take(24)] == noise
    held = [each.transport.get_write_buffer_size() for each in server.live.pages]
    assert max(held) < 2e6, "more than one event waits in the buffer of a connection"
    assert [message.get("text", "") for _, _, message in slow.take(26)][2:] == noise


def test_the_number_of_pages_is_limited_and_one_that_leaves_makes_room(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "MAX_PAGES", 2)
    first, second = Page(server.port), Page(server.port)
    until(lambda: len(server.live.pages) == 2)
    status, body, _ = ask(server, "/events")
    assert (status, body) == (503, b"2 pages are open; close some\n")
    assert ask(server)[0] == 200
    first.close()
    until(lambda: len(server.live.pages) == 1)
    assert [event for _, event, _ in Page(server.port).take(2)] == ["message"] * 2
    second.close()


def test_nothing_is_read_while_no_page_is_open(server: Server, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(server.port)
    page.take(2)
    page.close()
    until(lambda: len(server.live.pages) == 0)
    polls: list[int] = []

    def poll(_: Lines) -> list[dict[str, Any]]:
        polls.append(1)
        return []

    monkeypatch.setattr(Lines, "poll", poll)
    threading.Event().wait(0.1)
    assert len(polls) <= 1  # the one that had begun
    page = Page(server.port)
    until(lambda: len(polls) > 1)
    page.close()


def test_a_silent_stream_sends_comments(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "BEAT_S", 0.01)
    page = Page(server.port)
    page.take(2)
    said = [page.lines.readline() for _ in range(40)]
    start = said.index(b"event: caught-up\n")  # on a slow machine behind the first comments
    assert set(said[:start]) <= {b":\n", b"\n"}
    assert said[start : start + 5] == [b"event: caught-up\n", b"data:\n", b"\n", b":\n", b"\n"]
