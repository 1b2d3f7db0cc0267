"""What a tiny language model keeps of a run: distilled from its transcripts, asked once in place of policy and mutator.

    python train_query_mutator.py --backend embedded --config examples/first_run.json --num-env-steps 4096
    python benchmarks/distilled_rewriter.py --run runs/latest --out runs/rewriter

There is no pretrained model in it: tokenizer and weights begin with the run's own training questions. Random words are
copied first, because a model that cannot repeat a question cannot rewrite one; then come the rows of `qm data export`.
The last line is the command that compares it with the policy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from query_mutator.cli import main as qm
from query_mutator.jsonlines import read_json_lines
from query_mutator.sft.scratch import new_llama, new_tokenizer, save_scratch

VOCABULARY = 1500
LAYERS, WIDTH, HEADS = 2, 128, 4
POSITIONS = 320


def main() -> int:
    """Export, pretrain, fine-tune, and say how to evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="runs/latest", help="run folder to distil")
    parser.add_argument("--out", default="runs/rewriter", help="folder for everything made on the way")
    parser.add_argument("--copies", type=int, default=16_000, help="rows of random words to copy first")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the exported rows")
    flags = parser.parse_args()
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    rows = out / "train.jsonl"
    export = ["data", "export", "--run", flags.run, "-o", str(rows), "--keep-unchanged"]
    code = qm(export) or make_model(rows, out / "base")
    write_copies(rows, out / "copies.jsonl", count=flags.copies)
    code = code or train(out / "base", out / "copies.jsonl", out / "copier", rate="3e-3", epochs=2)
    code = code or train(out / "copier" / "model", rows, out / "rewriter", rate="5e-4", epochs=flags.epochs)
    print(f"qm eval --checkpoint {flags.run} --rewriter hf:{out / 'rewriter'}")
    return code


def texts_of(rows: Path) -> Iterator[str]:
    """Yield questions and rewrites."""
    for row in read_json_lines(rows):
        yield row["instruction"]
        yield row["response"]


def make_model(rows: Path, folder: Path) -> int:
    """Save a Llama with random weights and a tokenizer trained on the rows."""
    tokenizer = new_tokenizer(texts_of(rows), vocab_size=VOCABULARY)
    model = new_llama(tokenizer, width=WIDTH, layers=LAYERS, heads=HEADS, positions=POSITIONS)
    save_scratch(folder, tokenizer, model)
    print(f"{folder}: {model.num_parameters():,} weights, {len(tokenizer)} tokens")
    return 0


def write_copies(rows: Path, path: Path, *, count: int) -> None:
    """Write rows whose answer repeats the question: words of the training questions in random order."""
    words = sorted({word for text in texts_of(rows) for word in text.split()})
    rng = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = " ".join(rng.choice(words, size=int(rng.integers(2, 12))))
            file.write(json.dumps({"id": number, "instruction": text, "response": text}, ensure_ascii=False) + "\n")


def train(model: Path, data: Path, output: Path, *, rate: str, epochs: int) -> int:
    """Run `qm train sft` with packed rows."""
    shape = ["--pack", "--pack-mode", "greedy", "--pack-max-len", "512", "--max-length", str(POSITIONS)]
    length = ["--epochs", str(epochs), "--batch-size", "4", "--overlong", "drop", "--learning-rate", rate]
    return qm(["train", "sft", "--model", str(model), "--data", str(data), "--output", str(output), *shape, *length])


if __name__ == "__main__":
    sys.exit(main())
