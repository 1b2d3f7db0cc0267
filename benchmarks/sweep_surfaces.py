"""How often `qm sweep` is right about the optimum of surfaces whose optimum is known, by simulation.

    python benchmarks/sweep_surfaces.py                               200 simulations per row, about two hours
    python benchmarks/sweep_surfaces.py --simulations 50 --only cliff
    python benchmarks/sweep_surfaces.py --only "two peaks" --noise 0.05
    PYTHONPATH=OTHER python benchmarks/sweep_surfaces.py              the same of another checkout

`held`: the region holds the truth, or "grid too coarse" is said. Along a ridge the truth is all of it; of a plateau,
the end of it. `false interior`: said without an optimum inside, or of a region that misses it. `false edge`: the best
is said to lie at an end where it does not. `coarse`: how often that is said. `advice`: how often the truth lies between
the values that it names. `width`: octaves, mean of the axes, where "too coarse" is not said.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from query_mutator.lab.sweep.surface import Optimum, find_optimum

Floats = NDArray[np.float64]
Surface = Callable[[Floats], Floats]

BATCHES = (6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 13.0)
SPEEDS = (math.log2(160), 9.0, 10.0)
FIVE = (6.0, 7.0, 8.0, 9.0, 10.0), (7.0, 8.0, 9.0, 10.0, 11.0)
NINE = (tuple(float(level) for level in range(4, 13)),)
NAMES = "batch", "speed"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A surface over log2 of the settings; `truth` is its optimum, None where it has none inside the grid."""

    name: str
    grid: tuple[tuple[float, ...], ...]
    surface: Surface
    truth: tuple[float, ...] | None = None
    kind: str = "smooth"  # smooth, kink, coarse, ridge, plateau, edge, flat
    ridge: tuple[float, float] | None = None  # exponent k and value of log2(batch * speed**k)

    def settings(self, seeds: int) -> Floats:
        """Return log2 of the settings [N, D], `seeds` rows of each."""
        points = np.stack(np.meshgrid(*self.grid, indexing="ij"), axis=-1).reshape(-1, len(self.grid))
        return np.repeat(points, seeds, axis=0)

    def span(self) -> float:
        """Return the range of the surface over the grid's settings."""
        return float(np.ptp(self.surface(self.settings(1)))) or 1.0


def kinked(at: float, left: float, right: float) -> Surface:
    return lambda z: 0.7 - np.where(z[:, 0] < at, left * (at - z[:, 0]), right * (z[:, 0] - at))


def peak(at: Sequence[float], width: float, height: float = 0.4) -> Surface:
    return lambda z: 0.3 + height * np.exp(-((z - np.array(at)) ** 2).sum(axis=1) / (2 * width**2))


def two_peaks(best: Sequence[float], other: Sequence[float], widths: tuple[float, float]) -> Surface:
    """Return a bell and another one 0.8 times as high."""
    return lambda z: np.maximum(peak(best, widths[0], 1.0)(z), peak(other, widths[1], 0.8)(z)) - 0.3


def cliff(at: float, slope: float = 0.05, beyond: float = 0.0) -> Surface:
    return lambda z: np.where(z[:, 0] <= at, 0.4 + slope * (z[:, 0] - 6), 0.1 + beyond * (z[:, 0] - at))


def bump(z: Floats) -> Floats:
    return np.asarray(0.3 + 0.4 * np.exp(-(((z[:, 0] - 8.7) / 2.5) ** 2) - ((z[:, 1] - 8.9) / 2) ** 2))


def ridge(exponent: float, at: float, tilt: float = 0.0, sharp: float = 0.05) -> Surface:
    def surface(z: Floats) -> Floats:
        across = z[:, 0] + exponent * z[:, 1] - at
        return np.asarray(0.7 - sharp * across**2 - tilt * (z[:, 1] - 9) ** 2)

    return surface


