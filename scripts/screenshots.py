"""Take the pictures of the page in docs/images from the report of a run: desktop, phone, dark, an open question.

    qm report runs/latest -o page.html
    python scripts/screenshots.py page.html docs/images --question g-0689

Needs /usr/bin/chromium, and the typeface Inter (Debian's fonts-inter) for the same look.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"


def scroll_to(selector: str) -> Callable[[Page], None]:
    """Return an action that brings an element to the top, under the page's header."""
    return lambda page: page.locator(selector).first.evaluate("node => node.scrollIntoView()")


def open_question(name: str) -> Callable[[Page], None]:
    """Return an action that opens a question."""

    def act(page: Page) -> None:
        page.evaluate("name => { location.hash = `q=${encodeURIComponent(name)}`; }", name)
        page.locator("tr.details").wait_for()
        scroll_to(".search")(page)

    return act


def take(
    browser: Browser, file: Path, target: Path, *, size: tuple[int, int], scheme: str, act: Callable[[Page], None]
) -> None:
    """Take one picture of a page file."""
    page = browser.new_page(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
        device_scale_factor=1.5 if size[0] > 500 else 2,
    )
    page.goto(file.resolve().as_uri())
    page.evaluate("QM.ready")
    act(page)
    page.wait_for_timeout(200)  # for the scroll position
    page.screenshot(path=target)
    page.close()
    print(target)


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--question", required=True, help="id of the question to open")
    flags = parser.parse_args()
    top, question = scroll_to("#main"), open_question(flags.question)
    pictures = {
        "report.png": ((1200, 860), "light", top),
        "report-dark.png": ((1200, 860), "dark", scroll_to("#source")),
        "report-policy.png": ((1200, 860), "light", scroll_to("#policy")),
        "report-question.png": ((1200, 860), "light", question),
        "report-phone.png": ((420, 860), "light", top),
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        for name, (size, scheme, act) in pictures.items():
            take(browser, flags.page, flags.folder / name, size=size, scheme=scheme, act=act)
        browser.close()


if __name__ == "__main__":
    main()
