"""A model that writes the wording: SmolLM2 distilled from the best wordings of training questions, then by GRPO.

    python -m benchmarks.writer --json table.json       pairs, three distilled writers, one of them by GRPO, the table

Everything goes into --out; what is there is not made again. A pair is a training question of `general` and the wording
of it that got a right answer from the recorded model: as it stands, after `clean`, or as it was before it was spoiled;
of several the kind that is right most often, which also stands in where none is. Held-out questions are read for the
table alone: one call of the writer and one of the target, next to rivals with one call and with two.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np

from benchmarks.answer_rivals import grade, votes_of
from benchmarks.general import CLEAN, CONFIG, config_of, ideal_texts, plan_jobs
from benchmarks.learned_answer import Answers, best_at
from benchmarks.learning import World, make_evaluator, task_settings
from benchmarks.seeds_report import percent
from query_mutator import operators
from query_mutator.bounds import group_of
from query_mutator.cli.console import exit_code, table
from query_mutator.commands.main import main as qm
from query_mutator.data import split_questions
from query_mutator.data.bundled import general
from query_mutator.data.split import target_key
from query_mutator.encoder.documents import cache_dir
from query_mutator.env.task import Task
from query_mutator.evaluation.methods import Found
from query_mutator.evaluation.plan_search import find_plan
from query_mutator.files import atomic_write, encode, write_json
from query_mutator.learners.plan import Plan
from query_mutator.operators import OperatorContext
from query_mutator.session.dataset import split_dataset
from query_mutator.session.models import open_models
from query_mutator.session.task import make_task
from query_mutator.settings.models import ModelSettings
from query_mutator.stats.resampling import crossed_intervals
from query_mutator.types import DoubleArray, Question

FORM = "statement"  # the best one on the training questions
KEPT = 3  # of so many questions that need no other wording one is a pair
ARGV = ("--config", str(CONFIG), "--backend", "recorded")
SFT = (
    "--use-lora --lora-rank 16 --lr 1e-3 --epochs 1 --bucket-edges 64,96,160,256 --token-budget 1024 --max-length 256 "
    "--overlong drop --dtype bfloat16"
)
GRPO = f"--max-steps 100 --dataset general --gguf smollm2 --target-max-tokens 32 --form {FORM} --bf16"


def pairs_of(world: World, questions: Sequence[Question]) -> list[tuple[str, str]]:
    """Return question and wording of each pair."""
    clean = operators.local_rewrite(operators.get(CLEAN))
    assert clean is not None
    task = world.task_of(task_settings(config_of(ARGV))).on(questions)
    kinds = {
        "ideal": ideal_texts(questions),
        CLEAN: [clean(one.text, context=OperatorContext()) or one.text for one in questions],
        "as it stands": [one.text for one in questions],
    }
    client = world.system.calls.client
    right = np.array([
        [grade(one, client.complete(task.target(at, texts[at], FORM)).text) for at, one in enumerate(questions)]
        for texts in kinds.values()
    ])  # fmt: skip
    rates = right.mean(axis=1)
    print(dict(zip(kinds, rates.round(3).tolist(), strict=True)), file=sys.stderr)
    best = (right + 0.5 * rates[:, None]).argmax(axis=0)
    texts = list(kinds.values())
    pairs = [(one.text, texts[kind][at]) for at, (one, kind) in enumerate(zip(questions, best, strict=True))]
    same = [pair for pair in pairs if pair[0] == pair[1]]
    return [pair for pair in pairs if pair[0] != pair[1]] + same[::KEPT]


def write_pairs(path: Path) -> None:
    """Write the pairs of the training questions as turns."""
    world = World(group_of(ModelSettings, config_of(ARGV)), cache_dir() / "general")
    with world.system, atomic_write(path) as file:
        for question, wording in pairs_of(world, split_questions(general()).train):
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": wording}]
            file.write(encode({"messages": turns}) + b"\n")


def trained(out: Path, seeds: Sequence[int]) -> dict[str, list[Path]]:
    """Return the GGUF files of the writers by row; train those that are not there."""
    if not (pairs := out / "pairs.jsonl").exists():
        write_pairs(pairs)
    found: dict[str, list[Path]] = {"distilled": [], "distilled, then GRPO": []}
    for seed in seeds:
        run = out / f"sft-{seed}"
        argv = ["--model", "smollm2", "--dataset", str(pairs), "--out", str(run), "--seed", str(seed), *SFT.split()]
        found["distilled"].append(made(run, "sft", argv))
    argv = ["--model", str(out / f"sft-{seeds[0]}" / "model"), "--out", str(out / "grpo"), *GRPO.split()]
    found["distilled, then GRPO"].append(made(out / "grpo", "grpo", argv))
    return found


def made(run: Path, kind: str, argv: Sequence[str]) -> Path:
    """Return the GGUF file of a training, which is made unless it is there."""
    file = run / "model" / f"{run.name}.gguf"
    if not file.exists() and (code := qm(["train", kind, *argv])):
        sys.exit(code)
    return file


def written(file: Path, questions: Sequence[Question], folder: Path) -> Found:
    """Return the outcomes of a writer's wordings, from the live models."""
    flags = ["--gguf", "smollm2", str(file), "--operators", f"write,{CLEAN}", "--forms", FORM, "--ask", "form"]
    config = config_of(["--config", str(CONFIG), *flags])
    cache = {"cache": "all", "cache_path": str(folder / f"{file.stem}.sqlite")}
    os.environ["OMP_NUM_THREADS"] = "1"  # of each of the two models' processes
    with open_models(group_of(ModelSettings, config, **cache)) as models:
        settings = task_settings(config)
        task = make_task(models, settings, split_dataset(settings).train, learns=True).on(questions)
        plans = {f"write > {FORM}": Plan(steps=("write", FORM))}
        found = Found()
        make_evaluator(models.calls.client).run_all(plan_jobs(plans, task), found, title=file.stem)
    return found


