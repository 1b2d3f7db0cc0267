"""A page of `qm watch` in a browser: it is loaded again when its file is written again, at the question it shows."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import Queue

from playwright.sync_api import Browser, expect

from query_mutator.report.page.build import write_page
from query_mutator.report.page.watch import serve_pages
from tests.browser.page_runs import write_run


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
