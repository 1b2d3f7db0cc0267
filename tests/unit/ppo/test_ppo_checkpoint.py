"""Checkpoints: plain contents, whole files, and one line about anything else."""

from __future__ import annotations

import errno
import os
import pickle
import random
from pathlib import Path

import pytest
import torch

from ppo.algorithm import PPO
from ppo.checkpoint import load_checkpoint, save_checkpoint
from ppo.config import PPOConfig
from ppo.policy import Policy


def test_a_checkpoint_loads_with_weights_only_and_holds_the_state_dict(tmp_path: Path) -> None:
    ppo = PPO(4, 2, PPOConfig())
    path = save_checkpoint(tmp_path / "new" / "step_1.pt", {**ppo.state_dict(), "operators": ["a", "b"]})
    state = torch.load(path, weights_only=True)
    assert list(state["policy"]) == list(ppo.policy.state_dict())
    assert all(torch.equal(state["policy"][name], tensor) for name, tensor in ppo.policy.state_dict().items())
    assert state["operators"] == ["a", "b"]
    assert Policy.from_state_dict(load_checkpoint(path)["policy"])(torch.zeros(1, 4))[0].shape == (1, 2)
    assert [file.name for file in path.parent.iterdir()] == ["step_1.pt"]


def test_a_failed_write_leaves_the_old_checkpoint_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_checkpoint(tmp_path / "step_1.pt", {"policy": {"w": torch.ones(2)}})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(path, {"policy": {"w": torch.zeros(2)}})
    assert load_checkpoint(path)["policy"]["w"].tolist() == [1, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["step_1.pt"]


class Opener:
    """Runs code when unpickled, as a hostile file would."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("must_not_be_made",))


def test_a_file_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"policy": Opener()}, tmp_path / "hostile.pt")
    Path("hostile.pickle").write_bytes(pickle.dumps({"policy": Opener()}))
    for name in ("hostile.pt", "hostile.pickle"):
        with pytest.raises(ValueError, match="cannot read the checkpoint") as raised:
            load_checkpoint(tmp_path / name)
        assert "may run code" in str(raised.value)
        assert "weights_only" not in str(raised.value)  # PyTorch advises to load it after all
    assert not Path("must_not_be_made").exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no checkpoint at"),
        (b"", "cannot read"),
        (b"hello", "cannot read"),
        (b"PK\x03\x04cut short", "cannot read"),
        (pickle.dumps([1, 2], protocol=2), "cannot read|not a checkpoint"),
    ],
)
def test_anything_else_is_one_line(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "some.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert "some.pt" in str(caught.value)


def test_a_truncated_checkpoint_is_one_line(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "some.pt", PPO(4, 2, PPOConfig()).state_dict())
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match="cannot read") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("strip", [False, True], ids=["digest", "as older versions wrote it"])
def test_a_flipped_bit_is_found_or_harmless(tmp_path: Path, strip: bool) -> None:
    path = save_checkpoint(tmp_path / "some.pt", {"policy": {"w": torch.arange(64.0)}, "updates_done": 3})
    content = path.read_bytes()[:-71] if strip else path.read_bytes()
    rng, found, flips = random.Random(5), 0, 400
    for _ in range(flips):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            state = load_checkpoint(path)
        except ValueError as error:
            found += "some.pt" in str(error)
        else:
            assert state["updates_done"] == 3
            assert torch.equal(state["policy"]["w"], torch.arange(64.0))
    assert found > (flips // 2 if strip else flips * 0.95)  # elsewhere are bytes that nothing reads


def test_a_checkpoint_of_an_older_version_loads(tmp_path: Path) -> None:
    torch.save({"policy": {"w": torch.ones(2)}}, tmp_path / "old.pt")
    assert load_checkpoint(tmp_path / "old.pt")["policy"]["w"].tolist() == [1, 1]


def test_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        load_checkpoint(tmp_path)


def test_another_dictionary_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save({"model": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="no entry 'policy'"):
        load_checkpoint(tmp_path / "other.pt")
