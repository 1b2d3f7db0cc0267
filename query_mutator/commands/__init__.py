"""The commands of `qm` that have files of their own; each module imports what is heavy where it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from query_mutator.commands.batch_generate import GenerateFlags, generate_batches
from query_mutator.commands.batching import (
    AnalyzeFlags,
    HistogramFlags,
    SuggestFlags,
    analyze_buckets,
    show_histogram,
    suggest_edges,
)
from query_mutator.commands.batchplan_build import BuildFlags, build_plan
from query_mutator.commands.batchplan_look import InfoFlags, ShardFlags, VerifyFlags, shard_plan, show_plan, verify_plan
from query_mutator.commands.bench import BenchFlags, bench
from query_mutator.commands.export import ExportFlags, export
from query_mutator.commands.gym_run import GymInfoFlags, GymRunFlags, gym_info, gym_run
from query_mutator.commands.gym_serve import GymServeFlags, gym_serve
from query_mutator.commands.lengths import LengthsBuildFlags, LengthsStatsFlags, build_lengths, show_length_stats
from query_mutator.commands.train_sft import train_sft
from query_mutator.sft.config import SftFlags

#: What carries a command out; the number it returns, if any, is the exit code.
CarryOut = Callable[[Any], int | None]

#: command -> its flags, and what carries it out
COMMANDS: dict[str, tuple[type[Any], CarryOut]] = {
    "data lengths build": (LengthsBuildFlags, build_lengths),
    "data lengths stats": (LengthsStatsFlags, show_length_stats),
    "data batchplan build": (BuildFlags, build_plan),
    "data batchplan info": (InfoFlags, show_plan),
    "data batchplan verify": (VerifyFlags, verify_plan),
    "data batchplan shard": (ShardFlags, shard_plan),
    "data batching histogram": (HistogramFlags, show_histogram),
    "data batching analyze": (AnalyzeFlags, analyze_buckets),
    "data batching suggest": (SuggestFlags, suggest_edges),
    "data batch generate": (GenerateFlags, generate_batches),
    "data export": (ExportFlags, export),
    "gym run": (GymRunFlags, gym_run),
    "gym info": (GymInfoFlags, gym_info),
    "gym serve": (GymServeFlags, gym_serve),
    "train sft": (SftFlags, train_sft),
    "bench": (BenchFlags, bench),
}
