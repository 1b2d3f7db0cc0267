"""The docs site: every page is in its navigation, and it builds without a warning, with all blocks and tables."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import flag_pages

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def settings() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return loaded


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(item)


def test_navigation_has_every_page_once() -> None:
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages_of(settings()["nav"])) == sorted([*pages, *flag_pages.pages()])


def test_the_site_has_no_plug_ins() -> None:
    assert settings()["plugins"] == []


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    html = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert [str(path) for path, text in html.items() if "```" in text or "<p>|" in text] == []
    first = html[tmp_path / "tutorials" / "first-run.html"]
    assert re.search(r'<code class="language-bash">make run', first)
    assert "<table" in first


def test_make_docs_builds_the_site() -> None:
    done = subprocess.run(["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert "mkdocs build --strict" in done.stdout


@pytest.mark.parametrize("name", ["ci.yml"])
def test_the_workflow_runs_the_checks_on_each_python(name: str) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert job["strategy"]["matrix"]["python-version"] == ["3.11", "3.12", "3.13"]
    runs = "\n".join(step.get("run", "") for step in job["steps"])
    for target in re.findall(r"\bmake ([\w-]+)", runs):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    assert {"test", "docs", "check-wheel"} <= set(re.findall(r"\bmake ([\w-]+)", runs))
