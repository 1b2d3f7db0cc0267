"""Samples and pairs of preferences as records, their files, and the fingerprint of a data set: all in `schema`."""

from query_mutator.batching.records import SampleValidationError
from query_mutator.batching.samples.schema import (
    DatasetFingerprint,
    DatasetSource,
    DifficultyLevel,
    PreferenceSample,
    Sample,
    SampleMeta,
    SampleType,
    compute_dataset_fingerprint,
    load_samples,
    load_samples_async,
    save_samples,
    save_samples_async,
)

__all__ = [
    "DatasetFingerprint", "DatasetSource", "DifficultyLevel", "PreferenceSample", "Sample", "SampleMeta", "SampleType",
    "SampleValidationError", "compute_dataset_fingerprint", "load_samples", "load_samples_async", "save_samples",
    "save_samples_async",
]  # fmt: skip
