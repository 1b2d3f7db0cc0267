"""Pages in Chromium: real traffic, a plan, `qm serve` and `qm watch`."""

from __future__ import annotations

import json
import re
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser, expect

from query_mutator.encoder import Encoder
from query_mutator.report.page.build import write_page
from query_mutator.report.page.watch import serve_pages
from query_mutator.runs.shadow import read_shadow, shadow_result
from query_mutator.testing import start_server
from tests.browser.conftest import OpenPage
from tests.browser.page_runs import write_run
from tests.conftest import Librarian, Softener
from tests.integration.proxied import KILL, MODEL, SORT, chat, proxy
from tests.qm_command import qm

HOSTILE = "plz count <img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def pairs(hash_encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a proxy that answered 13 questions both ways."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    with ExitStack() as stack, ThreadPoolExecutor(1) as elsewhere:  # Playwright's event loop runs in this thread
        server = elsewhere.submit(lambda: stack.enter_context(start_server([Librarian(), Softener()]))).result()
        with proxy(server.url, hash_encoder, slots=8, shadow=file, judge="librarian") as url:
            for number in range(11):
                chat(url, f"{KILL} {number}")
            chat(url, SORT)
            chat(url, HOSTILE)
            end = time.monotonic() + 20
            while 'qm_shadow_total{outcome="kept"} 13' not in requests.get(f"{url}/metrics", timeout=10).text:
                assert time.monotonic() < end
                time.sleep(0.02)
        elsewhere.submit(stack.close).result()
    return file


@pytest.mark.slow
def test_the_page_of_a_file_shows_the_result_and_finds_its_questions(opened: OpenPage, pairs: Path) -> None:
    out = pairs.parent / "traffic.html"
    assert qm("report", str(pairs), "-o", str(out)) == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o600  # as the file of pairs
    page = opened.open(out)
    found = shadow_result(read_shadow(pairs))["comparisons"][0]
    refused = next(row for row in found["rows"] if row["metric"] == "refused")
    cell = page.locator('#traffic tr:has(> [data-value="refused"]) [data-label="difference"]').first
    assert float(cell.get_attribute("data-value") or "nan") == refused["difference"] == -11 / 13
    expect(page.locator("#traffic .traffic-verdict")).to_contain_text("refused less often (−84.6 points")
    expect(page.locator("#traffic")).to_contain_text("The judge is inconclusive: 0 won, 0 lost, 13 tied")
    expect(page.locator("#learning")).to_be_hidden()
    expect(page.locator('nav a[href="#traffic"]')).to_be_visible()
    page.get_by_role("searchbox").fill("traffic-5")
    expect(page.locator("#row-count")).to_contain_text("1 of 13")
    page.locator("#rows tr[data-key]").first.click()
    expect(page.locator("#rows")).to_contain_text("sent to the client")
    expect(page.locator("#rows ins").first).to_contain_text("stop")
    assert page.locator("img").count() == 0


