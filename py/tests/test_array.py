"""Persistent arrays: what survives, what is compared, what hostile headers do."""

import gc
import io
import os
import pickle
import random
import re
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aquifer
from aquifer import Pool, _array


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.pool"


@pytest.fixture
def pool(path: Path) -> Iterator[Pool]:
    pool = Pool.create(path, "8MiB")
    yield pool
    gc.collect()
    pool.close()
    path.unlink()


def reopened(pool: Pool) -> Pool:
    gc.collect()
    pool.close()
    return Pool.open(pool.path)


def test_an_array_survives(path: Path) -> None:
    with Pool.create(path, "16MiB") as pool:
        weights = pool.array("weights", shape=(3, 4), dtype="f4")
        assert weights.shape == (3, 4) and weights.dtype == np.float32 and not weights.any()
        assert (weights.name, weights.pool) == ("weights", pool)
        weights[:] = np.arange(12).reshape(3, 4)
        weights.psync()
        weights[0] = 99
        address = weights.ctypes.data
        assert address % 4096 == 0
        del weights
    with Pool.open(path) as pool:
        weights = pool.array("weights")
        assert weights.ctypes.data == address, "the same address in every process"
        assert weights.tolist() == np.arange(12).reshape(3, 4).tolist(), "what no psync covered is lost"
        del weights
    with Pool.open(path, read_only=True) as pool:
        weights = pool.array("weights", (3, 4), "f4")
        assert not weights.flags.writeable and weights[2, 3] == 11
        with pytest.raises(ValueError, match="read-only"):
            weights[0] = 1
        calls: list[Any] = [weights.psync, weights.rollback, weights.transaction().__enter__]
        for call in calls:
            with pytest.raises(aquifer.ReadOnlyError):
                call()
        with pytest.raises(aquifer.NotFoundError):
            pool.array("others", 3)
        del weights, calls, call


