"""The page in a real browser: the table of questions, its numbers, hostile texts, keyboard, phone and dark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from query_mutator.commands.main import main as qm_main
from query_mutator.report.page.build import write_page
from tests.browser.conftest import OpenPage
from tests.browser.page_runs import HOSTILE, METHODS, QUESTIONS, is_right, write_run

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROWS = QUESTIONS + 2  # with the guard


def count(page: Page) -> str:
    return page.locator("#row-count").inner_text()


def keys(page: Page) -> list[str]:
    return page.locator("#rows tr[data-key]").evaluate_all("rows => rows.map(row => row.dataset.key)")


def choose(page: Page, name: str, value: str) -> None:
    page.locator(f'[data-filter="{name}"]').select_option(value)


def shown_rate(page: Page, section: str, row: str, column: str) -> float:
    cell = page.locator(f'#{section} tr:has(> [data-value="{row}"]) [data-label="{column}"]').first
    return float(cell.get_attribute("data-value") or "nan")


def test_the_numbers_are_those_of_the_summary(page: Page, run_folder: Path) -> None:
    report = json.loads((run_folder / "summary.json").read_text())["eval"]
    for method in METHODS:
        found = report["methods"][method]
        columns = {
            "success": "success", "false refusals": "false_refusal", "guard refusals": "guard_refusal",
            "calls": "calls_per_question", "tokens": "tokens_per_question",
        }  # fmt: skip
        for column, key in columns.items():
            assert shown_rate(page, "answer", method, column) == found[key]
        low, high = (100 * end for end in found["success_ci"])
        text = page.locator(f'#answer tr:has(> [data-value="{method}"]) [data-label="success"]').inner_text()
        assert f"{100 * found['success']:.1f} [{low:.1f}, {high:.1f}]" in " ".join(text.split())
    for rival in ("identity", "best_plan"):
        assert shown_rate(page, "source", rival, "difference") == report["policy_minus"][rival]["success"]
    gained = sum(is_right(n, "policy", 0) and not is_right(n, "identity", 0) for n in range(QUESTIONS))
    assert shown_rate(page, "source", "identity", "gained") == gained


def test_the_curves_are_those_that_analyze_reads(page: Page, run_folder: Path, tmp_path: Path) -> None:
    assert qm_main(["analyze", str(run_folder), "--json", str(tmp_path / "analysis.json")]) == 0
    found = {metric["name"]: metric for metric in json.loads((tmp_path / "analysis.json").read_text())["metrics"]}
    for title, name, window in (("Return", "return", 5), ("Entropy", "entropy", 1)):  # the mean of the last 5; the last
        chart = page.locator("figure.chart").filter(has=page.get_by_text(title, exact=True))
        with page.expect_download() as saved:
            chart.get_by_role("button", name="CSV").click()
        points = [[float(cell) for cell in line.split(",")[-2:]] for line in saved.value.path().read_text().split()[1:]]
        (read,) = found[name]["groups"][0]["values"]
        last = [value for _, value in points[-window:]]
        assert points[-1][0] == read["x"]
        assert sum(last) / len(last) == pytest.approx(read["value"], rel=1e-6)


def test_each_chart_shows_its_numbers_and_saves_them(page: Page) -> None:
    charts = page.locator("figure.chart")
    assert charts.count() >= 8
    for chart in charts.all():
        toggle = chart.get_by_role("button", name="Numbers")
        toggle.click()
        expect(toggle).to_have_attribute("aria-expanded", "true")
        assert chart.locator("tbody tr").count() > 0
    with page.expect_download() as saved:
        page.locator('[data-chart="front:0"]').get_by_role("button", name="CSV").click()
    lines = saved.value.path().read_text().splitlines()
    assert lines[0].startswith("method,calls per question")
    assert {line.split(",")[0] for line in lines[1:]} == set(METHODS)


def test_search_finds_questions_rewrites_and_answers(page: Page) -> None:
    assert count(page) == f"{ROWS} questions"
    search = page.get_by_role("searchbox")
    for text, found in (
        ("NUMBER 17", 1),
        ("q17", 1),
        ("sorted(17)", 1),
        ("first try", ROWS),
        ("nowhere to be found", 0),
    ):
        search.fill(text)
        expect(page.locator("#row-count")).to_contain_text(f"{found} of" if found != ROWS else f"{ROWS} questions")
        assert len(keys(page)) == min(found, len(keys(page)))
    page.locator("#clear").click()
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
    choose(page, "from", "0:best_plan")
    assert count(page) == expected(lambda n: is_right(n, "best_plan", 0) and not is_right(n, "policy", 0))
    choose(page, "change", "")
    choose(page, "tag", "wordy")
    assert count(page) == expected(lambda n: n % 3 == 1)
    choose(page, "outcome", "right")
    assert count(page) == expected(lambda n: n % 3 == 1 and is_right(n, "policy", 0))
    choose(page, "operator", "neutral")
    assert count(page) == expected(lambda n: n % 3 == 1 and is_right(n, "policy", 0))
    choose(page, "to", "0:identity")
    assert count(page) == f"0 of {ROWS} questions"


def test_sorting_says_its_direction(page: Page) -> None:
    head = page.locator('#rows th[data-column="gain"]')
    gains = page.locator("#rows tr[data-key] td.n:nth-last-child(2)")
    for direction, first in (("ascending", "0.00"), ("descending", "+1.00")):
        head.get_by_role("button").click()
        expect(head).to_have_attribute("aria-sort", direction)
        assert gains.first.inner_text() == first
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "none")
    assert keys(page)[0] == "test/q0"


def test_a_row_opens_the_way_step_by_step(page: Page) -> None:
    page.get_by_role("searchbox").fill("number 18")
    opener = page.locator(".opener")
    opener.click()
    expect(page.locator(".opener")).to_have_attribute("aria-expanded", "true")
    detail = page.locator(".detail")
    assert detail.locator(".way .operator").all_inner_texts() == ["spelling", "ask", "neutral", "submit"]
    first = detail.locator(".way > li").first
    assert first.locator("del").inner_text() == "plz"
    assert first.locator("ins").inner_text() == "please"
    assert detail.locator(".attempt").count() == 2
    submitted = detail.locator(".attempt.submitted")
    assert "Use sorted(18)." in submitted.inner_text()
    assert "the last answer fits best" in submitted.inner_text()
    assert submitted.locator(".parts dt").all_inner_texts() == ["right", "meaning"]
    detail.get_by_role("button", name="identity").click()
    assert detail.locator(".way .operator").all_inner_texts() == ["submit"]
    assert page.url.endswith("#q=q18")


def test_a_link_opens_its_question_and_can_be_copied(opened: OpenPage, page_file: Path) -> None:
    opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = opened.open(page_file, "#q=q33")
    expect(page.locator('tr[data-key="test/q33"] .opener')).to_have_attribute("aria-expanded", "true")
    expect(page.locator('tr[data-key="test/q33"] .opener')).to_be_focused()
    expect(page.locator('tr[data-key="test/q33"]')).to_be_in_viewport()
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == f"{page_file.as_uri()}#q=q33"


@pytest.mark.parametrize("place", range(6), ids=list(HOSTILE))
def test_hostile_texts_stay_texts(opened: OpenPage, page_file: Path, place: int) -> None:
    page = opened.open(page_file, f"#q=q{place}")
    expected = list(HOSTILE.values())[place].replace("\ud83d", "\ufffd").replace("\r", "")
    more = page.locator(".detail").get_by_role("button", name="Show all")
    if len(expected) > 20_000:
        more.click()
    assert page.locator(".attempt.submitted .text").evaluate("node => node.textContent") == expected
    assert page.locator(".detail script, .detail img, .detail b, .detail textarea, .detail style").count() == 0
    assert page.title() != "owned"


def test_training_episodes_are_in_the_same_view(page: Page) -> None:
    page.get_by_role("button", name="Training episodes").click()
    assert count(page) == "2 episodes"
    choose(page, "episode", "right answer found")
    assert count(page) == "1 of 2 episodes"
    page.locator(".opener").click()
    assert page.locator(".detail .operator").all_inner_texts() == ["spelling", "ask", "submit"]
    assert "in the form quiz" in page.locator(".detail .attempt-head").first.inner_text()
    assert HOSTILE["closing"] in (page.locator(".detail").text_content() or "")
    page.get_by_role("button", name="Held-out questions").click()
    assert count(page) == f"{ROWS} questions"


def test_only_rows_in_view_are_in_the_document(page: Page) -> None:
    assert len(keys(page)) < 30
    page.locator(".viewport").evaluate("node => { node.scrollTop = node.scrollHeight }")
    expect(page.locator(f'tr[data-key="guard/q{ROWS - 1}"]')).to_be_visible()
    last = page.locator(f'tr[data-key="guard/q{ROWS - 1}"]')
    assert last.get_attribute("aria-rowindex") == str(ROWS + 1)
    assert page.locator("table.rows").get_attribute("aria-rowcount") == str(ROWS + 1)


def test_the_keyboard_is_enough(page: Page) -> None:
    page.evaluate("() => { window.requestAnimationFrame = (act) => setTimeout(act, 60) }")  # as on a busy machine
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the answer")).to_be_focused()
    page.get_by_role("searchbox").focus()
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('opener')"):
            break
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(page.locator('tr[data-key="test/q2"] .opener')).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator('tr[data-key="test/q2"] .opener')).to_have_attribute("aria-expanded", "true")
    expect(page.locator('tr[data-key="test/q2"] .opener')).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Escape")
    expect(page.locator('tr[data-key="test/q2"] .opener')).to_have_attribute("aria-expanded", "false")
    for _ in range(20):
        page.keyboard.press("ArrowDown")
    expect(page.locator('tr[data-key="test/q22"] .opener')).to_be_focused()
    page.locator('[data-chart="front:0"] svg').focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#announce")).to_contain_text("calls")


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
    for button in page.get_by_role("button", name="Numbers").all():
        button.click()
    assert page.evaluate("document.documentElement.scrollWidth") == 420
    assert page.locator(".viewport").evaluate("node => node.scrollWidth - node.clientWidth") == 0
    wide = page.locator("#rows th[data-column]").evaluate_all("cells => cells.map(cell => cell.dataset.column)")
    assert wide == ["question", "0:identity", "0:policy"]


def test_parts_are_landmarks_with_names_and_headings(page: Page) -> None:
    names = ["The answer", "Where it comes from", "What the policy does", "Learning", "Calls", "Questions", "Reproduce"]
    assert page.locator("main > section:not([hidden]) h2").all_inner_texts() == names
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
    expect(page.locator("#answer .pairs h3")).to_have_text("two against one")
    choose(page, "set", "test")
    choose(page, "change", "gained")
    gained = sum(is_right(n, "policy", 1) and not is_right(n, "policy", 0) for n in range(QUESTIONS))
    assert count(page) == f"{gained} of {ROWS} questions"
    assert shown_rate(page, "answer .pairs", "policy", "gained") == gained
    page.locator(".opener").first.click()
    page.locator(".detail").get_by_role("button", name="policy B").click()
    assert page.locator(".detail .way > li").count() == 4
