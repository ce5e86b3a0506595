"""Rows for asyncio."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aquifer
from aquifer import _memmap

Table = npt.NDArray[np.int64]


@pytest.fixture(params=["r", "r+"])
def array(request: pytest.FixtureRequest, path: str, table: Table) -> aquifer.memmap:
    return aquifer.memmap(path, np.int64, request.param, shape=table.shape, budget="64MiB")


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a program in a new loop."""
    loops: Any = pytest.importorskip(request.param, reason="uvloop is not installed: python3 -m pip install uvloop")
    found: Run = loops.run
    return found


def test_rows_come_while_other_tasks_run(run: Run, array: aquifer.memmap, table: Table) -> None:
    async def read() -> None:
        batches = [np.random.default_rng(seed).integers(-4096, 4096, 200) for seed in range(20)]
        for batch, found in zip(batches, await asyncio.gather(*map(array.take_async, batches))):
            assert (found == table[batch]).all()
        out = np.empty((2, 64), np.int64)
        assert await array.take_async([5, 6], out) is out and (out == table[5:7]).all()
        assert (await array.take_async([])).shape == (0, 64)
        assert len(_memmap._queues) == 1, "one for the loop"

    for _ in range(3):
        run(read())


def test_errors_are_raised_by_await(run: Run, array: aquifer.memmap, path: str) -> None:
    async def read() -> None:
        with pytest.raises(IndexError):
            await array.take_async([4096])
        os.truncate(path, 4096)
        with pytest.raises(aquifer.FaultError):
            await array.take_async([1000])

    run(read())


def test_cancelling_keeps_the_target_until_the_reads_have_ended(run: Run, array: aquifer.memmap, table: Table) -> None:
    async def read() -> None:
        out = np.zeros((4096, 64), np.int64)
        held = weakref.ref(out)
        task = asyncio.create_task(array.take_async(np.arange(4096), out))
        await asyncio.sleep(0)
        task.cancel()
        del out
        # An exception that is kept would keep the frame that has the target.
        await asyncio.wait([task])
        assert task.cancelled()
        del task
        completions = _memmap.queue_of_loop().completions
        while len(completions) > 0:
            assert held() is not None
            await asyncio.sleep(0)
        gc.collect()
        assert held() is None
        assert (await array.take_async([7]) == table[7]).all(), "the loop goes on"

    run(read())


def test_a_task_that_nothing_refers_to_ends(run: Run, array: aquifer.memmap, table: Table) -> None:
    async def read() -> None:
        found: list[Any] = []

        async def take() -> None:
            found.append(await array.take_async(np.arange(4096)))

        asyncio.create_task(take())
        await asyncio.sleep(0)
        gc.collect()
        async with asyncio.timeout(60):
            while not found:
                await asyncio.sleep(0)
        assert (found[0] == table).all()

    run(read())


def test_a_loop_that_ends_waits_for_its_reads(run: Run, array: aquifer.memmap) -> None:
    async def leave() -> None:
        task = asyncio.ensure_future(array.take_async(np.arange(4096)))
        await asyncio.sleep(0)
        task.cancel()

    for _ in range(20):
        run(leave())
    gc.collect()
    assert len(_memmap._queues) == 0, "nothing keeps a loop that has ended"
