"""The setting that `qm sweep` names next to that of Optuna's TPE, by trials and regret, on known surfaces.

    python benchmarks/sweep_and_tpe.py                     20 simulations per row, about ten minutes
    python benchmarks/sweep_and_tpe.py --only cliff --seeds 3 8

Regret: how far the true value of the setting is below the highest within the ends of the grid, mean of the simulations.
TPE samples the same ranges, one trial at a time, and names its best trial. `TPE needs`: the trials after which it stays
at least as good as the sweep. `about`: the place between the settings that the sweep estimates. `refined`: the sweep
after the values that "too coarse" names were run as well, next to TPE with as many trials. The surfaces are those of
sweep_surfaces.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import optuna
from sweep_surfaces import NAMES, Case, Floats, cases

from query_mutator.lab.sweep.plan import Trial
from query_mutator.lab.sweep.results import Measured, best_setting, by_setting
from query_mutator.lab.sweep.surface import Optimum, find_optimum


def chosen_setting(settings: Floats, values: Floats, names: Sequence[str]) -> tuple[Floats, Optimum]:
    """Return log2 of the setting that `qm sweep` names, and the optimum."""
    rows = [
        Measured(
            trial=Trial(setting=dict(zip(names, row, strict=True)), seed=seed),
            performance=float(value),
            throughput=None,
            source="",
        )
        for seed, (row, value) in enumerate(zip((2**settings).tolist(), values, strict=True))
    ]
    found = find_optimum(2**settings, values, names=names)
    best = best_setting(by_setting(rows, maximize=True), found, maximize=True)
    return np.log2([float(best.setting[name]) for name in names]), found


def refined_grid(case: Case, found: Optimum) -> Case:
    """Return the case with the values to try added to its grid."""
    levels = [set(axis) for axis in case.grid]
    for item in found.finer:
        name, values = item.split("=")
        levels[NAMES.index(name)] |= {round(math.log2(float(value)), 9) for value in values.split(",")}
    return replace(case, grid=tuple(tuple(sorted(axis)) for axis in levels))


def sweep_regrets(case: Case, seeds: int, noise: float, rng: np.random.Generator) -> tuple[float, float, float, int]:
    """Return the regrets of a sweep, of its estimate and of the refined sweep, and the trials of the refined one."""
    names = NAMES[: len(case.grid)]
    settings = case.settings(seeds)
    values = case.surface(settings) + noise * rng.normal(size=len(settings))
    best, found = chosen_setting(settings, values, names)
    about = np.log2([[axis.best for axis in found.axes]])
    regret, estimated = (case.best() - float(case.surface(at)[0]) for at in (best[None], about))
    if not found.finer:
        return regret, estimated, regret, len(settings)
    finer = refined_grid(case, found).settings(seeds)
    new = finer[~(finer[:, None] == settings[None]).all(axis=2).any(axis=1)]
    settings = np.concatenate([settings, new])
    values = np.concatenate([values, case.surface(new) + noise * rng.normal(size=len(new))])
    best, _ = chosen_setting(settings, values, names)
    return regret, estimated, case.best() - float(case.surface(best[None])[0]), len(settings)


def tpe_regrets(case: Case, trials: int, noise: float, seed: int) -> Floats:
    """Return the regret of the best trial of TPE after each trial."""
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)  # as qm sweep --sampler optuna
    study, rng = optuna.create_study(direction="maximize", sampler=sampler), np.random.default_rng(seed)
    ranges: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.FloatDistribution(min(levels), max(levels))
        for name, levels in zip(NAMES, case.grid, strict=False)
    }
    top, best, regrets = -math.inf, math.nan, []
    for _ in range(trials):
        trial = study.ask(ranges)
        true = float(case.surface(np.array([[trial.params[name] for name in ranges]]))[0])
        value = true + noise * rng.normal()
        study.tell(trial, value)
        if value > top:
            top, best = value, case.best() - true
        regrets.append(best)
    return np.array(regrets)


def show_tpe(chosen: Sequence[Case], seeds: Sequence[int], noises: Sequence[float], count: int) -> None:
    print(
        f"{'surface':<28} {'seeds':>5} {'noise':>5} {'trials':>6}"
        "  sweep  about  TPE    TPE needs  refined  (trials)  TPE",
        flush=True,
    )
    for case in chosen:
        for noise in noises:
            for number in seeds:
                rng, trials = np.random.default_rng(7), len(case.settings(number))
                of_sweeps = [sweep_regrets(case, number, noise, rng) for _ in range(count)]
                ours, about, finer, used = np.mean(of_sweeps, axis=0)
                theirs = np.mean([tpe_regrets(case, 3 * trials, noise, seed) for seed in range(count)], axis=0)
                worse = np.flatnonzero(theirs > ours)  # after the last of these TPE stays as good
                needs = int(worse[-1]) + 2 if len(worse) else 1
                needed = f"{needs}" if needs <= len(theirs) else f"> {len(theirs)}"
                at_used = theirs[min(len(theirs), round(used)) - 1]
                print(
                    f"{case.name:<28} {number:>5} {noise:>5.2f} {trials:>6}"
                    f"  {ours:.3f}  {about:.3f}  {theirs[trials - 1]:.3f}  {needed:>9}"
                    f"  {finer:.3f}    {used:>6.0f}    {at_used:.3f}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=20, help="of each row")
    parser.add_argument("--only", default="", help="surfaces whose name has this")
    parser.add_argument("--seeds", type=int, nargs="+", default=[3], help="per setting")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.03])
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    chosen = [case for case in cases() if arguments.only in case.name and case.name != "flat"]
    show_tpe(chosen, arguments.seeds, arguments.noise, arguments.simulations)


if __name__ == "__main__":
    main()
