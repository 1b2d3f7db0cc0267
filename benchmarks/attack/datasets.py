"""Damaged files for every command that reads a file of the user: one line says what is wrong, or all of it is read."""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import train_query_mutator
from benchmarks.attack.damage import damage
from benchmarks.attack.harness import Finished, Outcome, run_cli, run_qm, unchanged
from query_mutator.apply.batch_files import parse_line, read_input
from query_mutator.batching import BatchReader, OfflineDatasetStream, ReplayBuffer, load_samples, save_samples
from query_mutator.batching.samples import Sample, SampleMeta
from query_mutator.batching.training.sources import read_tokens
from query_mutator.data import load_questions
from query_mutator.files.run_dir import EventWriter

MESSAGE_CHARACTERS = 2000  # of the line that says what is wrong

Run = Callable[[Path], Finished]
Check = Callable[[Path, Finished], str]


@dataclass(frozen=True)
class Target:
    """A command and the file it reads, relative to the folder of `make_files`."""

    name: str
    file: str
    run: Run
    check: Check | None = None  # what is wrong with a run that ended with 0
    sealed: bool = False  # the file has a checksum: whoever reads it prints the same as before, or refuses


# --- valid files -----------------------------------------------------------------------------------------------------


@functools.cache
def make_files() -> Path:
    """Return a folder with a valid file of every kind; it is made once in a process."""
    folder = Path(tempfile.mkdtemp(prefix="attack-files-"))
    questions = [
        {"id": f"q{number}", "query": f"how do I sort {number} names?", "accept": ["sorted"], "tags": ["a"]}
        for number in range(12)
    ]
    _write_rows(folder / "questions.jsonl", questions)
    with (folder / "questions.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("id", "query", "answer"))
        writer.writerows((row["id"], row["query"], "sorted") for row in questions)
    _write_parquet(folder / "questions.parquet", questions)
    _write_rows(folder / "rows.jsonl", ROWS)
    _write_rows(folder / "batch.jsonl", BATCH)
    _write_rows(folder / "transcripts.jsonl", [_step(number) for number in range(6)])
    for name, value in SETTINGS.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "spec.yaml").write_text(SPEC)
    _write_runs(folder / "runs")
    samples = [Sample(input_ids=[1, n, 3], loss_mask=[0, 1, 1], meta=SampleMeta.create(f"i{n}", "d")) for n in range(6)]
    save_samples(samples, folder / "samples.jsonl")
    for line in _COMMANDS:
        assert run_qm(line.split(), folder).code == 0, line
    return folder


ROWS: list[dict[str, object]] = [
    {"id": "r0", "text": "some words here"},
    {"id": "r1", "instruction": "add", "input": "1 2", "response": "3"},
    {"id": "r2", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    {"id": "r3", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "difficulty": "easy", "reward": 0.5},
    *({"id": f"t{number}", "text": "word " * number} for number in range(1, 9)),
]
BATCH: list[dict[str, object]] = [
    {"id": "a", "prompt": "How do I sort a list?", "model": "m"},
    *(
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "m",
                "messages": [{"role": "user", "content": f"question {number}"}],
                "max_tokens": 8,
                "seed": 1,
            },
        }
        for number in range(4)
    ),
]
SETTINGS = {
    "flags.json": {"lr": 0.001, "num_processes": 4, "operators": "spelling,neutral"},
    "sft.json": {"learning_rate": 0.001, "batch_size": 4, "pack": False, "data": "rows.jsonl"},
    "calibration.json": {"context_bytes": 1 << 20, "factor": 1.5, "slack": 0.1},
}
SPEC = "metrics:\n  - name: success\n    tags: [charts/episodic_return]\n    role: performance\n"


def _write_runs(folder: Path) -> None:
    """Write runs of three kinds: rows of numbers, progress.csv, TensorBoard events."""
    for run in ("a-s1", "a-s2", "b-s1", "b-s2", "c-s1"):
        (folder / run).mkdir(parents=True)
    for run in ("a-s1", "a-s2", "b-s1", "b-s2"):
        steps = [{"step": step, "wall_s": float(step), "charts/episodic_return": step / 9} for step in range(8)]
        _write_rows(folder / run / "metrics.jsonl", [{**row, "data_s": 0.1, "updt_s": 0.2} for row in steps])
    (folder / "a-s1" / "config.json").write_text(json.dumps({"flags": {"lr": 0.1, "seed": 1}}))
    progress = "".join(f"{step},{step / 9}\n" for step in range(8))
    (folder / "c-s1" / "progress.csv").write_text(f"step,success\n{progress}")
    events = EventWriter(folder / "d-s1")
    for step in range(8):
        events.write({"charts/episodic_return": step / 9}, step=step)
    events.close()


