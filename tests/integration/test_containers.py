"""Dockerfile and compose.yaml, read by Docker's own parser and as YAML; no daemon runs here."""

from __future__ import annotations

import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import dockerfile
import pytest
import yaml

from query_mutator.commands import COMMANDS
from query_mutator.training.config import parse_config

ROOT = Path(__file__).resolve().parents[2]


ENVIRONMENT = ROOT / "environments" / "query_rewriting_env"


def steps(path: Path = ROOT / "Dockerfile") -> list[Any]:
    return list(dockerfile.parse_file(str(path)))


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    return loaded


def test_the_image_is_slim_and_its_user_is_not_root() -> None:
    stages = [step.value for step in steps() if step.cmd == "FROM"]
    assert {stage[0] for stage in stages} == {"python:3.11-slim"}
    last = steps()[max(place for place, step in enumerate(steps()) if step.cmd == "FROM") :]
    (user,) = [step for step in last if step.cmd == "USER"]
    assert user.value == ("qm",)
    created = [step.value[0] for step in last if step.cmd == "RUN" and "useradd" in step.value[0]]
    assert "--uid 1000 qm" in created[0]
    assert not [step for step in last[last.index(user) :] if step.cmd in ("RUN", "COPY")]


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


@pytest.mark.parametrize("name", ["ollama", "ollama-gpu"])
def test_the_model_server_is_healthy_when_it_lists_its_models(name: str) -> None:
    service = compose()["services"][name]
    assert service["healthcheck"]["test"] == ["CMD", "ollama", "list"]
    assert service["networks"]["default"]["aliases"] == ["model-server"]
    assert int(service["environment"]["OLLAMA_NUM_PARALLEL"].partition(":-")[2].rstrip("}")) == 8


def test_each_profile_has_one_server_and_the_gpu_is_reserved_in_one() -> None:
    services = compose()["services"]
    for profile, server in (("cpu", "ollama"), ("gpu", "ollama-gpu")):
        names = {name for name, one in services.items() if profile in one["profiles"]}
        assert names == {server, "pull", "trainer"}
    (device,) = services["ollama-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert "deploy" not in services["ollama"]


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


def test_every_named_volume_is_declared() -> None:
    loaded = compose()
    mounts = [mount.partition(":")[0] for one in loaded["services"].values() for mount in one.get("volumes", [])]
    assert {name for name in mounts if not fnmatch(name, "[./]*")} == set(loaded["volumes"])
