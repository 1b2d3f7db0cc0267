"""The page of a search for a plan in Chromium: training questions, the original next to the plan, no empty parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from query_mutator.report.page.build import write_page
from tests.browser.conftest import OpenPage

pytestmark = pytest.mark.slow


def point(plan: str, steps: list[str], *, success: float, calls: float) -> dict[str, Any]:
    return {
        "plan": plan, "steps": steps, "success": success, "success_ci": [success - 0.1, success + 0.1],
        "score": success, "calls": calls, "questions": 30,
    }  # fmt: skip


def test_the_page_of_a_plan_has_no_empty_parts(opened: OpenPage, tmp_path: Path) -> None:
    original, best = (
        point("the original question", [], success=0.433, calls=1.0),
        point("expand", ["expand"], success=0.467, calls=2.0),
    )
    bins = [{"n": 30, "mean_p": 0.05 + 0.1 * at, "rate": 0.1 * at} for at in range(10)]
    quality = {"answers": 300, "auroc": 0.8, "brier": 0.15, "calibration_error": 0.05, "reliability": bins}
    verdict = "Keep the original question: 43.3 % of 30 training questions right; the best plan, expand, has 40.0 %."
    front = {"1": original, "2": best}
    search = {"best": best, "original": original, "front": front, "verdict": verdict, "p_right": quality}
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
