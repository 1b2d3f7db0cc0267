"""Telnet and WebSocket wires, streams over every transport, and a real puzzle arcade."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from query_mutator.batching.streaming.gym_stream import GymEpisodeStream, MockGymStream
from query_mutator.batching.streaming.gym_types import (
    GymConfig,
    GymConnectionError,
    GymOutputMode,
    GymProtocolError,
    GymTransport,
    PuzzleDifficulty,
    PuzzleGame,
    PuzzleObservation,
    TelnetClientConfig,
)
from query_mutator.batching.streaming.telnet_client import (
    DO,
    DONT,
    ECHO,
    IAC,
    WILL,
    WONT,
    TelnetFilter,
    TelnetGymClient,
    action_of_hint,
)
from query_mutator.batching.streaming.types import EpisodeStatus, StreamSample, StreamState
from tests.promises.gym_server import GymServer, start_gym


class Letters:
    """A tokenizer of one token a character."""

    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.fixture
def server() -> Iterator[GymServer]:
    with start_gym() as running:
        yield running


def config_for(server: GymServer, **fields: Any) -> GymConfig:
    settings = {"retry_delay": 0.01, "read_timeout": 20, "connect_timeout": 20, **fields}
    return GymConfig(host="127.0.0.1", port=server.port, **settings)


# --- telnet ----------------------------------------------------------------------------------------------------------

SB, SE = 250, 240
WIRE = (
    b"a\xff\xffb"
    + bytes([IAC, WILL, ECHO, IAC, WILL, 31, IAC, DO, 24, IAC, SB, 24, 1, IAC, IAC, SE, IAC, SE])
    + (b"c\r\x00d\r\n" + bytes([IAC, 241]) + b"e")
)


@given(cuts=st.lists(st.integers(0, len(WIRE)), max_size=8))
def test_telnet_reads_the_same_wherever_it_is_cut(cuts: list[int]) -> None:
    codec, text, answer = TelnetFilter(), b"", b""
    edges = [0, *sorted(cuts), len(WIRE)]
    for begin, end in itertools.pairwise(edges):
        piece, reply = codec.feed(WIRE[begin:end])
        text, answer = text + piece, answer + reply
    assert text == b"a\xffbc\rd\r\ne"
    assert answer == bytes([IAC, DO, ECHO, IAC, DONT, 31, IAC, WONT, 24])


# --- a small server -------------------------------------------------------------------------------------------------


def play(config: GymConfig, **options: Any) -> tuple[list[StreamSample], GymEpisodeStream]:
    stream = GymEpisodeStream(config, Letters(), **options)
    return list(stream), stream


def action_of(sample: StreamSample) -> str:
    return "".join(chr(token) for token in sample.input_ids[sample.loss_mask == 1][:-1])


def test_a_stream_resumes_with_the_episode_that_comes_next(server: GymServer) -> None:
    whole, _ = play(config_for(server), max_episodes=4)
    half, stream = play(config_for(server), max_episodes=2)
    later = GymEpisodeStream(config_for(server), Letters(), max_episodes=4)
    later.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert [sample.sample_id for sample in [*half, *later]] == [sample.sample_id for sample in whole]


def test_the_policy_chooses_and_may_be_async(server: GymServer) -> None:
    seen: list[PuzzleObservation] = []

    async def policy(observation: PuzzleObservation) -> str | None:
        seen.append(observation)
        return "down" if observation.step_index < 2 else None

    samples, stream = play(config_for(server), max_episodes=1, policy=policy)
    assert [action_of(sample) for sample in samples] == ["down", "down"]
    assert {sample.episode_status for sample in samples} == {EpisodeStatus.FAILURE}
    assert [observation.step_index for observation in seen] == [0, 1, 2]
    assert stream.metrics.episodes_failed == 1


@pytest.mark.parametrize(
    ("actions", "status"),
    [(["down"] * 3, EpisodeStatus.FAILURE), (["fall"], EpisodeStatus.ERROR), (["dance"] * 4, EpisodeStatus.FAILURE)],
)
@pytest.mark.parametrize("mode", list(GymOutputMode))
def test_lost_failed_and_endless_episodes_have_different_statuses(
    server: GymServer, actions: list[str], status: str, mode: str
) -> None:
    def policy(observation: PuzzleObservation) -> str:
        return actions[observation.step_index]

    config = config_for(server, max_steps=4, output_mode=mode)
    samples, _ = play(config, max_episodes=2, policy=policy)
    assert [sample.episode_status for sample in samples] == [status] * 2 * len(actions)


def test_a_client_can_do_what_a_person_can(server: GymServer) -> None:
    async def run() -> None:
        settings = TelnetClientConfig(host="127.0.0.1", port=server.port)
        async with TelnetGymClient(settings) as client:
            assert client.games == {"climb": 1, "star_climb": 2}
            shown = await client.start_puzzle("star", PuzzleDifficulty.HARD, seed=3)
            assert (shown.game, shown.difficulty, shown.seed) == ("Star Climb", "hard", 3)
            assert (await client.get_hint()).info == {"action": "up"}
            result = await client.send_action("sideways")
            assert (result.success, result.code) == (False, "INVALID")
            result = await client.send_action("up")
            assert result.state is not None
            assert result.state.moves == 1
            assert (await client.get_stats())["invalid_moves"] == 1
            assert (await client.reset_puzzle()).moves == 0
            with pytest.raises(GymProtocolError, match="climb, star_climb"):
                await client.start_puzzle(PuzzleGame.SUDOKU)
            with pytest.raises(ValueError, match="one line per command"):
                await client.command("up\nup")
        assert not client.is_connected

    asyncio.run(run())


# --- broken connections ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def cutting_proxy(port: int, cuts: list[int]) -> AsyncIterator[int]:
    """A proxy of `port` whose n-th connection is cut after `cuts[n]` bytes from the server; later ones are whole."""
    left = list(cuts)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: float) -> None:
        while budget > 0 and (data := await reader.read(1000)):
            writer.write(data[: int(min(budget, 1000))])
            budget -= len(data)
        writer.close()

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        budget = left.pop(0) if left else float("inf")
        back, forth = await asyncio.open_connection("127.0.0.1", port)
        both = carry(reader, forth, float("inf")), carry(back, writer, budget)
        await asyncio.wait(map(asyncio.ensure_future, both), return_when=asyncio.FIRST_COMPLETED)
        writer.close()
        forth.close()

    server = await asyncio.start_server(on_client, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("transport", list(GymTransport))
def test_a_cut_connection_changes_nothing_but_the_count(server: GymServer, transport: str) -> None:
    async def run(cuts: list[int], seed: int = 3) -> tuple[list[dict[str, Any]], int]:
        async with cutting_proxy(server.port, cuts) as port:
            config = config_for(server, transport=transport, seed=seed).model_copy(update={"port": port})
            stream = GymEpisodeStream(config, Letters(), max_episodes=3)
            return [sample.model_dump(exclude={"timestamp"}) async for sample in stream], stream.metrics.reconnections

    whole, none = asyncio.run(run([]))
    cut, some = asyncio.run(run([50, 900, 1500]))
    assert (none, some) == (0, 3)
    assert cut == whole != asyncio.run(run([], seed=4))[0]


def test_after_the_last_retry_the_address_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        config = GymConfig(host="127.0.0.1", port=taken.getsockname()[1], max_retries=2, retry_delay=0.001)
        stream = GymEpisodeStream(config, Letters())
        with pytest.raises(GymConnectionError, match=str(config.port)):
            list(stream)
    assert stream.metrics.reconnections == 2
    assert stream.state is StreamState.ERROR


@asynccontextmanager
async def silent_server(greet: bool) -> AsyncIterator[int]:
    """Accept connections and send at most a menu."""

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if greet:
            writer.write(b"1) Climb - go up\r\nUnknown command\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(on_client, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("greet", [True, False])
def test_a_silent_server_is_a_connection_error(greet: bool) -> None:
    async def run() -> None:
        async with silent_server(greet) as port:
            settings = {"read_timeout": 0.1, "connect_timeout": 0.1, "max_retries": 0}
            config = GymConfig(host="127.0.0.1", port=port, transport="tcp", **settings)
            with pytest.raises(GymConnectionError, match=r"did not answer|no greeting"):
                _ = [sample async for sample in GymEpisodeStream(config, Letters())]

    asyncio.run(run())


def test_an_episode_that_takes_too_long_is_a_timeout(server: GymServer) -> None:
    async def slow(observation: PuzzleObservation) -> str | None:
        if observation.step_index:
            await asyncio.Event().wait()
        return "up"

    samples, stream = play(config_for(server, episode_timeout=2.0), max_episodes=1, policy=slow)
    assert [sample.episode_status for sample in samples] == [EpisodeStatus.TIMEOUT]
    assert stream.metrics.episodes_failed == 1


async def waiting_stream(port: int, **fields: Any) -> tuple[GymEpisodeStream, asyncio.Task[list[StreamSample]]]:
    """A stream whose consumer is waiting: for a server that never answers, or for its next try to connect."""
    stream = GymEpisodeStream(GymConfig(host="127.0.0.1", port=port, transport="tcp", **fields), Letters())

    async def consume() -> list[StreamSample]:
        return [sample async for sample in stream]

    task = asyncio.ensure_future(consume())
    while not stream._client.games and not stream.metrics.reconnections:
        await asyncio.sleep(0.001)
    return stream, task


def test_close_and_cancel_end_a_stream_that_waits() -> None:
    async def run() -> None:
        async with silent_server(True) as port:
            stream, task = await waiting_stream(port)
            await stream.close()
            assert await asyncio.wait_for(task, 20) == []
            assert stream.state is StreamState.IDLE
            stream, task = await waiting_stream(port)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not stream._client.is_connected
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            stream, task = await waiting_stream(taken.getsockname()[1], retry_delay=60)
            await stream.close()
            assert await asyncio.wait_for(task, 20) == []

    asyncio.run(run())


# --- mock gym, configured streams, hints -----------------------------------------------------------------------------


def test_the_mock_gym_is_the_same_after_a_reset_and_resumes() -> None:
    def episodes() -> MockGymStream:
        return MockGymStream(Letters(), 40, steps_per_episode=3, difficulty_range=(0.2, 0.8), seed=1)

    async def again() -> list[StreamSample]:
        stream = episodes()
        assert [sample.input_ids.tolist() async for sample in stream] == [one.input_ids.tolist() for one in samples]
        await stream.reset()
        return [sample async for sample in stream]

    samples = list(episodes())
    later = episodes()
    later.load_state_dict({"position": 5, "seed": 1})
    for found, wanted in ((asyncio.run(again()), samples), (list(later), samples[5:])):
        assert [
            one.model_copy(update={"timestamp": two.timestamp}) for one, two in zip(found, wanted, strict=True)
        ] == wanted
    assert samples[4].sample_id == "mock_0001_1"
    assert all(0.2 <= (sample.difficulty or 0) <= 0.8 for sample in samples)
    assert [sample.reward for sample in samples[:3]] == [0.0, 0.0, float(bool(samples[0].success))]


@pytest.mark.parametrize(
    ("hint", "action"),
    [
        ("Try placing 5 at row 3, column 4", "place 3 4 5"),
        ("Try pressing the light at row 1, column 2", "press 1 2"),
        ("Try setting horizontal edge at (2,3) to line", "set h 2 3 1"),
        ("The secret code is: 1 2 3 4", "guess 1 2 3 4"),
        ("Think about it", None),
    ],
)
def test_hints_in_words_become_commands(hint: str, action: str | None) -> None:
    assert action_of_hint(hint) == action


# --- a real puzzle arcade --------------------------------------------------------------------------------------------

ARCADE = """
import asyncio, sys
from chuk_protocol_server.servers.telnet_server import TelnetServer
from chuk_protocol_server.servers.ws_server_plain import PlainWebSocketServer
from chuk_puzzles_gym.server import ArcadeHandler
kind = PlainWebSocketServer if sys.argv[1] == "websocket" else TelnetServer
asyncio.run(kind("127.0.0.1", int(sys.argv[2]), ArcadeHandler).start_server())
"""


@pytest.fixture(scope="module")
def arcade() -> Iterator[Callable[[str], int]]:
    """Starts a real server for a transport, once, and returns its port."""
    pytest.importorskip("chuk_puzzles_gym")
    running: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}

    def start(transport: str) -> int:
        kind = "websocket" if transport == "websocket" else "telnet"
        if kind not in running:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            command = [sys.executable, "-c", ARCADE, kind, str(port)]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            running[kind] = port, process
            give_up_at = time.monotonic() + 60
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert time.monotonic() < give_up_at
                assert process.poll() is None
                time.sleep(0.05)
        return running[kind][0]

    yield start
    for _, process in running.values():
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize(("transport", "mode"), zip(GymTransport, GymOutputMode, strict=True))
def test_a_real_arcade_is_played_to_the_end(arcade: Callable[[str], int], transport: str, mode: str) -> None:
    tasks = {"puzzle_types": ("binary", "lights_out"), "difficulty_range": (0.0, 0.3), "output_mode": mode, "seed": 1}
    config = GymConfig(host="127.0.0.1", port=arcade(transport), transport=transport, **tasks)
    samples, stream = play(config, max_episodes=2)
    assert stream.metrics.episodes_successful == 2
    assert stream.metrics.reconnections == 0
    last = [sample for sample in samples if sample.step_index == (sample.total_steps or 0) - 1]
    assert [sample.reward for sample in last] == [1.0, 1.0]
    assert {action_of(sample).split()[0] for sample in samples} <= {"place", "press"}
