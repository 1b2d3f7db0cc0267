"""`benchmarks/learning.py` trains on stored calls exactly as a run over HTTP does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.learning import World, main, run_chain, run_one
from benchmarks.memoised import StoredVectors
from query_mutator.encoder.hashing import HashEncoder
from query_mutator.settings.models import ModelSettings
from query_mutator.types import FloatArray

SMALL = "--encoder hash --num-env-steps 96 --num-processes 4 --num-steps 8"


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--ask form --max-episode-steps 4", "--ask every_step"])
def test_a_training_on_stored_calls_equals_the_real_run(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--prove", f"{SMALL} {flags}"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith(": equal")]
    assert len(lines) == 5


@pytest.mark.slow
def test_the_calls_of_the_search_for_a_teacher_count(tmp_path: Path) -> None:
    teacher = "--teacher search --plan-calls 400 --teacher-steps 64"
    flags = f"--backend embedded {SMALL} --ask form --max-asks 1 {teacher}".split()
    world = World(ModelSettings(backend="embedded", encoder="hash"), tmp_path)
    with world.system:
        first, again = run_one(world, flags, max_calls=1000), run_one(world, flags, max_calls=1000)
    assert first == again  # replies from the store count as calls
    assert 400 < first.training_calls <= 1000
    assert first.questions > 0


@pytest.mark.slow
def test_a_policy_leaves_out_rewrites_of_its_teacher_that_change_nothing(tmp_path: Path) -> None:
    plan = "--ask form --teacher spelling,slang,neutral --no-skip-unchanged --teacher-steps 512"
    flags = f"--backend embedded --encoder hash --num-env-steps 512 --num-processes 8 {plan}".split()
    world = World(ModelSettings(backend="embedded", encoder="hash"), tmp_path)
    with world.system:
        found = run_one(world, flags, max_calls=1000)
        teacher = run_chain(world, "spelling slang neutral", [0], skip_unchanged=False)[0]
    assert teacher.calls == 4
    assert found.calls < 3
    assert found.success > teacher.success - 10


class Counting(HashEncoder):
    """Counts the texts that it encodes."""

    texts = 0

    def encode(self, texts: Sequence[str]) -> FloatArray:
        self.texts += len(texts)
        return super().encode(texts)


def test_stored_vectors_are_encoded_once_and_survive_a_killed_process(tmp_path: Path) -> None:
    first, second = Counting(), Counting()
    rows = StoredVectors(first, tmp_path).encode(["one", "two"])
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes() + b"part of a record")
    again = StoredVectors(second, tmp_path)
    assert np.array_equal(again.encode(["two", "one"]), rows[::-1])
    again.encode(["three"])
    assert np.array_equal(StoredVectors(second, tmp_path).encode(["three"]), HashEncoder().encode(["three"]))
    assert (first.texts, second.texts) == (2, 1)
