"""`qm serve` with several models behind `auto+qm`: who is asked at which price, what each server sees, and feedback."""

from __future__ import annotations

import json
import re
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmarks.proxy_modes import running
from query_mutator.commands.policy import open_policy
from query_mutator.commands.serve import ServeFlags, serving
from query_mutator.testing import StubServer, start_server
from query_mutator.types import ChatRequest
from tests import qm_command
from tests.integration.proxied import answering
from tests.integration.training_runs import the_run
from tests.qm_command import qm
from tests.scripted_server import STALL, ScriptedServer, http

LATENCIES_MS = {"small": 5.0, "large": 50.0}
RIGHT = {"small": 0.4, "large": 0.8}
ASKED = range(300, 360)  # sums that no plan was fitted to


def chance(*words: object) -> float:
    """Return a number from 0 to 1 that is the same for the same words."""
    return zlib.crc32(" ".join(map(str, words)).encode()) % 1000 / 1000


def sum_of(number: int) -> tuple[str, int]:
    """Return a question and the right answer."""
    first, second = number + 10, 7 * number % 90 + 3
    return f"What is {first} plus {second}?", first + second


def reply_of(name: str, question: str) -> str:
    """Return the reply of a model: right at its rate, and in doubt where it is wrong, but for one question in seven."""
    total, is_right = sum(map(int, re.findall(r"\d+", question))), chance(name, question) < RIGHT[name]
    said = total if is_right else total + 1 + int(10 * chance(name, question, "wrong"))
    is_odd = chance(name, question, "noise") < 1 / 7
    return f"The answer is {said}." if is_right != is_odd else f"Perhaps it is about {said}, but I am not sure"


def small(request: ChatRequest) -> str:
    return reply_of("small", request.messages[-1].content)


def large(request: ChatRequest) -> str:
    return reply_of("large", request.messages[-1].content)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, StubServer]]:
    with (
        start_server({"small": small}, latency_ms=LATENCIES_MS["small"]) as one,
        start_server({"large": large}, latency_ms=LATENCIES_MS["large"]) as other,
    ):
        yield {"small": one, "large": other}


