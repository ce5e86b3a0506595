"""Lists of millions of rows: memory, interruptions, the order of what is copied."""

from __future__ import annotations

import _thread
import functools
import operator
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aquifer
from aquifer._indices import bytes_in

Table = npt.NDArray[np.int64]

# More than are read between two looks at signals.
LONG = 3 << 20


def interrupted(call: Callable[[], object]) -> None:
    """Runs a native call when Ctrl-C has been pressed, and no line of Python comes between."""
    # A shell starts programs in the background with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(map(operator.call, [_thread.interrupt_main, call]))
    finally:
        signal.signal(signal.SIGINT, before)


def opened(path: str, kind: str) -> Any:
    if kind == "rows":
        return aquifer.Rows(path, np.int64, 1, budget="64MiB")
    mode, _, backend = kind.partition("-")
    return aquifer.memmap(path, np.int64, mode, shape=(4096 * 64, 1), budget="64MiB", backend=backend or "auto")  # type: ignore[arg-type]


def native_take(array: Any, rows: Table, out: Table) -> Callable[[], object]:
    if isinstance(array, aquifer.Rows):
        assert array._native is not None
        return functools.partial(array._native.take, rows, bytes_in(out))
    assert array._source is not None
    return functools.partial(array._source.region.take, array._layout(), rows, bytes_in(out))


@pytest.mark.parametrize("kind", ["r", "r+", "c", "r-cache", "rows"])
def test_a_long_list_is_copied_in_any_order(path: str, table: Table, kind: str) -> None:
    array, flat = opened(path, kind), table.reshape(-1, 1)
    random = np.random.default_rng(1)
    uneven = np.concatenate([random.integers(0, 64, 200_000), random.integers(-len(flat), len(flat), 200_000)])
    for rows in (random.integers(0, len(flat), 300_000), uneven, np.arange(len(flat))[::-1], np.arange(len(flat)), np.repeat(7, 150_000)):
        assert np.array_equal(array.take(rows), flat[rows])
    if kind != "rows":
        assert np.array_equal(array[::-3].take(rows[:1000]), flat[::-3][rows[:1000]])


@pytest.mark.parametrize("kind", ["r", "r+", "rows"])
def test_ctrl_c_interrupts_before_rows_are_copied(path: str, table: Table, kind: str) -> None:
    array = opened(path, kind)
    rows = np.random.default_rng(1).integers(0, 4096 * 64, LONG)
    out = np.full((LONG, 1), -1)
    interrupted(native_take(array, rows, out))
    assert (out == -1).all(), "no row was copied"
    # Also while the list is checked: the row at its end does not exist.
    rows[-1] = 1 << 40
    interrupted(native_take(array, rows, out))
    with pytest.raises(IndexError):
        array.take(rows)
    assert (out == -1).all()


def test_ctrl_c_interrupts_many_ranges(path: str, table: Table) -> None:
    array = aquifer.memmap(path, np.int64, "r", budget="64MiB")
    starts = np.zeros(LONG, np.int64)
    starts[-1] = -1
    source = array._source
    assert source is not None
    out = np.full(LONG, -1)
    interrupted(functools.partial(source.region.read_ranges, starts, np.full(LONG, 8), bytes_in(out)))
    assert (out == -1).all()
    assert (array.read_ranges(np.arange(200_000), 3).reshape(-1, 3)[:, 2] == np.arange(2, 200_002)).all()


@pytest.mark.parametrize("kind", ["r", "r+", "r-cache", "rows"])
def test_a_long_list_takes_little_memory(path: str, table: Table, kind: str, tmp_path: pathlib.Path) -> None:
    program = f"""
import sys
import numpy as np
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
from test_long_lists import LONG, opened
array = opened({path!r}, {kind!r})
rows = np.random.default_rng(1).integers(0, 4096 * 64, LONG)
array.take(rows[:200_000])
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) >> 10
out = np.full((LONG, 1), -1)
before = peak()
array.take(rows, out)
print(peak() - before)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    # 16 bytes of each row would be 48 MiB.
    assert int(ran.stdout) < 36, "MiB besides the result"


def test_an_end_of_an_object_may_start_another_call(path: str, table: Table) -> None:
    """Of what a call has used: the code runs without a lock that the call takes."""
    program = f"""
import numpy as np
import aquifer
from aquifer import _native

array = aquifer.memmap({path!r}, np.int64, "r", shape=(4096, 64), budget="64MiB")
source, layout = array._source, array._layout()
completions = _native.Completions()
ended = []

class Out(np.ndarray):
    def __del__(self):
        ended.append(1)
        start(len(ended), np.empty(512, np.uint8))

def start(token, out):
    completions.take_rows(token, source.region, layout, np.zeros(1, np.int64), out)

start(0, np.empty(512, np.uint8).view(Out))
while len(completions) > 0:
    completions.wait()
    assert all(error is None for _, error in completions.completed())
assert ended
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
