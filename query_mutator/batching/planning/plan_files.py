"""Plans on disk: a folder with meta.json and one checksummed file per epoch.

A folder named NAME.jsonl has epochs as text, one microbatch with its ids per line; any other has arrays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from query_mutator.batching.arrays import offsets_of
from query_mutator.batching.core.overlong import Cuts
from query_mutator.batching.files import (
    BatchFileError,
    is_text,
    json_bytes,
    read_arrays,
    read_checked_json,
    reading,
    write_arrays,
    write_checked_json,
)
from query_mutator.batching.ids import IdTable
from query_mutator.batching.lengths import LengthSource, as_lengths
from query_mutator.batching.planning.batch_plan import BatchPlan, BatchPlanMeta, LazyEpochs
from query_mutator.batching.planning.epoch_plan import EPOCH_KIND, EpochPlan, PlanContext
from query_mutator.batching.sync import to_async
from query_mutator.errors import UsageError
from query_mutator.files import atomic_folder, atomic_write, parse_json_object

META_FILE = "meta.json"
_UNITS_FILE = "units.safetensors"
_UNITS_KIND = "batch plan units"
_PLAN_FILES = re.compile(r"meta\.json|units\.safetensors|epoch_\d+\.(jsonl|safetensors)")
_CUT_COLUMNS = ("unit", "sample", "start", "stop")


def save_batch_plan(plan: BatchPlan, path: str | Path) -> None:
    """Write a plan atomically, in place of an older plan; UsageError for a folder that holds anything else."""
    target = Path(path)
    if target.exists() and not (target.is_dir() and (is_batch_plan(target) or not any(target.iterdir()))):
        raise UsageError(f"{target} exists and is not a plan; choose another folder")
    with atomic_folder(target) as folder:
        _write(plan, folder, text=is_text(target))


def is_batch_plan(path: Path) -> bool:
    """Return whether a folder holds the files of a plan and no other."""
    names = {one.name for one in path.iterdir()} if path.is_dir() else set()
    return META_FILE in names and all(_PLAN_FILES.fullmatch(name) for name in names)


def _write(plan: BatchPlan, folder: Path, *, text: bool) -> None:
    # Epochs first, one at a time in memory; meta.json with their checksums last.
    digests: dict[int, str] = {}
    cuts = Cuts.none()
    for number in plan.epochs:
        epoch = plan.epochs[number]
        cuts = epoch.context.cuts
        name = _epoch_name(number, text=text)
        if text:
            digests[number] = epoch.digest
            _write_text(folder / name, epoch)
        else:
            digests[number] = write_arrays(folder / name, epoch.arrays, kind=EPOCH_KIND, meta=epoch.head)
    columns = {name: getattr(cuts, name) for name in _CUT_COLUMNS}
    units = write_arrays(
        folder / _UNITS_FILE,
        {**plan.ids.to_arrays(), **columns},
        kind=_UNITS_KIND,
        meta={"count": len(plan.ids), "first": plan.ids.first},
    )
    plan = BatchPlan(plan.meta, plan.epochs, plan.ids, digests=digests)
    body = {
        **plan.meta.model_dump(mode="json"),
        "epochs": {str(number): digest for number, digest in digests.items()},
        "units": units,
        "fingerprint": plan.fingerprint,
    }
    write_checked_json(folder / META_FILE, body)


def _epoch_name(number: int, *, text: bool) -> str:
    return f"epoch_{number}.{'jsonl' if text else 'safetensors'}"


def load_batch_plan(
    path: str | Path,
    *,
    dataset_hash: str | None = None,
    tokenizer_hash: str | None = None,
    lengths: LengthSource | None = None,
    verify_all: bool = False,
) -> BatchPlan:
    """Open a plan; each epoch is mapped into memory and verified on first use, or all now with `verify_all`.

    Raises BatchFileError with the name of a damaged or exchanged file, and UsageError if hashes or lengths are given
    and the plan was made for others.
    """
    folder = Path(path)
    body = read_checked_json(folder / META_FILE)
    try:
        digests = {int(number): str(digest) for number, digest in body.pop("epochs").items()}
        units, fingerprint = body.pop("units"), body.pop("fingerprint")
        meta = BatchPlanMeta.model_validate(body)
    except (KeyError, ValueError, AttributeError) as error:
        raise BatchFileError(f"{folder / META_FILE} is not a plan of this version: {error}") from error
    # The epochs themselves are read on first use; their checksums are enough for the plan's fingerprint.
    context = _read_units(folder / _UNITS_FILE, units, meta)
    makers = {number: _epoch_loader(folder, number, digest, context) for number, digest in digests.items()}
    plan = BatchPlan(meta, LazyEpochs(makers), context.ids, digests=digests)
    if plan.fingerprint != fingerprint or meta.num_epochs != len(digests):
        raise BatchFileError(f"{folder / META_FILE}: fingerprint {fingerprint[:16]} does not match the plan's parts")
    check_plan(plan, dataset_hash=dataset_hash, tokenizer_hash=tokenizer_hash, lengths=lengths)
    for number in digests:
        _check_present(folder, number)
        if verify_all:
            plan.get_epoch(number)
    return plan


def check_plan(
    plan: BatchPlan,
    *,
    dataset_hash: str | None = None,
    tokenizer_hash: str | None = None,
    lengths: LengthSource | None = None,
) -> None:
    """Raise UsageError for a plan that was made for another data set, tokenizer or lengths."""
    pairs = (
        ("data set", dataset_hash, plan.meta.dataset_hash),
        ("tokenizer", tokenizer_hash, plan.meta.tokenizer_hash),
    )
    for what, given, planned in pairs:
        if given is not None and given != planned:
            raise UsageError(f"the plan was made for {what} {planned!r}, not {given!r}; build it again")
    if lengths is not None and as_lengths(lengths).digest != plan.meta.lengths_hash:
        raise UsageError("the plan was made for other samples or lengths; build it again")


def _check_present(folder: Path, number: int) -> None:
    if not any((folder / _epoch_name(number, text=text)).is_file() for text in (False, True)):
        raise BatchFileError(f"{folder / _epoch_name(number, text=False)} is missing")


def _read_units(path: Path, digest: str, meta: BatchPlanMeta) -> PlanContext:
    file = read_arrays(path, kind=_UNITS_KIND)
    if file.sha256 != digest:
        raise BatchFileError(f"{path} belongs to another plan")
    ids = IdTable.from_arrays(file.arrays, count=meta.num_samples, first=int(file.meta["first"]), path=path)
    return PlanContext(ids=ids, cuts=Cuts(**{name: file.arrays[name] for name in _CUT_COLUMNS}))


def _epoch_loader(folder: Path, number: int, digest: str, context: PlanContext) -> Callable[[], EpochPlan]:
    def load() -> EpochPlan:
        path = folder / _epoch_name(number, text=False)
        if not path.exists():
            return _read_text(folder / _epoch_name(number, text=True), digest, context)
        file = read_arrays(path, kind=EPOCH_KIND)
        if file.sha256 != digest:
            raise BatchFileError(f"{path} belongs to another plan than {folder / META_FILE}")
        return _epoch(path, {**file.meta, **file.arrays}, context)

    return load


def _epoch(path: Path, fields: Mapping[str, Any], context: PlanContext) -> EpochPlan:
    values = {name: value for name, value in fields.items() if name != "kind"}
    try:
        return EpochPlan(**values, context=context)
    except ValidationError as error:
        raise BatchFileError(f"{path} is not an epoch: {error.errors()[0]['msg']}") from error


def _write_text(path: Path, epoch: EpochPlan) -> None:
    """Write a header and one line per microbatch, with ids for a reader and the units and counts of the arrays."""
    header = {**epoch.head, "num_microbatches": epoch.num_microbatches}
    header |= {"total_samples": epoch.total_samples, "total_tokens": epoch.total_tokens}
    if not epoch.num_microbatches:  # with no row to read them from
        header["columns"] = list(epoch.arrays)
    counts = {name: values for name, values in epoch.arrays.items() if name in _TEXT_COUNTS}
    with atomic_write(path) as file:
        file.write(json_bytes(header) + b"\n")
        for number, batch in enumerate(epoch):
            row = {"samples": batch.samples, "packs": batch.packs, "bucket_id": batch.bucket_id}
            row |= {"max_len": batch.max_len, "index": batch.index, "units": epoch.units_of(number).tolist()}
            row |= {name: int(values[number]) for name, values in counts.items()}
            file.write(json_bytes(row) + b"\n")


_TEXT_COUNTS = ("tokens", "loss_tokens", "segment_squares", "shared_loss_tokens", "padding")


def _read_text(path: Path, digest: str, context: PlanContext) -> EpochPlan:
    """Read a text epoch into arrays and compare them with the plan's checksum."""
    with reading(path):
        lines = path.read_bytes().splitlines()
    try:
        header, *rows = (parse_json_object(line) for line in lines)
        if header.pop("num_microbatches") != len(rows):
            raise ValueError(f"{len(rows)} microbatches, not as many as in its header")
        fields: dict[str, Any] = {name: header[name] for name in ("epoch", "seed", "num_dropped", "sources")}
        fields |= _text_arrays(rows, context) if rows else _no_arrays(header["columns"])
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise BatchFileError(f"{path} is truncated or edited: {error}") from error
    epoch = _epoch(path, fields, context)
    if epoch.digest != digest:
        raise BatchFileError(f"{path} does not match the plan's checksum; it was edited or belongs to another plan")
    return epoch


