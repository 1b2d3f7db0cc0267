"""Nothing is lost: kills at random moments, damaged files, a full disk, two processes on one folder."""

from __future__ import annotations

import collections
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.promises.helpers import (
    QM,
    TRAIN,
    Command,
    ModelServer,
    contents,
    good,
    latest,
    model_server,
    one_line_error,
    questions,
    resume,
    rows_of,
    run,
    server_flags,
    train,
    train_flags,
    transcript,
    weights,
    write_questions,
)

BATCH_SIZE, KILLS = 4, 3
LEARNER = {
    "ppo": ["--deterministic"],
    "direct": ["--deterministic"],
    "iqn": ["--train-batch-size", "16", "--learning-starts", "16", "--replay-ratio", "4"],
}


@pytest.fixture
def slow_server() -> Iterator[ModelServer]:
    """A server slow enough for a kill to be near its moment on a busy machine."""
    with model_server(latency_ms=10, latency_sigma=1) as server:
        yield server


def run_folder(save_dir: Path) -> Path | None:
    """Return the run folder that a killed training began, if it did; a kill may come before `latest`."""
    found = [path.parent for path in save_dir.glob("2*/config.json")]
    return found[0] if found else None


def killed(argv: Callable[[], list[Any]], folder: Path, server: ModelServer, *, calls: int, seed: object) -> int:
    """Kill a command at random calls and run it again each time, to its end; return the number of kills."""
    rng, kills, share = random.Random(str(seed)), 0, calls // (KILLS + 1)
    for _ in range(KILLS):
        moment = server.total + rng.randrange(share // 2, share)
        command = Command(argv(), cwd=folder)
        if not command.wait_for(lambda: server.total >= moment):  # noqa: B023
            break
        command.kill()
        kills += 1
    assert kills
    good(run(argv(), cwd=folder))
    return kills


def resumption(flags: list[str], save_dir: Path, server: ModelServer) -> list[str]:
    """Return the flags that start a training, or those that resume it."""
    found = run_folder(save_dir)
    return [*flags, "--save-dir", str(save_dir)] if found is None else resume(server, found)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "direct"])
def test_killed_training_ends_as_one_that_was_not(algo: str, slow_server: ModelServer, tmp_path: Path) -> None:
    """A training, killed and resumed, has the weights of an uninterrupted one and repeats only calls in flight."""
    flags = [*train_flags(slow_server, tmp_path, algo=algo, steps=128), *LEARNER[algo]]
    # Equal requests are one call: questions enough for calls to be made in each rollout.
    rows = [
        {**row, "id": f"{row['id']}-{n}", "query": f"{row['query']}, part {n}"}
        for n in range(12)
        for row in questions()
    ]
    write_questions(tmp_path / "questions.jsonl", rows)
    good(run([*TRAIN, *flags, "--save-dir", tmp_path / "whole"], cwd=tmp_path))
    calls, (whole,) = slow_server.total, (tmp_path / "whole").glob("2*")
    kills = killed(
        lambda: [*TRAIN, *resumption(flags, tmp_path / "killed", slow_server)],
        tmp_path,
        slow_server,
        calls=calls,
        seed=algo,
    )
    (again,) = (tmp_path / "killed").glob("2*")
    assert transcript(again) == transcript(whole)
    assert weights(again) == weights(whole)
    # Equal requests that are in flight at the same time are one call, so the number of calls is not quite fixed.
    assert slow_server.total - calls <= calls + kills * BATCH_SIZE + 8


