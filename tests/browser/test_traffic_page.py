"""The part on real traffic in Chromium: from a proxy that answered both ways to its figures and its questions."""

from __future__ import annotations

import stat
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests
from playwright.sync_api import expect

from query_mutator.encoder import Encoder
from query_mutator.runs.shadow import read_shadow, shadow_result
from query_mutator.testing import start_server
from tests.browser.conftest import OpenPage
from tests.browser.page_runs import write_run
from tests.conftest import Librarian, Softener
from tests.integration.proxied import KILL, SORT, chat, proxy
from tests.qm_command import qm

pytestmark = pytest.mark.slow

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


def test_a_run_without_traffic_has_no_such_part(opened: OpenPage, page_file: Path) -> None:
    page = opened.open(page_file)
    expect(page.locator("#traffic")).to_be_hidden()
    expect(page.locator('nav a[href="#traffic"]')).to_be_hidden()


def test_compare_prints_the_same(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("compare", str(pairs)) == 0
    text = capsys.readouterr().out
    assert "-84.6" in text
    assert "With rewriting, on 13 questions of real traffic: refused less often" in text.splitlines()[-1]
    assert "inconclusive" in text
    assert qm("compare", str(pairs.parent)) == 2  # a folder without pairs is one run too few