_COMMANDS = (
    "data lengths build -d rows.jsonl -t bytes -o lengths.bin",
    "data lengths build -d rows.jsonl -t bytes -o lengths.jsonl",
    "data batchplan build -l lengths.bin -o plan -b 256 --bucket-edges 32,64 --overflow-max 128 -e 2",
    "data batch generate -p plan -d rows.jsonl -t bytes -o store",
    "gym run --mock -t bytes -o buffer.json --num-episodes 2",
)


def _write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_parquet(path: Path, rows: list[dict[str, object]]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=5)


def _step(number: int) -> dict[str, object]:
    texts = {"question": "plz sort", "rewrite": f"sort {number}", "answer": "sorted", "operator": "spelling"}
    parts = {"right": 1.0, "similarity": 1.0, "answered": 1.0}
    places = {"env": number % 2, "step": number, "episode": number, "question_id": f"q{number}"}
    return {**places, **texts, "baseline_score": 0.0, "score": 1.0, "parts": parts, "reward": 1.0, "valid": True}


# --- commands --------------------------------------------------------------------------------------------------------


def qm(line: str) -> Run:
    return lambda folder: run_qm(line.split(), folder)


def train(line: str) -> Run:
    argv = ["--dry-run", "--encoder", "hash", "--backend", "recorded", *line.split()]
    return lambda folder: run_cli(train_query_mutator.main, argv, folder)


def call(name: str, work: Callable[[Path], object]) -> Run:
    """Return a library function as a command that prints what the function returns."""

    def main(_: object) -> int:
        print(work(Path.cwd()))
        return 0

    return lambda folder: run_cli(main, [], folder, prog=name)


def _all_rows_are_counted(folder: Path, ended: Finished) -> str:
    """Return what is wrong where rows are in neither count."""
    report = json.loads(ended.out)
    there = _rows_in(folder / "rows.jsonl")
    counted = report["samples"] + report["bad_rows"]
    return "" if counted == there else f"{there} rows in the file, {counted} counted"


def _rows_in(path: Path) -> int:
    """Return the number of lines with something in them."""
    return sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))


def _all_questions_are_there(folder: Path, ended: Finished) -> str:
    path = next(folder.glob("questions*.jsonl"))
    there = _rows_in(path)
    return "" if int(ended.out) == there else f"{there} questions in the file, {ended.out} read"


def _read_store(folder: Path) -> list[object]:
    reader = BatchReader(folder / "store")
    return [
        (batch.sample_ids, batch.input_ids.tolist()) for number in reader.epochs for batch in reader.iter_epoch(number)
    ]


def _stream(folder: Path) -> int:
    stream = OfflineDatasetStream(folder / "rows.jsonl", tokenizer=_bytes(), skip_bad=True)
    return sum(1 for _ in stream) + stream.metrics.samples_errored + stream.metrics.samples_filtered


def _tokens(folder: Path) -> int:
    data = read_tokens(str(folder / "rows.jsonl"), _bytes(), mask_prompt=True, skip_bad=True)
    return len(data.rows) + data.bad_rows


def _ask(folder: Path) -> int:
    """Return how many lines of a batch are asked or refused."""
    count = 0
    for number, line in enumerate(read_input(folder / "batch.jsonl"), 1):
        with contextlib.suppress(ValueError):
            parse_line(number, line)
        count += bool(line.strip())
    return count


def _all_rows_are_read(folder: Path, ended: Finished) -> str:
    there = _rows_in(folder / "rows.jsonl")
    return "" if int(ended.out) == there else f"{there} rows in the file, {ended.out} counted"


def _bytes() -> object:
    from query_mutator.batching import load_tokenizer

    return load_tokenizer("bytes")


def _row_targets() -> Iterator[Target]:
    """Yield the commands that read questions and rows."""
    yield Target(
        "load_questions",
        "questions.jsonl",
        call("questions", lambda folder: len(load_questions(folder / "questions.jsonl"))),
        _all_questions_are_there,
    )
    for suffix in ("jsonl", "csv", "parquet"):
        yield Target("train", f"questions.{suffix}", train(f"--dataset questions.{suffix}"))
    yield Target("batch", "batch.jsonl", call("batch", _ask))
    build = "data lengths build -d rows.jsonl -t bytes -o new.bin --json -"
    yield Target("lengths build", "rows.jsonl", qm(build), _all_rows_are_counted)
    yield Target("lengths build --skip-bad", "rows.jsonl", qm(f"{build} --skip-bad"), _all_rows_are_counted)
    yield Target("stream", "rows.jsonl", call("stream", _stream), _all_rows_are_read)
    yield Target("read_tokens", "rows.jsonl", call("tokens", _tokens), _all_rows_are_read)
    yield Target("bench", "rows.jsonl", qm("bench -d rows.jsonl -t bytes"))
    yield Target("batch generate", "rows.jsonl", qm("data batch generate -p plan -d rows.jsonl -t bytes -o new"))
    generate = "data batch generate -p plan -d rows.jsonl -t bytes -o new --skip-bad"
    yield Target("batch generate --skip-bad", "rows.jsonl", qm(generate))


