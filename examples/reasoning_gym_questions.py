"""Write questions of reasoning-gym as a file for `--dataset`.

    pip install reasoning-gym==0.1.25
    python examples/reasoning_gym_questions.py gcd letter_counting --size 50 --out gym.jsonl
    qm train --dataset gym.jsonl --reward right=1

The answers of a task are gold: numbers are compared as numbers, others as texts. A task with several right answers
needs a reward part of your own, see docs/how-to/extend.md.
"""

import argparse
import json
from pathlib import Path

import reasoning_gym


def rows(task: str, *, size: int, seed: int) -> list[dict[str, object]]:
    """Return the entries of a task as rows of a question file."""
    found: list[dict[str, object]] = []
    for number, entry in enumerate(reasoning_gym.create_dataset(task, size=size, seed=seed)):
        answer = str(entry["answer"])
        row = {"id": f"{task}-{seed}-{number}", "query": entry["question"], "about": entry["question"]}
        found.append({**row, "accept": [answer], "tags": [task]})
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("gym.jsonl"))
    args = parser.parse_args()
    found = [row for task in args.tasks for row in rows(task, size=args.size, seed=args.seed)]
    args.out.write_text("".join(f"{json.dumps(row)}\n" for row in found), encoding="utf-8")
