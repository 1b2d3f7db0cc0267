"""Models of many kinds: estimates against the profiler, with oneDNN on and off; what depends on data is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.sizing_errors import KINDS, OPTIMIZERS, compare, workload_of
from query_mutator.commands.main import main
from query_mutator.errors import UsageError
from query_mutator.lab.sizing.sizes import Recipe, Workload

pytestmark = pytest.mark.slow

HERE = "tests.unit.lab.sizing.test_sizing_kinds"
REFUSED = ("mask by values", "crop by values")


@pytest.fixture(autouse=True)
def _short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.sizing_errors.STEPS", 24)  # the benchmark has 100, and all sizes of all kinds


@pytest.mark.parametrize("with_onednn", [pytest.param(False, id="oneDNN off"), pytest.param(True, id="oneDNN on")])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_within_three_per_cent_or_refused(name: str, with_onednn: bool) -> None:
    optimizer = OPTIMIZERS[(list(KINDS).index(name) + with_onednn) % len(OPTIMIZERS)]
    for precision in KINDS[name].precisions:
        recipe = Recipe(optimizer=optimizer, precision=precision, device="cpu")  # type: ignore[arg-type]
        row = compare(name, 5, recipe, with_onednn=with_onednn)
        assert row.refused == (name in REFUSED)
        assert row.holds, row


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_is_exact_and_takes_its_state(optimizer: str) -> None:
    row = compare("fan-out", 64, Recipe(optimizer=optimizer, device="cpu"), with_onednn=True)  # type: ignore[arg-type]
    assert row.error == pytest.approx(0, abs=0.001)


def test_an_operation_too_large_to_run_has_a_range_that_holds_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("query_mutator.lab.sizing.tracker.PROBE_BYTES", 2**20)
    monkeypatch.setattr("query_mutator.lab.sizing.tracker._known_costs", {})
    row = compare("conv3d", 8, Recipe(device="cpu"), with_onednn=True)
    assert row.low < row.truth <= row.high


def lstm() -> Workload:
    return replace(workload_of("lstm"), name="lstm")


def selects_rows() -> Workload:
    return workload_of("mask by values")


def branches() -> Workload:
    return workload_of("crop by values")


@pytest.mark.parametrize("name", ["selects_rows", "branches"])
def test_sizes_that_depend_on_data_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="real steps"):
        main(["size", f"{HERE}:{name}", "--batch", "4"])


def test_what_is_sized_is_with_or_without_onednn(capsys: pytest.CaptureFixture[str]) -> None:
    peaks = []
    for flag in ("--onednn", "--no-onednn"):
        assert main(["size", f"{HERE}:lstm", "--batch", "6", "--device", "cpu", flag]) == 0
        said = capsys.readouterr().out
        assert f"(oneDNN {'off' if flag == '--no-onednn' else 'on'}) on cpu" in said
        peaks.append(said.splitlines()[4].split()[4])
    assert peaks[0] != peaks[1]
