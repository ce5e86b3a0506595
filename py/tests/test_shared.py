"""`r+` and `w+` as shared mappings: several processes that store to one file, full disks, forks, budgets."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap
from typing import Any, Literal

import numpy as np
import pytest

import aquifer

from test_processes import in_child

ELEMENTS = 2000

_FILL = """
import sys
import numpy as np
import aquifer

path, of, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
array = aquifer.memmap(path, np.int64, "r+")
print(flush=True)
sys.stdin.readline()
for index in range(rank, len(array), of):
    array[index] = index + 1
    if index % 100 == rank:
        array.flush()
array.flush()
"""


def test_processes_that_fill_elements_of_their_own_lose_none(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "results")
    np.zeros(ELEMENTS, np.int64).tofile(path)
    arguments = [[sys.executable, "-c", _FILL, path, "4", str(rank)] for rank in range(4)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in arguments]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "\n"
    for process in processes:
        # All of them have the file mapped.
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert (np.fromfile(path, np.int64) == np.arange(1, ELEMENTS + 1)).all()


def test_forked_children_store_as_with_numpy(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "results")
    array = aquifer.memmap(path, np.int64, "w+", shape=(ELEMENTS,))
    odd = array[1::2]

    def body() -> None:
        odd[:] = np.arange(len(odd))
        array[0] = 7
        np.add(array[2:4], 5, out=array[2:4])
        array.flush()
        odd.flush()

    in_child(body)
    assert array[0] == 7 and array[2] == 5 and (odd[2:] == np.arange(2, len(odd))).all()
    in_child(lambda: array.__setitem__(slice(4, None), 3))
    assert (array[4:] == 3).all()
    del odd
    array.close()
    assert np.fromfile(path, np.int64)[0] == 7


def _store(array: aquifer.memmap, index: int) -> None:
    array[index] = index


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_multiprocessing_store_into_the_array(tmp_path: pathlib.Path, method: Literal["fork", "spawn"]) -> None:
    import multiprocessing

    array = aquifer.memmap(tmp_path / "results", np.int64, "w+", shape=(8,))
    context = multiprocessing.get_context(method)
    workers = [context.Process(target=_store, args=(array, index)) for index in range(8)]  # type: ignore[attr-defined]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    assert array.tolist() == list(range(8))


def test_joblib_workers_fill_a_shared_array(tmp_path: pathlib.Path) -> None:
    joblib = pytest.importorskip("joblib")
    array = aquifer.memmap(tmp_path / "results", np.int64, "w+", shape=(ELEMENTS,))
    joblib.Parallel(n_jobs=2)(joblib.delayed(_store)(array, index) for index in range(0, ELEMENTS, 50))
    assert (np.asarray(array)[::50] == np.arange(0, ELEMENTS, 50)).all()


def test_stores_are_seen_at_once(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "file")
    array = aquifer.memmap(path, np.int64, "w+", shape=(ELEMENTS,))
    other = np.memmap(path, np.int64, "r+")
    array[3] = 7
    other[4] = 8
    assert other[3] == 7 and array[4] == 8 and np.fromfile(path, np.int64)[3] == 7
    again = pickle.loads(pickle.dumps(array))
    array[5] = 9
    assert again[5] == 9


def test_repr_names_the_file_mode_stores_and_budget(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "file")
    array = aquifer.memmap(path, np.int64, "w+", shape=(3,), budget="64MiB")
    assert repr(array) == f"memmap([0, 0, 0], file={path!r}, mode='w+', stores='shared', budget='64 MiB')"
    assert (array.stores, array[1:].stores) == ("shared", "shared")
    private = aquifer.memmap(path, np.int64, "r+", stores="private", budget="64MiB")
    assert "stores='private'" in repr(private) and private.stores == "private"
    assert repr(aquifer.memmap(path, np.int64, "r", budget="64MiB")) == f"memmap([0, 0, 0], file={path!r}, mode='r', budget='64 MiB')"
    assert repr(array.copy()).removeprefix("memmap").removeprefix("array") == "([0, 0, 0])"


def test_a_file_that_refuses_shared_stores_gets_private_ones() -> None:
    descriptor = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, 4096)
    # Shared writable mappings are refused from here on.
    fcntl.fcntl(descriptor, 1033, 0x10)  # F_ADD_SEALS, F_SEAL_FUTURE_WRITE
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 4096)
    array = aquifer.memmap(f"/proc/self/fd/{descriptor}", np.uint8, "r+")
    assert array.stores == "private" and "stores='private'" in repr(array)
    array[3] = 7
    assert array[3] == 7 and os.pread(descriptor, 4, 0) == bytes(4)
    with pytest.raises(OSError):
        array.flush()
    os.close(descriptor)


def test_blocks_are_reserved_if_asked_for(tmp_path: pathlib.Path) -> None:
    length = 8 << 20
    aquifer.memmap(tmp_path / "sparse", np.uint8, "w+", shape=(length,))
    assert os.stat(tmp_path / "sparse").st_blocks * 512 < length // 2
    aquifer.memmap(tmp_path / "reserved", np.uint8, "w+", shape=(length,), allocate=True)
    assert os.stat(tmp_path / "reserved").st_blocks * 512 >= length


@pytest.mark.parametrize("options", [{"mode": "r"}, {"mode": "c"}, {"mode": "r+", "backend": "cache"}])
@pytest.mark.parametrize("option", [{"stores": "private"}, {"stores": "shared"}, {"allocate": True}])
def test_what_stores_do_not_fit_is_refused(tmp_path: pathlib.Path, options: Any, option: Any) -> None:
    np.zeros(8).tofile(tmp_path / "file")
    with pytest.raises(ValueError, match="default backend"):
        aquifer.memmap(tmp_path / "file", **options, **option)
    with pytest.raises(ValueError, match='use "shared" or "private"'):
        aquifer.memmap(tmp_path / "file", mode="r+", stores="exact")  # type: ignore[arg-type]


_ON_A_FULL_DISK = """
import ctypes, os, sys
ctypes.CDLL(None).mount  # it is there
libc = ctypes.CDLL(None, use_errno=True)
directory = sys.argv[1]
if libc.mount(b"none", directory.encode(), b"tmpfs", 0, b"size=1m") != 0:
    sys.exit(77)
