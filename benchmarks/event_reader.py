"""How fast event files are read: writes one with many points, reads it, checks what was read.

python benchmarks/event_reader.py --points 10000000
"""

from __future__ import annotations

import argparse
import resource
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from query_mutator.lab.analysis.events import read_event_file

TAGS = (
    *("rollout/ep_rew_mean", "train/loss", "losses/value_loss", "perf/transitions_learned_per_second"),
    "validation/success",
)


def write_points(path: Path, points: int) -> None:
    """Write points of five tags in turn; checksums of records are left zero, as nothing here looks at them."""
    headers: dict[int, bytes] = {}
    values = np.random.default_rng(0).random(points)
    with path.open("wb") as file:
        for at in range(points):
            summary = Summary(value=[Summary.Value(tag=TAGS[at % len(TAGS)], simple_value=values[at])])
            record = Event(wall_time=1e9 + at / 100, step=at // len(TAGS), summary=summary).SerializeToString()
            if len(record) not in headers:
                length = struct.pack("<Q", len(record))
                headers[len(record)] = length + struct.pack("<I", masked_crc32c(length))
            file.write(headers[len(record)] + record + bytes(4))


def main() -> None:
    """Write, read, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1_000_000)
    points = parser.parse_args().points
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.out.tfevents.0"
        write_points(path, points)
        began, cpu_began = time.perf_counter(), time.process_time()
        scalars = read_event_file(path).scalars
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    found = sum(len(of_tag.step) for of_tag in scalars.values())
    assert found == points, (found, points)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ten_million = seconds / points * 1e7
    print(f"{points:,} points in {seconds:.1f} s ({ten_million:.1f} s for ten million)")
    print(f"{cpu_s:.1f} s of processor time, peak {peak_mib:,.0f} MiB")


if __name__ == "__main__":
    main()
