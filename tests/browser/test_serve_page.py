"""The page of `qm serve` in Chromium: one question, both answers, and what was done."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from playwright.sync_api import Browser, expect

from query_mutator.encoder import Encoder
from query_mutator.testing import start_server
from tests.conftest import Librarian, Softener
from tests.integration.proxied import KILL, MODEL, proxy

pytestmark = pytest.mark.slow


@pytest.fixture
def served(hash_encoder: Encoder) -> Iterator[str]:
    with ExitStack() as stack, ThreadPoolExecutor(1) as elsewhere:  # Playwright's event loop runs in this thread
        server = elsewhere.submit(lambda: stack.enter_context(start_server([Librarian(), Softener()]))).result()
        with proxy(server.url, hash_encoder) as url:
            yield url
        elsewhere.submit(stack.close).result()


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