def cases() -> list[Case]:
    """Return the surfaces: first those of tests/unit/lab/sweep/test_sweep_surface.py, then the hard ones."""
    line: tuple[tuple[float, ...], ...] = (BATCHES,)
    three = ((5.0, 7.0, 9.0), SPEEDS)
    diagonal_cliff: Surface = lambda z: np.where(  # noqa: E731
        z.sum(axis=1) <= 17.4, 0.3 + 0.06 * (z[:, 0] - 6) + 0.05 * (z[:, 1] - 7), 0.1
    )
    return [
        Case(name="hill", grid=line, surface=lambda z: 0.7 - 0.02 * (z[:, 0] - 9) ** 2, truth=(9.0,)),
        Case(name="bump 4 x 3", grid=(BATCHES[::2], SPEEDS), surface=bump, truth=(8.7, 8.9)),
        Case(name="kink 0.15 / 0.03", grid=line, surface=kinked(9, 0.15, 0.03), truth=(9.0,), kind="kink"),
        Case(name="kink 0.03 / 0.15", grid=line, surface=kinked(9, 0.03, 0.15), truth=(9.0,), kind="kink"),
        Case(name="kink 0.12 / 0.06", grid=line, surface=kinked(8.4, 0.12, 0.06), truth=(8.4,), kind="kink"),
        Case(name="rising", grid=line, surface=lambda z: 0.05 * z[:, 0], truth=(13.0,), kind="edge"),
        Case(
            name="rising, bent",
            grid=line,
            surface=lambda z: 0.05 * z[:, 0] + 1 - np.exp((6 - z[:, 0]) / 2),
            truth=(13.0,),
            kind="edge",
        ),
        Case(name="flat", grid=line, surface=lambda z: 0 * z[:, 0], kind="flat"),
        Case(
            name="hill, other axis flat 3 x 3",
            grid=three,
            surface=lambda z: 0.3 - 0.02 * (z[:, 0] - 7) ** 2,
            truth=(7.0, math.nan),
            kind="flat",
        ),
        # not in the tests: smooth
        Case(name="hill near the end", grid=line, surface=lambda z: 0.7 - 0.02 * (z[:, 0] - 12) ** 2, truth=(12.0,)),
        Case(name="hill just inside", grid=line, surface=lambda z: 0.7 - 0.02 * (z[:, 0] - 6.3) ** 2, truth=(6.3,)),
        Case(name="bell of width 1.5", grid=line, surface=peak([8.4], 1.5), truth=(8.4,)),
        Case(name="bell of width 1", grid=line, surface=peak([8.4], 1.0), truth=(8.4,)),
        Case(name="bell 5 x 5, width 1.2", grid=FIVE, surface=peak([7.7, 9.4], 1.2), truth=(7.7, 9.4)),
        Case(
            name="skewed",
            grid=line,
            surface=lambda z: 0.3 + 0.4 * (z[:, 0] - 5.5) * np.exp(1 - (z[:, 0] - 5.5) / 2.2) / 2.2,
            truth=(7.7,),
        ),
        Case(name="two peaks", grid=NINE, surface=two_peaks([10.8], [5.2], (0.7, 1.3)), truth=(10.8,)),
        Case(name="two peaks, both narrow", grid=NINE, surface=two_peaks([10.9], [5.0], (0.6, 0.7)), truth=(10.9,)),
        Case(
            name="two peaks 5 x 5",
            grid=FIVE,
            surface=two_peaks([9.5, 8.3], [8.0, 9.6], (0.5, 0.8)),
            truth=(9.5, 8.3),
        ),
        Case(
            name="480 of 100 to 600",
            grid=(tuple(math.log2(100 * number) for number in range(1, 7)),),
            surface=lambda z: 1 - 0.15 * (z[:, 0] - math.log2(480)) ** 2,
            truth=(math.log2(480),),
        ),
        # cliffs and peaks that the grid does not resolve
        Case(name="cliff at 9.6", grid=line, surface=cliff(9.6), truth=(9.6,), kind="coarse"),
        Case(name="cliff at 9.9", grid=line, surface=cliff(9.9), truth=(9.9,), kind="coarse"),
        Case(name="cliff, falling on", grid=line, surface=cliff(9.6, beyond=-0.05), truth=(9.6,), kind="coarse"),
        Case(name="cliff before the end", grid=line, surface=cliff(11.8), truth=(11.8,), kind="coarse"),
        Case(
            name="cliff 5 x 5",
            grid=FIVE,
            surface=lambda z: cliff(8.6, 0.06)(z) - 0.02 * (z[:, 1] - 9.2) ** 2,
            truth=(8.6, 9.2),
            kind="coarse",
        ),
        Case(name="cliff, diagonal", grid=FIVE, surface=diagonal_cliff, truth=(10.0, 7.4), kind="coarse"),
        Case(name="peak of width 0.25", grid=line, surface=peak([8.3], 0.25), truth=(8.3,), kind="coarse"),
        Case(name="peak of width 0.4", grid=line, surface=peak([8.4], 0.4), truth=(8.4,), kind="coarse"),
        Case(name="peak of width 0.4, between", grid=line, surface=peak([8.5], 0.4), truth=(8.5,), kind="coarse"),
        Case(name="peak 5 x 5, width 0.35", grid=FIVE, surface=peak([8.2, 9.3], 0.35), truth=(8.2, 9.3), kind="coarse"),
        # TWO
        # ridges
        Case(name="ridge, product", grid=FIVE, surface=ridge(1, 17), kind="ridge", ridge=(1, 17)),
        Case(name="ridge, product, between", grid=FIVE, surface=ridge(1, 17.5), kind="ridge", ridge=(1, 17.5)),
        Case(name="ridge, ratio", grid=FIVE, surface=ridge(-1, -1), kind="ridge", ridge=(-1, -1)),
        Case(name="ridge, square root", grid=FIVE, surface=ridge(0.5, 12.5), kind="ridge", ridge=(0.5, 12.5)),
        Case(name="ridge, sharp", grid=FIVE, surface=ridge(1, 17, sharp=0.2), kind="ridge", ridge=(1, 17)),
        Case(name="ridge with a top", grid=FIVE, surface=ridge(1, 17, tilt=0.02), truth=(8.0, 9.0)),
        # plateaus
        Case(
            name="plateau from 9",
            grid=line,
            surface=lambda z: 0.3 + 0.12 * np.minimum(z[:, 0] - 6, 3),
            truth=(13.0,),
            kind="plateau",
        ),
        Case(
            name="plateau, saturating",
            grid=line,
            surface=lambda z: 0.3 + 0.4 * (1 - np.exp(6 - z[:, 0])),
            truth=(13.0,),
            kind="plateau",
        ),
        Case(
            name="plateau to the low end",
            grid=line,
            surface=lambda z: 0.7 - 0.1 * np.maximum(z[:, 0] - 9, 0),
            truth=(6.0,),
            kind="plateau",
        ),
    ]


