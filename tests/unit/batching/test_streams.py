"""Rows of every shape become tokens; offline streams in both forms give the same samples in a fixed order."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from query_mutator.batching.files import BatchFileError
from query_mutator.batching.generation.jsonl import JsonlIndex, JsonlSamples
from query_mutator.batching.generation.rows import RowTokenizer, tokenizer_fingerprint
from query_mutator.batching.samples.schema import (
    Sample,
    SampleMeta,
    compute_dataset_fingerprint,
    load_samples,
    save_samples,
)
from query_mutator.batching.streaming.offline_stream import AsyncOfflineDatasetStream, OfflineDatasetStream
from query_mutator.batching.streaming.protocols import AsyncSampleStream, SampleStream
from query_mutator.batching.streaming.types import (
    SampleSource,
    StreamConfig,
    StreamMetrics,
    StreamSample,
    StreamState,
)
from query_mutator.batching.training.data import read_tokens
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


def test_a_plain_tokenizer_gets_its_start_and_end_once() -> None:
    tokens = RowTokenizer(Plain()).tokens({"instruction": "x", "response": "yz"})
    ids = tokens.input_ids.tolist()
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert ids[-3:] == [10 + ord("y"), 10 + ord("z"), 9]
    assert tokens.loss_mask.tolist()[-4:] == [0, 1, 1, 1]


def test_messages_without_a_template_learn_the_assistant(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    tokens = RowTokenizer(tokenizer).tokens({"messages": messages})
    assert tokens.input_ids[tokens.loss_mask == 1].tolist() == [3, 3]


def test_messages_with_a_template_learn_assistant_texts_and_their_ends() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    tokens = RowTokenizer(Chat()).tokens({"messages": messages})
    text = "".join(chr(one - 10) for one in tokens.input_ids.tolist()[1:-1])
    assert text == "<u>q.<a>r."
    learned = "".join(chr(one - 10) for one in tokens.input_ids[tokens.loss_mask == 1].tolist()[:-1])
    assert learned == "r."


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({}, "no text"),
        ({"question": "x"}, "its keys are question"),
        ({"text": ""}, "no text"),
        ({"instruction": "a", "response": ""}, "not empty"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no token has a loss"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"input_ids": []}, "at least one"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "loss_mask"),
        ({"input_ids": [1.5]}, "token id"),
        ({"input_ids": [-1]}, "range"),
    ],
)
def test_an_invalid_row_is_an_error_with_the_reason(tokenizer: Tokenizer, row: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RowTokenizer(tokenizer).tokens(row)


def test_text_without_a_tokenizer_is_an_error() -> None:
    with pytest.raises(ValueError, match="give a tokenizer"):
        RowTokenizer(None).tokens({"text": "a"})


def test_the_fingerprint_follows_the_vocabulary(tokenizer: Tokenizer) -> None:
    before = tokenizer_fingerprint(tokenizer)
    assert before == tokenizer_fingerprint(Tokenizer.from_str(tokenizer.to_str()))
    tokenizer.add_tokens(["new"])
    assert tokenizer_fingerprint(tokenizer) != before
    assert tokenizer_fingerprint(Plain()) != tokenizer_fingerprint(Chat())


def test_samples_of_a_file_are_read_when_asked_for(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "t.jsonl", [{"id": 0, "text": "a"}, "\n", {"text": "b c"}, {"id": "x", "nothing": 1}])
    samples = JsonlSamples(path, tokenizer, skip_bad=True)
    assert list(samples) == ["0", "t_000001", "x"]
    assert samples["t_000001"].input_ids.tolist() == [1, 3, 4]
    assert samples.lengths() == {"0": 2, "t_000001": 3}
    assert samples.bad_rows == 1
    assert "t.jsonl:4" in samples.first_errors[0]
    with pytest.raises(DatasetError, match=r"t\.jsonl:4"):
        JsonlSamples(path, tokenizer).lengths()


def test_an_id_that_comes_twice_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "t.jsonl", [{"id": 0, "text": "a"}, {"id": "0", "text": "b"}])
    with pytest.raises(DatasetError, match=r"t\.jsonl:2.*'0' occurs twice"):
        JsonlSamples(path, tokenizer)


# --- samples and metrics ----------------------------------------------------------------------------------------------


def test_a_sample_is_frozen_and_checked() -> None:
    fields: dict[str, Any] = {"sample_id": "a", "dataset_id": "d", "source": "offline"}
    sample = StreamSample(input_ids=(1, 2), loss_mask=(0, 1), **fields)
    with pytest.raises(ValidationError):
        sample.reward = 1.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        sample.input_ids[0] = 5
    for bad in ({"input_ids": []}, {"loss_mask": [1]}, {"loss_mask": [0, 2]}, {"difficulty": 1.5}, {"priority": -1}):
        with pytest.raises(ValidationError):
            StreamSample(**{"input_ids": [1, 2], "loss_mask": [0, 1], **fields, **bad})


def test_a_replay_is_a_marked_copy() -> None:
    sample = StreamSample(input_ids=[1], loss_mask=[1], sample_id="a", dataset_id="d", source="offline")
    twice = sample.with_replay().with_replay()
    assert (twice.replay_count, twice.source, twice.is_replay) == (2, SampleSource.REPLAY, True)
    assert (sample.replay_count, sample.is_replay) == (0, False)
    assert twice == sample.model_copy(update={"replay_count": 2, "source": SampleSource.REPLAY})
    assert twice.model_dump_json() == StreamSample.model_validate_json(twice.model_dump_json()).model_dump_json()


def test_metrics_are_means_of_what_carries_the_value() -> None:
    metrics = StreamMetrics()
    for length, difficulty in [(2, 0.5), (4, None)]:
        metrics = metrics.record_sample(
            StreamSample(
                input_ids=range(length),
                loss_mask=[1] * length,
                sample_id="a",
                dataset_id="d",
                source="gym",
                difficulty=difficulty,
            )
        )
    metrics = metrics.record_filtered().record_episode(success=True).record_episode(success=False).record_time(0.5)
    found = metrics.to_dict()
    assert (found["mean_length"], found["mean_difficulty"], found["mean_reward"]) == (3.0, 0.5, 0.0)
    assert (found["min_length_seen"], found["max_length_seen"], found["samples_per_second"]) == (2, 4, 4.0)
    assert (found["success_rate"], found["filter_rate"]) == (0.5, pytest.approx(1 / 3))


def test_a_stream_config_checks_itself() -> None:
    with pytest.raises(ValidationError, match="above max_length"):
        StreamConfig(min_length=9, max_length=3)


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


def test_ids_count_rows_and_not_lines(data: Path) -> None:
    samples = list(OfflineDatasetStream(data))
    assert [sample.sample_id for sample in samples[:4]] == ["0", "train_000001", "2", "train_000003"]
    assert samples[4].reward == 2.0
    assert samples[0].dataset_id == "train"


def test_an_interrupted_iteration_resumes(data: Path) -> None:
    stream = OfflineDatasetStream(data)
    first = [next(iter(stream)).sample_id for _ in range(3)]
    rest = [sample.sample_id for sample in stream]
    assert len(first + rest) == len(set(first + rest)) == 10
    assert len(list(stream)) == 10


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


def test_async_stream_as_context_and_after_reset(data: Path) -> None:
    async def run() -> tuple[int, int, StreamState]:
        async with AsyncOfflineDatasetStream(data) as stream:
            first = len([sample async for sample in stream])
            await stream.reset()
            state = stream.state
            return first, await stream.count_samples(), state

    assert asyncio.run(run()) == (10, 10, StreamState.IDLE)


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
    path.write_bytes(path.read_bytes().replace(b"[1,2,3]", b"[1,4,3]"))
    for read in (load_samples, JsonlIndex, lambda path: compute_dataset_fingerprint(path, "t")):
        with pytest.raises(BatchFileError, match=r"does not match samples\.jsonl\.sha256"):
            read(path)


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
