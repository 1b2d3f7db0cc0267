"""The commands of `qm`: what each does, and where its function is.

A command's module is imported when the command runs, so `qm --help` loads no room.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, get_type_hints

HELP = {"-h", "--help", "--help-all"}


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `qm`: what it does, and where its function is."""

    summary: str
    target: str  # "module:function", the module in query_mutator.commands
    takes_words: bool = False  # whether the function reads the flags itself, from the words after the command

    @property
    def flags(self) -> Any:
        """Return the dataclass of the command's flags: the type of its function's parameter, or what words are."""
        first = next(iter(get_type_hints(self.run, include_extras=True).values()))
        return getattr(first, "__metadata__", (first,))[-1]

    @property
    def run(self) -> Any:
        """Return the function that carries the command out; a number it returns is the exit code."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(f"query_mutator.commands.{module}"), name)


#: The commands of `qm --help`, in the order in which a project needs them.
_FIRST = {
    "init": Command("write settings and example questions for a new project", "project:init"),
    "check": Command("show how a file of questions is read and graded", "project:check"),
    "doctor": Command("check a model server and what would make it faster", "doctor:doctor"),
    "plan": Command("find the best fixed order of rewrites and forms, and save it", "plan:plan"),
    "train": Command("learn which rewrite makes a question get a better answer", "train:train", True),
    "eval": Command("compare a trained policy with the baselines", "policy:evaluate_policy"),
    "rewrite": Command("rewrite a question and show the answer", "rewrite:rewrite"),
    "batch": Command("answer a file of questions; rerun to resume", "batch:answer"),
    "serve": Command("serve a proxy that rewrites questions for a model server", "serve:serve"),
}
_RUNS = {
    "runs": Command("list runs: state, steps, success, calls", "runs:show_runs"),
    "show": Command("open the page of a run in the browser", "runs:show_page"),
    "watch": Command("serve the pages of runs while they train", "runs:watch"),
    "report": Command("write one page of several runs, question by question", "runs:report"),
    "compare": Command("compare Query Mutator runs question by question", "runs:compare_runs"),
    "export-policy": Command("write a policy to one portable file", "export:export_policy"),
    "export replies": Command("write a run's replies as a graded log", "export:export_replies"),
    "test-server": Command("serve echoed, canned or recorded replies without a model", "stub_server:test_server"),
    "data export": Command("write a run's best rewrites as training rows", "export:export"),
}
_BATCHING = {
    "data lengths build": Command("tokenize a dataset, keep the length of each row", "batching:build_lengths"),
    "data lengths stats": Command("show statistics of a length cache", "batching:show_length_stats"),
    "data batchplan build": Command("assign samples to batches for every epoch", "batching:build_plan"),
    "data batchplan info": Command("show a plan's settings and how full its batches are", "batching:show_plan"),
    "data batchplan verify": Command(
        "rebuild a plan and compare it; exit code 1 if it differs", "batching:verify_plan"
    ),
    "data batchplan shard": Command("write each rank's part of a plan", "batching:shard_plan"),
    "data batching histogram": Command("plot the distribution of lengths", "batching:show_histogram"),
    "data batching analyze": Command("compare buckets with other ways of batching", "batching:analyze_buckets"),
    "data batching suggest": Command("suggest bucket edges", "batching:suggest_edges"),
    "data batch generate": Command("write the batches of a plan to disk", "batching:generate_batches"),
    "train sft": Command("fine-tune a causal language model", "batching:train_sft"),
    "bench": Command("compare ways of batching on a dataset", "bench:bench"),
    "gym run": Command("play episodes of a puzzle gym, keep the samples", "gym_run:gym_run"),
    "gym info": Command("show the settings of a gym connection", "gym_run:gym_info"),
}
_LAB = {
    "analyze": Command("compare metrics of runs of any trainer", "analyze:compare_runs"),
    "sweep": Command("run a command over settings and seeds, find the best", "sweep:sweep"),
    "size": Command("estimate the memory of a training step", "size:size"),
    "size replay": Command("estimate the main memory of a replay buffer", "size:size_replay"),
    "size workers": Command("find the number of data-loader workers", "size:size_workers"),
}
#: The commands by title, for `qm help --all`; `qm --help` lists the first group.
GROUPS = {
    "policies": _FIRST,
    "runs": _RUNS,
    "toolkit: batching": _BATCHING,
    "toolkit: lab": _LAB,
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
