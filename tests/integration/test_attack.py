"""A few random cases of each area of benchmarks.attack; `make attack` runs ten thousand."""

from __future__ import annotations

import pytest

from benchmarks.attack.campaign import AREAS, run_case

pytestmark = pytest.mark.slow

SEED = 20_26


@pytest.mark.parametrize("index", range(25))
@pytest.mark.parametrize("area", AREAS)
def test_a_random_case_is_answered_in_order(area: str, index: int) -> None:
    outcome = run_case(area, index, SEED)
    assert outcome.verdict == "ok", f"{outcome.case}\n{outcome.detail}"
