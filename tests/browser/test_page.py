"""The page in a real browser: questions, numbers, hostile texts, keyboard, phone, dark, print, and `qm watch`."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import Queue

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from query_mutator.report.build import MAX_CHARS, serve_pages, write_page
from tests.browser.conftest import OpenPage
from tests.browser.page_runs import HOSTILE, METHODS, QUESTIONS, is_right, question_text, write_run

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROWS = QUESTIONS + 2  # with the guard


def count(page: Page, table: str = "held-out") -> str:
    return page.locator(f"#{table} .count").inner_text()


def ids(page: Page) -> list[str]:
    """Return the questions that the table shows, in order."""
    shown = page.locator("#held-out tbody tr:not([hidden], .details)")
    return [str(name) for name in shown.evaluate_all("rows => rows.map(row => row.dataset.id)")]


def choose(page: Page, name: str, value: str, table: str = "held-out") -> None:
    page.locator(f'#{table} [data-filter="{name}"]').select_option(value)


def row_of(page: Page, name: str) -> Locator:
    return page.locator(f'#held-out tr[data-id="{name}"]')


def test_each_chart_shows_its_numbers_and_saves_them(page: Page) -> None:
    charts = page.locator("figure.chart")
    assert charts.count() >= 8
    for chart in charts.all():
        chart.locator("summary").click()
        expect(chart.locator("tbody tr").first).to_be_visible()
        assert chart.locator("svg title").count() > 0  # shown under the pointer
    for title, header, names in (
        ("Success against calls", "method,calls per question", {*METHODS}),
        ("Entropy", "step,Entropy", {f"{step}" for step in range(0, 513, 64)}),
    ):
        with page.expect_download() as saved:
            page.locator(f'[data-chart="{title}"]').get_by_role("button", name="CSV").click()
        lines = saved.value.path().read_text().splitlines()
        assert lines[0].startswith(header)
        assert {line.split(",")[0] for line in lines[1:]} == names
    assert lines[-1] == "512,1.5"


def test_search_finds_questions_rewrites_and_answers(page: Page) -> None:
    assert count(page) == f"{ROWS} questions"
    search = page.locator("#held-out").get_by_role("searchbox")
    for text, found in (
        ("NUMBER 17", 1), ("q17", 1), ("sorted(17)", 1), ("first try", ROWS), ("wordy", 14), ("nowhere to be found", 0),
    ):  # fmt: skip
        search.fill(text)
        expect(page.locator("#held-out .count")).to_have_text(
            f"{found} of {ROWS} questions" if found != ROWS else f"{ROWS} questions"
        )
        assert len(ids(page)) == found
    page.locator("#held-out .clear").click()
    assert count(page) == f"{ROWS} questions"


def test_filters_by_tag_outcome_operator_change_and_set(page: Page) -> None:
    def expected(passes: object) -> str:
        assert callable(passes)
        return f"{sum(bool(passes(n)) for n in range(QUESTIONS))} of {ROWS} questions"

    choose(page, "set", "test")
    choose(page, "change", "gained")
    assert count(page) == expected(lambda n: is_right(n, "policy", 0) and not is_right(n, "identity", 0))
    choose(page, "change", "lost")
    assert count(page) == f"0 of {ROWS} questions"
    page.locator('#held-out [data-filter="from"]').select_option(label="best_plan")
    assert count(page) == expected(lambda n: is_right(n, "best_plan", 0) and not is_right(n, "policy", 0))
    choose(page, "change", "")
    choose(page, "tag", "wordy")
    assert count(page) == expected(lambda n: n % 3 == 1)
    choose(page, "outcome", "right")
    assert count(page) == expected(lambda n: n % 3 == 1 and is_right(n, "policy", 0))
    choose(page, "operator", "neutral")
    assert count(page) == expected(lambda n: n % 3 == 1 and is_right(n, "policy", 0))
    page.locator('#held-out [data-filter="to"]').select_option(label="identity")
    assert count(page) == f"0 of {ROWS} questions"


def test_sorting_says_its_direction(page: Page) -> None:
    head = page.locator('#held-out th[data-column="score"]')
    gains = page.locator("#held-out tbody tr td.n:nth-last-child(2)")
    for direction, first in (("ascending", "0.00"), ("descending", "+1.00")):
        head.get_by_role("button").click()
        expect(head).to_have_attribute("aria-sort", direction)
        assert gains.first.inner_text() == first
    page.locator("#held-out").get_by_role("searchbox").fill("number 18")  # a search after sorting finds the same
    expect(page.locator("#held-out .count")).to_have_text(f"1 of {ROWS} questions")
    assert ids(page) == ["q18"]
    page.locator("#held-out .clear").click()
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "none")
    assert ids(page)[0] == "q0"


def test_a_row_opens_the_way_step_by_step(page: Page) -> None:
    opener = row_of(page, "q18").locator(".opener")
    opener.click()
    expect(opener).to_have_attribute("aria-expanded", "true")
    shown = page.locator(".detail .side[open]")
    expect(shown.locator("summary")).to_contain_text("policy right · score 1.00 · 4 calls · 80 tokens")
    assert shown.locator(".way .operator").all_inner_texts() == ["spelling", "ask", "neutral", "submit"]
    first = shown.locator(".way > li").first
    assert first.locator("del").inner_text() == "plz"
    assert first.locator("ins").inner_text() == "please"
    assert shown.locator(".attempt").count() == 2
    submitted = shown.locator(".attempt.submitted")
    assert "Use sorted(18)." in submitted.inner_text()
    assert "the last answer fits best" in submitted.inner_text()
    assert submitted.locator(".parts dt").all_inner_texts() == ["right", "meaning"]
    page.locator(".detail summary", has_text="identity").click()
    expect(shown).to_have_count(1)  # one way at a time
    assert shown.locator(".way .operator").all_inner_texts() == ["submit"]
    assert page.url.endswith("#q=q18")


def test_a_link_opens_its_question_and_can_be_copied(opened: OpenPage, page_file: Path) -> None:
    opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = opened.open(page_file, "#q=q33")
    opener = row_of(page, "q33").locator(".opener")
    expect(opener).to_have_attribute("aria-expanded", "true")
    expect(opener).to_be_focused()
    expect(opener).to_be_in_viewport()
    for name, copied in (("Copy link", f"{page_file.as_uri()}#q=q33"), ("Copy question", question_text(33))):
        page.get_by_role("button", name=name).click()
        expect(page.get_by_role("button", name="Copied").first).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == copied


@pytest.mark.parametrize("place", range(6), ids=list(HOSTILE))
def test_hostile_texts_stay_texts(opened: OpenPage, page_file: Path, place: int) -> None:
    page = opened.open(page_file, f"#q=q{place}")
    expected = list(HOSTILE.values())[place].replace("\ud83d", "\ufffd").replace("\0", "\ufffd")
    assert (
        page.locator(".side[open] .attempt.submitted .text").evaluate("node => node.textContent")
        == expected[:MAX_CHARS]
    )
    if len(expected) > MAX_CHARS:
        expect(page.locator(".side[open]")).to_contain_text("1,030,010 more characters are in the run folder")
    assert (
        page.locator(":is(.detail, main) :is(script:not([type]), img, b, textarea, style, i:not(.outcome))").count()
        == 0
    )
    assert page.title() != "owned"


def test_training_episodes_are_in_the_same_part(page: Page) -> None:
    page.locator("label", has_text="Training episodes").click()
    expect(page.locator("#held-out")).to_be_hidden()
    assert count(page, "episodes") == "2 episodes"
    choose(page, "outcome", "right answer found", "episodes")
    assert count(page, "episodes") == "1 of 2 episodes"
    page.locator("#episodes .opener:visible").click()
    assert page.locator(".detail .operator").all_inner_texts() == ["spelling", "ask", "submit"]
    assert "in the form quiz" in page.locator(".detail .attempt-head").first.inner_text()
    assert HOSTILE["closing"] in (page.locator(".detail").text_content() or "")
    page.locator("label", has_text="Held-out questions").click()
    expect(page.locator("#episodes")).to_be_hidden()
    assert count(page) == f"{ROWS} questions"


def test_the_keyboard_is_enough(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the answer")).to_be_focused()
    page.locator("#held-out").get_by_role("searchbox").focus()
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('opener')"):
            break
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    opener = row_of(page, "q2").locator(".opener")
    expect(opener).to_be_focused()
    page.keyboard.press("Enter")
    expect(opener).to_have_attribute("aria-expanded", "true")
    expect(opener).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Escape")
    expect(opener).to_have_attribute("aria-expanded", "false")
    for _ in range(20):
        page.keyboard.press("ArrowDown")
    expect(row_of(page, "q22").locator(".opener")).to_be_focused()
    expect(row_of(page, "q22").locator(".opener")).to_be_in_viewport()
    page.locator('[data-chart="Success against calls"] summary').focus()
    page.keyboard.press("Enter")
    expect(page.locator('[data-chart="Success against calls"] td').first).to_be_visible()


def contrast(page: Page) -> list[str]:
    """Return the texts whose color differs too little from what is behind them."""
    found = page.evaluate((HERE / "contrast.js").read_text())
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_readable(opened: OpenPage, page_file: Path, scheme: str) -> None:
    opened.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page = opened.open(page_file, "#q=q7")
    assert contrast(page) == []
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert contrast(page) == []
    page.reload()
    page.evaluate("QM.ready")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_a_phone_needs_no_sideways_scrolling(opened: OpenPage, page_file: Path) -> None:
    opened.page.set_viewport_size({"width": 420, "height": 800})
    page = opened.open(page_file, "#q=q1")
    for numbers in page.locator("figure summary").all():
        numbers.click()
    assert page.evaluate("document.documentElement.scrollWidth") == 420
    assert page.locator("#held-out .viewport").evaluate("node => node.scrollWidth - node.clientWidth") == 0
    wide = page.locator("#held-out th[data-column]:visible").evaluate_all(
        "cells => cells.map(cell => cell.dataset.column)"
    )
    assert wide == ["question", "identity", "policy"]


def test_without_a_script_all_but_the_steps_is_there(browser: Browser, page_file: Path) -> None:
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(page_file.as_uri())
        expect(page.locator(".verdict")).to_be_visible()
        assert page.locator("#held-out tbody tr").count() == ROWS
        assert page.locator("figure svg circle").count() > 0


def test_parts_are_landmarks_with_names_and_headings(page: Page) -> None:
    names = ["The answer", "Where it comes from", "What the policy does", "Learning", "Calls", "Questions", "Reproduce"]
    assert page.locator("main > section h2").all_inner_texts() == names
    for name in names:
        expect(page.get_by_role("region", name=name, exact=True).first).to_be_attached()
    assert page.locator("h1").count() == 1
    assert page.locator("table:not(:has(caption))").count() == 0
    assert page.locator("button:not([type])").count() == 0


def test_two_runs_are_next_to_each_other_and_paired(opened: OpenPage, run_folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "two", seed=1)
    write_page([run_folder, other], tmp_path / "both.html")
    page = opened.open(tmp_path / "both.html")
    assert page.locator("#answer .run").count() == 2
    expect(page.locator("#answer > .block h3")).to_have_text("two against one")
    choose(page, "set", "test")
    choose(page, "change", "gained")
    gained = sum(is_right(n, "policy", 1) and not is_right(n, "policy", 0) for n in range(QUESTIONS))
    assert count(page) == f"{gained} of {ROWS} questions"
    expect(page.locator("#answer > .block tr", has_text="policy").locator('[data-label="gained"]')).to_have_text(
        f"{gained}"
    )
    page.locator("#held-out .opener:visible").first.click()
    expect(page.locator(".detail .side[open] summary")).to_contain_text("policy B")
    assert page.locator(".detail .side[open] .way > li").count() == 4


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
        expect(page.locator('tr[data-id="q3"] .opener')).to_have_attribute("aria-expanded", "true")
        page.evaluate("window.mark = 'not loaded again'")
        page.wait_for_timeout(1500)
        assert page.evaluate("window.mark") == "not loaded again"
        with page.expect_navigation():
            write_page([run], run / "report.html")
    assert errors == []
    page.close()
