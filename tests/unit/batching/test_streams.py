"""Samples of rows in a stream, windows of plans over what was kept, and buffers that draw and evict."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from query_mutator.batching.generation.rows import JsonlSamples, RowTokenizer, tokenizer_fingerprint
from query_mutator.batching.samples import (
    Sample,
    SampleMeta,
    compute_dataset_fingerprint,
    load_samples,
    save_samples,
)
from query_mutator.batching.streaming.offline_stream import AsyncOfflineDatasetStream, OfflineDatasetStream
from query_mutator.batching.streaming.protocols import AsyncSampleStream, SampleStream
from query_mutator.batching.streaming.replay_buffer import BufferEvictionPolicy, ReplayBuffer, ReplayBufferConfig
from query_mutator.batching.streaming.rolling_window import RollingBatchPlanWindow, WindowConfig
from query_mutator.batching.streaming.types import (
    EpisodeStatus,
    SampleSource,
    StreamMetrics,
    StreamSample,
    StreamState,
)
from query_mutator.batching.training.sources import read_tokens
from query_mutator.errors import DatasetError, UsageError

WORDS = ["<unk>", "<s>", "a", "b", "c", "d", "Instruction", "Response", "User", "Assistant", "#", ":"]


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Words to their place in WORDS, with `<s>` before every text."""
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


class Plain:
    """A tokenizer that has `encode` and `eos_token_id` alone, and puts a 1 before every text."""

    eos_token_id = 9

    def encode(self, text: str) -> list[int]:
        return [1] + [10 + ord(letter) for letter in text if letter != "\n"]