DTYPES: list[Any] = [
    "?",
    "i1",
    ">i2",
    "u8",
    "f2",
    "c16",
    "S5",
    "U3",
    "V7",
    "M8[ns]",
    "m8[D]",
    [("a", "i4"), ("b", "f8", (2, 3))],
    np.dtype([("my-field", "i1"), ("größe", ">f4")], align=True),
    {"names": ["x", "y"], "formats": ["u1", "<i8"], "offsets": [3, 8], "itemsize": 24},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_data_types_are_kept(pool: Pool, dtype: Any) -> None:
    dtype = np.dtype(dtype)
    for number, (shape, order) in enumerate([((), "C"), ((5,), "C"), ((2, 3), "F"), ((0, 4), "C")]):
        name = f"array {number}"
        array = pool.array(name, shape, dtype, order=order)
        assert array.dtype == dtype and array.shape == shape
        assert array.flags.f_contiguous if order == "F" else array.flags.c_contiguous
        # All bytes, those between fields as well.
        with memoryview(pool._attached[name].native) as memory:
            expected = random.Random(number).randbytes(array.nbytes)
            memory[4096 : 4096 + array.nbytes] = expected
        array.psync()
        del array
        again = pool.array(name, shape, dtype)
        with memoryview(pool._attached[name].native) as memory:
            assert memory[4096 : 4096 + again.nbytes] == expected
        assert again.dtype == dtype and again.shape == shape
        assert again.flags.f_contiguous if order == "F" else again.flags.c_contiguous


def test_the_object_is_a_file_in_numpys_format(pool: Pool) -> None:
    array = pool.array("a", (2, 3), "i2")
    array[:] = [[1, 2, 3], [4, 5, 6]]
    native = pool._attached["a"].native
    with memoryview(native) as memory:
        assert np.load(io.BytesIO(bytes(memory))).tolist() == array.tolist()


@pytest.mark.parametrize("dtype", ["O", [("a", "O")], "S0", "V0", np.dtypes.StringDType() if hasattr(np.dtypes, "StringDType") else "O"])
def test_data_types_that_cannot_be_stored_are_refused(pool: Pool, dtype: Any) -> None:
    with pytest.raises(aquifer.InvalidInputError, match="objects of this process" if np.dtype(dtype).hasobject else "no bytes"):
        pool.array("a", 3, dtype)
    assert pool.arrays() == []


def test_data_types_whose_description_is_not_enough_are_refused(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    overlapping = np.dtype({"names": ["x", "y"], "formats": ["i4", "i4"], "offsets": [0, 2]})
    for dtype in (overlapping, np.dtype([(f"a long name {number}", "i1") for number in range(300)])):
        with pytest.raises(aquifer.InvalidInputError, match="cannot be stored"):
            pool.array("a", 3, dtype)
    # As of a data type of another library.
    monkeypatch.setattr("aquifer._array.npy.dtype_to_descr", lambda dtype: "|V2")
    with pytest.raises(aquifer.InvalidInputError, match="cannot be stored"):
        pool.array("a", 3, "f2")
    assert pool.arrays() == []


def test_impossible_shapes_are_refused(pool: Pool) -> None:
    shapes: list[Any] = [-1, (2, -3), (1,) * 33, (1 << 40, 1 << 40), 1 << 62]
    for shape in shapes:
        with pytest.raises(aquifer.InvalidInputError, match="the shape is"):
            pool.array("a", shape, "i8")
    with pytest.raises(aquifer.NoSpaceError):
        pool.array("a", 1 << 30, "i8")
    assert pool.arrays() == []


def test_shape_and_type_are_compared(pool: Pool) -> None:
    array = pool.array("a", (2, 3), "i4")
    others: list[Any] = [((3, 2), None), (6, None), (None, "u4"), ((2, 3), ">i4")]
    for attached in (True, False):
        for shape, dtype in others:
            with pytest.raises(aquifer.ArrayMismatchError, match="the array 'a' has the"):
                pool.array("a", shape, dtype)
        if attached:
            assert pool.array("a", (2, 3), np.int32).shape == (2, 3)
            del array
    with pytest.raises(FileNotFoundError, match="give its shape"):
        pool.array("b")
    with pytest.raises(FileNotFoundError):
        pool.array("b", 3, mode="r+")
    with pytest.raises(FileExistsError):
        pool.array("a", (2, 3), mode="x")
    with pytest.raises(aquifer.InvalidInputError, match="needs a shape"):
        pool.array("b", mode="x")
    assert pool.array("b", 3).dtype == np.float64
    assert not pool.array("c", 3, mode="x").any()
    for mode, order in [("w", "C"), (None, "A")]:
        with pytest.raises(ValueError):
            pool.array("d", 3, mode=mode, order=order)


def test_an_attached_array_is_shared_in_the_process(pool: Pool) -> None:
    one = pool.array("a", 3, "i4")
    other = pool.array("a")
    one[1] = 5
    assert other.tolist() == [0, 5, 0]
    with pytest.raises(aquifer.BusyError):
        pool.array("a", mode="r")
    del one
    other.psync()
    del other
    reader = pool.array("a", mode="r")
    assert reader[1] == 5 and not reader.flags.writeable


def test_threads_attach_one_array_together(pool: Pool) -> None:
    """Also while another one's last reference goes."""
    barrier = threading.Barrier(4)
    errors: list[BaseException] = []

    def attach() -> None:
        try:
            for _ in range(200):
                barrier.wait(timeout=60)
                array = pool.array("a", 1000, "i8")
                array[3] = 5
                del array
                pool.array("a")
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=attach) for _ in range(barrier.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_an_array_is_attached_as_long_as_its_memory_is_used(pool: Pool) -> None:
    array = pool.array("a", 3, "i4")
    plain = np.asarray(array)
    # A plain array refers to the memory, and not to the array that it was made of.
    del array
    again = pool.array("a")
    plain[1] = 5
    assert again[1] == 5
    del plain, again
    assert pool.array("a", mode="r").tolist() == [0, 0, 0]


def test_views_are_persistent_and_copies_are_not(pool: Pool) -> None:
    array = pool.array("a", (4, 4), "i8")
    part = array[1:3, ::2]
    assert isinstance(part, aquifer.Array)
    part[:] = 3
    part.psync()
    del part
    plains: list[Any] = [array + 1, array[[0, 1]], array[array > 2], array.copy(), np.sqrt(array), array.astype("f4")]
    for plain in plains:
        assert getattr(plain, "_attached", None) is None
    with pytest.raises(ValueError, match="not in a pool"):
        array.copy().psync()
    assert np.sum(array) == 12 and type(array.sum()) is np.int64
    array += 1
    assert isinstance(array, aquifer.Array) and array.sum() == 28
    np.add(array, 1, out=array)
    again = pickle.loads(pickle.dumps(array))
    assert type(again) is np.ndarray and again.tolist() == array.tolist()
    array.rollback()
    assert array.sum() == 12


def test_transactions_commit_or_roll_back(pool: Pool) -> None:
    array = pool.array("a", 2000, "i8")
    array[0] = 1  # becomes durable when the next block begins
    with array.transaction() as same:
        assert same is array
        array[1] = 2
        array[1999] = 3
    with pytest.raises(KeyError):
        with array.transaction():
            array[:] = 9
            raise KeyError("no")
    assert array[[0, 1, 2, 1999]].tolist() == [1, 2, 0, 3]
    with array.transaction():
        with pytest.raises(RuntimeError, match="in progress"):
            with array.transaction():
                pass
        with pytest.raises(RuntimeError, match="in progress"):
            with pool.transaction():
                pass
    with array.transaction():
        pass
    stats = array.stats()
    assert stats["psyncs"] == 2 and stats["shadow_bytes"] >= 4096
    del array, same
    pool = reopened(pool)
    assert pool.array("a")[[0, 1, 2, 1999]].tolist() == [1, 2, 0, 3]
    pool.close()


def test_several_arrays_at_once(pool: Pool) -> None:
    one, other = pool.array("one", 10, "i8"), pool.array("other", 10, "i8")
    with pool.transaction():
        one[0] = other[0] = 1
    with pytest.raises(ZeroDivisionError):
        with pool.transaction():
            one[0] = other[0] = 2
            1 / 0
    assert (one[0], other[0]) == (1, 1)
    one[1] = other[1] = 5
    pool.psync()
    del one, other
    pool = reopened(pool)
    assert [pool.array(name)[:2].tolist() for name in ("one", "other")] == [[1, 5], [1, 5]]
    pool.close()


def test_arrays_are_listed_renamed_and_removed(pool: Pool) -> None:
    assert pool.arrays() == []
    first = pool.array("first", (2, 3), "f4")
    pool.array("second", 5, [("x", "u1")], order="F", read_key="secret")
    listed = pool.arrays()
    assert [(one.name, one.shape, one.order, one.nbytes) for one in listed] == [
        ("first", (2, 3), "C", 24),
        ("second", (5,), "F", 5),
    ]
    assert [(one.state, one.needs_read_key) for one in listed] == [("W", False), ("D", True)]
    assert listed[0].address == first.ctypes.data and listed[1].dtype.names == ("x",)
    calls: list[Any] = [lambda: pool.remove("first"), lambda: pool.rename("first", "third")]
    for call in calls:
        with pytest.raises(aquifer.BusyError):
            call()
    del first
    pool.rename("first", "third")
    pool.remove("third")
    with pytest.raises(FileNotFoundError):
        pool.remove("third")
    with pytest.raises(PermissionError):
        pool.remove("second")
    pool.remove("second", key="secret")
    assert pool.arrays() == []


def test_keys(pool: Pool) -> None:
    pool.array("a", 3, read_key="read", write_key=b"write")[0] = 1
    for key in (None, "wrong"):
        with pytest.raises(aquifer.AccessDeniedError):
            pool.array("a", key=key)
    with pytest.raises(aquifer.AccessDeniedError):
        pool.array("a", key="read")
    assert not pool.array("a", mode="r", key="read").flags.writeable
    array = pool.array("a", key="write")
    with pytest.raises(aquifer.BusyError):
        pool.array("a", mode="r", key="read")
    with pytest.raises(aquifer.AccessDeniedError):
        pool.array("a")  # attached, but not with this key
    del array


READER = """
import aquifer, sys
pool = aquifer.Pool.open(sys.argv[1], read_only=sys.argv[2] == "r")
try:
    array = pool.array("a", mode=sys.argv[2])
    print("has", array[0], flush=True)
    sys.stdin.read()
except aquifer.BusyError:
    print("busy", flush=True)
"""


def other_process(path: Path, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", READER, str(path), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_one_writer_or_many_readers(pool: Pool, path: Path) -> None:
    array = pool.array("a", 3, "i4")
    array[0] = 7
    array.psync()
    with other_process(path, "r") as reader, other_process(path, "r+") as writer:
        assert (line(reader), line(writer)) == ("busy", "busy")
        reader.communicate()
        writer.communicate()
    del array
    with other_process(path, "r") as one, other_process(path, "r") as other:
        assert (line(one), line(other)) == ("has 7", "has 7")
        with pytest.raises(aquifer.BusyError, match="attached"):
            pool.array("a")
        assert pool.array("a", mode="r")[0] == 7
        assert pool.arrays()[0].state in "RD"
        one.communicate()
        other.communicate()
    assert pool.array("a")[0] == 7


def test_other_objects_are_not_arrays(pool: Pool) -> None:
    native = pool._native
    native.create_object("bytes", 8192, b"some text", None, None)
    native.create_object("zeros", 4096, b"", None, None)
    for name in ("bytes", "zeros"):
        for call in (lambda: pool.array(name), lambda: pool.remove(name), lambda: pool.rename(name, "x")):
            with pytest.raises(aquifer.NotAnArrayError, match=f"the object '{name}' is no array"):
                call()
    assert pool.arrays() == []
    native.remove_object("bytes", None)


def header(text: str, version: bytes = b"\x03\x00", length: int | None = None) -> bytes:
    room = 4096 - 12
    return b"\x93NUMPY" + version + struct.pack("<I", room if length is None else length) + text.encode().ljust(room - 1) + b"\n"


HOSTILE = [
    "",
    "[]",
    "None",
    "{'descr': '<f8', 'fortran_order': False}",
    "{'descr': '<f8', 'fortran_order': 0, 'shape': (3,)}",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (3,), 'more': 1}",
    "{'descr': '|O', 'fortran_order': False, 'shape': (3,)}",
    "{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (3,)}",
    "{'descr': '<f8', 'fortran_order': False, 'shape': 3}",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (True,)}",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (1000,)}",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (0, 9223372036854775807, 9223372036854775807)}",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "1," * 40 + ")}",
    "{'descr': '|S0', 'fortran_order': False, 'shape': (3,)}",
    "{'descr': '|V99999999999', 'fortran_order': False, 'shape': (0,)}",
    "{'descr': '<f8,<f8', 'fortran_order': False, 'shape': (999,)}",
    "{'descr': ('<f8', (3,)), 'fortran_order': False, 'shape': (3,)}",
    "{'descr': __import__('os').abort(), 'fortran_order': False, 'shape': (3,)}",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "9" * 3000 + ",)}",
    "(" * 1500 + ")" * 1500,
    "[" * 4000,
    "-" * 4000 + "1",
    "'" * 4001,
    "\x00" * 100,
    "{'descr': '\udcff'}".encode("utf-8", "surrogateescape").decode("latin1"),
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:60]))
def test_hostile_headers_are_errors(pool: Pool, text: str) -> None:
    pool._native.create_object("a", 8192, header(text), None, None)
    with pytest.raises(aquifer.NotAnArrayError):
        pool.array("a", 3)
    assert pool.arrays() == []


