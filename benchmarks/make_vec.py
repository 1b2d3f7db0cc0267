"""How long `gymnasium.make_vec` takes with the hash encoder, once imports are done and a server runs.

python benchmarks/make_vec.py --num-envs 16
"""

from __future__ import annotations

import argparse
import json
import time

import gymnasium

from query_mutator.embedded.default_models import default_models
from query_mutator.embedded.server import start_server
from query_mutator.encoder import resolve_encoder


def main() -> None:
    """Print one line of JSON: the seconds of each `make_vec`, and of its first `reset`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=16, help="environments")
    parser.add_argument("--repeats", type=int, default=5, help="how often it is made")
    arguments = parser.parse_args()
    encoder = resolve_encoder("hash")
    with start_server(default_models(encoder), encoder=encoder) as server:
        rows = [measure(server.url, arguments.num_envs) for _ in range(arguments.repeats)]
    print(
        json.dumps(
            {"num_envs": arguments.num_envs, "make_s": [row[0] for row in rows], "reset_s": [row[1] for row in rows]}
        )
    )


def measure(url: str, num_envs: int) -> tuple[float, float]:
    """Return the seconds of `make_vec` and of the first reset."""
    started = time.perf_counter()
    name = "rl_query_mutator_env:QueryMutation-v0"
    envs = gymnasium.make_vec(
        name,
        num_envs=num_envs,
        backend="ollama",
        ollama_url=url,
        encoder="hash",
        target_model="pydoc-assistant",
        mutator_model="rule-rewriter",
    )
    made = time.perf_counter()
    envs.reset(seed=0)
    done = time.perf_counter()
    envs.close()
    return round(made - started, 3), round(done - made, 3)


if __name__ == "__main__":
    main()