class Chat(Plain):
    """With a chat template, as those of the hub."""

    chat_template = "yes"

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        text = "".join(f"<{item['role'][0]}>{item['content']}." for item in messages)
        return text + ("<a>" if add_generation_prompt else "")


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Ten rows of 1..10 tokens with blank lines among them; only every other row has an id."""
    rows: list[Any] = []
    for number in range(10):
        row: dict[str, Any] = {"input_ids": list(range(number + 1)), "reward": number / 2, "difficulty": number / 10}
        rows += [{"id": number, **row} if number % 2 == 0 else row, "\n"]
    return write(tmp_path / "train.jsonl", rows)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_text_is_learned_whole_with_special_tokens_once(tokenizer: Tokenizer) -> None:
    for key in ("text", "content", "input"):
        row = RowTokenizer(tokenizer).tokens({key: "a b"})
        assert row.input_ids.tolist() == [1, 2, 3]
        assert row.loss_mask.tolist() == [0, 1, 1]
    assert row.input_ids.dtype == np.int32
    assert row.loss_mask.dtype == np.uint8


@pytest.mark.parametrize("keys", [("instruction", "response"), ("instruction", "output"), ("prompt", "completion")])
def test_only_the_answer_of_a_pair_is_learned(tokenizer: Tokenizer, keys: tuple[str, str]) -> None:
    row = {keys[0]: "a", keys[1]: "c d"}
    tokens = RowTokenizer(tokenizer).tokens(row)
    assert tokens.input_ids[tokens.loss_mask == 1].tolist() == [4, 5]
    assert 2 in tokens.input_ids
    assert tokens.input_ids.tolist().count(1) == 1
    everything = RowTokenizer(tokenizer, mask_prompt=False).tokens(row)
    assert everything.loss_mask.tolist() == [0] + [1] * (everything.length - 1)


def test_messages_learn_the_assistant_with_a_template_and_without(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokens = RowTokenizer(tokenizer).tokens({"messages": messages * 2})
    assert tokens.input_ids[tokens.loss_mask == 1].tolist() == [3, 3]
    tokens = RowTokenizer(Chat()).tokens({"messages": messages})
    for ids, text in ((tokens.input_ids[1:-1], "<u>a.<a>b."), (tokens.input_ids[tokens.loss_mask == 1][:-1], "b.")):
        assert "".join(chr(one - 10) for one in ids.tolist()) == text


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({}, "no text"),
        ({"instruction": "a", "response": ""}, "not empty"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no token has a loss"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"input_ids": []}, "at least one"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask"),
        ({"input_ids": [1.5]}, "token id"),
        ({"input_ids": [-1]}, "range"),
    ],
)
def test_an_invalid_row_is_an_error_with_the_reason(tokenizer: Tokenizer, row: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RowTokenizer(tokenizer).tokens(row)


def test_text_without_a_tokenizer_and_an_id_that_comes_twice_are_errors(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="give a tokenizer"):
        RowTokenizer(None).tokens({"text": "a"})
    path = write(tmp_path / "t.jsonl", [{"id": 0, "text": "a"}, {"id": "0", "text": "b"}])
    with pytest.raises(DatasetError, match=r"t\.jsonl:2.*'0' occurs twice"):
        JsonlSamples(path, tokenizer)


def test_the_fingerprint_follows_the_vocabulary(tokenizer: Tokenizer) -> None:
    before = tokenizer_fingerprint(tokenizer)
    assert before == tokenizer_fingerprint(Tokenizer.from_str(tokenizer.to_str()))
    tokenizer.add_tokens(["new"])
    assert tokenizer_fingerprint(tokenizer) != before
    assert tokenizer_fingerprint(Plain()) != tokenizer_fingerprint(Chat())


# --- samples and metrics ----------------------------------------------------------------------------------------------


def test_metrics_are_means_of_what_carries_the_value() -> None:
    metrics = StreamMetrics().record_sample(stored("a", length=2, difficulty=0.5)).record_sample(stored("b", length=4))
    metrics = metrics.record_filtered().record_episode(success=True).record_episode(success=False).record_time(0.5)
    found = metrics.to_dict()
    assert (found["mean_length"], found["mean_difficulty"], found["mean_reward"]) == (3.0, 0.5, 0.0)
    assert (found["min_length_seen"], found["max_length_seen"], found["samples_per_second"]) == (2, 4, 4.0)
    assert (found["success_rate"], found["filter_rate"]) == (0.5, pytest.approx(1 / 3))


# --- offline streams --------------------------------------------------------------------------------------------------


def collect(stream: AsyncOfflineDatasetStream) -> list[StreamSample]:
    async def run() -> list[StreamSample]:
        return [sample async for sample in stream]

    return asyncio.run(run())


def without_time(samples: list[StreamSample]) -> list[dict[str, Any]]:
    return [sample.model_dump(exclude={"timestamp"}) for sample in samples]


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 3}, {"min_length": 3, "max_length": 7}])
def test_both_forms_give_the_same_samples_and_account(data: Path, options: dict[str, Any]) -> None:
    sync, other = OfflineDatasetStream(data, **options), AsyncOfflineDatasetStream(data, **options)
    assert without_time(list(sync)) == without_time(collect(other))
    account = [stream.metrics.model_dump(exclude={"total_time_seconds"}) for stream in (sync, other)]
    assert account[0] == account[1]
    assert sync.state == other.state == StreamState.EXHAUSTED
    assert isinstance(sync, SampleStream)
    assert isinstance(other, AsyncSampleStream)


def test_ids_count_rows_and_an_interrupted_iteration_resumes(data: Path) -> None:
    stream = OfflineDatasetStream(data)
    first = [next(iter(stream)) for _ in range(3)]
    samples = [*first, *stream]
    assert [sample.sample_id for sample in samples[:4]] == ["0", "train_000001", "2", "train_000003"]
    assert (samples[4].reward, samples[0].dataset_id) == (2.0, "train")
    assert len({sample.sample_id for sample in samples}) == len(samples) == len(list(stream)) == 10


def test_the_order_is_of_seed_and_epoch_alone(data: Path) -> None:
    def order(stream: OfflineDatasetStream) -> list[str]:
        return [sample.sample_id for sample in stream]

    stream = OfflineDatasetStream(data, shuffle=True, seed=1)
    first = order(stream)
    stream.reset()
    assert stream.metrics.samples_produced == 0
    assert order(stream) == first
    stream.set_epoch(1)
    second = order(stream)
    assert second != first
    assert sorted(second) == sorted(first)
    fresh = OfflineDatasetStream(data, shuffle=True, seed=1)
    fresh.set_epoch(1)
    assert order(fresh) == second


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_resumes_where_it_was(data: Path, shuffle: bool) -> None:
    stream = OfflineDatasetStream(data, shuffle=shuffle)
    stream.set_epoch(2)
    walk = iter(stream)
    for _ in range(4):
        next(walk)
    state = json.loads(json.dumps(stream.state_dict()))
    twin = OfflineDatasetStream(data, shuffle=shuffle)
    twin.load_state_dict(state)
    assert without_time(list(twin)) == without_time(list(walk))
    with pytest.raises(UsageError, match="seed=42"):
        OfflineDatasetStream(data, shuffle=shuffle, seed=7).load_state_dict(state)


@pytest.mark.parametrize("row", [{"difficulty": "odd"}, {"difficulty": 7}, {"loss_mask": [1]}, {"reward": "much"}])
def test_a_field_that_cannot_be_is_an_error_with_its_line(tmp_path: Path, row: dict[str, Any]) -> None:
    path = write(tmp_path / "t.jsonl", [{"input_ids": [1, 2], **row}])
    with pytest.raises(DatasetError, match=r"t\.jsonl:1"):
        list(OfflineDatasetStream(path))


def test_looking_in_does_not_move_the_stream(data: Path) -> None:
    stream = OfflineDatasetStream(data, min_length=2, keep=lambda sample: sample.length != 5)
    assert stream.count_samples() == 10
    assert [sample.length for sample in stream.peek(2)] == [2, 3]
    assert sorted(stream.get_length_distribution().values()) == [2, 3, 4, 6, 7, 8, 9, 10]
    assert stream.metrics.samples_produced == 0
    assert len(list(stream)) == 8
    assert stream.metrics.samples_filtered == 2


def test_saved_samples_are_read_by_every_loader(tmp_path: Path) -> None:
    samples = [
        Sample(input_ids=[1, number, 3], loss_mask=[0, 1, 1], meta=SampleMeta.create(f"id-{number}", "d"))
        for number in range(5)
    ]
    path = tmp_path / "samples.jsonl"
    save_samples(samples, path)
    assert load_samples(path) == samples
    stored = JsonlSamples(path, None)
    assert {name: row.input_ids.tolist() for name, row in stored.tokenized()} == {
        one.meta.sample_id: one.input_ids.tolist() for one in samples
    }
    streamed = list(OfflineDatasetStream(path))
    assert [(one.sample_id, one.loss_mask.tolist()) for one in streamed] == [
        (one.meta.sample_id, [0, 1, 1]) for one in samples
    ]
    assert compute_dataset_fingerprint(path, "t").num_samples == 5


#: Rows that no loader can turn into tokens, each for another reason.
BAD_ROWS = (
    "{not json", "[1]", '{"text": "\\ud800"}', '{"id": "\\udfff", "text": "x"}', '{"input_ids": null}',
    '{"input_ids": 7}', '{"input_ids": [[1], [2, 3]]}', '{"input_ids": ["a"]}', '{"input_ids": [1], "loss_mask": null}',
    '{"input_ids": [99999999999]}', '{"text": null}', '{"text": NaN}', '{"messages": "hi"}', '{"messages": [7]}',
    '{"instruction": 1, "response": 2}', '{"id": {"a": 1}, "text": "x"}', '{"id": true, "text": "x"}', "[" * 200_000,
    '{"text": ' + "[" * 500 + "]" * 500 + "}", "\ufeff{", "null",
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD_ROWS)))
def test_a_bad_row_is_named_or_skipped_by_every_loader(number: int, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "one", "text": "a b"}\n' + BAD_ROWS[number] + '\n{"id": "two", "text": "b c"}\n')
    where = r"rows\.jsonl:2: "
    with pytest.raises(DatasetError, match=where):
        dict(JsonlSamples(path, tokenizer).tokenized())
    with pytest.raises(DatasetError, match=where):
        list(OfflineDatasetStream(path, tokenizer=tokenizer))
    with pytest.raises(DatasetError, match=where):
        read_tokens(str(path), tokenizer, mask_prompt=True)
    samples = JsonlSamples(path, tokenizer, skip_bad=True)
    assert [name for name, _ in samples.tokenized()] == ["one", "two"]
    assert samples.bad_rows == 1
    stream = OfflineDatasetStream(path, tokenizer=tokenizer, skip_bad=True)
    assert [sample.sample_id for sample in stream] == ["one", "two"]
    assert stream.metrics.samples_errored == 1
    data = read_tokens(str(path), tokenizer, mask_prompt=True, skip_bad=True)
    assert (list(data.rows), data.bad_rows) == (["one", "two"], 1)


WHAT = st.sampled_from([*["add"] * 9, *["update"] * 4, "clear"])  # mostly full, or nothing would be evicted


def make(number: int, length: int | None = None) -> StreamSample:
    return stored(f"s{number:04d}", length=10 + number % 20 if length is None else length)


def window_over(count: int, **fields: object) -> RollingBatchPlanWindow:
    settings = {"min_samples": 10, "bucket_edges": (16, 32), "overflow_max": 64, "token_budget": 128, **fields}
    buffer = ReplayBuffer()
    buffer.add_batch(make(number) for number in range(count))
    return RollingBatchPlanWindow(buffer, WindowConfig(**settings))


def drain(window: RollingBatchPlanWindow) -> list[str]:
    return [name for microbatch in window.iter_current() for name in microbatch.samples]


def test_no_window_is_larger_than_asked_and_what_waits_comes_next() -> None:
    window = window_over(100, window_microbatches=3, overlap_fraction=0.0, min_samples=1)
    seen: list[str] = []
    while len(seen) < 100:
        state = window.build_next_window_sync()
        assert state.plan_microbatches <= 3
        assert state.repeated_samples == 0
        seen += drain(window)
    assert len(seen) == len(set(seen)) == 100


def test_the_overlap_is_the_share_of_samples_seen_before() -> None:
    window = window_over(90, overlap_fraction=0.25)
    window.build_next_window_sync()
    window.buffer.add_batch(make(number) for number in range(200, 230))
    state = window.build_next_window_sync()
    assert (state.fresh_samples, state.repeated_samples) == (30, 10)
    names = drain(window)
    assert sum(name >= "s0200" for name in names) == 30
    assert len(names) == 40


def test_few_new_samples_are_filled_up_to_the_minimum() -> None:
    window = window_over(50, overlap_fraction=0.0, min_samples=20)
    window.build_next_window_sync()
    window.buffer.add(make(99))
    state = window.build_next_window_sync()
    assert (state.fresh_samples, state.repeated_samples) == (1, 19)
    state = window.build_next_window_sync()
    assert (state.fresh_samples, state.repeated_samples) == (0, 51)


def test_a_window_made_meanwhile_ends_the_iteration_over_the_old_one() -> None:
    window = window_over(9)
    assert not window.can_build_window
    assert not window.should_build_next
    with pytest.raises(UsageError, match="holds 9 samples; a window needs 10"):
        window.build_next_window_sync()
    window.buffer.add_batch(make(number) for number in range(9, 100))
    window.build_next_window_sync()
    walk = window.iter_current()
    next(walk)
    remaining = window.build_next_window_sync().plan_microbatches
    assert next(walk, None) is None
    assert window.get_remaining_microbatches() == remaining


@pytest.mark.parametrize(("policy", "tokens"), [("drop", 0), ("truncate", 64)])
def test_samples_that_fit_no_batch_are_counted_and_cut(policy: str, tokens: int) -> None:
    window = window_over(10, overlong=policy)
    window.buffer.add(make(500, length=100))
    state = window.build_next_window_sync()
    assert state.overlong_samples == 1
    found = [sample for _, samples in window.iter_current_with_samples() for sample in samples]
    assert sum(sample.length for sample in found if sample.sample_id == "s0500") == tokens
    assert max(sample.length for sample in found) <= 64
    window.buffer.add(make(501))
    assert window.build_next_window_sync().fresh_samples == 1


def test_a_restored_window_resumes_with_the_same_microbatches() -> None:
    window = window_over(100, window_microbatches=8)
    window.build_next_window_sync()
    next(window.iter_current())
    data = json.loads(json.dumps(window.to_dict()))
    buffer = ReplayBuffer.from_dict(json.loads(json.dumps(window.buffer.to_dict())))
    twin = RollingBatchPlanWindow.from_dict(data, buffer)
    assert twin.has_window
    assert twin.get_remaining_microbatches() == window.get_remaining_microbatches()
    assert drain(twin) == drain(window)
    assert twin.build_next_window_sync().plan_fingerprint == window.build_next_window_sync().plan_fingerprint
    data["samples"]["s0000"]["input_ids"][0] += 1
    with pytest.raises(UsageError, match="edited"):
        RollingBatchPlanWindow.from_dict(data, buffer)
    window.discard_current()
    assert drain(window) == []
    assert RollingBatchPlanWindow.from_dict(window.to_dict(), window.buffer).current_state is None


def stored(name: str, *, length: int = 3, **fields: object) -> StreamSample:
    return StreamSample(
        input_ids=range(length), loss_mask=[1] * length, sample_id=name, dataset_id="d", source="gym", **fields
    )


def filled(count: int, **settings: object) -> ReplayBuffer:
    buffer = ReplayBuffer(ReplayBufferConfig(**settings))
    for number in range(count):
        buffer.add(stored(f"s{number}"), priority=float(number % 7))
    return buffer


def names(samples: list[StreamSample]) -> list[str]:
    return [sample.sample_id for sample in samples]


def test_random_evicts_any_with_the_same_chance() -> None:
    left: Counter[str] = Counter()
    for seed in range(400):
        buffer = filled(5, max_size=4, eviction_policy="random", seed=seed)
        left.update({f"s{number}" for number in range(4)} - set(names(buffer.get_all())))
    assert set(left) == {"s0", "s1", "s2", "s3"}
    assert min(left.values()) > 60  # 100 expected of each


def test_draws_follow_priority_to_the_power_alpha() -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(priority_alpha=0.5))
    buffer.add_batch([stored("a"), stored("b"), stored("never")], [1.0, 9.0, 0.0])
    drawn = Counter(names(buffer.sample(20_000)))
    assert drawn["never"] == 0
    assert drawn["b"] / drawn["a"] == pytest.approx(3.0, rel=0.1)
    for name in ("a", "b"):
        buffer.update_priority(name, 0.0)
    assert set(names(buffer.sample(100))) == {"a", "b", "never"}  # all are zero


def test_drawn_samples_are_replays_once_there_are_enough() -> None:
    buffer = filled(2, min_samples_before_sampling=3)
    assert not buffer.can_sample
    for draw in (buffer.sample, buffer.sample_uniform):
        with pytest.raises(UsageError, match="holds 2 samples"):
            draw(1)
    buffer = ReplayBuffer()
    buffer.add(stored("a"))
    (drawn,) = buffer.sample(1)
    assert drawn == stored("a").with_replay().model_copy(update={"timestamp": drawn.timestamp})
    assert (drawn.replay_count, drawn.source) == (1, SampleSource.REPLAY)
    assert buffer.get_all()[0].replay_count == 0
    assert sorted(names(filled(6).sample_uniform(10))) == [f"s{number}" for number in range(6)]


def test_samples_of_one_id_are_not_merged() -> None:
    buffer = ReplayBuffer()
    buffer.add_batch([stored("a", length=1), stored("a#2", length=2), stored("a", length=3), stored("a", length=4)])
    snapshot = buffer.snapshot()
    assert snapshot.get_lengths() == {"a": 1, "a#2": 2, "a#3": 3, "a#4": 4}
    assert buffer.update_priority("a", 5.0)
    assert buffer.to_dict()["priorities"] == [5.0, 1.0, 5.0, 5.0]


def test_means_are_of_what_is_held() -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=2))
    for name, difficulty, success in [("a", 1.0, False), ("b", 0.25, True), ("c", None, None)]:
        buffer.add(stored(name, difficulty=difficulty, success=success, reward=None if success is None else 2.0))
    assert buffer.mean_difficulty == 0.25
    assert buffer.success_rate == 1.0
    assert buffer.mean_reward == 2.0
    assert (buffer.total_added, buffer.total_evicted) == (3, 1)
    untracked = ReplayBuffer(ReplayBufferConfig(max_size=1, track_difficulty=False, track_success=False))
    untracked.add_batch([stored("a", difficulty=0.5, success=True), stored("b", difficulty=0.5)])
    assert (untracked.mean_difficulty, untracked.success_rate) == (0.0, 0.0)


def test_filters_and_bounds_of_difficulty() -> None:
    buffer = ReplayBuffer()
    buffer.add_batch([stored("easy", difficulty=0.1, success=True), stored("hard", difficulty=0.9), stored("none")])
    assert names(buffer.filter_by_difficulty(0.5, 1.0)) == ["hard"]
    assert names(buffer.filter_by_success(True)) == ["easy"]
    assert names(buffer.filter_by_source(SampleSource.GYM)) == ["easy", "hard", "none"]
    assert set(names(buffer.sample(20, min_difficulty=0.5))) == {"hard"}
    with pytest.raises(UsageError, match="difficulty"):
        buffer.sample(1, min_difficulty=0.95)


def test_priorities_by_reward_move_towards_reward_plus_one() -> None:
    buffer = ReplayBuffer()
    for priority in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="priority"):
            buffer.add(stored("a"), priority=priority)
    buffer.add_batch([stored("a", reward=1.0), stored("b", reward=-3.0), stored("c")], [1.0, 1.0, 1.0])
    buffer.update_priorities_by_reward(alpha=0.5)
    assert buffer.to_dict()["priorities"] == [1.5, 0.5, 1.0]
    other = ReplayBuffer(ReplayBufferConfig(default_priority=4.0))
    other.add_batch([stored("a"), stored("b", priority=2.0)])
    assert other.to_dict()["priorities"] == [4.0, 2.0]


@pytest.mark.parametrize("policy", list(BufferEvictionPolicy))
def test_a_restored_buffer_continues_as_the_first_would(tmp_path: Path, policy: str) -> None:
    buffer = filled(30, max_size=20, eviction_policy=policy)
    buffer.add(
        stored("full", episode_id="e", episode_status=EpisodeStatus.SUCCESS, step_index=1, total_steps=2, success=True),
        priority=6.5,
    )
    buffer.add(stored("packed", segment_ids=[0, 0, 1], reward=-0.5, difficulty=0.25, priority=2.5))
    buffer.sample(5)
    buffer.update_priority("s25", 0.5)
    buffer.save(tmp_path / "buffer.json")
    twin = ReplayBuffer.load(tmp_path / "buffer.json")
    content = bytearray((tmp_path / "buffer.json").read_bytes())
    content[-6] ^= 1
    (tmp_path / "damaged.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"damaged\.json"):
        ReplayBuffer.load(tmp_path / "damaged.json")
    assert twin.get_all() == buffer.get_all()
    for number in range(40):
        assert names(twin.sample(3)) == names(buffer.sample(3))
        for one in (twin, buffer):
            one.add(stored(f"later{number}"), priority=number % 5)
        assert names(twin.get_all()) == names(buffer.get_all())
    assert (twin.total_added, twin.total_evicted) == (buffer.total_added, buffer.total_evicted)


@settings(max_examples=100)
@given(
    policy=st.sampled_from([BufferEvictionPolicy.FIFO, BufferEvictionPolicy.PRIORITY]),
    steps=st.lists(st.tuples(WHAT, st.integers(0, 9), st.integers(0, 3)), min_size=20, max_size=60),
)
def test_evictions_match_a_plain_list(policy: BufferEvictionPolicy, steps: list[tuple[str, int, int]]) -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=5, eviction_policy=policy))
    plain: list[list[object]] = []  # [name, priority], oldest first
    for what, number, priority in steps:
        name = f"s{number}"
        if what == "add":
            if len(plain) == 5:
                plain.remove(min(plain, key=lambda one: one[1]) if policy == "priority" else plain[0])
            plain.append([name, float(priority)])
            buffer.add(stored(name), priority=float(priority))
        elif what == "clear":
            plain = []
            buffer.clear()
        else:
            for one in plain:
                one[1] = float(priority) if one[0] == name else one[1]
            buffer.update_priority(name, float(priority))
        assert names(buffer.get_all()) == [one[0] for one in plain]
        by_name = dict(zip(buffer.snapshot().keys, [one[1] for one in plain], strict=True))
        assert len(by_name) == buffer.size
