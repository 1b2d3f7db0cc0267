"""`qm data batch generate`: the tokens of a plan's batches, written once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from query_mutator.batching import (
    BatchWriter,
    JsonlSamples,
    check_plan,
    compute_dataset_fingerprint,
    load_batch_plan,
    tokenizer_fingerprint,
)
from query_mutator.batching.generation.token_store import is_batch_store
from query_mutator.batching.tokenizers import load_tokenizer, pad_id_of
from query_mutator.cli.common import show
from query_mutator.cli.console import progress
from query_mutator.cli.outputs import Output
from query_mutator.commands.data_flags import BatchPlanFlags, TokenizerFlags
from query_mutator.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class GenerateFlags(BatchPlanFlags, TokenizerFlags):
    """Write the tokens of a plan's batches; rerun the command to resume an interrupted run."""

    dataset: Annotated[str, arg(aliases=["-d"])]
    """JSONL file that the plan was built for."""
    output: Annotated[
        str, arg(name="out", aliases=["--output", "-o"]), Output(is_batch_store, is_folder=True, resumes=True)
    ]
    """Folder of the batches."""
    mask_prompt: bool = True
    """Learn answers only; --no-mask-prompt learns the questions too."""
    skip_bad: bool = False
    """Skip rows without tokens; must be as in `qm data lengths build`."""


def generate_batches(flags: GenerateFlags) -> None:
    """Write the batches of a plan after comparing it with data and tokenizer."""
    tokenizer = load_tokenizer(flags.tokenizer)
    tokenizer_hash = tokenizer_fingerprint(tokenizer)
    plan = load_batch_plan(flags.plan, tokenizer_hash=tokenizer_hash)
    if plan.meta.shard is not None:
        raise UsageError(f"{flags.plan} is the shard of one rank; give the whole plan")
    if plan.meta.dataset_hash:
        check_plan(plan, dataset_hash=compute_dataset_fingerprint(flags.dataset, tokenizer_hash).fingerprint)
    samples = JsonlSamples(flags.dataset, tokenizer, mask_prompt=flags.mask_prompt, skip_bad=flags.skip_bad)
    writer = BatchWriter(plan, samples, flags.output, pad_id=pad_id_of(tokenizer), tokenizer_hash=tokenizer_hash)
    with progress("writing", len(samples), unit="sample") as bar:
        samples.on_read = bar.update
        files = writer.write_all()
    samples.close()
    size = sum(file.stat().st_size for file in files)
    report = {
        "output": flags.output,
        "files": [file.name for file in files],
        "bytes": size,
        "batches": plan.total_microbatches,
        "epochs": plan.num_epochs,
        "fingerprint": plan.fingerprint,
    }
    show(flags, report, f"{flags.output}: {plan.total_microbatches} batches in {len(files)} files of {size} bytes")
