"""Random attacks on every edge of the product: `python -m benchmarks.attack --help`.

Each area is one module with `attack(rng, folder) -> Outcome`: one case, fully determined by `rng`, run in `folder`,
which is empty and the case's own. `harness` has what the areas share, `damage` and `hostile` what files and replies
suffer, `campaign` runs many cases in processes that are watched, `tests/integration/test_peers.py` a few in CI.
"""