# --- what is said -----------------------------------------------------------------------------------------------------


def is_coarse(found: Optimum) -> bool:
    return "too coarse" in found.why


def held(case: Case, found: Optimum) -> bool:
    """Return whether what is said is true."""
    if is_coarse(found):
        return True
    if case.ridge is not None:
        return holds_ridge(case.ridge, case.grid, found)
    inside = [
        math.isnan(at) or axis.low * (1 - 1e-9) <= 2**at <= axis.high * (1 + 1e-9)
        for axis, at in zip(found.axes, case.truth or (), strict=False)
    ]
    return all(inside)


def holds_ridge(ridge: tuple[float, float], grid: Sequence[Sequence[float]], found: Optimum) -> bool:
    """Return whether the region holds all places of the ridge within the grid."""
    (exponent, at), (first, second) = ridge, found.axes
    along = np.linspace(min(grid[1]), max(grid[1]), 401)
    across = at - exponent * along
    inside = (across >= min(grid[0])) & (across <= max(grid[0]))
    pairs = ((first, across[inside]), (second, along[inside]))
    return all(math.log2(axis.low) <= of.min() + 0.1 and of.max() <= math.log2(axis.high) + 0.1 for axis, of in pairs)


def says_false_interior(case: Case, found: Optimum) -> bool:
    if found.kind != "interior":
        return False
    return case.kind in ("edge", "flat", "plateau", "ridge") or not held(case, found)


