"""A flipped bit in any file of a run is found, or harmless; `python -m benchmarks.attack.bit_flips` flips thousands."""

from __future__ import annotations

import pytest

from benchmarks.attack.bit_flips import flips_of
from benchmarks.attack.runs import KINDS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_in_any_file_is_found_or_harmless(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    resumes = int(kind == "ppo killed")
    counts = dict(flips_of(kind, flips=8, resumes=resumes, seed=7))
    assert len(counts) >= 8
    assert [name for name, count in counts.items() if count["wrong"]] == [], capsys.readouterr().err
    assert sum(count["found"] for count in counts.values()) >= 5 * len(counts)
