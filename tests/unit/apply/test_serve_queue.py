"""The slots of the proxy: names of models come and go, and a slot is never given twice."""

from __future__ import annotations

import asyncio
import random

from query_mutator.apply.proxy.traffic import Queue


def test_a_slot_is_held_once_while_names_come_and_go() -> None:
    async def hold(queue: Queue, name: str, rng: random.Random, held: list[str]) -> None:
        async with queue.place(name):
            held.append(name)
            assert held.count(name) <= 2
            try:
                await asyncio.sleep(rng.random() / 1000)
            finally:
                held.remove(name)

    async def run() -> Queue:
        queue, rng, held = Queue(2), random.Random(0), list[str]()
        tasks = [asyncio.create_task(hold(queue, f"m{number % 7}", rng, held)) for number in range(300)]
        for task in rng.sample(tasks, 100):
            await asyncio.sleep(rng.random() / 1000)
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [each for each in found if isinstance(each, AssertionError)]
        return queue

    queue = asyncio.run(run())
    assert queue.counts() == {}
    assert not queue._limits


def test_counts_are_by_model() -> None:
    queue = Queue()
    queue.in_flight.update({"b:1": 1, "a": 2})
    queue.waiting.update({"c": 1})
    assert queue.counts() == {
        "a": {"in_flight": 2, "waiting": 0},
        "b:1": {"in_flight": 1, "waiting": 0},
        "c": {"in_flight": 0, "waiting": 1},
    }