def _no_arrays(columns: Sequence[str]) -> dict[str, Any]:
    """Return the arrays of an epoch without microbatches; offsets begin at 0."""
    return {name: np.zeros(int(name.endswith("offsets")), np.int64) for name in columns}


def _text_arrays(rows: list[dict[str, Any]], context: PlanContext) -> dict[str, Any]:
    units = [unit for row in rows for unit in row["units"]]
    ids = context.ids.take(context.cuts.resolve(np.array(units, np.int64))[0])
    if ids != [one for row in rows for one in row["samples"]]:
        raise ValueError("samples and units disagree")
    columns = {"max_len": "max_len", "bucket": "bucket_id", **{name: name for name in _TEXT_COUNTS if name in rows[0]}}
    if "padding" in columns:
        columns["index"] = "index"
    fields: dict[str, Any] = {name: np.array([row[column] for row in rows]) for name, column in columns.items()}
    fields["order"] = np.array(units, np.int64)
    fields["offsets"] = offsets_of(np.array([len(row["packs"] or row["samples"]) for row in rows]))
    if rows[0]["packs"] is not None:
        fields["pack_offsets"] = offsets_of(np.array([len(pack) for row in rows for pack in row["packs"]]))
    return fields


save_batch_plan_async = to_async(save_batch_plan)
load_batch_plan_async = to_async(load_batch_plan)