@pytest.fixture(scope="module")
def run(servers: dict[str, StubServer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a plan that asks the small model first, fitted to logged replies."""
    folder = tmp_path_factory.mktemp("several")
    rows = [
        {"question": question, "model": name, "reply": reply_of(name, question), "gold": gold}
        for question, gold in map(sum_of, range(200))
        for name in servers
    ]
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = [*named(servers), "--price", "small=1,large=8", "--budget", "6", "--encoder", "hash"]
    assert qm("plan", "--from-logs", folder / "log.jsonl", *flags, "--save-dir", folder / "runs") == 0
    return the_run(folder)


def named(servers: dict[str, StubServer], **others: str) -> list[str]:
    """Return the flags that name both models."""
    urls = {name: server.url for name, server in servers.items()} | others
    return [word for name, url in urls.items() for word in ("--target-model", f"{name}@{url}")]


@contextmanager
def proxied(run: Path, flags: list[str], **settings: Any) -> Iterator[str]:
    """Serve a plan in this process; yield the address."""
    served = ServeFlags(checkpoint=str(run), target_model=tuple(flags[1::2]), encoder="hash", **settings)
    with open_policy(served) as rewriter, running(serving(served, rewriter, None)) as url:
        yield url


def ask(url: str, question: str, *, headers: dict[str, str] | None = None, **fields: Any) -> requests.Response:
    body = {"model": "auto+qm", "messages": [{"role": "user", "content": question}], **fields}
    session = requests.Session()
    session.trust_env = False  # it reads no .netrc
    return session.post(f"{url}/v1/chat/completions", json=body, headers=headers, stream=True, timeout=20)


def said(reply: requests.Response) -> str:
    return str(reply.json()["choices"][0]["message"]["content"])


def doubtful() -> str:
    """Return a question at which the small model is in doubt."""
    return next(sum_of(number)[0] for number in ASKED if "not sure" in reply_of("small", sum_of(number)[0]))


def test_a_higher_price_asks_the_large_model_less(run: Path, servers: dict[str, StubServer]) -> None:
    found = []
    for price in (2, 8, 32):
        before = servers["large"].stats()["calls_by_model"].get("large", 0)
        right, first_byte_s = 0, []
        with proxied(run, named(servers), price=f"small=1,large={price}") as url:
            for question, gold in map(sum_of, ASKED):
                began = time.perf_counter()
                with ask(url, question, stream=True) as reply:
                    lines = reply.iter_lines()
                    opening = next(lines)
                    first_byte_s.append(time.perf_counter() - began)
                    right += str(gold) in b"".join([opening, *lines]).decode()
        large = servers["large"].stats()["calls_by_model"].get("large", 0) - before
        found.append((large / len(ASKED), right / len(ASKED), sorted(first_byte_s)[len(ASKED) // 2]))
        print(f"large={price}: {large} of {len(ASKED)} to large, {right} right, first byte {found[-1][2]:.3f} s")
    shares, success, seconds = zip(*found, strict=True)
    assert shares[0] > shares[1] > shares[2]
    assert success[1] > success[2] + 0.2  # that of the small model alone
    assert success[1] > success[0] - 0.1
    assert seconds[2] < seconds[0] - LATENCIES_MS["large"] / 2000


def test_only_auto_is_virtual_and_other_names_pass_to_the_first_address(
    run: Path, servers: dict[str, StubServer]
) -> None:
    with proxied(run, named(servers)) as url:
        listed = [row["name"] for row in requests.get(f"{url}/api/tags", timeout=10).json()["models"]]
        assert listed[:2] == ["small:latest", "auto+qm"]
        assert not any("large" in name or "+qm" in name for name in listed[2:])
        assert requests.get(f"{url}/v1/models/auto+qm", timeout=10).json()["id"] == "auto+qm"
        assert requests.post(f"{url}/api/show", json={"model": "auto+qm"}, timeout=10).status_code == 200
        assert requests.delete(f"{url}/api/delete", json={"model": "auto+qm"}, timeout=10).status_code == 400
        question = sum_of(0)[0]
        for name, status in (("small", 200), ("large", 404), ("small+qm", 404), ("large+qm", 404)):
            passed = ask(url, question, model=name)
            assert (passed.status_code, "x-qm-decision" in passed.headers) == (status, False)
        reply = ask(url, question, audio={"voice": "x"})
        assert (reply.headers["x-qm-decision"], reply.headers["x-qm-model"]) == ("passed; audio", "small")
        requests.post(f"{url}/v1/responses", json={"model": "auto+qm", "input": "x"}, timeout=10)
        counted = requests.get(f"{url}/metrics", timeout=10).text
    assert 'qm_decisions_total{decision="passed",mode="passed",reason="audio"} 1' in counted
    assert 'qm_decisions_total{decision="passed",mode="passed",reason="responses"} 1' in counted


def test_the_format_of_replies_is_kept_and_the_answer_says_who_gave_it(run: Path) -> None:
    seen: list[Any] = []
    with arm("small", '{"sum": 3}', seen) as small, arm("large", '{"sum":3.0}', seen) as large:
        flags = named({}, small=f"{small}/v1", large=f"{large}/v1")
        with proxied(run, flags, price="small=1,large=1") as url:
            form = {"type": "json_object"}
            reply = ask(url, doubtful(), response_format=form)
            assert (reply.headers["x-qm-decision"], reply.headers["x-qm-calls"]) == ("kept", "2")
            assert reply.headers["x-qm-model"] in ("small", "large")
            assert json.loads(said(reply)) == {"sum": 3}
            wrong = requests.post(f"{url}/api/chat", json={"model": "auto+qm", "messages": []}, timeout=10)
            assert (wrong.status_code, "/v1/chat/completions" in wrong.json()["error"]) == (400, True)
    assert [body["response_format"] for _, body in seen] == [form, form]


@contextmanager
def arm(name: str, answer: str | int, seen: list[Any]) -> Iterator[str]:
    """Serve one model with OpenAI's routes, or a status to calls, and note headers and bodies of these."""

    def reply(path: str, headers: dict[str, str], body: Any) -> tuple[int, str, bytes]:
        found: Any = {"object": "list", "data": [{"id": name}]}
        if body is not None:
            seen.append((headers, body))
            choice = {"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
            found = {"model": name, "choices": [choice]}
        is_failing = body is not None and isinstance(answer, int)
        return int(answer) if is_failing else 200, "application/json", json.dumps(found).encode()

    with answering(reply) as url:
        yield url


def test_each_server_gets_its_own_key_and_another_one_nothing_of_the_client(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password sk-netrc\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    ours: list[Any] = []
    theirs: list[Any] = []
    with arm("small", "Perhaps it is about 5, but I am not sure", ours) as small, arm("large", "5", theirs) as large:
        monkeypatch.setenv("QM_KEYS", f"{large}=sk-large")
        flags = named({}, small=f"{small}/v1", large=f"{large}/v1")
        with proxied(run, flags, price="small=1,large=1") as url:
            for key in ({}, {"Authorization": "Bearer sk-client", "X-Api-Key": "sk-client", "Cookie": "who=me"}):
                assert ask(url, doubtful(), headers=key).status_code == 200
    assert [headers.get("authorization") for headers, _ in ours] == [None, "Bearer sk-client"]
    assert [headers.get("authorization") for headers, _ in theirs] == ["Bearer sk-large"] * 2
    assert "sk-client" not in str(theirs)
    assert "cookie" not in theirs[1][0]
    assert "sk-netrc" not in str([*ours, *theirs])
    assert not any(str(headers.get("authorization")).startswith("Basic") for headers, _ in [*ours, *theirs])


def test_no_redirect_is_followed_and_an_arm_that_fails_leaves_the_answer_that_is_there(
    run: Path, servers: dict[str, StubServer]
) -> None:
    listed, seen = http('{"data": [{"id": "large"}]}'), list[Any]()
    with arm("large", "5", seen) as elsewhere:
        moved = http("", status="307 Moved", headers=[f"Location: {elsewhere}/v1/chat/completions"])
        for failure in (moved, STALL):  # the second one until the deadline
            with closing(ScriptedServer(listed, listed, failure)) as large:
                settings: Any = {"price": "small=1,large=1", "request_deadline_s": 5.0}
                with proxied(run, named(servers, large=f"{large.url}/v1"), **settings) as url:
                    reply = ask(url, doubtful())
            assert large.requests[-1].startswith(b"POST")
            assert (seen, reply.headers["x-qm-model"], "not sure" in said(reply)) == ([], "small", True)
    with arm("small", 500, seen) as small, proxied(run, named(servers, small=f"{small}/v1")) as url:
        assert ask(url, doubtful()).status_code == 500  # of the first, where no other has answered


def test_traffic_becomes_a_log_with_feedback_that_a_plan_reads(
    run: Path, servers: dict[str, StubServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "traffic.jsonl"
    flags = [*named(servers), "--encoder", "hash", "--log-traffic", str(log)]
    with qm_command.serving(run, tmp_path, *flags) as (_, url):
        replies = [ask(url, sum_of(number)[0], stream=number == 0) for number in range(3)]
        names = [reply.headers["x-qm-id"] for reply in replies if reply.content]
        for name, right in ((names[0], True), (names[2], False)):
            graded = requests.post(f"{url}/qm/feedback", json={"id": name, "right": right}, timeout=10)
            assert (graded.status_code, graded.text) == (200, '{"status":"ok"}')
        assert "qm_feedback_p_right_count{} 2\n" in requests.get(f"{url}/metrics", timeout=10).text
        line = next(one for one in (tmp_path / "log.txt").read_text().splitlines() if "questions are sent to" in one)
        assert line.endswith(f"questions are sent to {servers['small'].url}, {servers['large'].url}")
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        assert [row["right"] for row in rows] == [True, None, False]
        assert [row["question"] for row in rows] == [sum_of(number)[0] for number in range(3)]
        assert {(row["form"], row["model"] in RIGHT) for row in rows} == {("as_is", True)}
        assert all(name not in log.read_text() for name in names)
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        assert qm("plan", "--from-logs", log, "--save-dir", tmp_path / "plans", "--encoder", "hash") == 2
        assert "left out: 1 without a grade" in capsys.readouterr().err
        assert qm("serve", "--delete-traffic", log) == 0
        assert log.read_bytes() == b""
        ask(url, sum_of(3)[0])
        assert json.loads(log.read_text())["question"] == sum_of(3)[0]
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "mine"}')
    assert qm("serve", "--delete-traffic", other) == 2
    assert other.read_text() == '{"question": "mine"}'
