"""The five documents that the product was asked for: their commands, functions, flags and metric names, as ours.

    batching-improvements, controlling-batch-size   train_query_mutator.py, ollama_utils, rl_query_mutator_env
    batching-examples                               `lazarus` is `qm`, its `data.batching` query_mutator.batching
    batch-size-and-running-speed                    scripts/analyze_experiment.py, extract_tensorboard_data.py, qm sweep
    batch-size-and-num-workers                      qm size

Where a document is known to be wrong (a loss that is summed over its batch, memory by rules of thumb), the test holds
what is measured.
"""

from __future__ import annotations

import asyncio
import csv
import importlib
import json
import math
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

import ollama_utils
from query_mutator.batching import (
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    BatchReader,
    BucketSpec,
    CheckpointPosition,
    GymConfig,
    GymEpisodeStream,
    GymTransport,
    PackingConfig,
    PackingMode,
    ReplayBuffer,
    SequenceToPack,
    TokenBudgetBatchSampler,
    compute_batch_fingerprint,
    compute_packing_metrics,
    create_segment_attention_mask,
    iter_from_checkpoint,
    load_batch_plan,
    pack_sequences,
    save_batch_plan,
    verify_batch_fingerprint,
)
from rl_query_mutator_env import BatchedQueryMutationEnv, make_env
from tests.promises.events import write_run
from tests.promises.gym_server import start_gym
from tests.promises.helpers import (
    QM,
    ROOT,
    TRAIN,
    Command,
    ModelServer,
    good,
    last_metrics,
    latest,
    one_line_error,
    questions,
    run,
    train_flags,
    write_questions,
)


def at_once(lines: Iterable[str], *, cwd: Path, program: Sequence[str] = QM) -> list[CompletedProcess[str]]:
    """Run commands side by side, each of which must end with exit code 0."""
    started = [Command([*program, *shlex.split(line)], cwd=cwd) for line in lines]
    return [good(command.wait()) for command in started]


# ---------------------------------------------------------------- batching-improvements, controlling-batch-size

#: Flags of each training command -> environments and calls in flight.
TRAINING = {
    "": (16, 8),
    "--num-processes 16 --use-batching": (16, 8),
    "--num-processes 16 --num-env-steps 1000 --no-batching": (16, 1),
    "--num-processes 16 --num-steps 32 --ppo-epoch 4 --num-mini-batch 4 --use-batching": (16, 8),
    "--batch-size 16": (16, 16),
    "--num-processes 16 --batch-size 8 --num-env-steps 10000 --use-batching": (16, 8),
    "--num-processes 8 --batch-size 4 --num-env-steps 500": (8, 4),
    "--num-processes 32 --batch-size 16": (32, 16),
    "--mutator-model qwen2.5:3b": (16, 8),
}


def test_commands_of_training(tmp_path: Path) -> None:
    """Every training command of the documents is accepted, with their defaults: 16 environments, 8 calls in flight."""
    small = f"--dataset {write_questions(tmp_path / 'questions.jsonl')} --encoder hash --target-model librarian"
    lines = [f"--dry-run {small} {flags}" for flags in TRAINING]
    found = at_once(lines, cwd=tmp_path, program=TRAIN)
    for (flags, (envs, in_flight)), done in zip(TRAINING.items(), found, strict=True):
        assert re.search(rf"environment steps .*= \d+ x {envs} processes x 32 steps", done.stdout), flags
        assert re.search(rf"calls in flight +{in_flight}\n", done.stdout), flags


def test_batching_is_on_and_several_times_faster(own_server: ModelServer, tmp_path: Path) -> None:
    """Training has 8 calls in flight by default and is more than 3 times as fast as --no-batching, which has 1."""
    own_server.set(latency_ms=80)
    flags = [*train_flags(own_server, tmp_path), "--num-processes", "16"]
    at = flags.index("--batch-size")
    del flags[at : at + 2]
    seconds = {8: math.inf, 1: math.inf}
    tries: list[tuple[list[str], int]] = [(["--no-batching", "--batch-size", "8"], 1), *[([], 8)] * 3]
    for more, in_flight in tries:  # a busy machine has a free moment
        own_server.reset()
        good(run([*TRAIN, *flags, *more], cwd=tmp_path))
        assert own_server.stats()["max_in_service"] == in_flight
        seconds[in_flight] = min(seconds[in_flight], last_metrics(latest(tmp_path))["wall_s"])
        if seconds[1] > 3 * seconds[8]:
            return
    raise AssertionError(seconds)


