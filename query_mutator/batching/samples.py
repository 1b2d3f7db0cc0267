"""Training samples as token ids, files of them, and the fingerprint of a data set."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator

from query_mutator.batching.files import json_bytes, sha256_of
from query_mutator.batching.generation.rows import JsonlIndex, parse_row, row_errors
from query_mutator.batching.records import (
    Fingerprint,
    Int32Array,
    Record,
    SampleValidationError,
    TokenRecord,
    UInt8Array,
    check_row,
)
from query_mutator.batching.sync import to_async
from query_mutator.errors import DatasetError
from query_mutator.files import atomic_write

__all__ = [
    "DatasetFingerprint", "DatasetSource", "DifficultyLevel", "PreferenceSample", "Sample", "SampleMeta", "SampleType",
    "SampleValidationError", "compute_dataset_fingerprint", "load_samples", "load_samples_async", "save_samples",
    "save_samples_async",
]  # fmt: skip


class SampleType(StrEnum):
    """Training method that a sample is for."""

    SFT = "sft"
    DPO = "dpo"
    PRETRAIN = "pretrain"
    RL = "rl"
    GRPO = "grpo"
    PPO = "ppo"


class DatasetSource(StrEnum):
    """Origin of a sample."""

    LOCAL = "local"
    HUGGINGFACE = "huggingface"
    GYM = "gym"
    SYNTHETIC = "synthetic"
    REMOTE = "remote"


class DifficultyLevel(StrEnum):
    """Difficulty of a sample, as a word."""

    TRIVIAL = "trivial"
    EASY = "easy"
    MEDIUM = "medium"
    HARD = "hard"
    EXPERT = "expert"


class SampleMeta(Record):
    """Everything known about a sample except its tokens."""

    sample_id: str = Field(min_length=1)
    dataset_id: str
    episode_id: str | None = None
    source: DatasetSource = DatasetSource.LOCAL
    difficulty: DifficultyLevel | None = None
    difficulty_score: float | None = Field(default=None, ge=0.0, le=1.0)
    reward: float | None = None
    success: bool | None = None
    original_index: int | None = Field(default=None, ge=0)
    split: str | None = None

    @classmethod
    def create(cls, sample_id: str, dataset_id: str, **fields: Any) -> Self:
        """Return a record from its two required fields and any others."""
        return cls(sample_id=sample_id, dataset_id=dataset_id, **fields)


class Sample(TokenRecord):
    """One sequence: `input_ids` int32 [L], `loss_mask` uint8 [L] (1 = has a loss), `segment_ids` int32 [L] or None."""

    segment_ids: Int32Array | None = None
    meta: SampleMeta
    sample_type: SampleType = SampleType.SFT

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_row(self.input_ids, self.loss_mask, f"sample {self.meta.sample_id!r}", self.segment_ids)
        if self.segment_ids is not None and np.any(np.diff(self.segment_ids) < 0):
            raise SampleValidationError("segment_ids must be non-decreasing")
        return self

    @property
    def num_target_tokens(self) -> int:
        """Number of tokens a causal model learns to predict: loss tokens except the first, which nothing precedes."""
        return int(np.count_nonzero(self.loss_mask[1:]))

    @property
    def num_segments(self) -> int:
        """Number of different segments, 1 without segment_ids."""
        return 1 if self.segment_ids is None else len(np.unique(self.segment_ids))

    def to_lists(self) -> dict[str, Any]:
        """Return plain lists and values, ready for JSON."""
        return self.model_dump(mode="json")

    @classmethod
    def from_lists(cls, data: Mapping[str, Any]) -> Self:
        """Return the sample of `to_lists`."""
        return cls.model_validate(dict(data))


class PreferenceSample(Record):
    """A chosen and a rejected answer that begin with the same prompt of `prompt_length` tokens."""

    chosen_input_ids: Int32Array
    chosen_loss_mask: UInt8Array
    rejected_input_ids: Int32Array
    rejected_loss_mask: UInt8Array
    prompt_length: int = Field(ge=0)
    meta: SampleMeta

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_row(self.chosen_input_ids, self.chosen_loss_mask, "chosen answer")
        check_row(self.rejected_input_ids, self.rejected_loss_mask, "rejected answer")
        if self.prompt_length > min(len(self.chosen_input_ids), len(self.rejected_input_ids)):
            raise SampleValidationError(
                f"prompt_length={self.prompt_length} is longer than an answer that contains the prompt"
            )
        prompt = slice(self.prompt_length)
        if not np.array_equal(self.chosen_input_ids[prompt], self.rejected_input_ids[prompt]):
            raise SampleValidationError("chosen and rejected answers do not begin with the same prompt")
        return self

    @property
    def max_length(self) -> int:
        """Length of the longer answer."""
        return max(len(self.chosen_input_ids), len(self.rejected_input_ids))

    def to_samples(self) -> tuple[Sample, Sample]:
        """Return the chosen and the rejected answer as samples with ids `ID_chosen` and `ID_rejected`."""
        return self._side("chosen"), self._side("rejected")

    def _side(self, side: str) -> Sample:
        return Sample(
            input_ids=getattr(self, f"{side}_input_ids"),
            loss_mask=getattr(self, f"{side}_loss_mask"),
            meta=self.meta.model_copy(update={"sample_id": f"{self.meta.sample_id}_{side}"}),
            sample_type=SampleType.DPO,
        )


def save_samples(samples: Iterable[Sample], path: str | Path) -> None:
    """Write samples as JSON lines."""
    with atomic_write(path) as file:
        for sample in samples:
            file.write(json_bytes(sample.to_lists()) + b"\n")


def load_samples(path: str | Path) -> list[Sample]:
    """Load the samples of `save_samples`."""
    index, samples = JsonlIndex(path), []
    for number, line in index.rows():
        where = index.where(number)
        with row_errors(where):
            samples.append(Sample.from_lists(parse_row(line, where)))
    return samples


save_samples_async = to_async(save_samples)
load_samples_async = to_async(load_samples)


class DatasetFingerprint(Fingerprint):
    """Hashes of a data set and its tokenizer; `sample_limit` is the number of rows read (None = all)."""

    content_hash: str
    tokenizer_hash: str
    num_samples: int = Field(ge=0)
    sample_limit: int | None = None
    source_path: str | None = None
    algorithm: str = "sha256"
    version: int = 1


def compute_dataset_fingerprint(
    path: str | Path, tokenizer_hash: str, sample_limit: int | None = None
) -> DatasetFingerprint:
    """Hash the rows of a JSONL file by content: blank lines, spaces and the order of keys do not matter.

    A line that is not a JSON object counts as it is, because commands may skip such rows.
    """
    digest, count = hashlib.sha256(), 0
    for _, line in JsonlIndex(path).rows():
        if count == sample_limit:
            break
        try:
            row = json_bytes(parse_row(line, str(path)))
        except DatasetError:
            row = line.strip()
        digest.update(row + b"\n")
        count += 1
    content = digest.hexdigest()
    full = sha256_of([json_bytes([content, tokenizer_hash, count, sample_limit])])
    return DatasetFingerprint(
        fingerprint=full[:16],
        full_hash=full,
        content_hash=content,
        tokenizer_hash=tokenizer_hash,
        num_samples=count,
        sample_limit=sample_limit,
        source_path=str(path),
    )
