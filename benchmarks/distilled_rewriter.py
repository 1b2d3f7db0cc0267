"""What a tiny language model keeps of a run: distilled from its transcripts, asked once in place of policy and mutator.

    python train_query_mutator.py --backend embedded --config examples/first_run.json --num-env-steps 4096
    python benchmarks/distilled_rewriter.py --run runs/latest --out runs/rewriter

There is no pretrained model in it. Tokenizer and weights begin with the run's own questions and the assistant's
documents; the first weights copy (benchmarks/scratch_lm.py), because a model that cannot repeat a question cannot
rewrite one. Then it learns two things at once: to repeat texts, and the rows of `qm data export`. Rewrites that look
something up (a phrase, a neighbouring question) are left out: held-out questions need other phrases. The last line is
the command that compares the model with the policy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scratch_lm import new_llama, new_tokenizer, save_scratch

from query_mutator.commands.main import main as qm
from query_mutator.embedded.corpus import load_corpus
from query_mutator.files.json_lines import read_json_lines

VOCABULARY = 1200
LAYERS, WIDTH, HEADS = 2, 128, 2
POSITIONS = 320
LOOKED_UP = "expand,merge,keywords,first_part"  # operators that add what the question does not say, or take it away
LONGEST_COPY = 30  # words


def main() -> int:
    """Export, make the model, train, and say how to evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="runs/latest", help="run folder to distil")
    parser.add_argument("--out", default="runs/rewriter", help="folder for everything made on the way")
    parser.add_argument("--copies", type=int, default=8_000, help="rows to repeat")
    parser.add_argument("--repeats", type=int, default=16, help="how often each exported row comes")
    flags = parser.parse_args()
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    exported = out / "rewrites.jsonl"
    rules = ["--keep-unchanged", "--simplest", "--without", LOOKED_UP]
    code = qm(["data", "export", "--run", flags.run, "-o", str(exported), *rules])
    if code:
        return code
    rows = list(read_json_lines(exported))
    documents = [entry.summary for entry in load_corpus().entries]
    make_model([*texts_of(rows), *documents], out / "base")
    write_mixture(rows, documents, out / "train.jsonl", copies=flags.copies, repeats=flags.repeats)
    code = train(out / "base", out / "train.jsonl", out / "rewriter")
    print(f"qm eval --checkpoint {flags.run} --rewriter hf:{out / 'rewriter'}")
    return code


def texts_of(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield questions and rewrites."""
    for row in rows:
        yield row["instruction"]
        yield row["response"]


def make_model(texts: list[str], folder: Path) -> None:
    """Save a Llama whose first weights copy, and a tokenizer trained on the texts."""
    tokenizer = new_tokenizer(texts, vocab_size=VOCABULARY)
    model = new_llama(tokenizer, width=WIDTH, layers=LAYERS, heads=HEADS, positions=POSITIONS, copies=True)
    save_scratch(folder, tokenizer, model)
    print(f"{folder}: {model.num_parameters():,} weights, {len(tokenizer)} tokens")


def write_mixture(rows: list[dict[str, Any]], documents: list[str], path: Path, *, copies: int, repeats: int) -> None:
    """Write each exported row `repeats` times, and rows whose answer is the question: documents, and words at random.

    What is repeated comes from documents and rewrites alone: a question's own words may be those to replace.
    """
    rng = np.random.default_rng(0)
    words = sorted({word for text in [*documents, *(row["response"] for row in rows)] for word in text.split()})
    pairs = [(row["instruction"], row["response"]) for row in rows for _ in range(repeats)]
    for kind in rng.random(copies):
        if kind < 0.5:
            text = " ".join(rng.choice(words, size=int(rng.integers(3, LONGEST_COPY))))
        else:
            text = " ".join(" ".join(rng.choice(documents, size=2)).split()[:LONGEST_COPY])
        pairs.append((text, text))
    with path.open("w", encoding="utf-8") as file:
        for number, (asked, answer) in enumerate(pairs):
            row = {"id": number, "instruction": asked, "response": answer}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def train(model: Path, data: Path, output: Path) -> int:
    """Run `qm train sft` once over the mixture."""
    shape = ["--token-budget", "1024", "--max-length", str(POSITIONS), "--overlong", "drop"]
    length = ["--epochs", "1", "--learning-rate", "2e-3", "--log-interval", "50"]
    return qm(["train", "sft", "--model", str(model), "--data", str(data), "--output", str(output), *shape, *length])


if __name__ == "__main__":
    sys.exit(main())