import numpy as np
import aquifer

path = os.path.join(directory, "array")
array = aquifer.memmap(path, np.uint8, "w+", shape=(2 << 20,))
raised = None
try:
    for start in range(0, 2 << 20, 4096):
        array[start : start + 4096] = start // 4096 % 251 + 1
        at = start
except aquifer.NoSpaceError as error:
    raised = error.with_traceback(None)
assert raised is not None and raised.filename == path and raised.offset is not None, raised
assert "bytes" in str(raised)
# Nothing is lost, and the rest can be stored as well.
for start in range(at, 2 << 20, 4096):
    try:
        array[start : start + 4096] = start // 4096 % 251 + 1
    except aquifer.NoSpaceError:
        pass
try:
    array.flush()
except aquifer.NoSpaceError as error:
    print("flush:", error.offset is not None)
wanted = np.repeat(np.arange(512) % 251 + 1, 4096).astype(np.uint8)
assert (np.asarray(array) == wanted).all()
# With room, the next flush writes all.
assert libc.mount(b"none", directory.encode(), b"tmpfs", 32, b"size=16m") == 0  # MS_REMOUNT
array.flush()
assert (np.fromfile(path, np.uint8) == wanted).all()
array.close()
try:
    aquifer.memmap(os.path.join(directory, "more"), np.uint8, "w+", shape=(64 << 20,), allocate=True)
except aquifer.NoSpaceError:
    print("refused")
"""


def test_a_full_disk_is_an_exception_and_loses_nothing(tmp_path: pathlib.Path) -> None:
    """In a mount namespace of its own, which root may make."""
    command = ["unshare", "-m", sys.executable, "-c", textwrap.dedent(_ON_A_FULL_DISK), str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("mounting is not permitted")
    assert (done.returncode, done.stdout) == (0, "flush: True\nrefused\n"), done.stderr


@pytest.mark.parametrize("mode", ["r+", "w+"])
def test_a_file_of_many_budgets_is_filled(tmp_path: pathlib.Path, mode: str) -> None:
    """How much stays in memory is tested with the mapper."""
    budget, step = 64 << 20, 8 << 20
    length = 8 * budget
    with open(tmp_path / "file", "wb") as file:
        file.truncate(length)
    array = aquifer.memmap(tmp_path / "file", np.uint8, mode, shape=(length,), budget=budget)
    for start in range(0, length, step):
        array[start : start + step] = start // step % 251 + 1
    assert array.stats()["stores"] == "shared" and "writable_resident_bytes" in array.stats()
    array.budget = budget // 2
    for start in range(0, length, step):
        assert np.all(array[start : start + step] == start // step % 251 + 1)
    array.close()
    there = np.fromfile(tmp_path / "file", np.uint8)
    assert np.array_equal(there[:: 1 << 12], np.repeat(np.arange(length // step) % 251 + 1, step >> 12))


def test_system_calls_store_beyond_the_budget(tmp_path: pathlib.Path) -> None:
    budget = 16 << 20
    with open(tmp_path / "source", "wb") as file:
        file.write(os.urandom(1 << 20) * 64)
    array = aquifer.memmap(tmp_path / "file", np.uint8, "w+", shape=(64 << 20,), budget=budget)
    with open(tmp_path / "source", "rb", buffering=0) as file:
        assert file.readinto(array.data) == 64 << 20
    assert (np.asarray(array) == np.fromfile(tmp_path / "source", np.uint8)).all()


def test_a_store_by_other_code_behind_the_end_is_raised(tmp_path: pathlib.Path) -> None:
    array = aquifer.memmap(tmp_path / "file", np.uint8, "w+", shape=(16 << 10,))
    os.truncate(tmp_path / "file", 4096)
    ctypes.memset(array.ctypes.data + 8192, 1, 8)
    with pytest.raises(aquifer.FaultError):
        array.check()
    assert os.path.getsize(tmp_path / "file") == 4096