def says_false_edge(case: Case, found: Optimum) -> bool:
    """Return whether the best is said to lie at an end of an axis, and does not."""
    if "lies at the edge" not in found.why:
        return False
    ends = [
        (f"{name} at its {end} end", of(levels))
        for name, levels in zip(NAMES, case.grid, strict=False)
        for end, of in (("low", min), ("high", max))
    ]
    named = [place for words, place in ends if words in found.why]
    return case.truth is None or not set(named) <= set(case.truth)


def advice_holds(case: Case, found: Optimum) -> bool:
    """Return whether the truth lies within the values to try, on the axes that they are of."""
    for item in found.finer:
        name, values = item.split("=")
        tried = [math.log2(float(value)) for value in values.split(",")]
        if case.truth is None or not min(tried) <= case.truth[NAMES.index(name)] <= max(tried):
            return False
    return True


def width(found: Optimum) -> float:
    return float(np.mean([math.log2(axis.high / axis.low) for axis in found.axes]))


def simulated(case: Case, *, seeds: int, noise: float, count: int) -> list[Optimum]:
    logs, rng = case.settings(seeds), np.random.default_rng(7)
    truth = case.surface(logs)
    names = NAMES[: logs.shape[1]]
    return [find_optimum(2**logs, truth + noise * rng.normal(size=len(logs)), names=names) for _ in range(count)]


def row_of(case: Case, found: Sequence[Optimum]) -> str:
    fine = [width(one) for one in found if not is_coarse(one)]
    kinds = [one.kind for one in found]
    common = " ".join(f"{kind} {kinds.count(kind)}" for kind in sorted(set(kinds), key=kinds.count, reverse=True))
    shares = (
        100 * float(np.mean([of(one) for one in found]))
        for of in (
            lambda one: held(case, one),
            lambda one: says_false_interior(case, one),
            lambda one: says_false_edge(case, one),
            is_coarse,
        )
    )
    numbers = "  ".join(f"{share:5.1f}" for share in shares)
    advised = [advice_holds(case, one) for one in found if getattr(one, "finer", ()) and case.truth is not None]
    numbers += f"  {100 * np.mean(advised):5.1f}" if advised else "      -"
    return f"{numbers}  {np.mean(fine) if fine else math.nan:5.2f}  {common}"


def show_verdicts(chosen: Sequence[Case], seeds: Sequence[int], noises: Sequence[float], count: int) -> None:
    print(
        f"{'surface':<28} {'seeds':>5} {'noise':>5}   held  false interior  edge  coarse  advice  width  verdicts",
        flush=True,
    )
    for case in chosen:
        for noise in noises:
            for number in seeds:
                found = simulated(case, seeds=number, noise=noise, count=count)
                print(f"{case.name:<28} {number:>5} {noise:>5.2f}  {row_of(case, found)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=200, help="of each row")
    parser.add_argument("--only", default="", help="surfaces whose name has this")
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 5, 8], help="per setting")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.01, 0.03, 0.06])
    arguments = parser.parse_args()
    chosen = [case for case in cases() if arguments.only in case.name]
    show_verdicts(chosen, arguments.seeds, arguments.noise, arguments.simulations)


if __name__ == "__main__":
    main()