def _sealed_targets() -> Iterator[Target]:
    """Yield the commands that read files with checksums."""
    for name in ("lengths.bin", "lengths.jsonl"):
        for line in ("lengths stats", "batching histogram", "batching analyze", "batching suggest"):
            yield Target(line, name, qm(f"data {line} -c {name}"), sealed=True)
        yield Target("batchplan build", name, qm(f"data batchplan build -l {name} -o new"))
        yield Target("batchplan verify", name, qm(f"data batchplan verify -p plan -l {name}"), sealed=True)
    yield Target("batchplan info", "plan", qm("data batchplan info -p plan -n 4 --json -"), sealed=True)
    yield Target("batchplan verify", "plan", qm("data batchplan verify -p plan -l lengths.bin"), sealed=True)
    yield Target("batchplan shard", "plan", qm("data batchplan shard -p plan -w 2 -o new --equal-steps"), sealed=True)
    yield Target("batch generate", "plan", qm("data batch generate -p plan -d rows.jsonl -t bytes -o new"))


def _other_targets() -> Iterator[Target]:
    """Yield the commands that read stores, samples, transcripts, settings and runs."""
    yield Target("batch generate again", "store", qm("data batch generate -p plan -d rows.jsonl -t bytes -o store"))
    yield Target("BatchReader", "store", call("reader", _read_store), sealed=True)
    yield Target("load_samples", "samples.jsonl", call("samples", lambda f: load_samples(f / "samples.jsonl")))
    read = call("buffer", lambda folder: ReplayBuffer.load(folder / "buffer.json").get_all())
    yield Target("ReplayBuffer.load", "buffer.json", read, sealed=True)
    yield Target("data export", "transcripts.jsonl", qm("data export --run transcripts.jsonl -o new.jsonl"))
    yield Target("train --config", "flags.json", train("--config flags.json"))
    yield Target(
        "train sft --config",
        "sft.json",
        qm("train sft --model /nowhere --tokenizer bytes --dataset rows.jsonl --config sft.json"),
    )
    yield Target("size --calibration", "calibration.json", qm("size smolvla --calibration calibration.json"))
    yield Target("size workers", "runs", qm("size workers --from-logs runs/a-s1"))
    yield Target("analyze", "runs", qm("analyze runs/*  "))
    yield Target("analyze --spec", "spec.yaml", qm("analyze runs/* --spec spec.yaml"))
    yield Target("sweep --spec", "spec.yaml", qm("sweep --grid lr=1,2 --seeds 1 --dry-run --spec spec.yaml -- true"))


TARGETS = (*_row_targets(), *_sealed_targets(), *_other_targets())


# --- one case --------------------------------------------------------------------------------------------------------


def attack(rng: random.Random, folder: Path) -> Outcome:
    """Damage one file, run one command that reads it, and judge what it did."""
    target = rng.choice(TARGETS)
    source = make_files()
    shutil.copytree(source, folder, dirs_exist_ok=True)
    path = folder / target.file
    how = "; ".join(_safely(rng, path, target) for _ in range(rng.choice((1, 1, 1, 2))))
    case = f"{target.name}, {how}"
    with unchanged(folder) as inputs:
        ended = target.run(folder)
        outcome = ended.outcome()
        if outcome.verdict != "ok":
            return Outcome(case=f"{case}: {outcome.case}", verdict=outcome.verdict, detail=outcome.detail)
        changed = [one for one in inputs.changed() if not _is_own(one, target)]
    if changed:
        return Outcome(case=case, verdict="input changed", detail=", ".join(map(str, changed)))
    wrong = _wrong(target, folder, ended)
    return Outcome(case=case, verdict="wrong" if wrong else "ok", detail=wrong)


def _safely(rng: random.Random, path: Path, target: Target) -> str:
    try:
        return damage(rng, path, subtle=target.sealed and rng.random() < 0.6)
    except (OSError, ValueError, IndexError, TypeError):  # a second mutation of what is no file any more
        return "nothing more"


def _is_own(path: Path, target: Target) -> bool:
    """Return whether a file is one that the command itself writes: the store that it completes."""
    return target.name == "batch generate again" and "store" in path.parts


def _wrong(target: Target, folder: Path, ended: Finished) -> str:
    """Return what is wrong with a run that ended in order, or nothing."""
    longest = max((len(line) for line in ended.err.splitlines()), default=0)
    if longest > MESSAGE_CHARACTERS:
        return f"a line of {longest} characters on stderr: {ended.err[:200]}"
    if ended.code != 0:
        return ""
    if target.check is not None:
        return target.check(folder, ended)
    if target.sealed:
        with tempfile.TemporaryDirectory() as intact:
            shutil.copytree(make_files(), intact, dirs_exist_ok=True)
            before = target.run(Path(intact)).out
        if before != ended.out:
            different = next(
                pair for pair in itertools.zip_longest(before.split("\n"), ended.out.split("\n")) if pair[0] != pair[1]
            )
            return f"damage was not noticed: {different}"
    return ""
