"""After `close`: arrays refuse to be used, and memory that something still refers to is zeros, and not memory of others."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aquifer

Table = npt.NDArray[np.int64]


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    table = np.arange(1, 4096 * 64 + 1, dtype=np.int64)
    table.tofile(tmp_path / "table")
    return str(tmp_path / "table")


def opened(path: str, mode: str = "r", **options: Any) -> Any:
    return aquifer.memmap(path, np.int64, mode, shape=(4096, 64), **options)


class Mine(np.ndarray[Any, np.dtype[Any]]):
    """A subclass of another program."""


# What NumPy's C code makes, which refers to the array object itself.
HIDDEN: dict[str, Callable[[Any], Any]] = {
    "broadcast": lambda array: np.broadcast(array, 1).iters[0],
    "nditer": lambda array: np.nditer(array, flags=["external_loop"]).value,
    "nditer to store": lambda array: np.nditer(array, ["external_loop"], [["readwrite"]]).value,
    "flat of C": lambda array: np.ndarray.flat.__get__(array),
    "recarray of C": lambda array: np.ndarray.view(array, np.recarray).reshape(-1),
}


@pytest.mark.parametrize("mode", ["r", "r+", "w+", "c", "private"])
@pytest.mark.parametrize("kind", HIDDEN)
def test_what_close_cannot_see_reads_zeros(path: str, mode: str, kind: str) -> None:
    array = opened(path, "r+", stores="private") if mode == "private" else opened(path, mode)
    if mode == "r" and kind == "nditer to store":
        pytest.skip("nothing is stored in it")
    if mode == "w+":
        array[:] = 7
    held, before = HIDDEN[kind](array), os.stat(path)
    if kind != "broadcast":
        assert held[64] != 0
    array.close()
    content = pathlib.Path(path).read_bytes()
    # Allocations of the size of the shape, which would take the place of what is freed.
    filler = [np.full(n, 0x5555, np.int64) for n in (1, 2, 64, 4096) * 50]
    assert all(int(value) == 0 for value in (held if kind == "broadcast" else held[[0, 64, 4096 * 64 - 1]]))
    if mode != "r" and kind not in ("broadcast", "nditer"):
        held[100:200] = 9
        held[4096 * 64 - 1] = 9
        assert held[150] == 9 and held[0] == 0
    del array
    if kind != "broadcast":
        assert held[0] == 0 and held[4096 * 64 - 1] in (0, 9)
    del held, filler
    assert pathlib.Path(path).read_bytes() == content and os.stat(path).st_ino == before.st_ino, "nothing reached the file"


VISIBLE: dict[str, Callable[[Any], Any]] = {
    "memoryview": lambda array: memoryview(array),
    "data": lambda array: array.data,
    "flat": lambda array: array.flat,
    "views of nditer": lambda array: np.nditer(array).itviews,
    "DLPack": lambda array: array.__dlpack__(**({"max_version": (1, 0)} if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else {})),
    "from DLPack": lambda array: np.from_dlpack(array),
    "recarray": lambda array: array.view(np.recarray),
    "recarray of a dtype": lambda array: array.view(dtype=np.uint8, type=np.recarray),
    "matrix": lambda array: np.asmatrix(array),
    "masked": lambda array: np.ma.asarray(array),
    "a subclass": lambda array: array.view(Mine),
    "a plain array": lambda array: np.asarray(array),
    "frombuffer": lambda array: np.frombuffer(array, np.uint8),
    "windows": lambda array: np.lib.stride_tricks.sliding_window_view(array, 3, axis=0),
    "ndenumerate": lambda array: np.ndenumerate(array),
    "a field": lambda array: array.view([("a", "i4"), ("b", "i4")])["b"],
}


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("kind", VISIBLE)
def test_close_is_refused_while_views_exist(path: str, mode: str, kind: str) -> None:
    if mode == "r" and "DLPack" in kind and np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("NumPy exports no read-only arrays")
    array = opened(path, mode)
    held = VISIBLE[kind](array)
    with pytest.raises(BufferError, match="slices or other arrays"):
        array.close()
    assert not array.closed and array[0, 1] == 2, "nothing has changed"
    del held
    array.close()


USES: dict[str, Callable[[Any], Any]] = {
    "index": lambda array: array[0],
    "index of elements": lambda array: array[0, 0],
    "index of rows": lambda array: array[[1, 2]],
    "slice": lambda array: array[1:],
    "store": lambda array: array.__setitem__(0, 1),
    "iteration": lambda array: next(iter(array)),
    "ufunc": lambda array: np.add(array, 1),
    "operator": lambda array: array + 1,
    "comparison": lambda array: array == 1,
    "in place": lambda array: array.__iadd__(1),
    "as output": lambda array: np.add(1, 1, out=array),
    "reduction": lambda array: np.add.reduce(array),
    "array function": lambda array: np.concatenate([array, array]),
    "np.sum": lambda array: np.sum(array),
    "sum": lambda array: array.sum(),
    "tolist": lambda array: array.tolist(),
    "tobytes": lambda array: array.tobytes(),
    "copy": lambda array: array.copy(),
    "astype": lambda array: array.astype(np.float64),
    "view": lambda array: array.view(np.ndarray),
    "reshape": lambda array: array.reshape(-1),
    "fill": lambda array: array.fill(1),
    "sort": lambda array: array.sort(),
    "T": lambda array: array.T,
    "flat": lambda array: array.flat,
    "item": lambda array: array.item(0),
    "truth": lambda array: bool(array),
    "membership": lambda array: 1 in array,
    "pickle": lambda array: pickle.dumps(array),
    "buffer": lambda array: memoryview(array),
    "data": lambda array: array.data,
    "bytes": lambda array: bytes(array),
    "write": lambda array: io.BytesIO().write(array),
    "frombuffer": lambda array: np.frombuffer(array, np.uint8),
    "__array__": lambda array: array.__array__(),
    "interface": lambda array: array.__array_interface__,
    "DLPack": lambda array: np.from_dlpack(array),
    "take": lambda array: array.take([0]),
    "prefetch": lambda array: array.prefetch([0]),
    "flush": lambda array: array.flush(),
    "advise": lambda array: array.advise("random"),
    "stats": lambda array: array.stats(),
    "budget": lambda array: array.budget,
    "with": lambda array: array.__enter__(),
}


@pytest.mark.parametrize("kind", USES)
def test_a_closed_array_says_so(path: str, kind: str) -> None:
    for mode in ("r", "r+"):
        array = opened(path, mode)
        address = array.__array_interface__["data"][0]
        array.close()
        with pytest.raises(ValueError, match="is closed"):
            USES[kind](array)
        array.close()
        assert array.closed and isinstance(array, aquifer.memmap) and "closed" in repr(array)
        assert array.shape == (4096, 64) and array.dtype == np.int64 and (array.filename, array.mode) == (path, mode)
        plain = np.ndarray.__dict__["__array_interface__"].__get__(array)
        assert plain["data"][0] == address, "nothing replaces the pointer"


def test_an_array_of_a_subclass_can_be_closed(path: str) -> None:
    class Named(aquifer.memmap):
        label = "a name"

    array = Named(path, np.int64)
    array.close()
    with pytest.raises(ValueError, match="is closed"):
        array.sum()
    assert isinstance(array, Named) and array.label == "a name" and type(array).__name__ == "Named"


def test_an_iterator_that_was_begun_ends(path: str) -> None:
    array = opened(path)
    rows = iter(array)
    next(rows)
    array.close()
    with pytest.raises(ValueError, match="is closed"):
        next(rows)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_an_error_leaves_a_with_statement_as_it_was_raised(path: str, mode: str) -> None:
    """Its traceback refers to the array."""
    with pytest.raises(IndexError, match="out of bounds"), opened(path, mode) as array:
        array.take([1 << 40])
    with pytest.raises(BufferError), opened(path, mode) as array:
        held = array[1:]
    assert held.shape == (4095, 64)


class Interrupting:
    """A region of which Ctrl-C follows the end."""

    def __init__(self, region: Any) -> None:
        self._region = region

    def __getattr__(self, name: str) -> Any:
        return getattr(self._region, name)

    def __len__(self) -> int:
        return len(self._region)

    def retire(self) -> None:
        self._region.retire()
        raise KeyboardInterrupt


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_ctrl_c_leaves_no_open_array_of_zeros(path: str, mode: str) -> None:
    array = opened(path, mode)
    array._source.region = Interrupting(array._source.region)
    with pytest.raises(KeyboardInterrupt):
        array.close()
    assert array.closed
    with pytest.raises(ValueError, match="is closed"):
        array.sum()


class Closing:
    """Closes an array when it is asked for its value."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __index__(self) -> int:
        self.array.close()
        return 7

    __int__ = __index__


