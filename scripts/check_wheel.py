"""Install the wheel alone into an empty virtual environment, and use it in an empty folder as a new user would.

python scripts/check_wheel.py               the newest versions that the ranges allow
python scripts/check_wheel.py --lowest      the lowest ones (uv resolves them)

The CPU build of torch is put into the environment first, from the index TORCH_INDEX if that is set. Every step is
printed with its seconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"  # the one tested version
STEP_S = 600

QUESTION = "What country is Beijing the capital of?"
BATCH = f"""
echo '{{"id": 1, "prompt": "{QUESTION}"}}' > in.jsonl
qm batch in.jsonl --checkpoint runs/latest --out out.jsonl; cat out.jsonl
"""
#: Ask a policy through `qm serve`, before a test server with the model of its training.
SERVE = f"""
qm test-server --port 11511 --model SmolLM2-135M-Instruct.Q4_1 & qm serve runs/latest \\
  --ollama-url http://127.0.0.1:11511 --port 11512 2>/dev/null & trap 'kill %1 %2' EXIT; for i in $(seq 60); do
python - 2>/dev/null <<END && break; sleep 0.5; done
import json, urllib.request as u
say = {{"model": "SmolLM2-135M-Instruct.Q4_1+qm", "messages": [{{"role": "user", "content": "{QUESTION}"}}]}}
print(u.urlopen("http://127.0.0.1:11512/api/chat", json.dumps(say).encode(), timeout=9).read().decode())
END
"""

#: What using takes: the commands of an install without an extra, which has no torch.
LIGHT: tuple[tuple[str, str], ...] = (
    ("qm --help", "qm COMMAND"),
    ("qm init", "wrote qm.toml"),
    ("qm doctor --backend recorded --no-probe", "model:"),
    ("qm plan --backend recorded --max-calls 600", "plan"),
    (f"qm rewrite '{QUESTION}' --checkpoint runs/latest", "answer"),
    ("qm eval runs/latest --eval-calls 200", "held-out questions"),
    (BATCH, '"answer":'),
    (SERVE, '"done":true'),
    ("qm train 2>&1 | grep -F 'query-mutator[train]'", "pip install"),
    ("python -m ppo 2>&1 | grep -F 'query-mutator[train]'", "pip install"),
    ("python -c 'import torch' 2>&1 | tail -1", "No module named"),
)
#: The commands of the smoke test with the extra `train`, and what each has to print.
COMMANDS: tuple[tuple[str, str], ...] = (
    ("qm --version", ""),
    ("qm init", "wrote qm.toml"),
    ("qm doctor --backend recorded --no-probe", "model:"),
    (
        "qm train --num-env-steps 256 --num-processes 8 --plan-calls 200 --eval-calls 400",
        "policy",
    ),
    ("qm report runs/latest", "report.html"),
    (f"qm rewrite '{QUESTION}'", "answer"),
)


def timed(words: Sequence[str], folder: Path, *, wanted: str = "", environ: dict[str, str] | None = None) -> None:
    """Run a command and print its seconds; end the process when it fails or does not print `wanted`."""
    start = time.monotonic()
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=STEP_S, check=False)
    print(f"{time.monotonic() - start:6.1f} s  {words[-1]}", flush=True)
    if done.returncode or wanted not in done.stdout:
        sys.exit(f"exit code {done.returncode}, {wanted!r} expected\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def install(python: Path, wheel: Path, *, extra: str, lowest: bool) -> None:
    """Install the wheel with its dependencies, with torch before the extra `train`; check that they fit together."""
    uv = [sys.executable, "-m", "uv", "pip"]
    where = ["--quiet", "--python", str(python)]
    environ = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""), **os.environ}
    index = ["--index-url", os.environ["TORCH_INDEX"]] if "TORCH_INDEX" in os.environ else []
    if extra:
        timed([*uv, "install", *where, *index, TORCH], python.parent, environ=environ)
    resolution = "lowest-direct" if lowest else "highest"
    timed([*uv, "install", *where, "--resolution", resolution, f"{wheel}{extra}"], python.parent, environ=environ)
    timed([*uv, "check", *where], python.parent)


def smoke(bin_folder: Path, folder: Path, commands: Sequence[tuple[str, str]]) -> None:
    """Run commands of a new user with nothing else on the path or in the folder."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environ |= {"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    folder.mkdir()
    for line, wanted in commands:
        timed(["bash", "-c", line], folder, wanted=wanted, environ=environ)


def main() -> None:
    """Build the wheel, install it, use it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lowest", action="store_true", help="the lowest versions that the ranges allow")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", name, str(ROOT)]
        timed(build, folder)
        (wheel,) = folder.glob("*.whl")
        venv.create(folder / "venv")
        for extra, commands in (("", LIGHT), ("[train]", COMMANDS)):
            install(folder / "venv" / "bin" / "python", wheel, extra=extra, lowest=flags.lowest)
            smoke(folder / "venv" / "bin", folder / f"project{extra}", commands)
    print("the wheel works in an empty environment and an empty folder")


if __name__ == "__main__":
    main()
