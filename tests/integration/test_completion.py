"""Shell completion in real shells: bash, zsh and fish accept the scripts, and Tab offers commands, flags and values."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from query_mutator.commands.completion import SCRIPTS, complete
from tests.qm_command import qm


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("tr", ["train"]),
        ("he", ["help"]),
        ("train ", ["sft"]),
        ("data batch", ["batchplan", "batching", "batch"]),
        ("data batchplan ", ["build", "info", "verify", "shard"]),
        ("train --target-m", ["--target-model", "--target-max-tokens"]),
        ("train sft --lora-r", ["--lora-rank"]),
        ("train --answer vo", ["vote"]),
        ("train --validation-fold n", ["none"]),
        ("rewrite --cache ", ["auto", "off", "eval", "all"]),
        ("--completion z", ["zsh"]),
        ("nothing ", []),
        ("report runs/la", []),
    ],
)
def test_tab_offers(line: str, offered: list[str]) -> None:
    words = line.split() + ([""] if line.endswith(" ") else [])
    assert complete(words) == offered


def need(shell: str) -> None:
    """Skip where a shell is not installed; CI installs all of them."""
    if shutil.which(shell) is None and "CI" not in os.environ:
        pytest.skip(f"{shell} is not installed")


def run_shell(shell: str, code: str, folder: Path) -> str:
    """Run code in a shell, with `qm` of this checkout on its path."""
    need(shell)
    command = folder / "qm"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m query_mutator "$@"\n')
    command.chmod(0o755)
    environ = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)}
    done = subprocess.run([shell, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("shell", list(SCRIPTS))
def test_a_shell_accepts_the_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need(shell)
    assert qm("--completion", shell) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes(tmp_path: Path) -> None:
    code = 'eval "$(qm --completion bash)"; COMP_WORDS=(qm data batchplan v); COMP_CWORD=3; _qm; echo "${COMPREPLY[@]}"'
    assert run_shell("bash", code, tmp_path) == "verify\n"


def test_zsh_completes(tmp_path: Path) -> None:
    stubs = "compdef() { :; }; compadd() { print -l -- ${(P)2}; }; _files() { print files; }"
    code = (
        f'{stubs}; eval "$(qm --completion zsh)"; words=(qm doc); CURRENT=2; _qm; words=(qm report x); CURRENT=3; _qm'
    )
    assert run_shell("zsh", code, tmp_path) == "doctor\nfiles\n"


def test_fish_completes(tmp_path: Path) -> None:
    code = 'qm --completion fish | source; complete -C "qm doct"; complete -C "qm train --target-mo"'
    assert run_shell("fish", code, tmp_path).split() == ["doctor", "--target-model"]


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("--completion", "csh") == 2
    assert "--completion must be one of bash, zsh, fish, not 'csh'" in capsys.readouterr().err
