"""What the page of a long run takes: size of the file, time and memory to build it, and to read it in a browser.

    python benchmarks/report_size.py                     50,000 steps, 1,000 held-out questions
    python benchmarks/report_size.py --keep runs/long    leave the run folder and its page there, for a browser

The run folder is written by the product's own writers. Its texts are drawn from the bundled questions word by word
(each word followed by one that follows it there), so they are about as compressible as real ones; most of them are
different, as those of a model at a temperature above 0 are.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from page_in_browser import CHROMIUM, browse  # noqa: E402
from page_in_browser import LIMITS as BROWSER_LIMITS  # noqa: E402

from query_mutator.data import python_docs  # noqa: E402
from query_mutator.evaluation.outcomes import Outcome  # noqa: E402
from query_mutator.evaluation.summary import Results, summarize  # noqa: E402
from query_mutator.files import write_checked_json  # noqa: E402
from query_mutator.files.metrics import METRICS  # noqa: E402
from query_mutator.files.run_dir import RunDir  # noqa: E402
from query_mutator.types import Question, StepRecord  # noqa: E402

OPERATORS = (
    "spelling",
    "grammar",
    "neutral",
    "expand",
    "how_to",
    "slang",
    "filler",
    "context",
    "ask",
    "undo",
    "submit",
)
METHODS = ("identity", "random", "best_single", "best_of_k", "best_plan", "bandit", "policy")
LIMITS = {"size_mb": 15.0, "wall_s": 20.0, "peak_mb": 500.0, **BROWSER_LIMITS}
ENVS, EPISODE_STEPS, ROW_STEPS = 16, 7, 512
REPEATED = 0.3  # of the answers: refusals, and questions asked again


class Writer:
    """Draws texts that read like the bundled questions."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.questions = python_docs()
        self._after: dict[str, list[str]] = defaultdict(list)
        for question in self.questions:
            words = f"{question.text} {question.reference or ''}".split()
            for word, following in pairwise(words):
                self._after[word].append(following)
        self._starts = sorted(self._after)
        self._said = ["I'm sorry, but I can't help with that request."]

    def text(self, words: int) -> str:
        """Return a text of about this many words."""
        word, found = self.rng.choice(self._starts), []
        for _ in range(max(3, int(self.rng.gauss(words, words / 4)))):
            found.append(word)
            word = self.rng.choice(self._after.get(word) or self._starts)
        return " ".join(found)

    def answer(self, words: int) -> str:
        """Return an answer, some of which were given before."""
        if self.rng.random() < REPEATED:
            return self.rng.choice(self._said)
        self._said.append(self.text(words))
        return self._said[-1]


def steps_of(writer: Writer, count: int, words: int) -> Iterator[StepRecord]:
    """Yield steps, the environments interleaved."""
    rng = writer.rng
    chosen: dict[int, Question] = {}
    for number in range(count):
        env, step = number % ENVS, number // ENVS
        if step % EPISODE_STEPS == 0:
            chosen[env] = rng.choice(writer.questions)
        is_asked = rng.random() < 0.5
        parts = {name: rng.random() for name in ("right", "similarity", "answered", "meaning")}
        yield StepRecord(
            env=env, step=step, episode=step // EPISODE_STEPS, question_id=chosen[env].id, question=chosen[env].text,
            operator=rng.choice(OPERATORS), rewrite=writer.text(18), answer=writer.answer(words) if is_asked else "",
            baseline_score=None, score=rng.random(), parts=parts if is_asked else {}, reward=rng.random() - 0.5,
            calls=1 + is_asked, timing={"step_s": rng.random(), "queue_wait_s": rng.random()},
        )  # fmt: skip


def outcome(writer: Writer, question: Question, words: int) -> Outcome:
    """Return the way of a method on a question."""
    rng, asked = writer.rng, [writer.text(18) for _ in range(3)]
    return Outcome(
        question_id=question.id, success=float(rng.random() < 0.4), score=rng.random(), calls=5, tokens=400,
        seconds=1.0, actions=tuple(rng.choices(OPERATORS, k=6)), rewrites=tuple(rng.choices(asked, k=6)),
        asked=tuple(asked),
        answers=tuple(writer.answer(words) for _ in asked), parts=({"right": 1.0, "similarity": rng.random()},) * 3,
        scores=(rng.random(),) * 3, fits=(rng.random(),) * 3, submitted=1,
        why="best: fit to its wording 0.71, then 0.60, of 3 answers",
    )  # fmt: skip


def write_run(folder: Path, *, steps: int, questions: int, words: int) -> None:
    """Write the files of a run that a page reads."""
    writer = Writer(seed=1)
    run = RunDir(folder)
    run.write_config({"flags": {"num_env_steps": steps, "seed": 1}, "command_line": "python train_query_mutator.py"})
    for number, record in enumerate(steps_of(writer, steps, words), 1):
        run.add_record(record)
        if number % ROW_STEPS == 0 or number == steps:
            run.write_records()
            run.metrics.write({key: writer.rng.random() for key in METRICS}, step=number, wall_s=float(number))
    asked = [Question(id=f"h{n}", text=writer.text(15), accept=(f"t{n}",), tags=("wordy",)) for n in range(questions)]
    found = {name: [outcome(writer, question, words) for question in asked] for name in METHODS}
    results = Results(questions=asked, outcomes=found, guard=(), guarded=dict.fromkeys(METHODS, ()))
    with (folder / "evaluation.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in results.rows())
    write_checked_json(run.summary_path, {"eval": summarize(results), "env_steps": steps})
    run.close()


def measure(folder: Path, page: Path) -> dict[str, float]:
    """Return what building the page takes, in a separate process."""
    argv = [sys.executable, "-m", "query_mutator", "report", str(folder), "-o", str(page), "--force"]
    began = time.perf_counter()
    subprocess.run(argv, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return {
        "size_mb": page.stat().st_size / 1e6,
        "wall_s": time.perf_counter() - began,
        "peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3,
    }


def main() -> None:
    """Write a run, build its page, print the figures next to their limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--words", type=int, default=50, help="of an answer")
    parser.add_argument("--keep", type=Path, help="folder of the run, left there")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = flags.keep or Path(temporary) / "run"
        folder.mkdir(parents=True)
        write_run(folder, steps=flags.steps, questions=flags.questions, words=flags.words)
        found: dict[str, Any] = measure(folder, folder / "report.html")
        found["read_mb"] = (
            sum((folder / f"{name}.jsonl").stat().st_size for name in ("transcripts", "evaluation")) / 1e6
        )
        if Path(CHROMIUM).exists():
            found |= browse(folder / "report.html")
    for name, value in found.items():
        print(f"{name:<18} {value:8.1f}" + (f"  limit {LIMITS[name]:g}" if name in LIMITS else ""))


if __name__ == "__main__":
    main()