def test_close_sees_calls_that_have_begun(path: str) -> None:
    array = opened(path, "r+")
    calls: list[Callable[[Any], Any]] = [
        lambda closing: array.__setitem__((0, 0), closing),
        lambda closing: array.repeat(closing),
    ]
    for call in calls:
        with pytest.raises(BufferError):
            call(Closing(array))
    array.close()


_HELD_AT_EXIT = """
import sys
import numpy as np
import aquifer

array = aquifer.memmap(sys.argv[1], np.int64, "r+", shape=(4096, 64), **eval(sys.argv[3]))
held = {
    "plain": lambda: np.asarray(array),
    "recarray": lambda: array.view(np.recarray),
    "DLPack": lambda: np.from_dlpack(array),
    "memoryview": lambda: np.frombuffer(memoryview(array), np.int64).reshape(4096, 64),
    "nditer": lambda: np.nditer(array, op_flags=[["readwrite"]]).itviews[0].reshape(4096, 64),
    "hidden": lambda: np.ndarray.view(array, np.recarray),
}[sys.argv[2]]()
del array
held[3, :] = 77
# Nothing that the interpreter destroys at its end.
sys.modules["kept"] = held
import ctypes
ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
"""


@pytest.mark.parametrize("options", [{}, {"stores": "private"}, {"backend": "cache"}], ids=["shared", "private", "cache"])
@pytest.mark.parametrize("kind", ["plain", "recarray", "DLPack", "memoryview", "nditer", "hidden"])
def test_stores_through_views_that_live_at_the_end_reach_the_file(path: str, kind: str, options: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", _HELD_AT_EXIT, path, kind, repr(options)], check=True)
    there = np.fromfile(path, np.int64).reshape(4096, 64)
    assert (there[3] == 77).all() and there[4, 0] == 257
