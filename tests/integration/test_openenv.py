"""`qm env serve` with the published OpenEnv, in an environment of its own over the packages of this one."""

from __future__ import annotations

import sys

import pytest

from query_mutator.cli.console import exit_code
from query_mutator.commands.main import main as qm_main
from scripts.check_peers import PEERS
from tests.peers_python import python_with, run_tests

(PACKAGE,) = PEERS["openenv"][0]


def test_without_openenv_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openenv", None)
    assert exit_code(qm_main, ["env", "serve"], prog="qm") == 2
    assert capsys.readouterr().err == "qm: qm env serve needs openenv: pip install 'query-mutator[openenv]'\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_openenvs_clients_and_validator() -> None:
    run_tests(python_with(PACKAGE), "tests/integration/openenv_sessions.py")