@pytest.mark.parametrize("text", ["(" * 40 + ")" * 40, "-" * 4000 + "1", "[1 for x in 'y']", "1.5", "f()", "'" * 4001])
def test_only_plain_headers_are_parsed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("aquifer._array.ast.literal_eval", parsed)
    with pytest.raises(ValueError, match="not that of an array"):
        _array._decode(header(text), 8192)


def test_headers_of_other_versions_and_lengths_are_errors() -> None:
    good = "{'descr': '<f8', 'fortran_order': False, 'shape': (3,)}"
    assert _array._decode(header(good), 8192).shape == (3,)
    for content in [header(good, b"\x01\x00"), header(good, length=64), header(good, length=1 << 31), header(good)[:100], b""]:
        with pytest.raises(ValueError):
            _array._decode(content, 8192)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_headers_are_errors_or_arrays_inside_the_object(data: st.DataObject) -> None:
    descr = data.draw(st.sampled_from(["'<f8'", "[('a', '<i4'), ('b', '|S3', (2,))]", "'|V8'"]))
    content = bytearray(header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': (3, 4)}}"))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, 130))] = data.draw(st.integers(0, 255))
    try:
        found = _array._decode(bytes(content), 8192)
    except ValueError:
        return
    assert found.nbytes <= 4096 and not found.dtype.hasobject
    np.ndarray(found.shape, found.dtype, bytearray(found.nbytes))


def test_a_psync_releases_the_interpreters_lock(pool: Pool) -> None:
    array = pool.array("a", 1 << 18, "i8")
    gate, ran = threading.Lock(), threading.Event()
    gate.acquire()

    def wait_and_run() -> None:
        gate.acquire()
        ran.set()

    thread = threading.Thread(target=wait_and_run)
    interval = sys.getswitchinterval()
    thread.start()
    # From here on a thread runs only while this one has released the lock in a call.
    sys.setswitchinterval(3600)
    try:
        gate.release()
        for _ in range(10_000):
            array[0] += 1
            array.psync()
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def test_a_large_array_changes_in_small_steps(path: Path) -> None:
    pool = Pool.create(path, "12MiB", log_size="256KiB")
    array = pool.array("a", 1 << 19, "i8")  # 4 MiB, more than the log
    array[:] = 1
    array.psync()
    before = array.stats()["psync_bytes"]
    assert before >= 4 << 20
    array[:: 1 << 14] = 2
    array.psync()
    # Patches of 32 pages, or these pages whole where their earlier content is no longer in the page cache.
    assert array.stats()["psync_bytes"] - before <= 32 * 4096
    del array
    pool.close()
    path.unlink()


WRITER = """
import aquifer, sys
pool = aquifer.Pool.open(sys.argv[1])
array = pool.array("a")
with_transaction = sys.argv[2] == "transaction"
number = int(array[0])
assert (array == number).all(), "a mix of two states"
print(number, flush=True)
while True:
    number += 1
    if with_transaction:
        with array.transaction():
            array[:] = number
    else:
        array[:] = number
        array.psync()
    print(number, flush=True)
"""


@pytest.mark.parametrize("how", ["psync", "transaction"])
def test_a_killed_writer_leaves_its_last_psync_or_the_next(path: Path, how: str) -> None:
    with Pool.create(path, "8MiB", log_size="256KiB") as pool:
        pool.array("a", 20_000, "i8")
    rng = random.Random(11)
    last = 0
    for round_ in range(12):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path), how], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(rng.randrange(1, 40)):
            said = process.stdout.readline()
            assert said, "the writer found a mix, or failed"
        # At any point of the next ones.
        for _ in range(rng.randrange(3000)):
            pass
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
        process.wait(60)
        process.stdout.close()
        numbers = [int(number) for number in re.findall(r"^(\d+)\n", said + rest, re.MULTILINE)]
        assert numbers[0] >= last
        with Pool.open(path) as pool:
            array = pool.array("a")
            found = int(array[0])
            assert (array == found).all(), f"round {round_}: a mix of two states"
            assert found in (numbers[-1], numbers[-1] + 1), f"round {round_}: {found} after {numbers[-1]}"
            last = found
            del array
    assert last > 0


def test_arrays_of_a_forked_child_are_its_own(path: Path) -> None:
    """A child that attaches an array anew has it at the same address, where its parent's is not."""
    with Pool.create(path, "8MiB") as pool:
        array = pool.array("a", 10, "i8")
        array[:] = 4
        array.psync()
        address = array.ctypes.data
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with Pool.open(path, read_only=True) as own:
                    try:
                        own.array("a")
                    except aquifer.BusyError:
                        os.write(write, b"busy")
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        with open(read) as told:
            assert told.read() == "busy"
        del array
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with Pool.open(path) as own:
                    mine = own.array("a")
                    mine[0] = 5
                    mine.psync()
                    status = 0 if mine.ctypes.data == address else 2
                    del mine
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert pool.array("a")[:2].tolist() == [5, 4]
