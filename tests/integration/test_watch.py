"""`qm watch` as a process: pages of runs, nothing else and for this machine only, loaded again when written again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from query_mutator.report.page.build import MARK, write_page
from tests.browser.page_runs import write_run
from tests.qm_command import qm

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def watcher(run: Path) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """Yield a `qm watch`, the path of its page, and its port."""
    command = [sys.executable, "-m", "query_mutator", "watch", str(run), "--no-browser"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:(\d+)(/\S*) ", process.stdout.readline())
            assert found, process.communicate()
            yield process, found[2], int(found[1])
        finally:
            process.kill()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run, the link to it, and files and folders that are no pages."""
    runs = tmp_path_factory.mktemp("parent") / "runs"
    run = write_run(runs / "one")
    write_page([run], run / "report.html")
    (runs / "latest").symlink_to("one")
    for name, text in {"stranger": "<script>1</script>", "of a link": ""}.items():
        (runs / name).mkdir()
        (runs / name / "config.json").write_text("{}")
        (runs / name / "report.html").write_text(text)
    (runs / "of a link" / "report.html").unlink()
    (runs / "of a link" / "report.html").symlink_to(run / "config.json")
    shutil.copy(run / "report.html", runs.parent / "report.html")
    shutil.copy(run / "report.html", runs / "report.html")
    return runs


@pytest.fixture(scope="module")
def port(runs: Path) -> Iterator[int]:
    with watcher(runs) as (_, path, port):
        assert path == "/"
        yield port


def ask(
    port: int, path: str, *, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[HTTPResponse, str]:
    """Return a reply and its body."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as client:
        client.request(method, path, headers=headers or {})
        reply = client.getresponse()
        return reply, reply.read().decode()


@pytest.mark.parametrize("name", ["one", "latest"])
def test_the_page_of_a_run_is_its_file_and_a_script_that_loads_it_again(runs: Path, port: int, name: str) -> None:
    reply, body = ask(port, f"/{name}/")
    assert (reply.status, reply.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    tag = reply.headers["ETag"]
    start, _, end = body.partition('<script>\n"use strict";\nsetInterval')
    policy = f"; connect-src http://127.0.0.1:{port}/{name}/"
    assert start.replace(policy, "") + "</body>\n</html>\n" == (runs / "one" / "report.html").read_text()
    assert f"tag !== '{tag}'" in end
    head, nothing = ask(port, f"/{name}/", method="HEAD")
    assert (head.status, head.headers["ETag"], nothing) == (200, tag, "")
    assert reply.headers["Content-Security-Policy"].startswith("default-src 'none'; ")
    assert policy in reply.headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in reply.headers["Content-Security-Policy"]


def test_the_runs_are_listed_with_links_to_their_pages(port: int) -> None:
    reply, body = ask(port, "/")
    assert reply.status == 200
    assert set(re.findall(r'href="([^"]*)"', body)) == {"/one/", "/latest/", "/stranger/"}


@pytest.mark.parametrize(
    "path",
    ["/one", "/one/config.json", "/one/report.html", "/../", "/%2e%2e/", "/./", "/one/../one/",
     "/..%2fruns%2fone/", "/one%2f/", "/etc/passwd", "*", "/one%00/", "/%c3%a9/", "/%ff/", f"/{'x' * 300}/"],
)  # fmt: skip
def test_nothing_else_is_served(port: int, path: str) -> None:
    reply, body = ask(port, path)
    assert reply.status in (400, 404) or "there is no page yet" in body
    assert MARK not in body


def test_a_file_that_is_no_page_of_a_run_is_not_served(port: int) -> None:
    _, body = ask(port, "/stranger/")
    assert "is not a page of a run" in body
    assert "<script>1</script>" not in body
    assert "there is no page yet" in ask(port, "/of%20a%20link/")[1]


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example"}, {"Host": "localhost@evil.example"}, {"Host": ""},
     {"Origin": "http://evil.example"}, {"Origin": "null"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/one/"])
def test_other_sites_get_nothing(port: int, path: str, headers: dict[str, str]) -> None:
    reply, body = ask(port, path, headers=headers)
    assert reply.status == 403
    assert "only pages that this server sent" in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_it_is_read_only(port: int, method: str) -> None:
    assert ask(port, "/one/", method=method)[0].status == 501


def test_a_run_that_begins_later_is_waited_for_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    with watcher(tmp_path / "runs" / "latest") as (process, path, port):
        assert path == "/latest/"
        waiting, body = ask(port, path)
        assert f"Waiting for {tmp_path}/runs/latest" in body
        run = write_run(tmp_path / "runs" / "one")
        (tmp_path / "runs" / "latest").symlink_to("one")
        assert ask(port, path, method="HEAD")[0].headers["ETag"] == waiting.headers["ETag"]
        tags = {waiting.headers["ETag"]}
        for count in (2, 3):
            write_page([run], run / "report.html")
            tags.add(ask(port, path, method="HEAD")[0].headers["ETag"])
            assert len(tags) == count
        assert MARK in ask(port, path)[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130


def test_a_file_in_place_of_a_run_and_a_port_in_use_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], port: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("", encoding="utf-8")
    assert qm("watch", path, "--no-browser") == 2
    assert capsys.readouterr().err.splitlines() == [f"qm: {path} is a file; give a run folder such as runs/latest"]
    assert qm("watch", tmp_path, "--no-browser", "--port", str(port)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"port {port} of 127.0.0.1 cannot be used" in line
