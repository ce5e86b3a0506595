"""Files that shrink under an array: exceptions in place of SIGBUS."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aquifer

Table = npt.NDArray[np.int64]
CUT = 40_960


@pytest.fixture(params=["r", "r+", "c"])
def cut(request: pytest.FixtureRequest, path: str, table: Table) -> aquifer.memmap:
    """An array whose file has only 80 rows left."""
    array = aquifer.memmap(path, np.int64, request.param, shape=table.shape, budget="64MiB")
    os.truncate(path, CUT)
    return array


def is_the_cut(raised: pytest.ExceptionInfo[aquifer.FaultError], array: aquifer.memmap, at: int = CUT) -> None:
    error = raised.value
    assert (error.filename, error.offset, error.errno) == (array.filename, at, errno.ENODATA)


def test_calls_indices_and_ufuncs_raise(cut: aquifer.memmap) -> None:
    row = 1000  # the first of a page
    wanted: list[Any] = [
        lambda: cut[row, 3],
        lambda: cut[:, 3][row],
        lambda: cut.take([row]),
        lambda: cut[[1, row]],
        lambda: np.add(cut[row], 1),
        lambda: cut[row] + 1,
        lambda: np.multiply.reduce(cut[row]),
    ]
    for access in wanted:
        with pytest.raises(aquifer.FaultError) as raised:
            access()
        is_the_cut(raised, cut, row * 512)
        assert cut[79, 63] == 80 * 64 - 1, "what is there can be read"
    with pytest.raises(aquifer.FaultError) as raised:
        cut.sum()
    is_the_cut(raised, cut)


def test_foreign_code_sees_zeros_and_the_next_call_raises(cut: aquifer.memmap) -> None:
    calls: list[Any] = [cut.check, cut.flush, cut.close, lambda: cut.take([0]), lambda: cut[0, 0]]
    for call in calls:
        into = np.ones(512, np.int64)
        ctypes.memmove(into.ctypes.data, cut.ctypes.data + CUT, 4096)
        assert not into.any()
        with pytest.raises(aquifer.FaultError) as raised:
            call()
        is_the_cut(raised, cut)
    cut.check()
    assert not cut.closed


def test_bytes_that_come_back_are_seen(cut: aquifer.memmap, path: str, table: Table) -> None:
    with pytest.raises(aquifer.FaultError):
        cut.sum()
    table.tofile(path)
    assert (cut == table).all() and (cut.take([1000]) == table[1000]).all()


def test_a_fault_of_one_array_is_not_raised_by_another(cut: aquifer.memmap, tmp_path: Any, table: Table) -> None:
    table.tofile(tmp_path / "other")
    other = aquifer.memmap(tmp_path / "other", np.int64, "r", shape=table.shape)
    ctypes.memmove(np.ones(1).ctypes.data, cut.ctypes.data + CUT, 8)
    assert other[1000, 0] == 64_000 and other.sum() == table.sum()
    other.check()
    with pytest.raises(aquifer.FaultError):
        cut.check()


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_stores_behind_the_end_raise(path: str, table: Table, mode: str) -> None:
    array = aquifer.memmap(path, np.int64, mode, shape=table.shape)
    array[3] = 7
    os.truncate(path, CUT)
    with pytest.raises(aquifer.FaultError) as raised:
        array[1000] = 1
    is_the_cut(raised, array, 1000 * 512 // 4096 * 4096)
    if mode == "r+":
        with pytest.raises(aquifer.FaultError, match="the file ends before"):
            array.flush()
    else:
        array.flush()
    assert os.path.getsize(path) == CUT, "nothing is written there"
    assert np.fromfile(path, np.int64)[3 * 64] == (7 if mode == "r+" else 3 * 64)


def run(code: str, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("when", ["before", "after"])
def test_faulthandler_may_be_enabled_before_the_first_array(path: str, table: Table, when: str) -> None:
    """Before or after the import. Aquifer's faults are served."""
    enable = "import faulthandler; faulthandler.enable()"
    code = f"""
import os, sys
{enable if when == "before" else ""}
import aquifer, numpy as np
{enable if when == "after" else ""}
array = aquifer.memmap(sys.argv[1], np.int64, "r", shape=(4096, 64))
cached = aquifer.memmap(sys.argv[1], np.int64, "r", shape=(4096, 64), backend="cache")
assert array[9, 0] == 576 == cached[9, 0]
assert cached.sum() == array.sum()
os.truncate(sys.argv[1], 4096)
try:
    array.sum()
except aquifer.FaultError as error:
    print("raised", error.offset)
"""
    done = run(code, path)
    assert (done.returncode, done.stdout) == (0, "raised 4096\n"), done.stderr




def test_a_missed_fault_takes_no_stores_with_it(path: str, table: Table) -> None:
    array = aquifer.memmap(path, np.int64, "r+", shape=table.shape)
    array[0, 0] = 99
    os.truncate(path, CUT)
    into = np.ones(512, np.int64)
    ctypes.memmove(into.ctypes.data, array.ctypes.data + CUT, 4096)
    with pytest.raises(aquifer.FaultError):
        array.close()
    assert np.fromfile(path, np.int64)[0] == 99
    assert os.path.getsize(path) == CUT


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_methods_of_the_user_backend_raise_and_indices_end_the_process(path: str, table: Table, mode: str) -> None:
    array = aquifer.memmap(path, np.int64, mode, shape=table.shape, backend="cache", budget="64MiB")
    os.truncate(path, CUT)
    try:
        calls: list[Any] = [lambda: array.take([1000]), lambda: array[[1000]]]
        for call in calls:
            with pytest.raises(aquifer.FaultError) as raised:
                call()
            is_the_cut(raised, array, 1000 * 512)
    finally:
        # What shows the array of a test that has failed would end the process.
        table.tofile(path)
    code = """
import os, sys, aquifer
array = aquifer.memmap(sys.argv[1], mode="r", backend="cache", shape=CUT + 1, budget="16MiB")
os.truncate(sys.argv[1], 4096)
array[CUT]
"""
    assert run(code.replace("CUT", str(CUT)), path).returncode == -signal.SIGBUS
