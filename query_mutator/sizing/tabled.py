"""Models that are sized from a table of what others measured, not followed step by step: SmolVLA.

peak(B) = max(floor, base + slope B) MiB of a training step with AdamW, weights in 32 bit. The figures were taken by
following LeRobot's own SmolVLA (450.05 M parameters, of which 99.88 M learn) the way this package follows its presets.
Pictures are brought to 512 x 512 whatever the camera, so its resolution changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from query_mutator.errors import UsageError
from query_mutator.sizing.fits import Fit

MIB = 2**20
SMOLVLA = "smolvla"
#: Slope by number of cameras, MiB a sample
_SLOPES = {2: 226.0, 3: 314.0}
_FLOOR, _BASE = 3248.0, 2479.0
_UNFROZEN_SLOPE, _UNFROZEN_BASE = 1552.0, 4714.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tabled:
    """A row of the table: its fit in bytes, parameters in millions, and what it is of."""

    name: str
    fit: Fit
    parameters_m: float
    trained_m: float
    source: str = "from a table, by the number of cameras; not followed here"


def smolvla(*, cameras: int = 2, unfrozen: bool = False) -> Tabled:
    """Return SmolVLA's row; UsageError for a number of cameras that the table lacks."""
    known = {2} if unfrozen else set(_SLOPES)
    if cameras not in known:
        many = " or ".join(map(str, sorted(known)))
        raise UsageError(f"--cameras {cameras}: the table of smolvla has {many} cameras")
    if unfrozen:
        fit = Fit(floor=0.0, base=_UNFROZEN_BASE * MIB, slope=_UNFROZEN_SLOPE * MIB)
        return Tabled(name="smolvla, 2 cameras, unfrozen", fit=fit, parameters_m=450.05, trained_m=392.9)
    fit = Fit(floor=_FLOOR * MIB, base=_BASE * MIB, slope=_SLOPES[cameras] * MIB)
    return Tabled(name=f"smolvla, {cameras} cameras", fit=fit, parameters_m=450.05, trained_m=99.88)