def rivals(world: World, task: Task, questions: Sequence[Question]) -> dict[str, tuple[DoubleArray, float]]:
    """Return whether the answers of the rivals are right [n] and their calls: recorded replies."""
    held_out = task.on(questions)
    plans = {"identity": Plan(), "best form": Plan(steps=(FORM,)), CLEAN: Plan(steps=(CLEAN,))}
    plans[f"{CLEAN} > {FORM}"] = Plan(steps=(CLEAN, FORM))
    search = find_plan(world.evaluator, task, max_calls=20_000, seed=1)
    plans |= {"best plan, 1 call": best_at(search, 1, learned=False).plan}
    plans |= {"best plan, 2 calls": best_at(search, 2, learned=False).plan}
    found = Found()
    world.evaluator.run_all(plan_jobs(plans, held_out), found, title="rivals")
    rows = {
        name: (
            np.array([float(one.is_right) for one in found[name].values()]),
            float(np.mean([one.calls for one in found[name].values()])),
        )
        for name in plans
    }
    training, answers = Answers(world, task, task.questions), Answers(world, task, questions)
    rates = dict(zip(training.forms, training.right().mean(axis=1), strict=True))
    order = sorted(rates, key=lambda form: -rates[form])[:2]
    return rows | {
        f"{CLEAN}, {name}": (right, float(k)) for (name, k), right in votes_of(answers.replies(order)).items() if k == 2
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, evaluate and return the rows: right [seeds, n], calls."""
    writers = trained(arguments.out, arguments.seeds)
    config = config_of(ARGV)
    world = World(group_of(ModelSettings, config), cache_dir() / "general")
    split = split_dataset(task_settings(config))
    questions = split.validation if arguments.validation else split.test
    with world.system:
        task = world.task_of(task_settings(config)).with_rules(ask="form", max_asks=None)
        rows = {name: (right[None, :], calls) for name, (right, calls) in rivals(world, task, questions).items()}
    for name, files in writers.items():
        outcomes = [written(file, questions, arguments.out) for file in files]
        for plan in outcomes[0]:
            right = np.array([[float(one.is_right) for one in found[plan].values()] for found in outcomes])
            calls = float(np.mean([one.calls for found in outcomes for one in found[plan].values()]))
            rows[f"{name}: {plan}"] = (right, calls)
    keys = [target_key(question) for question in questions]
    best = rows[f"{CLEAN} > {FORM}"][0]
    return {name: figures(right, calls, best, keys) for name, (right, calls) in rows.items()}


def figures(right: DoubleArray, calls: float, best: DoubleArray, keys: Sequence[str]) -> dict[str, Any]:
    """Return the figures of a row; its lead is over cleaning in the best form."""
    values = np.stack([right, right - best], axis=2)
    of_right, of_lead = crossed_intervals(values, keys).tolist()
    return {
        "success": float(right.mean()), "ci": of_right, "calls": calls, "seeds": right.mean(axis=1).tolist(),
        "lead": float((right - best).mean()), "lead_ci": of_lead,
    }  # fmt: skip


def in_words(found: Mapping[str, Any]) -> str:
    """Return the table."""
    rows = [
        (name, f"{row['calls']:.2f}", percent(row["success"], row["ci"]),
         f"{100 * min(row['seeds']):.1f}" if len(row["seeds"]) > 1 else "",
         percent(row["lead"], row["lead_ci"], sign="+"))
        for name, row in found.items()
    ]  # fmt: skip
    return table(
        "held-out questions of general", ("", "calls", "right", "lowest seed", f"minus {CLEAN} > {FORM}"), rows
    )


def main(argv: Sequence[str]) -> int:
    """Print the table; write it as JSON. Return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/writer"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--validation", action="store_true", help="score validation questions")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = run(arguments)
    print(in_words(found))
    if arguments.json is not None:
        write_json(arguments.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:], prog="writer"))
