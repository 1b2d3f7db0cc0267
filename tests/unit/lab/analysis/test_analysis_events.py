"""The event reader against TensorBoard's own, on files of real trainers and in every style a scalar can have."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util import tensor_util

from query_mutator.files.metrics import MetricsWriter
from query_mutator.lab.analysis.events import EventFile, read_event_file
from tests.promises.events import write_events

Triples = dict[str, list[tuple[int, float, float]]]


def tensorboards(path: Path) -> Triples:
    """Return every scalar as TensorBoard's loader gives it, which turns old ones into tensors."""
    found: Triples = {}
    plugins: dict[str, str] = {}
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            plugin = plugins.setdefault(value.tag, value.metadata.plugin_data.plugin_name)
            if plugin == "scalars":
                number = float(tensor_util.make_ndarray(value.tensor).item())
                found.setdefault(value.tag, []).append((event.step, event.wall_time, number))
    return found


def triples(file: EventFile) -> Triples:
    return {
        tag: list(zip(points.step.tolist(), points.wall.tolist(), points.value.tolist(), strict=True))
        for tag, points in file.scalars.items()
    }


@pytest.fixture(scope="module")
def sb3_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a real PPO of Stable-Baselines3 for a moment."""
    from stable_baselines3 import PPO

    folder = tmp_path_factory.mktemp("sb3")
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=1, tensorboard_log=str(folder))
    model.learn(256, log_interval=1)
    return next(folder.rglob("*tfevents*"))


def test_a_file_of_stable_baselines3_reads_as_in_tensorboard(sb3_file: Path) -> None:
    found = triples(read_event_file(sb3_file))
    assert len(found["rollout/ep_rew_mean"]) == 4
    assert found == tensorboards(sb3_file)


def test_a_file_of_our_trainer_reads_as_in_tensorboard(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, first_step=512)
    for step in range(600, 5000, 7):
        writer.write(
            {"validation/success": step / 9000, "llm/calls": step, "losses/entropy": -1 / step}, step=step, wall_s=1
        )
    writer.close()
    path = next((tmp_path / "tensorboard").iterdir())
    file = read_event_file(path)
    assert triples(file) == tensorboards(path)
    assert file.restarts == [513]


def test_newer_scalars_texts_and_other_plugins(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    for step in range(300):
        writer.add_scalar("new/style", step / 7, step, new_style=True)
        writer.add_scalar("new/double", step / 7, step, new_style=True, double_precision=True)
        writer.add_scalar("old/style", float("nan") if step == 5 else step, step)
    writer.add_histogram("weights", np.arange(10.0), 3)
    writer.add_text("hyperparameters", "|param|value|\n|-|-|\n|lr|0.001|")
    writer.close()
    path = next(tmp_path.iterdir())
    file, expected = read_event_file(path), tensorboards(path)
    found = triples(file)
    assert np.isnan(found["old/style"].pop(5)[2])
    assert np.isnan(expected["old/style"].pop(5)[2])
    assert found == expected
    assert file.texts["hyperparameters/text_summary"].endswith("|lr|0.001|")


TENSORS = {
    "float": TensorProto(dtype=1, float_val=[0.25]),
    "double": TensorProto(dtype=2, double_val=[1 / 3]),
    "int": TensorProto(dtype=3, int_val=[-7]),
    "int64": TensorProto(dtype=9, int64_val=[-(2**40)]),
    "bool": TensorProto(dtype=10, bool_val=[True]),
    "half": TensorProto(dtype=19, half_val=[0x3555]),
    "bfloat16": TensorProto(dtype=14, half_val=[0x3FC0]),
    "content": TensorProto(dtype=2, tensor_content=struct.pack("<d", 2.5)),
    "content_int": TensorProto(dtype=3, tensor_content=struct.pack("<i", -3)),
}


def test_every_kind_of_tensor_scalar(tmp_path: Path) -> None:
    file = read_event_file(write_tensors(tmp_path / "tensors.tfevents", TENSORS, plugin="scalars"))
    values = {tag: points.value[0] for tag, points in file.scalars.items()}
    assert values == {
        "float": 0.25, "double": 1 / 3, "int": -7, "int64": -(2**40), "bool": 1, "half": float(np.float16(1 / 3)),
        "bfloat16": 1.5, "content": 2.5, "content_int": -3,
    }  # fmt: skip


def test_tensors_of_other_plugins_and_of_several_numbers_are_not_scalars(tmp_path: Path) -> None:
    several = {"several": TensorProto(dtype=1, float_val=[1, 2]), "many": TensorProto(dtype=3, int_val=[1, 2, 300])}
    assert not read_event_file(write_tensors(tmp_path / "a.tfevents", several, plugin="scalars")).scalars
    assert not read_event_file(write_tensors(tmp_path / "b.tfevents", TENSORS, plugin="histograms")).scalars


def write_tensors(path: Path, tensors: dict[str, Any], *, plugin: str) -> Path:
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin))
    with path.open("wb") as file:
        for tag, tensor in tensors.items():
            value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
            RecordWriter(file).write(Event(wall_time=1.0, step=1, summary=Summary(value=[value])).SerializeToString())
    return path


@pytest.mark.parametrize("cut", [1, 5, 13, 20])
def test_a_torn_last_record_is_left_out(sb3_file: Path, tmp_path: Path, cut: int) -> None:
    torn = tmp_path / "torn.tfevents"
    torn.write_bytes(sb3_file.read_bytes()[:-cut])
    whole, found = triples(read_event_file(sb3_file)), triples(read_event_file(torn))
    points = sum(map(len, found.values()))
    assert points == sum(map(len, whole.values())) - 1
    assert all(series == whole[tag][: len(series)] for tag, series in found.items())


def test_what_follows_a_damaged_frame_is_left_out(tmp_path: Path) -> None:
    path = write_events(tmp_path, [(step, step, {"a": step}) for step in range(100)])
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    path.write_bytes(data)
    steps = read_event_file(path).scalars["a"].step
    assert 40 <= len(steps) <= 50
    assert (steps == np.arange(len(steps))).all()
    (tmp_path / "empty").write_bytes(b"")
    assert not read_event_file(tmp_path / "empty").scalars


def test_records_of_any_size_give_tensorboards_points(tmp_path: Path) -> None:
    rows = [(-3, 0.0, {"a": 1.0})] + [
        (step**3, step / 10, {"a": step, f"a much longer tag/{step % 3}": -step}) for step in range(400)
    ]
    path = write_events(tmp_path, rows)
    found = triples(read_event_file(path))
    assert found == tensorboards(path)
    assert found["a"][0][0] == -3


def test_records_inside_a_record_are_not_taken_for_frames(tmp_path: Path) -> None:
    inner = write_events(tmp_path / "inner", [(step, step, {"inside": step}) for step in range(50)]).read_bytes()
    path = tmp_path / "outer.tfevents"
    with path.open("wb") as file:
        image = Summary.Value(tag="image", image=Summary.Image(encoded_image_string=inner))
        for step in range(3):
            number = Summary.Value(tag="number", simple_value=step)
            RecordWriter(file).write(Event(step=step, summary=Summary(value=[image, number])).SerializeToString())
    found = triples(read_event_file(path))
    assert list(found) == ["number"]
    assert [step for step, _, _ in found["number"]] == [0, 1, 2]
