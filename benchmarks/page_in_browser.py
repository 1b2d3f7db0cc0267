"""What a page takes in a headless Chromium: time to its first paint, time of a key stroke in the search, memory.

python benchmarks/page_in_browser.py runs/long/report.html
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
LIMITS = {"first_paint_s": 2.0, "search_ms": 200.0, "episodes_search_ms": 200.0, "tab_mb": 500.0}
SEARCHES = ("how do i sort", "list of wor", "zzzz")
#: Notes when the table of the answer has been painted; runs before the page's own scripts.
_WATCH = """(() => {
  const look = () => (document.querySelector("#answer table") ? setTimeout(() => { window.answerAt = performance.now(); }) : requestAnimationFrame(look));
  look();
})()"""  # noqa: E501
#: Types a search letter by letter; returns the milliseconds from each letter to the frame that shows its result.
_TYPE = """async (search) => {
  const input = document.getElementById("search"), took = [];
  for (let size = 1; size <= search.length; size += 1) {
    const began = performance.now();
    input.value = search.slice(0, size);
    input.dispatchEvent(new Event("input"));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    took.push(performance.now() - began);
  }
  return Math.max(...took);
}"""


def browse(path: Path) -> dict[str, float]:
    """Return the figures of a page file."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.add_init_script(_WATCH)
        page.goto(path.resolve().as_uri())
        page.evaluate("QM.ready")
        found = {
            "first_paint_s": float(page.evaluate("window.answerAt")) / 1e3,
            "complete_s": float(page.evaluate("performance.now()")) / 1e3,
            "search_ms": slowest_stroke(page),
        }
        page.get_by_role("button", name="Training episodes").click()
        found["episodes_search_ms"] = slowest_stroke(page)
        found["tab_mb"] = peak_memory_mb(browser)
        browser.close()
    return found


def slowest_stroke(page: Page) -> float:
    """Return the milliseconds of the slowest key stroke, the first one of all included."""
    return max(float(page.evaluate(_TYPE, search)) for search in SEARCHES)


def peak_memory_mb(browser: Browser) -> float:
    """Return the peak resident memory of the largest renderer process, which is the tab's."""
    processes = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    found = [
        re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process['id']}/status").read_text())
        for process in processes
        if process["type"] == "renderer"
    ]
    return max(int(match[1]) for match in found if match) / 1e3


def main() -> None:
    """Print the figures of a page next to their limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    for name, value in browse(parser.parse_args().page).items():
        print(f"{name:<18} {value:8.2f}" + (f"  limit {LIMITS[name]:g}" if name in LIMITS else ""))


if __name__ == "__main__":
    main()
