"""Command lines for `lerobot-train` with options that it has (LeRobot 0.6): there is no --bf16."""

from __future__ import annotations

#: Options that lines of ours use, with what they take
OPTIONS = (
    "dataset.repo_id", "policy.type", "policy.push_to_hub", "batch_size", "steps", "num_workers", "prefetch_factor",
    "persistent_workers", "dataloader_multiprocessing_context", "accelerator.mixed_precision",
    "accelerator.gradient_accumulation.steps",
)  # fmt: skip


def train_line(
    *,
    policy: str = "act",
    batch_size: int,
    workers: int | None = None,
    prefetch: int | None = None,
    start_method: str | None = None,
    precision: str = "no",
    accumulate: int = 1,
) -> str:
    """Return a `lerobot-train` line; the data set is left for the reader to name."""
    options = {
        "dataset.repo_id": "USER/DATASET",
        "policy.type": policy,
        "policy.push_to_hub": "false",
        "batch_size": str(batch_size),
    }
    if workers is not None:
        options["num_workers"] = str(workers)
    if workers:
        options["prefetch_factor"] = str(prefetch or 2)
        options["persistent_workers"] = "true"
        options["dataloader_multiprocessing_context"] = start_method or "spawn"
    if precision != "no":
        options["accelerator.mixed_precision"] = precision
    if accumulate > 1:
        options["accelerator.gradient_accumulation.steps"] = str(accumulate)
    return " ".join(["lerobot-train", *(f"--{name}={value}" for name, value in options.items())])
