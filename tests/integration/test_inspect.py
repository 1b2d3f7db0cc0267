"""`qm eval --inspect` with the published inspect_ai, in an environment of its own over the packages of this one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.peers_python import python_with, run_tests
from tests.qm_command import qm


def test_without_inspect_one_line_says_what_to_install(
    trained: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained("--plan-calls", "0")
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    assert qm("eval", run, "--inspect", run / "logs") == 2
    assert capsys.readouterr().err == "qm: --inspect needs inspect_ai; pip install 'query-mutator[inspect]'\n"
    assert not (run / "logs").exists()


def test_logs_go_into_a_folder_of_logs_only(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("--plan-calls", "0")
    assert qm("eval", run, "--inspect", run) == 2
    assert "was not written by this command" in capsys.readouterr().err
    assert qm("eval", run, "--inspect", tmp_path / "logs", "--target-model", "one", "two") == 2
    assert "--inspect takes the logs of one model" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_inspects_own_reader_opens_the_logs() -> None:
    run_tests(python_with("inspect-ai==0.3.285"), "tests/integration/inspect_sessions.py")
