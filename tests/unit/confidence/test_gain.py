"""Predicted gains of asking another arm: fitted to questions that both arms answered."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import cascades
from query_mutator.confidence.features import FEATURES
from query_mutator.confidence.gain import GainModel, gain_inputs
from query_mutator.errors import CheckpointError

ARMS = ("small", "large")
CUT = FEATURES.index("unfinished")


def replies(n: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs [n, 2, I] and grades [n, 2]: `small` is wrong where cut, `large` right about apples alone."""
    rng = np.random.default_rng(0)
    cut, apples = rng.random(n) < 0.5, rng.random(n) < 0.5
    columns = np.zeros((n, len(FEATURES)))
    columns[:, CUT] = cut
    inputs = gain_inputs(columns, ["Which apple?" if one else "Which pear?" for one in apples])
    return np.stack([inputs, inputs], axis=1), np.stack([~cut, apples], axis=1).astype(float)


def test_gain_is_of_the_other_arm_and_not_of_a_doubtful_reply() -> None:
    inputs, right = replies()
    model = GainModel.fit(ARMS, inputs, right, np.arange(len(right)) % 5)
    gains = model.gains("small", inputs[:, 0])
    assert not gains[:, 0].any()
    lead = right[:, 1] - right[:, 0]
    assert gains[lead > 0, 1].min() > 0.2 > 0.1 > np.abs(gains[lead == 0, 1]).max()  # drawn to the mean, which is 0
    assert gains[lead < 0, 1].max() < -0.2
    assert np.corrcoef(model.out_of_fold[:, 0, 1], lead)[0, 1] > 0.9
    turned = model.ordered(ARMS[::-1]).gains("small", inputs[:, 0])
    assert np.array_equal(turned, gains[:, ::-1])
    stored = GainModel.from_arrays(model.to_arrays(), ARMS)
    assert np.array_equal(stored.gains("large", inputs[:, 1]), model.gains("large", inputs[:, 1]))
    for arms in (("small",), ("small", "large", "other")):
        with pytest.raises(CheckpointError, match="gains"):
            GainModel.from_arrays(model.to_arrays(), arms)


def test_cascades_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "gsm8k_models"
    folder.mkdir()
    rows = [
        {
            "question": f"How many are {at} and {at}?",
            "gold": str(2 * at),
            "part": "test" if at % 2 else "train",
            "right": {"llama3_8b": at % 4 < 2, "gemma2_9b": True},
            "answers": {"llama3_8b": f"The answer is {2 * at + (at % 4 > 1)}", "gemma2_9b": f"{2 * at}"},
        }
        for at in range(80)
    ]
    (folder / "logs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "prompts.json").write_text("{}")
    pair = "Llama-3-8B > Gemma-2-9B"
    for flags in (["--train-only"], ["--refits", "2", "--json", str(tmp_path / "found.json")]):
        assert cascades.main([str(tmp_path), "--pairs", pair, *flags]) == 0
        assert f"| {pair} | 50.0 | 100.0 | gain |" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())[pair]["n"] == 40