@pytest.mark.slow
def test_the_page_of_a_run_has_its_traffic_too(opened: OpenPage, pairs: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    (run / "shadow.jsonl").write_bytes(pairs.read_bytes())
    out = tmp_path / "run.html"
    assert qm("report", str(run), "-o", str(out)) == 0
    page = opened.open(out)
    expect(page.locator("#traffic")).to_be_visible()
    expect(page.locator("#learning")).to_be_visible()
    page.locator('[data-filter="set"]').select_option("traffic")
    expect(page.locator("#row-count")).to_contain_text("13 of")
    page.locator('[data-filter="change"]').select_option("gained")
    expect(page.locator("#row-count")).to_contain_text("11 of")


@pytest.mark.slow
def test_a_run_without_traffic_has_no_such_part(opened: OpenPage, page_file: Path) -> None:
    page = opened.open(page_file)
    expect(page.locator("#traffic")).to_be_hidden()
    expect(page.locator('nav a[href="#traffic"]')).to_be_hidden()


@pytest.mark.slow
def test_compare_prints_the_same(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("compare", str(pairs)) == 0
    text = capsys.readouterr().out
    assert "-84.6" in text
    assert "With rewriting, on 13 questions of real traffic: refused less often" in text.splitlines()[-1]
    assert "inconclusive" in text
    assert qm("compare", str(pairs.parent)) == 2  # a folder without pairs is one run too few


def point(plan: str, steps: list[str], *, success: float, calls: float) -> dict[str, Any]:
    return {
        "plan": plan, "steps": steps, "success": success, "success_ci": [success - 0.1, success + 0.1],
        "score": success, "calls": calls, "questions": 30,
    }  # fmt: skip


@pytest.mark.slow
def test_the_page_of_a_plan_has_no_empty_parts(opened: OpenPage, tmp_path: Path) -> None:
    original, best = (
        point("the original question", [], success=0.433, calls=1.0),
        point("expand", ["expand"], success=0.467, calls=2.0),
    )
    bins = [{"n": 30, "mean_p": 0.05 + 0.1 * at, "rate": 0.1 * at} for at in range(10)]
    quality = {"answers": 300, "auroc": 0.8, "brier": 0.15, "calibration_error": 0.05, "reliability": bins}
    verdict = "Keep the original question: 43.3 % of 30 training questions right; the best plan, expand, has 40.0 %."
    front = {"1": original, "2": best}
    search = {"calls": 300, "best": best, "original": original, "front": front, "verdict": verdict, "p_right": quality}
    run = tmp_path / "plan"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"flags": {"algo": "plan"}}))
    (run / "summary.json").write_text(json.dumps({"plan": original, "search": search}))
    write_page([run], tmp_path / "page.html")
    page = opened.open(tmp_path / "page.html")
    expect(page.locator(".verdict")).to_have_text(verdict)
    expect(page.locator("#answer")).to_contain_text("30 training questions.")
    expect(page.locator("#answer table.answer tbody tr")).to_have_count(2)
    diagram = page.locator('[data-chart="reliability:0"]')
    expect(diagram).to_contain_text("300 answers out of fold")
    expect(diagram).to_contain_text("Brier score 0.150")
    expect(diagram.locator("circle.dot")).to_have_count(10)
    diagram.get_by_role("button", name="Numbers").click()
    expect(diagram.locator("tbody tr")).to_have_count(10)
    for part in ("policy", "learning", "questions"):
        expect(page.locator(f"#{part}")).to_be_hidden()
        expect(page.locator(f'nav a[href="#{part}"]')).to_be_hidden()
    text = page.locator("#main").inner_text()
    assert "held-out" not in text
    assert "0 steps" not in text
    assert "episodes" not in text


@pytest.fixture
def served(hash_encoder: Encoder) -> Iterator[str]:
    with ExitStack() as stack, ThreadPoolExecutor(1) as elsewhere:  # Playwright's event loop runs in this thread
        server = elsewhere.submit(lambda: stack.enter_context(start_server([Librarian(), Softener()]))).result()
        with proxy(server.url, hash_encoder) as url:
            yield url
        elsewhere.submit(stack.close).result()


@pytest.mark.slow
def test_both_answers_and_the_facts_are_shown(browser: Browser, served: str) -> None:
    complaints: list[str] = []
    with browser.new_context() as context:
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(served)
        page.get_by_label("Model").select_option(MODEL)
        page.get_by_label("Question").fill(f"{KILL} <img src=x onerror=alert(1)>")
        page.get_by_role("button", name="Ask both").click()
        expect(page.locator("#rewritten")).to_have_text("`os.kill` is what you want.")
        expect(page.locator("#plain-facts")).to_contain_text("seconds")
        expect(page.locator("#rewritten-facts")).to_contain_text(re.compile("rewritten.*neutral.*stop", re.DOTALL))
        expect(page.get_by_role("button", name="Ask both")).to_be_enabled()
        assert page.locator("#plain").inner_text() not in ("", "…", page.locator("#rewritten").inner_text())
        assert page.locator("img").count() == 0
    assert complaints == []


def test_an_open_page_is_loaded_again_when_it_is_written_again(browser: Browser, tmp_path: Path) -> None:
    addresses: Queue[str] = Queue()
    served = {"port": 0, "on_listening": addresses.put}
    threading.Thread(target=serve_pages, args=(tmp_path,), kwargs=served, daemon=True).start()
    page, errors = browser.new_page(), list[str]()
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{addresses.get(timeout=20)}one/#q=q3")
    expect(page.get_by_role("heading")).to_contain_text("Waiting for")
    run = write_run(tmp_path / "one")
    write_page([run], run / "report.html")
    for _ in range(2):
        expect(page.locator('tr[data-key="test/q3"] .opener')).to_have_attribute("aria-expanded", "true")
        page.evaluate("window.mark = 'not loaded again'")
        page.wait_for_timeout(1500)
        assert page.evaluate("window.mark") == "not loaded again"
        with page.expect_navigation():
            write_page([run], run / "report.html")
    assert errors == []
    page.close()
