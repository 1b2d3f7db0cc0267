"""How often `qm analyze` and `qm eval` are wrong and how often they see: verdicts on simulated runs and evaluations.

    python benchmarks/verdicts.py                  1,000 simulations per row, about three minutes
    python benchmarks/verdicts.py --simulations 200
    python benchmarks/verdicts.py --only copies    two methods on the same questions, about ten minutes

A row of `null` has groups without a difference: a verdict of better or worse is false (5 % allowed, for a family of
comparisons together). A row of `power` has the difference that `detectable` names (80 %). `equivalence` has groups that
differ by exactly the margin: a verdict of equivalent is false. `copies` are two copies of one method (A/A) on the same
questions, whose replies are drawn again, alone or with what each training makes of each target: a difference that is
called clear is false.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from query_mutator.data import BUNDLED, split_questions, target_key
from query_mutator.lab.analysis.compare import Analysis, analyze
from query_mutator.lab.analysis.events import Series
from query_mutator.lab.analysis.groups import Group
from query_mutator.lab.analysis.runs import Run
from query_mutator.lab.analysis.spec import Spec, read_spec
from query_mutator.stats import difference_interval, mean_interval, minimum_detectable_effect
from query_mutator.types import Question

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]
Finals = Sequence[Floats]  # final values of the runs of each group

TAG = "rollout/ep_rew_mean"
POINTS = 8
SPREAD = 0.3  # of final values around 1: far more than the margin of 5 %
NARROW = 0.02  # for verdicts of equivalence
DRAWS: dict[str, Draw] = {
    "normal": lambda rng, n: rng.normal(size=n),
    "t, 3 degrees": lambda rng, n: rng.standard_t(3, n),
    "t, 2 degrees": lambda rng, n: rng.standard_t(2, n),
    "exponential": lambda rng, n: rng.exponential(size=n) - 1,
    "lognormal": lambda rng, n: rng.lognormal(size=n) - math.exp(0.5),
    "contaminated": lambda rng, n: rng.normal(size=n) * np.where(rng.random(n) < 0.1, 10, 1),
}


def compared(
    spec: Spec, finals: Finals, rng: np.random.Generator, *, copies: int = 1, points: int = POINTS
) -> Analysis:
    """Return the analysis of runs that end at these values; each run is there `copies` times."""
    groups = []
    for number, values in enumerate(finals):
        runs = [replace(run) for value in values for run in [noisy_run(value, rng, points)] * copies]
        groups.append(Group(name=f"g{number}", runs=tuple(runs), seeds=tuple(range(len(runs)))))
    return analyze(groups, spec)


def noisy_run(final: float, rng: np.random.Generator, points: int) -> Run:
    """Return a run whose last five points have the mean `final`."""
    values = final + rng.normal(0, 1e-3, points)
    values[-5:] += final - values[-5:].mean()
    step = np.arange(1, points + 1) * 100
    series = {TAG: Series(step, step / 10.0, values)}
    return Run(name="run", path=Path("run"), folders=(Path("run"),), series=series)


def share(found: Sequence[bool]) -> str:
    """Return a percentage and its Monte Carlo error."""
    rate = statistics.mean(found)
    return f"{100 * rate:5.1f} ± {100 * math.sqrt(max(rate * (1 - rate), 1e-4) / len(found)):.1f}"


def held_out_sizes(questions: Sequence[Question]) -> Sequence[int]:
    """Return the number of held-out questions about each target."""
    return tuple(Counter(map(target_key, split_questions(questions).test)).values())


SETS = {name: held_out_sizes(questions()) for name, questions in BUNDLED.items()} | {"40 targets": (1,) * 40}


def verdicts(analysis: Analysis) -> set[str]:
    return {one.verdict for result in analysis.results for one in result.comparisons}


def nulls(rng: np.random.Generator) -> Iterator[tuple[str, Callable[[], Finals], dict[str, int]]]:
    """Yield name, a draw of final values, and what is said of their runs."""
    for name, draw in DRAWS.items():
        for n, m in ((3, 3), (5, 5), (10, 10)):
            yield f"{name}, {n} against {m}", lambda d=draw, n=n, m=m: [1 + SPREAD * d(rng, k) for k in (n, m)], {}
    for n, m in ((2, 2), (2, 10), (3, 10)):
        for spread in (0.3, 1.0, 3.0, 10.0):
            sizes = ((n, spread), (m, 1.0))
            yield (
                f"spreads {spread:g} to 1, {n} against {m}",
                lambda s=sizes: [1 + SPREAD * d * rng.normal(size=k) for k, d in s],
                {},
            )
    yield "5 copies of each of 2 seeds", lambda: [1 + SPREAD * rng.normal(size=2) for _ in range(2)], {"copies": 5}
    yield (
        "5 copies, one number each",
        lambda: [1 + SPREAD * rng.normal(size=2) for _ in range(2)],
        {"copies": 5, "points": 1},
    )
    yield (
        "shares of 8 questions, 10 against 10",
        lambda: [rng.binomial(8, 0.6, 10) / 8 for _ in range(2)],
        {"points": 1},
    )
    yield "5 groups of 5", lambda: [1 + SPREAD * rng.normal(size=5) for _ in range(5)], {}
    yield "rounding alone", lambda: [np.float32(0.3) + 1e-9 * rng.normal(size=4) for _ in range(2)], {}


def show_nulls(spec: Spec, rng: np.random.Generator, simulations: int) -> None:
    print(f"{'null':<38} false verdicts, %")
    for name, draw, runs in nulls(rng):
        found = [verdicts(compared(spec, draw(), rng, **runs)) for _ in range(simulations)]
        print(f"{name:<38} {share([bool({'better', 'worse'} & one) for one in found])}", flush=True)


def show_power(spec: Spec, rng: np.random.Generator, simulations: int) -> None:
    print(f"\n{'power at `detectable`':<38} detected, %")
    for n, m, spread in (
        (2, 2, 1.0),
        (3, 3, 1.0),
        (5, 5, 1.0),
        (10, 10, 1.0),
        (2, 10, 1.0),
        (3, 10, 3.0),
        (10, 3, 3.0),
    ):
        effect = minimum_detectable_effect(n, m, spreads=(spread, 1.0))
        found = []
        for _ in range(simulations):
            finals = [rng.normal(size=m), effect + spread * rng.normal(size=n)]
            found.append("better" in verdicts(compared(spec, [1 + SPREAD * one for one in finals], rng)))
        print(f"{f'{n} against {m}, spread {spread:g}: {effect:.2f} sd':<38} {share(found)}", flush=True)


def show_equivalence(spec: Spec, rng: np.random.Generator, simulations: int) -> None:
    margin = 0.05  # of the baseline's mean: metrics.yaml, return
    print(f"\n{'equivalence':<38} called equivalent, %")
    for groups, distance in ((2, margin), (5, margin), (2, 0.0), (5, 0.0)):
        found = []
        for _ in range(simulations):
            means = [1.0, *[1.0 + distance] * (groups - 1)]
            found.append(
                "equivalent" in verdicts(compared(spec, [m + NARROW * rng.normal(size=5) for m in means], rng))
            )
        print(f"{f'{groups} groups of 5, {100 * distance:g} % apart':<38} {share(found)}", flush=True)


def copies(rng: np.random.Generator, sizes: Sequence[int], *, by_target: float) -> Floats:
    """Return the differences [n] of success of two copies of a method on questions about targets of these sizes.

    A question is right with a probability of its own. A training makes the share `by_target` of all replies to
    questions about one target right or wrong together.
    """
    target = np.repeat(np.arange(len(sizes)), sizes)
    often = rng.beta(0.4, 0.8, len(target))  # right in a third; two copies differ on a quarter

    def one() -> Floats:
        luck, together = rng.random(len(target)), rng.random(len(sizes))[target]
        return (np.where(rng.random(len(target)) < by_target, together, luck) < often).astype(np.float64)

    return one() - one()


def show_copies(rng: np.random.Generator, simulations: int) -> None:
    print(f"\n{'two copies, same questions':<52} called clear, %")
    for name, sizes in SETS.items():
        clusters = [str(target) for target, size in enumerate(sizes) for _ in range(size)]
        for by_target in (0.0, 0.6) if max(sizes) > 1 else (0.0,):
            drawn = [copies(rng, sizes, by_target=by_target) for _ in range(simulations)]
            found = [difference_interval(one, clusters) for one in drawn]
            differ = np.mean([np.mean(one != 0) for one in drawn])
            row = f"{name}, {differ:.0%} differ, {by_target:.0%} by target"
            print(f"{row:<52} {share([not low <= 0 <= high for low, high in found])}", flush=True)


def show_coverage(rng: np.random.Generator, simulations: int) -> None:
    print(f"\n{'coverage of the interval of a mean':<38} %")
    for name, draw in DRAWS.items():
        cells = []
        for n in (3, 5, 10, 20, 40):
            pairs = (mean_interval(draw(rng, n).tolist()) for _ in range(simulations))
            cells.append(f"n={n}: {share([low <= 0 <= high for low, high in pairs])}")
        print(f"{name:<38} {'  '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=1000, help="of each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["copies"], help="these rows")
    arguments = parser.parse_args()
    rng, spec = np.random.default_rng(arguments.seed), read_spec()
    if arguments.only is None:
        show_nulls(spec, rng, arguments.simulations)
        show_power(spec, rng, arguments.simulations)
        show_equivalence(spec, rng, arguments.simulations)
        show_coverage(rng, arguments.simulations)
    show_copies(rng, arguments.simulations)


if __name__ == "__main__":
    main()