@pytest.mark.slow
def test_killed_iqn_keeps_every_step(slow_server: ModelServer, tmp_path: Path) -> None:
    """An IQN training that is killed and resumed keeps each step that was written, and has each step once."""
    flags = [*train_flags(slow_server, tmp_path, algo="iqn", steps=128), *LEARNER["iqn"]]
    command = Command([*TRAIN, *flags], cwd=tmp_path)
    written = 0

    def moment() -> bool:
        nonlocal written
        found = run_folder(tmp_path / "runs")
        file = found / "transcripts.jsonl" if found else tmp_path / "nothing"
        written = file.read_bytes().count(b"\n") if file.exists() else 0
        return written > 60

    assert command.wait_for(moment)
    command.kill()
    (found,) = (tmp_path / "runs").glob("2*")
    before = [json.loads(line) for line in (found / "transcripts.jsonl").read_text().splitlines() if line[-1] == "}"]
    good(run([*TRAIN, *resume(slow_server, found)], cwd=tmp_path))
    rows = rows_of(found / "transcripts.jsonl")
    assert len(rows) == 128
    assert set(collections.Counter((row["env"], row["step"]) for row in rows).values()) == {1}
    at = {(row["env"], row["step"]): row for row in rows}
    said = ("question_id", "operator", "rewrite", "answer", "reward", "valid")
    for row in before[:-BATCH_SIZE]:
        assert [at[row["env"], row["step"]][name] for name in said] == [row[name] for name in said]


@pytest.mark.slow
def test_killed_batch_asks_no_answered_line_again(slow_server: ModelServer, tmp_path: Path) -> None:
    """`qm batch`, killed and repeated, has the rows of an uninterrupted one and repeats at most the calls in flight."""
    lines = [{"id": n, "prompt": f"which planet is number {n}"} for n in range(200)]
    words = ["batch", write_questions(tmp_path / "in.jsonl", lines), *server_flags(slow_server)[:4]]
    words += ["--batch-size", str(BATCH_SIZE)]
    good(run([*QM, *words, "-o", tmp_path / "whole.jsonl"], cwd=tmp_path))
    assert slow_server.total == len(lines)
    argv = [*QM, *words, "-o", tmp_path / "killed.jsonl"]
    kills = killed(lambda: argv, tmp_path, slow_server, calls=len(lines), seed=1)
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert slow_server.total - 2 * len(lines) <= kills * BATCH_SIZE


@pytest.mark.slow
def test_killed_plan_finds_the_same(slow_server: ModelServer, tmp_path: Path) -> None:
    """`qm plan`, killed and repeated, finds what an uninterrupted one does and repeats at most the calls in flight."""
    words = [*QM, "plan", *server_flags(slow_server), "--dataset", write_questions(tmp_path / "questions.jsonl")]
    words += ["--operators", "spelling,neutral,filler", "--forms", "none", "--answer", "searched", "--max-calls", "300"]
    words += ["--batch-size", str(BATCH_SIZE), "--cache", "all"]
    found, calls = [], []
    for name in ("whole", "killed"):
        before = slow_server.total
        places = ["--save-dir", tmp_path / name, "--cache-path", tmp_path / f"{name}.sqlite", "--json", f"{name}.json"]
        kills = 0
        if name == "whole":
            good(run([*words, *places], cwd=tmp_path))
        else:
            kills = killed(lambda: [*words, *places], tmp_path, slow_server, calls=calls[0], seed=2)  # noqa: B023
        calls.append(slow_server.total - before)
        found.append(json.loads((tmp_path / f"{name}.json").read_text()))
    assert [one["plan"] for one in found] == [found[0]["plan"]] * 2
    assert found[1]["front"] == found[0]["front"]
    assert calls[1] <= calls[0] + kills * BATCH_SIZE + 4


@pytest.mark.slow
def test_killed_sweep_has_the_same_results(slow_server: ModelServer, tmp_path: Path) -> None:
    """`qm sweep`, killed and repeated, has the results of an uninterrupted one and repeats at most the trial it ran."""
    trial = tmp_path / "trial.py"
    trial.write_text(
        "import json, sys, time, pathlib\n"
        "flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "with open('asked.txt', 'a') as file: file.write('trial\\n')\n"
        "time.sleep(0.3)\n"
        "print(json.dumps({'success': float(flags['--lr']) * 10 + int(flags['--seed']) % 7 / 100}))\n"
    )
    words = [*QM, "sweep", "--grid", "lr=0.001,0.01,0.02", "--seeds", "2"]
    found = []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        asked = tmp_path / name / "asked.txt"
        argv = [*words, "--out", tmp_path / name / "sweep", "--", sys.executable, trial]
        for enough in (2, 4) if name == "killed" else ():
            command = Command(argv, cwd=tmp_path / name)
            assert command.wait_for(lambda: asked.exists() and len(asked.read_text().split()) >= enough)  # noqa: B023
            command.kill()
        good(run(argv, cwd=tmp_path / name))
        results = json.loads((tmp_path / name / "sweep" / "results.json").read_text())
        found.append(json.loads(json.dumps(results).replace(str(tmp_path / name), "")))
        assert 6 <= len(asked.read_text().split()) <= 8
    assert without_times(found[1]) == without_times(found[0])