def test_batch_functions(own_server: ModelServer, caplog: pytest.LogCaptureFixture) -> None:
    """The three batch functions keep the order, have 8 workers or max_workers, and log a failure without raising it."""
    own_server.set(latency_ms=400)
    texts = [row["query"] for row in questions()]
    where: dict[str, Any] = {"url": own_server.url}
    for workers, settings in ((8, where), (2, {**where, "max_workers": 2})):
        own_server.reset()
        rewrites = ollama_utils.batch_mutate_queries(texts[:10], "neutral", model="softener", **settings)
        assert own_server.stats()["max_in_service"] == workers
        answers = ollama_utils.batch_query_target_model(rewrites, model="librarian", **settings)
        assert answers == [f"It is {row['accept'][0]}." for row in questions()[:10]]
        assert own_server.stats()["max_in_service"] == workers
    vectors = ollama_utils.batch_encode_queries(texts, model="hash", batch_size=5)
    np.testing.assert_allclose(vectors, [ollama_utils.encode_query(text, model="hash") for text in texts], atol=1e-6)
    assert ollama_utils.batch_mutate_queries(texts[:2], "neutral", model="nowhere", **where) == texts[:2]
    assert ollama_utils.batch_query_target_model(["a"], model="nowhere", **where) == [ollama_utils.DEFAULT_REFUSAL]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3


def test_batched_environment_wraps_single_ones(own_server: ModelServer, tmp_path: Path) -> None:
    """BatchedQueryMutationEnv.batch_reset and batch_step give the data of its environments stepped one by one."""
    own_server.set(latency_ms=60)
    settings: dict[str, Any] = {
        "ollama_url": own_server.url, "target_model": "librarian", "mutator_model": "softener", "encoder": "hash",
        "dataset": str(write_questions(tmp_path / "questions.jsonl")), "operators": "neutral,filler", "forms": "none",
        "ask": "every_step", "answer": "best", "reward": "right=1", "max_episode_steps": 3,
    }  # fmt: skip
    singles = [make_env(env_id=number, **settings) for number in range(4)]
    expected = [[env.reset(seed=7 + number)[0] for number, env in enumerate(singles)]]
    steps = [[env.step(np.int64(action)) for env in singles] for action in (0, 1)]
    envs = BatchedQueryMutationEnv([make_env(env_id=number, **settings) for number in range(4)], batch_size=4)
    own_server.reset()
    found = [envs.batch_reset(seed=7)[0]]
    for action, step in zip((0, 1), steps, strict=True):
        obs, rewards, terminations, _, _ = envs.batch_step(np.full(4, action))
        found.append(obs)
        expected.append([one[0] for one in step])
        assert rewards.tolist() == pytest.approx([one[1] for one in step])
        assert not terminations.any()
    np.testing.assert_array_equal(found, expected)
    assert own_server.stats()["max_in_service"] == 4
    for env in (*singles, envs):
        env.close()


def test_benchmark_of_batching(own_server: ModelServer, tmp_path: Path) -> None:
    """benchmark_batching.py measures a batch size against sequential calls, and recommends one."""
    own_server.set(latency_ms=120)
    flags = f"--ollama-url {own_server.url} --target-model librarian --mutator-model softener --json out.json"
    script = [ROOT / "benchmark_batching.py", *shlex.split(flags), "--num-queries", "8", "--batch-sizes", "4"]
    for _ in range(3):  # a busy machine has a free moment
        good(run([*script, "--repeats", "1"], cwd=tmp_path))
        report = json.loads((tmp_path / "out.json").read_text())
        (tmp_path / "out.json").unlink()
        rows = {(row["mode"], row["batch_size"]): row for row in report["rows"]}
        if 2 < rows["async", 4]["speedup"] <= 4.5:
            break
    assert rows["sequential", 1]["calls"] == rows["async", 4]["calls"] == 2 * 8
    assert 2 < rows["async", 4]["speedup"] <= 4.5
    assert report["recommended"]["batch_size"] == 4
    assert report["recommended"]["num_processes"] == 8


# ---------------------------------------------------------------- batching-examples


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("01_basic_batching", "the same seed gives the same batches: True"),
        ("02_sequence_packing", "segments  [0, 0, 0, 1, 1, 2, 2, -1]"),
        ("03_batch_plan", "the same again: True"),
        ("04_distributed", "equal steps by pad: 75 on every rank"),
        ("05_e2e_pipeline", "both ways give the same 34 batches: True"),
        ("06_analyze", "no other 4 edges pad less"),
        ("07_streaming", "resumed at 30: the rest is the same: True"),
        ("08_online_learning", "online: 25 episodes, solved: 100%"),
    ],
)
def test_examples(name: str, line: str, tmp_path: Path) -> None:
    """The eight examples run, and print what they show."""
    script = [ROOT / "examples" / "batching" / f"{name}.py"]
    assert line in good(run(script, cwd=tmp_path)).stdout
    if name == "08_online_learning":
        with start_gym() as server:
            assert line in good(run([*script, "--gym-port", str(server.port)], cwd=tmp_path)).stdout
            assert server.sessions_served


