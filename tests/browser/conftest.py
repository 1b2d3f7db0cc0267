"""One headless Chromium for all tests of the page, and pages of a small run whose texts are hostile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from query_mutator.report.build import write_page
from tests.browser.page_runs import write_run

CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture(scope="module")  # while it is open, its event loop is that of the thread
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is missing: apt-get install chromium")
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=flags)
        yield found
        found.close()


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "one")


@pytest.fixture(scope="session")
def page_file(run_folder: Path) -> Path:
    path = run_folder.parent / "one.html"
    write_page([run_folder], path)
    return path


class OpenPage:
    """A page in the browser, with everything it asked for and complained about."""

    def __init__(self, page: Page) -> None:
        self.page, self.requests, self.errors = page, list[str](), list[str]()
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self, path: Path, hash_: str = "") -> Page:
        """Open a file and wait until all its messages are applied and drawn."""
        self.page.goto(f"{path.as_uri()}{hash_}")
        self.page.evaluate("async () => { await QM.ready; await new Promise(requestAnimationFrame) }")
        return self.page


@pytest.fixture
def opened(browser: Browser) -> Iterator[OpenPage]:
    """Yield a page of 1,280 pixels; afterwards nothing was printed to its console, and nothing was asked for."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page = OpenPage(context.new_page())
    yield page
    context.close()
    assert page.errors == []
    assert {url.split(":")[0] for url in page.requests} <= {"file"}
    assert len(page.requests) <= 2  # the file itself


@pytest.fixture
def page(opened: OpenPage, page_file: Path) -> Page:
    return opened.open(page_file)