def without_times(value: Any) -> Any:
    """Return a JSON value without what depends on the clock."""
    if isinstance(value, dict):
        return {
            k: without_times(v) for k, v in value.items() if not k.endswith(("_s", "seconds", "time", "throughput"))
        }
    return [without_times(one) for one in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def whole_run(server: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder that is copied, then damaged."""
    folder = tmp_path_factory.mktemp("whole")
    return train(server, folder, "--num-processes", "2", "--save-interval", "2", "--no-use-linear-lr-decay")


def home_of(trained: Path) -> Path:
    """Return the home of the user who trained a run, which has its questions."""
    return trained.parent.parent


#: Before a digit that is in the reader's result: the first flip makes another digit of it.
TELLING = {"metrics.jsonl": b'"charts/learning_rate":0.00'}


def flipped(file: Path, rng: random.Random, *, telling: bytes = b"") -> str:
    """Flip one bit of a file, the lowest one of the byte after the last `telling` if there is one; return where."""
    content = bytearray(file.read_bytes())
    at, bit = rng.randrange(len(content)), rng.randrange(8)
    if telling:
        at, bit = content.rindex(telling) + len(telling), 0
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return f"{file.name}: bit {bit} of byte {at} of {len(content)}"


READERS = {
    "policy.qm": "rewrite --checkpoint {run}/policy.qm --ollama-url {url} --json {out} umm_which_planet",
    "transcripts.jsonl": "data export --run {run} --out {out}",
    "metrics.jsonl": "analyze {run}/metrics.jsonl --json {out}",
    "config.json": "data export --run {run} --out {out}",
}


def read_by(command: str, found: Path, out: Path, url: str) -> tuple[int, str, str]:
    """Return a command's exit code, what it said on stderr, and its result."""
    ended = run([*QM, *command.format(run=found, out=out, url=url).split()], cwd=found.parent)
    assert "Traceback" not in ended.stderr, ended.stderr
    result = out.read_text(encoding="utf-8") if out.exists() else ""
    return ended.returncode, ended.stderr.replace(str(out), "OUT"), result


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
@pytest.mark.parametrize("name", READERS)
def test_flipped_bit_is_found_or_harmless(
    name: str, seed: int, whole_run: Path, server: ModelServer, tmp_path: Path
) -> None:
    """A bit that flips in a file of a run is reported by the command that reads it, or changes no result."""
    found = Path(shutil.copytree(whole_run, tmp_path / "run"))
    code, said, result = read_by(READERS[name], found, tmp_path / "whole", server.url)
    assert (code, bool(result)) == (0, True), said
    where = flipped(found / name, random.Random(f"{name} {seed}"), telling=TELLING.get(name, b"") if seed == 1 else b"")
    damaged = read_by(READERS[name], found, tmp_path / "damaged", server.url)
    assert damaged[1] != said or damaged == (code, said, result), where


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
@pytest.mark.parametrize("name", ["resume.pt", "transcripts.jsonl", "config.json"])
def test_flipped_bit_does_not_spoil_a_resumption(
    name: str, seed: int, whole_run: Path, server: ModelServer, tmp_path: Path
) -> None:
    """A bit that flips in a run folder is reported by --resume, or the resumed run ends as it would have."""
    ends = []
    for damaged in (False, True):
        found = Path(shutil.copytree(whole_run, tmp_path / f"{damaged}" / whole_run.name))
        where = flipped(found / name, random.Random(f"{name} {seed}")) if damaged else ""
        ended = run([*TRAIN, *resume(server, found), "--num-env-steps", "80"], cwd=home_of(whole_run))
        assert "Traceback" not in ended.stderr, where
        ends.append((ended.returncode, ended.stderr.replace(str(found), "RUN"), found))
    (code, said, one), (broken_code, broken_said, other) = ends
    assert code == 0, said
    assert broken_code in (0, 2)
    if broken_said == said:
        assert transcript(other) == transcript(one), where
        assert weights(other) == weights(one), where


# ---------------------------------------------------------------- disk, home, two processes


def test_full_disk_loses_nothing(server: ModelServer, tmp_path: Path) -> None:
    """A full disk ends a run with one line and exit code 2; with space again, --resume ends as a run that had it."""
    flags = [*train_flags(server, tmp_path, steps=768), "--deterministic", "--save-interval", "2", "--num-steps", "16"]
    whole = tmp_path / "whole"
    good(run([*TRAIN, *flags, "--save-dir", whole], cwd=tmp_path))
    stopped = run([*TRAIN, *flags], cwd=tmp_path, limit_bytes=300_000)
    assert stopped.returncode == 2, stopped.stderr
    assert "Traceback" not in stopped.stderr
    last = stopped.stderr.strip().splitlines()[-1]
    assert last.startswith("train_query_mutator.py: ")
    assert "free some space" in last
    assert not list(tmp_path.rglob("*.partial"))
    good(run([*TRAIN, *resume(server, latest(tmp_path))], cwd=tmp_path))
    assert transcript(latest(tmp_path)) == transcript(whole / "latest")
    assert weights(latest(tmp_path)) == weights(whole / "latest")


def test_home_that_cannot_be_written(server: ModelServer, tmp_path: Path) -> None:
    """With a home that cannot be written a run says so in one line each time, and loses nothing."""
    home = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null/cache", "XDG_CONFIG_HOME": "/dev/null/config"}
    ended = good(run([*TRAIN, *train_flags(server, tmp_path), "--deterministic"], cwd=tmp_path, env=home))
    assert "Traceback" not in ended.stderr
    assert 1 <= sum("/dev/null" in line for line in ended.stderr.splitlines()) <= 3
    rows, arrays = transcript(latest(tmp_path)), weights(latest(tmp_path))
    good(run([*TRAIN, *train_flags(server, tmp_path), "--deterministic"], cwd=tmp_path))
    assert transcript(latest(tmp_path)) == rows
    assert weights(latest(tmp_path)) == arrays


def test_two_processes_on_one_folder(slow_server: ModelServer, tmp_path: Path) -> None:
    """A second process on a run folder ends with one line and exit code 2, and the first one is not disturbed."""
    slow_server.set(latency_ms=200)
    flags = train_flags(slow_server, tmp_path, steps=96)
    first = Command([*TRAIN, *flags], cwd=tmp_path)
    assert first.wait_for(lambda: (tmp_path / "runs" / "latest" / "resume.pt").exists())
    slow_server.set(latency_ms=5_000)
    said = one_line_error(run([*TRAIN, *resume(slow_server, latest(tmp_path))], cwd=tmp_path))
    assert str(latest(tmp_path)) in said
    assert first.poll() is None, "the first had ended before the second began"
    slow_server.set(latency_ms=1)
    good(first.wait())
    assert len(transcript(latest(tmp_path))) == 96


def test_outputs_are_not_replaced(server: ModelServer, tmp_path: Path) -> None:
    """An output file that exists is not replaced: one line, exit code 2."""
    questions = write_questions(tmp_path / "in.jsonl", [{"id": 1, "prompt": "which planet"}])
    mine = tmp_path / "mine.jsonl"
    mine.write_text("mine\n")
    before = contents(tmp_path)
    for argv in (
        ["batch", questions, "-o", mine, *server_flags(server)[:4]],
        ["plan", *server_flags(server), "--dataset", questions, "--json", mine],
        ["init", "--out", mine],
    ):
        one_line_error(run([*QM, *argv], cwd=tmp_path))
        assert contents(tmp_path) == before