#: Package of `chuk_lazarus` -> the names that it exports, all of which query_mutator.batching exports too.
PACKAGES = {
    "analyze": """BatchingEfficiencyReport BucketAnalysis BucketEfficiency BucketSuggestion HistogramBin LengthHistogram
        OptimizationGoal analyze_bucket_efficiency compute_length_histogram create_efficiency_report
        suggest_bucket_edges visualize_buckets""",
    "core": "BatchMetrics BatchShapeHistogram BatchSpec BucketId BucketSpec BucketStats TokenBudgetBatchSampler",
    "distributed": """CheckpointPosition DistributedConfig get_rank get_world_size interleave_microbatches
        is_main_process load_checkpoint_position save_checkpoint_position shard_batch_plan""",
    "generation": "BatchReader BatchWriter CollatedBatch LengthCache LengthEntry default_collate pad_sequences",
    "planning": """BatchFingerprint BatchPlan BatchPlanBuilder BatchPlanMeta BatchingConfig BatchingMode EpochPlan
        MicrobatchSpec PackedSequence PackingConfig PackingMetrics PackingMode PadPolicy SequenceToPack
        compute_batch_fingerprint compute_batch_fingerprint_async compute_packing_metrics
        create_segment_attention_mask load_batch_plan load_batch_plan_async load_fingerprint pack_sequences
        save_batch_plan save_batch_plan_async save_fingerprint verify_batch_fingerprint""",
    "samples": """DatasetFingerprint DatasetSource PreferenceSample Sample SampleMeta SampleType SampleValidationError
        compute_dataset_fingerprint""",
    "streaming": """AsyncOfflineDatasetStream AsyncSampleStream BufferEvictionPolicy BufferSnapshot DifficultyProfile
        EpisodeStatus GymConfig GymEpisode GymEpisodeStream GymOutputMode GymStep GymTransport MockGymStream
        OfflineDatasetStream PuzzleDifficulty PuzzleGame PuzzleObservation PuzzleResult ReplayBuffer ReplayBufferConfig
        RollingBatchPlanWindow SampleSource SampleStream StreamConfig StreamMetrics StreamSample StreamState
        TelnetClientConfig TelnetGymClient WindowConfig WindowState""",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_names_of_the_toolkit(package: str) -> None:
    """query_mutator.batching and its packages export every name of the document's library."""
    toolkit, part = (importlib.import_module(f"query_mutator.batching{name}") for name in ("", f".{package}"))
    names = PACKAGES[package].split()
    assert set(names) <= set(part.__all__) <= set(toolkit.__all__)
    assert all(getattr(part, name) is getattr(toolkit, name) for name in names)


def test_quick_start() -> None:
    """The document's quick start forms batches of all samples within the token budget, whose fingerprint verifies."""
    lengths = {f"s{i}": 100 + i * 10 for i in range(50)}
    sampler = TokenBudgetBatchSampler(
        lengths=lengths, bucket_spec=BucketSpec(edges=(128, 256, 512), overflow_max=1024), token_budget=2048, seed=42
    )

    async def batches(epoch: int) -> list[Any]:
        return [batch async for batch in sampler.iter_epoch(epoch=epoch)]

    found = asyncio.run(batches(0))
    assert sorted(name for batch in found for name in batch.sample_ids) == sorted(lengths)
    assert all(batch.batch_size * batch.max_length <= 2048 for batch in found)
    assert all(lengths[name] <= batch.max_length for batch in found for name in batch.sample_ids)
    known = compute_batch_fingerprint(found)
    assert verify_batch_fingerprint(asyncio.run(batches(0)), known) == (True, None)
    assert not verify_batch_fingerprint(asyncio.run(batches(1)), known)[0]


#: Command -> its flags as `-s/--long=default`.
FLAGS = {
    "data lengths build": "-d/--dataset -t/--tokenizer -o/--output",
    "data lengths stats": "-c/--cache",
    "data batchplan build": "-l/--lengths -e/--epochs=1 -b/--token-budget=4096 --bucket-edges=128,256,512 "
    "--overflow-max=2048 -p/--predictable -s/--seed=42 --dataset-hash -o/--output",
    "data batchplan info": "-p/--plan -n/--show-batches=0 -r/--rank -w/--world-size",
    "data batchplan verify": "-p/--plan -l/--lengths",
    "data batchplan shard": "-p/--plan -w/--world-size -o/--output",
    "data batching analyze": "-c/--cache --bucket-edges=128,256,512 --overflow-max=2048 -o/--output",
    "data batching histogram": "-c/--cache --bins=15 --width=50",
    "data batching suggest": "-c/--cache -n/--num-buckets=4 -g/--goal=waste --max-length=2048",
    "data batch generate": "-p/--plan -d/--dataset -t/--tokenizer -o/--output",
    "gym run": "-t/--tokenizer --host=localhost --port=8023 --transport --output-mode --buffer-size=100000 "
    "--timeout=10 --retries=3 --difficulty-min --difficulty-max --max-samples -o/--output --seed=42 --mock "
    "--num-episodes=10 --steps-per-episode=5 --success-rate=0.7",
    "gym info": "",
    "bench": "-d/--dataset -t/--tokenizer --bucket-edges --token-budget=4096 --max-length=2048 --max-samples "
    "--num-samples=1000 --seed",
    "train sft": "--model --data --eval-data --output --epochs=3 --max-steps --batch-size=4 --learning-rate=1e-05 "
    "--max-length=512 --use-lora --lora-rank=8 --lora-targets --freeze-layers --config --mask-prompt --log-interval "
    "--batchplan --bucket-edges --token-budget --pack --pack-max-len --pack-mode=first_fit --online --gym-host "
    "--gym-port=8023 --buffer-size=100000",
}


def test_flags_of_the_commands(tmp_path: Path) -> None:
    """The thirteen commands and `train sft` have every flag of the document, long and short, with its default."""
    pages = at_once((f"{name} --help-all" if name == "train sft" else f"{name} --help" for name in FLAGS), cwd=tmp_path)
    for (command, flags), page in zip(FLAGS.items(), pages, strict=True):
        told = [" ".join(entry.split()) for entry in re.split(r"\n  (?=-)", page.stdout)]
        for flag in flags.split():
            names, _, default = flag.partition("=")
            found = [
                entry for entry in told if all(re.search(rf"(^|[ ,]){name}[ ,]", entry) for name in names.split("/"))
            ]
            assert found, f"qm {command} has no {names}"
            default_of = rf"(?<![\w.]){re.escape(default)}(?!\w)"
            assert not default or re.search(default_of, found[0]), f"qm {command} {flag}: {found[0]}"


def rows_to_learn(count: int) -> list[dict[str, Any]]:
    """Return rows with an instruction and a response of many lengths."""
    words = ["how", "do", "i", "sort", "count", "stop", "and", "join", "the", "words", "of", "my", "list"]
    return [
        {"id": f"r{n}", "instruction": " ".join(words[: 1 + n % 12]), "response": " ".join(words[:: -1 - n % 3])}
        for n in range(count)
    ]


def test_commands_from_rows_to_batches(tmp_path: Path) -> None:
    """The document's commands, in its order, turn a file of rows into batches that hold each row once an epoch."""
    write_questions(tmp_path / "train.jsonl", rows_to_learn(400))
    for block in (
        ["data lengths build -d train.jsonl -t bytes -o lengths.jsonl"],
        [
            "data lengths stats -c lengths.jsonl",
            "data batchplan build -l lengths.jsonl -e 3 -b 4096 -o batch_plan/",
            "data batching histogram -c lengths.jsonl --bins 20",
            "data batching analyze -c lengths.jsonl --bucket-edges 128,256,512",
            "data batching suggest -c lengths.jsonl --num-buckets 4 --goal waste",
            "bench -d train.jsonl -t bytes",
        ],
        [
            "data batchplan info -p batch_plan/",
            "data batchplan verify -p batch_plan/ -l lengths.jsonl",
            "data batchplan shard -p batch_plan/ -w 4 -o shards/",
            "data batch generate -p batch_plan/ -d train.jsonl -t bytes -o batches/",
        ],
    ):
        at_once(block, cwd=tmp_path)
    plan, names = load_batch_plan(tmp_path / "batch_plan"), sorted(f"r{n}" for n in range(400))
    shards = [load_batch_plan(tmp_path / "shards" / f"rank_{rank}") for rank in range(4)]
    rows, reader = rows_to_learn(400), BatchReader(tmp_path / "batches")
    for epoch in range(3):
        assert sorted(name for shard in shards for one in shard.iter_epoch(epoch) for name in one.samples) == names
        whole = list(plan.iter_epoch(epoch))
        for rank, shard in enumerate(shards):
            assert [one.samples for one in shard.iter_epoch(epoch)] == [one.samples for one in whole[rank::4]]
        for batch, planned in zip(reader.iter_epoch(epoch), whole, strict=True):
            assert batch.sample_ids == planned.samples
            for name, ids, mask in zip(batch.sample_ids, batch.input_ids, batch.loss_mask, strict=True):
                row = rows[int(name[1:])]
                learned = bytes(int(token) for token, counts in zip(ids, mask, strict=True) if counts and token < 256)
                assert row["instruction"].encode() in bytes(int(token) for token in ids if token < 256)
                assert learned.decode().strip() == row["response"]


def plan_of(config: BatchingConfig, *, epochs: int = 2) -> BatchPlan:
    """Return a plan of 500 samples."""
    lengths = {f"s{number}": 16 + 7 * number % 400 for number in range(500)}
    return BatchPlanBuilder(lengths, config, dataset_hash="data", tokenizer_hash="tokens").build_sync(epochs)


def test_plans_are_exact(tmp_path: Path) -> None:
    """A plan is the same when built or loaded again, and a resumption has exactly the batches that were not done."""
    config = BatchingConfig(token_budget=2048, bucket_edges=(128, 256), overflow_max=512, seed=42)
    plan, again = plan_of(config), plan_of(config)
    save_batch_plan(plan, tmp_path / "plan")
    loaded = load_batch_plan(tmp_path / "plan")
    assert plan.fingerprint == again.fingerprint == loaded.fingerprint
    whole = [(epoch, one.samples) for epoch in range(2) for one in loaded.iter_epoch(epoch)]
    assert whole == [(epoch, one.samples) for epoch in range(2) for one in plan.iter_epoch(epoch)]
    for part in (loaded, loaded.shard(1, 3)):
        every = [(epoch, one) for epoch in range(2) for one in part.iter_epoch(epoch)]
        assert [(epoch, one) for epoch, _, one in part.iter_from(0, 5)] == every[5:]
        position = CheckpointPosition.at(part, 0, 5)
        assert [(epoch, one) for epoch, _, one in iter_from_checkpoint(part, position)] == every[5:]
    assert plan_of(config.changed(seed=43)).fingerprint != plan.fingerprint


@pytest.mark.parametrize("mode", PackingMode)
def test_packs_are_exact(mode: PackingMode) -> None:
    """Packs hold every token of every sequence once, in fewer rows, and no token attends to another sequence."""
    rng = np.random.default_rng(3)
    sequences = [
        SequenceToPack(sample_id=f"s{n}", input_ids=rng.integers(1, 999, size).tolist(), loss_mask=[1] * size)
        for n, size in enumerate(rng.integers(2, 40, 60).tolist())
    ]
    packed = pack_sequences(sequences, PackingConfig(mode=mode, max_length=64), pad_token_id=0)
    found = {}
    for one in packed:
        assert one.length <= 64
        mask = create_segment_attention_mask(one.segment_ids, use_mlx=False)
        np.testing.assert_array_equal(
            mask[one.segment_ids >= 0], np.tril(one.segment_ids[:, None] == one.segment_ids)[one.segment_ids >= 0]
        )
        for segment, name in enumerate(one.sample_ids):
            found[name] = one.input_ids[one.segment_ids == segment].tolist()
    assert found == {one.sample_id: list(one.input_ids) for one in sequences}
    metrics = compute_packing_metrics(packed)
    assert metrics.total_tokens == sum(len(one.input_ids) for one in sequences)
    assert metrics.packing_ratio > 2.5


class Words:
    """A tokenizer with a token for each character."""

    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.mark.parametrize("transport", ["telnet", "tcp", "websocket"])
def test_gym_client_plays_a_server(transport: str, tmp_path: Path) -> None:
    """`qm gym run` and GymEpisodeStream play a puzzle server over each transport, and keep a sample for each step."""
    with start_gym() as server:
        where = f"--host 127.0.0.1 --port {server.port} --transport {transport}"
        line = f"gym run -t bytes {where} --num-episodes 3 --output buffer.json --json"
        [done] = at_once([line], cwd=tmp_path)
        config = GymConfig(host="127.0.0.1", port=server.port, transport=GymTransport(transport), seed=4)

        async def play() -> tuple[list[Any], Any]:
            async with GymEpisodeStream(config, Words(), max_episodes=3) as stream:
                return [sample async for sample in stream], stream.metrics

        samples, metrics = asyncio.run(play())
    report = json.loads(done.stdout)
    assert (report["episodes"], report["solved"]) == (3, 3)
    assert ReplayBuffer.load(tmp_path / "buffer.json").size == report["samples"] > 3
    assert (metrics.episodes_completed, metrics.success_rate) == (3, 1.0)
    assert sum(sample.reward for sample in samples) == 3.0  # 1 for each puzzle, at its last step
    assert all(len(sample.input_ids) == len(sample.loss_mask) for sample in samples)


def test_mock_gym_needs_no_server(tmp_path: Path) -> None:
    """The document's gym commands run without a server, and are the same each time."""
    line = "gym run -t bytes --mock --num-episodes 10"
    first, second, saved, info = at_once(
        [f"{line} --json", f"{line} --json", "gym run -t bytes --mock --output buffer.json", "gym info"], cwd=tmp_path
    )
    report = json.loads(first.stdout)
    assert first.stdout == second.stdout
    assert (report["episodes"], report["samples"]) == (10, 50)
    assert 0 < report["solved"] < 10
    assert ReplayBuffer.load(tmp_path / "buffer.json").size == 50
    assert "buffer.json" in saved.stdout
    assert "8023" in info.stdout


@pytest.mark.slow
def test_training_on_batches(tmp_path: Path) -> None:
    """The document's four `train sft` commands train a model: on a plan, buckets, packs, and a gym's episodes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = {letter: at for at, letter in enumerate(["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")  # type: ignore
    fast.save_pretrained(tmp_path / "model")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=257, max_position_embeddings=2048, bos_token_id=0, eos_token_id=0, **shape)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    write_questions(tmp_path / "train.jsonl", rows_to_learn(60))
    at_once(["data lengths build -d train.jsonl -t model -o lengths.jsonl"], cwd=tmp_path)
    at_once(["data batchplan build -l lengths.jsonl -e 3 -b 4096 -o batch_plan/"], cwd=tmp_path)
    with start_gym() as server:
        ways = {
            "plan": "--data train.jsonl --batchplan batch_plan/",
            "buckets": "--data train.jsonl --bucket-edges 128,256,512 --token-budget 4096",
            "packs": "--data train.jsonl --pack --pack-max-len 2048",
            "online": f"--online --gym-host localhost --gym-port {server.port} --max-steps 4",
        }
        rate = "--learning-rate 0.01"
        lines = [f"train sft --model model {flags} {rate} --output {name}" for name, flags in ways.items()]
        at_once(lines, cwd=tmp_path)
    for name in ways:
        report = json.loads((tmp_path / name / "summary.json").read_text())
        assert report["last_loss"] < report["first_loss"]
        assert (tmp_path / name / "model").is_dir()


# ---------------------------------------------------------------- batch-size-and-running-speed

#: Run -> batch size, speed, loss summed over the batch, best time (s), mean Q, share of the learner's time in training;
#: those of uni_8 are not told.
RUNS = {
    "uni_5": (2048, 160, 300.96, 24.56, -0.5848, 0.538),
    "uni_6": (8192, 160, 2962.12, 24.77, -2.1154, 0.526),
    "uni_7": (512, 512, 77.72, 24.63, -0.5204, 0.784),
    "uni_8": (128, 768, 52.41, 25.18, -1.1609, 0.804),
    "uni_9": (64, 1024, 29.07, 25.10, -1.0951, 0.821),
}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Return a folder with the document's runs as TensorBoard files, under the names that it gives."""
    for name, (batch, speed, loss, best, value, share) in RUNS.items():
        rising = np.linspace(0, 1, 30)
        tags: dict[str, Any] = {
            "Training/loss": loss * (3 - 2 * rising),
            "alltime_min_ms_hock": 60_000 + (1000 * best - 60_000) * rising,
            "Race/eval_race_time_robust_trained_hock": 60 + (best - 60) * rising,
            "RL/avg_Q_trained_hock": value * (4 - 3 * rising),
            "Performance/learner_percentage_training": np.full(30, share),
            "Performance/transitions_learned_per_second": np.full(30, 1000 * share),
            "Gradients/norm_before_clip_max": [40.0] * 29 + [120.0],
        }
        write_run(tmp_path / "tensorboard" / name, tags, every=100_000, batch_size=batch, running_speed=speed, seed=444)
    return tmp_path / "tensorboard"


def test_running_speed_sets_the_time_of_a_call(tmp_path: Path) -> None:
    """--running-speed X makes each recorded reply take 16 s / X, and is refused next to --latency-ms."""
    flags = "--backend recorded --operators none --forms statement --encoder hash --num-env-steps 64 --num-processes 8 "
    flags += "--num-steps 8 --num-mini-batch 2 --answer-calls 20 --eval-interval 0 --no-evaluate --running-speed 80"
    script = [*TRAIN, *shlex.split(flags)]
    good(run(script, cwd=tmp_path))
    assert 0.2 <= last_metrics(latest(tmp_path))["llm/latency_s"] < 0.5
    assert "running_speed" in one_line_error(run([*script, "--latency-ms", "5"], cwd=tmp_path))


def test_published_experiment(published: Path) -> None:
    """analyze_experiment.py reads the document's metrics; one seed decides nothing, and losses are per sample."""
    command = [ROOT / "scripts" / "analyze_experiment.py", *RUNS]
    assert "race_time[hock]: uni_7 against uni_5" in good(run(command, cwd=published.parent)).stdout
    found = good(run([*command, "--logdir", published, "--json", "-"], cwd=published))
    analysis = json.loads(found.stdout)
    metrics = {metric["name"]: metric for metric in analysis["metrics"]}
    tags = {value["tag"] for metric in metrics.values() for group in metric["groups"] for value in group["values"]}
    assert tags == {
        "Training/loss", "alltime_min_ms_hock", "Race/eval_race_time_robust_trained_hock", "RL/avg_Q_trained_hock",
        "Performance/learner_percentage_training", "Performance/transitions_learned_per_second",
        "Gradients/norm_before_clip_max",
    }  # fmt: skip
    assert {row["verdict"] for metric in metrics.values() for row in metric["comparisons"]} == {"inconclusive"}
    assert [group["mean"] for group in metrics["race_time[hock]"]["groups"]] == pytest.approx(
        [r[3] for r in RUNS.values()]
    )
    losses = dict(zip(RUNS, (group["mean"] for group in metrics["loss"]["groups"]), strict=True))
    assert losses["uni_7"] / losses["uni_5"] == pytest.approx(1.033, abs=0.001)  # "74 % lower" as a sum over the batch
    assert losses["uni_6"] / losses["uni_5"] == pytest.approx(2.46, abs=0.01)
    assert {finding["run"] for finding in analysis["findings"] if finding["rule"] == "above"} == set(RUNS)


def test_points_of_chosen_tags(published: Path) -> None:
    """extract_tensorboard_data.py writes every point of the tags that it is asked for."""
    command = [ROOT / "scripts" / "extract_tensorboard_data.py", "uni_5", "uni_7", "--logdir", published]
    tags = ["Gradients/norm_before_clip_max", "Performance/transitions_learned_per_second"]
    rows = list(csv.DictReader(good(run([*command, "--tag", *tags], cwd=published)).stdout.splitlines()))
    assert len(rows) == 2 * 2 * 30
    assert {(row["run"], row["tag"]) for row in rows} == {(name, tag) for name in ("uni_5", "uni_7") for tag in tags}
    assert max(float(row["value"]) for row in rows if row["tag"] == tags[0]) == 120
    assert rows[29]["step"] == "3000000"
    assert "alltime_min_ms_hock" in good(run(command, cwd=published)).stdout
    assert "'Training/loss'" in one_line_error(run([*command, "--tag", "Training/los"], cwd=published))


def test_copies_of_runs_count_once(tmp_path: Path) -> None:
    """`qm analyze` counts copies of a run once: ten files of two seeds do not make a difference clear."""
    noise = np.random.default_rng(0).normal(0, 0.003, 20)
    verdicts = []
    for seeds in (2, 10):
        for name, finals in (("a", (0.50, 0.52)), ("b", (0.53, 0.55))):
            for file in range(10):
                curve = np.linspace(0.1, finals[file % 2], 20) + noise * (1 + file % seeds)
                write_run(
                    tmp_path / str(seeds) / f"{name}-s{file}", {"rollout/ep_rew_mean": curve}, seed=file, batch=name
                )
        done = good(run([*QM, "analyze", "*", "--logdir", str(seeds), "--json", "-"], cwd=tmp_path))
        analysis = json.loads(done.stdout)
        verdicts.append(analysis["metrics"][0]["comparisons"][0]["verdict"])
        assert any("10 runs, but only 2" in remark for remark in analysis["remarks"]) == (seeds == 2)
    assert verdicts == ["inconclusive", "better"]


#: A trainer whose success is best at batch 512, with noise of a seed.
TRAINER = """
import json, math, sys

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
batch, seed = float(flags["--train-batch-size"]), int(flags["--seed"])
success = 0.7 - 0.03 * (math.log2(batch) - 9) ** 2 + 0.01 * math.sin(7 * seed + batch)
print(json.dumps({"success": success, "steps_per_s": batch}))
"""


def test_sweep_with_an_optimum_at_an_edge(tmp_path: Path) -> None:
    """`qm sweep` says that an optimum lies at the grid's edge, and with --extend goes on to the golden middle."""
    (tmp_path / "train.py").write_text(TRAINER)
    sweep = [*QM, *shlex.split("sweep --grid train_batch_size=32,64,128 --jobs 2")]
    trainer = ["--", sys.executable, "-S", str(tmp_path / "train.py")]
    edge = good(run([*sweep, "--out", "edge", *trainer], cwd=tmp_path)).stdout
    assert json.loads((tmp_path / "edge" / "results.json").read_text())["optimum"]["kind"] == "edge"
    assert "edge" in edge
    middle = good(run([*sweep, "--extend", "4", "--out", "middle", *trainer], cwd=tmp_path)).stdout
    found = json.loads((tmp_path / "middle" / "results.json").read_text())
    assert found["optimum"]["kind"] == "interior"
    assert [row["setting"]["train_batch_size"] for row in found["settings"]][:4] == [32, 64, 128, 256]
    best = re.search(r"golden middle is at train_batch_size about ([\d,]+)", middle)
    assert best is not None
    assert 256 < int(best[1].replace(",", "")) < 1024


def test_sweep_of_batch_and_speed(tmp_path: Path) -> None:
    """`qm sweep` tries the document's batch sizes and speeds together on our IQN, which accepts each command."""
    grid = "--grid train_batch_size=64,512,2048,8192 --grid running_speed=160,512,1024 --seeds 1 --dry-run"
    trainer = f"-- python train_query_mutator.py --algo iqn --dataset {write_questions(tmp_path / 'questions.jsonl')}"
    [done] = at_once([f"sweep {grid} --out s {trainer}"], cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert len(lines) == 12
    chosen = [line.partition("train_query_mutator.py ")[2] for line in (lines[0], lines[-1])]
    assert "--train-batch-size 64 --running-speed 160 --seed 1" in chosen[0]
    assert "--train-batch-size 8192 --running-speed 1024 --seed 1" in chosen[1]
    at_once([f"{line} --dry-run --backend recorded --encoder hash" for line in chosen], cwd=tmp_path, program=TRAIN)


# ---------------------------------------------------------------- batch-size-and-num-workers

MIB = 2**20


def size(words: str, *, cwd: Path) -> dict[str, Any]:
    """Return the JSON of `qm size`."""
    [done] = at_once([f"size {words} --json -"], cwd=cwd)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_size_of_the_documents_policies(tmp_path: Path) -> None:
    """`qm size` is within 1 % of LeRobot's ACT and SmolVLA as measured, and names the batch that 12 GB hold."""
    act = size("act --cameras 3 --resolution 224x224 --batch 8 --device cuda", cwd=tmp_path)
    assert act["estimates"][0]["peak"] / MIB == pytest.approx(1535, rel=0.01)
    [smolvla] = at_once(["size smolvla --vram 12227MiB --batch 8 16"], cwd=tmp_path)
    told = {
        int(batch): float(peak.replace(",", ""))
        for batch, peak in re.findall(r"as it is +(\d+) +([\d,]+)", smolvla.stdout)
    }
    assert told == {8: pytest.approx(4289, rel=0.01), 16: pytest.approx(6099, rel=0.01)}
    assert "largest batch on 12227MiB (as it is): 37" in smolvla.stdout
    line = next(line for line in smolvla.stdout.splitlines() if line.startswith("lerobot-train "))
    options = {word.partition("=")[0] for word in shlex.split(line)[1:]}
    assert options <= {"--dataset.repo_id", "--policy.type", "--policy.push_to_hub", "--batch_size", "--num_workers"}


@pytest.mark.slow
def test_size_of_published_figures(tmp_path: Path) -> None:
    """`qm size` is within 1 % of ACT as measured, at two batches and cameras, and within 7 % of a V100's bert-large."""
    for camera, peaks in (("", (2334, 4071)), ("--cameras 3 --resolution 224x224", (1535, 2472))):
        found = size(f"act {camera} --batch 8 16 --device cpu --no-onednn", cwd=tmp_path)
        assert [row["peak"] / MIB for row in found["estimates"]] == pytest.approx(peaks, rel=0.01)
    bert = size("bert-large --tokens 512 --batch 4 --device cuda", cwd=tmp_path)
    assert bert["estimates"][0]["reserved"] / MIB + 1343 == pytest.approx(14949, rel=0.07)


def test_workers_from_a_log(tmp_path: Path) -> None:
    """`qm size workers` says from a training log whether steps wait for data, and how many workers they need."""
    row = "INFO step:{} smpl:2K ep:3 epch:0.10 loss:1.21 grdn:9.3 lr:1.0e-05 updt_s:0.100 data_s:{}\n"
    for name, wait in (("starved", "0.100"), ("fed", "0.002")):
        (tmp_path / name).write_text("".join(row.format(200 * n, wait) for n in (1, 2)))
    lines = [f"size workers --from-logs {name} --num-workers 4" for name in ("starved", "fed")]
    starved, fed = (done.stdout for done in at_once(lines, cwd=tmp_path))
    assert "about 10 workers instead of 4" in starved
    assert "the workers are enough" in fed
