"""The docs site builds without a warning; Dockerfile and compose.yaml have what they name."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dockerfile
import pytest
import yaml

from query_mutator.commands import COMMANDS
from query_mutator.training.config import parse_config
from scripts import flag_pages

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "environments" / "query_rewriting_env"


def settings() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return loaded


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(item)


@pytest.mark.slow
def test_navigation_has_every_page_once() -> None:
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages_of(settings()["nav"])) == sorted([*pages, *flag_pages.pages()])


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    html = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert [str(path) for path, text in html.items() if "```" in text or "<p>|" in text] == []
    first = html[tmp_path / "tutorials" / "first-run.html"]
    assert re.search(r'<code class="language-bash">make run', first)
    assert "<table" in first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ci.yml"])
def test_the_workflow_runs_the_checks_on_each_python(name: str) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert job["strategy"]["matrix"]["python-version"] == ["3.11", "3.12", "3.13"]
    runs = "\n".join(step.get("run", "") for step in job["steps"])
    for target in re.findall(r"\bmake ([\w-]+)", runs):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    assert {"test", "docs", "check-wheel"} <= set(re.findall(r"\bmake ([\w-]+)", runs))


def steps(path: Path = ROOT / "Dockerfile") -> list[Any]:
    return list(dockerfile.parse_file(str(path)))


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    return loaded


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = [name for step in steps() if step.cmd == "COPY" and not step.flags for name in step.value[:-1]]
    assert set(copied) == sent
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_the_image_builds_a_whole_wheel() -> None:
    # The modules and the files of the build that pyproject.toml names are copied.
    copied = {name for step in steps() if step.cmd == "COPY" for name in step.value}
    modules = [path.name for path in ROOT.glob("*.py")]
    assert {"pyproject.toml", "README.md", "LICENSE", "ppo", "query_mutator", *modules} <= copied


def test_the_image_installs_the_lock_and_the_tested_torch() -> None:
    runs = " ".join(step.value[0] for step in steps() if step.cmd == "RUN")
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    assert next(pin for pin in pins if pin.startswith("torch==")) in runs.split()
    assert "--constraint /dist/requirements.txt" in runs
    assert [step.value for step in steps() if step.cmd == "ENTRYPOINT"] == [("qm",)]


def test_the_image_for_openenv_adds_the_versions_of_the_package_and_serves_its_port() -> None:
    found = steps(ENVIRONMENT / "server" / "Dockerfile")
    project = tomllib.loads((ENVIRONMENT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (install,) = [step.value[0] for step in found if step.cmd == "RUN"]
    assert project["dependencies"][0] in shlex.split(install)
    assert [step.value for step in found if step.cmd == "USER"] == [("root",), ("qm",)]
    assert [step.value for step in found if step.cmd == "ENTRYPOINT"] == [
        ("python", "-m", "query_rewriting_env.server.app", "--host", "0.0.0.0")
    ]
    port = yaml.safe_load((ENVIRONMENT / "openenv.yaml").read_text(encoding="utf-8"))["port"]
    assert [step.value for step in found if step.cmd == "EXPOSE"] == [(str(port),)]


# --- compose.yaml ----------------------------------------------------------------------------------------------------


def test_the_trainer_waits_for_the_models_and_the_pull_for_the_server() -> None:
    services = compose()["services"]
    assert services["trainer"]["depends_on"] == {"pull": {"condition": "service_completed_successfully"}}
    wanted = {"condition": "service_healthy", "required": False}
    assert services["pull"]["depends_on"] == {"ollama": wanted, "ollama-gpu": wanted}
    assert services["pull"]["environment"] == {"OLLAMA_HOST": "http://model-server:11434"}


def test_what_the_trainer_runs_is_a_command_of_ours() -> None:
    trainer = compose()["services"]["trainer"]
    command = [word.partition(":-")[2].rstrip("}") if word.startswith("${") else word for word in trainer["command"]]
    assert command[0] in COMMANDS
    config = parse_config(command[1:])
    (pull,) = compose()["services"]["pull"]["command"]
    pulled = [word.partition(":-")[2].rstrip("}") for word in shlex.split(pull) if word.startswith("${")]
    assert pulled == [config.target_model, config.mutator_model]
