"""Forks, other processes, signals, the end of the interpreter."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aquifer

Table = npt.NDArray[np.int64]


def in_child(body: Callable[[], None]) -> None:
    """Runs the body in a forked child, which says by its exit status whether it failed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(60)
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("offset", [0, 3 * 8 + 4096])
def test_a_forked_child_reads_the_file(path: str, table: Table, mode: str, offset: int) -> None:
    expected = table.reshape(-1)[offset // 8 :]
    array = aquifer.memmap(path, np.int64, mode, offset, budget="64MiB", stores="private" if mode == "r+" else None)
    half = array[len(array) // 2 :]
    if mode != "r":
        array[3] = -1  # not flushed

    def body() -> None:
        assert array[9] == expected[9] and (half == expected[len(array) // 2 :]).all()
        assert array[3] == expected[3], "of the file, not of the parent"
        assert (array.take([5, 7]) == expected[[5, 7]]).all() and (array[[5, 7]] == expected[[5, 7]]).all()
        calls: list[Callable[[], object]] = [
            lambda: array.prefetch([1]),
            lambda: array.advise("random"),
            lambda: setattr(array, "budget", 1 << 25),
        ]
        for call in calls:
            with pytest.raises(aquifer.ForkedError):
                call()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        again = aquifer.memmap(path, np.int64, "r", offset, budget="64MiB")
        assert (again.take([5, 7]) == expected[[5, 7]]).all()
        shared = aquifer.memmap(path, np.int64, "r", offset)
        assert shared[5] == expected[5]

    in_child(body)
    assert array[3] == (expected[3] if mode == "r" else -1), "the parent's is as it was"
    if mode == "r+":
        array.flush()
        assert np.fromfile(path, np.int64, offset=offset)[3] == -1


def test_a_childs_end_changes_nothing(path: str, table: Table) -> None:
    array = aquifer.memmap(path, np.int64, "r+", budget="64MiB", stores="private")
    array[3] = -1

    def body() -> None:
        nonlocal array
        del array

    in_child(body)
    assert (np.fromfile(path, np.int64) == table.reshape(-1)).all()
    assert array[3] == -1


def test_the_user_backend_is_not_inherited(path: str, table: Table) -> None:
    array = aquifer.memmap(path, np.int64, "r", backend="cache", budget="64MiB")
    assert array[3] == 3

    def body() -> None:
        calls: list[Callable[[], object]] = [lambda: array.prefetch([1]), lambda: array.advise("random")]
        for call in calls:
            with pytest.raises(aquifer.ForkedError):
                call()

    in_child(body)


def row_sum(array: aquifer.memmap, row: int) -> int:
    return int(array.take([row]).sum())


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_arrays_go_to_other_processes(path: str, table: Table, method: str) -> None:
    array = aquifer.memmap(path, np.int64, "r", shape=table.shape, budget="64MiB")
    with multiprocessing.get_context(method).Pool(2) as pool:
        sums = pool.starmap(row_sum, [(array, row) for row in range(0, 4096, 512)])
    assert sums == table[::512].sum(axis=1).tolist()


class Interrupted(Exception):
    pass


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """A signal's handler raises in the block, which has to end by that."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupted):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_signal_interrupts_a_long_call(path: str, table: Table, mode: str) -> None:
    array = aquifer.memmap(path, np.int64, mode, budget="64MiB")
    rows = np.random.default_rng(1).integers(0, table.size, 4_000_000)
    out = np.full(len(rows), -1, np.int64)

    with interrupted_after(0.02):
        array.take(rows, out)
        # A machine that has read all of them by now has not failed.
        signal.pause()
    assert (array.take(rows[:9]) == rows[:9]).all()


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_stores_outlive_the_interpreter(path: str, table: Table) -> None:
    code = """
import ctypes, sys, aquifer, numpy as np
array = aquifer.memmap(sys.argv[1], np.int64, "r+")
array[3] = -1
ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))  # never freed
"""
    done = run(code, path)
    assert (done.returncode, done.stderr) == (0, "")
    assert np.fromfile(path, np.int64)[3] == -1


def test_the_interpreter_ends_with_reads_under_way(path: str, table: Table) -> None:
    code = """
import asyncio, sys, aquifer, numpy as np
array = aquifer.memmap(sys.argv[1], np.int64, "r")
async def read():
    for _ in range(20):
        asyncio.ensure_future(array.take_async(np.arange(100_000)))
    await asyncio.sleep(0)
loop = asyncio.new_event_loop()
loop.run_until_complete(read())
"""
    done = run(code, path)
    assert done.returncode == 0, done.stderr


def test_resident_memory_stays_under_the_budget(path: str) -> None:
    """Twenty times the budget is read, in order and at random."""
    rows, row_bytes, budget = 20 * 16_384, 4096, 64 << 20
    with open(path, "wb") as file:
        for start in range(0, rows, 4096):
            block = np.zeros((4096, row_bytes), np.uint8)
            block[:, 0] = np.arange(start, start + 4096) % 251
            file.write(block.tobytes())
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for backend in ("auto", "cache"):
        code = """
import re, sys, aquifer, numpy as np
path, backend, rows, row_bytes, budget = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
array = aquifer.memmap(path, np.uint8, "r", shape=(rows, row_bytes), budget=budget, backend=backend)
def resident():
    return sum(int(size) for size in re.findall(r"^Rss(?:Anon|File): +(\\d+)", open("/proc/self/status").read(), re.M)) * 1024
before, most = resident(), 0
for start in range(0, rows, 4096):
    assert array[start:start + 4096, 0].sum() == (np.arange(start, start + 4096) % 251).sum()
    most = max(most, resident() - before)
random = np.random.default_rng(1)
out = np.empty((4096, row_bytes), np.uint8)
out[:] = 1
for _ in range(20):
    wanted = random.integers(0, rows, 4096)
    assert (array.take(wanted, out)[:, 0] == wanted % 251).all()
    most = max(most, resident() - before)
print(most)
"""
        done = run(code, path, backend, str(rows), str(row_bytes), str(budget))
        assert done.returncode == 0, done.stderr
        # The target of the batches, buffers, the interpreter's own; and what a fast disk reads in a moment.
        assert int(done.stdout) < budget + (16 << 20) + (64 << 20), backend
