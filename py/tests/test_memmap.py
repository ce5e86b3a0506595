"""Arrays of files: modes, indexing, closing."""

from __future__ import annotations

import asyncio
import copy
import io
import os
import pathlib
import pickle
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aquifer

Table = npt.NDArray[np.int64]


def opened(path: str, mode: str = "r", **options: Any) -> aquifer.memmap:
    options.setdefault("shape", (4096, 64))
    return aquifer.memmap(path, np.int64, mode, budget="64MiB", **options)


def test_it_is_an_array_of_the_file(path: str, table: Table) -> None:
    array = opened(path)
    assert isinstance(array, np.ndarray) and array.shape == table.shape and array.dtype == np.int64
    assert array[5, 3] == table[5, 3] and (array[7] == table[7]).all() and (array == table).all()
    assert (array[3:90:7, ::-2] == table[3:90:7, ::-2]).all()
    assert (array.filename, array.mode, array.offset) == (path, "r", 0)
    assert array[2:, 1:].offset == (2 * 64 + 1) * 8
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1


def test_slices_copy_nothing(path: str, table: Table) -> None:
    array = opened(path)
    assert np.shares_memory(array, array[10:20, 3:]) and isinstance(array[10:20], aquifer.memmap)
    assert np.shares_memory(array, np.asarray(array)) and np.shares_memory(array, array.T.reshape(64, -1))
    assert np.from_dlpack(array.copy()).sum() == table.sum()


def test_what_is_computed_is_an_ordinary_array(path: str, table: Table) -> None:
    array = opened(path)
    for made in (array + 1, array[array > 7], array.sum(axis=0), np.sqrt(array), array[[1, 2]], array.take([3])):
        assert type(made) is np.ndarray
    assert isinstance(array.sum(), np.int64) and isinstance(array.max(), np.int64)
    assert array.sum() == table.sum() and np.concatenate([array, array]).shape == (8192, 64)
    out: Any = (np.empty(64, np.int64), None)
    low, high = np.divmod(array[5], 7, out=out)
    assert (low == table[5] // 7).all() and (high == table[5] % 7).all()
    copied = np.array(array, subok=True)
    with pytest.raises(ValueError, match="lies in memory"):
        copied.prefetch([1])


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_what_is_made_of_an_array_is_as_numpys(path: str, table: Table, mode: str) -> None:
    array, plain = opened(path, mode), table
    rows = [5, 3, -1]
    methods: list[Callable[[Any], Any]] = [
        lambda a: a.copy(),
        lambda a: a.astype(np.float32),
        lambda a: a.flatten(),
        lambda a: a.T.ravel(),
        lambda a: a.T.reshape(-1, 2),
        lambda a: a.repeat(2),
        lambda a: a.byteswap(),
        lambda a: a.compress([True, False, True], axis=0),
        lambda a: a.argsort(axis=0),
        lambda a: a.argpartition(3, axis=0)[:, 0].shape,
        lambda a: a.dot(np.ones(64, np.int64)),
        lambda a: a.round(-1),
        lambda a: a.clip(5, 90),
        lambda a: a.cumsum(axis=0),
        lambda a: copy.copy(a),
        lambda a: np.sort(a, axis=0),
        lambda a: np.partition(a, 3)[:, 3],
        lambda a: np.roll(a, 3),
        lambda a: np.tile(a, 2),
        lambda a: np.repeat(a, 2),
        lambda a: np.zeros_like(a),
        lambda a: np.nan_to_num(a),
        lambda a: np.median(a, axis=0),
        lambda a: np.take(np.sort(a), rows),
        lambda a: np.take(a.astype("f8"), rows, axis=0),
        lambda a: a.copy().take(rows),
        lambda a: np.split(a.copy(), 2)[1],
        lambda a: np.unique(a % 7),
    ]
    for method in methods:
        found, expected = method(array), method(plain)
        assert type(found) is type(expected) and np.array_equal(found, expected), method
    # What is of the file stays so, and an array that is given is given back.
    for view in (array.T, array.reshape(-1), array.ravel(), np.flip(array), np.expand_dims(array, 0), array.diagonal()):
        assert isinstance(view, aquifer.memmap) and view.filename == path
    out = np.empty_like(table)
    assert np.cumsum(array, axis=0, out=out) is out
    # What keeps subclasses keeps this one, without a file.
    copied: Any = np.array(array, subok=True)
    assert type(copied) is aquifer.memmap and copied.filename is None
    copied.flush()
    assert np.array_equal(np.take(copied, rows), np.take(plain, rows)) and np.array_equal(copied.take(rows), plain[rows])
    assert np.array_equal(copied.take(rows, axis=1), plain[:, rows]) and type(copied.take(rows)) is np.ndarray


def test_an_array_of_one_number_is_an_index(tmp_path: pathlib.Path) -> None:
    words = np.array(["one", "two", "three"])
    for number, dtype in enumerate(("U5", "S5", "i4")):
        name = tmp_path / str(number)
        expected = words.astype(dtype) if dtype != "i4" else np.arange(3, dtype=dtype)
        expected.tofile(name)
        array = aquifer.memmap(name, dtype, "r")
        assert array[(np.array(1),)] == expected[1] == array[np.array(1)]
        with pytest.raises(IndexError):
            array[np.array(1), 0:1]
        pairs = aquifer.memmap(name, dtype, "r", shape=(3, 1))
        assert np.array_equal(pairs[(np.array(1),)], expected.reshape(3, 1)[1]) and pairs[np.array(1), 0:1] == expected[1:2]


def test_what_is_wrong_is_refused_before_the_file_is_emptied(path: str, table: Table) -> None:
    wrong: list[dict[str, Any]] = [
        {"order": "K"},
        {"advice": "often"},
        {"budget": "much"},
        {"budget": "16MiB", "policy": "mru"},
        {"cache": object()},
        {"allocate": "no"},
        {"shape": (1,) * 65},
        {"shape": 1 << 61},
        {"shape": (1 << 59) - 1},
    ]
    for options in wrong:
        with pytest.raises((ValueError, TypeError, OSError)):
            aquifer.memmap(path, np.int64, "w+", **{"shape": (4,), **options})
        assert os.path.getsize(path) == table.nbytes, options


def test_an_array_without_axes(path: str, table: Table) -> None:
    with aquifer.memmap(path, np.int64, "r+", offset=8 * 5, shape=()) as array:
        assert array.shape == () and array[()] == 5 and int(array) == 5 and array.offset == 40
        array[...] = 7
        array.flush()
        assert np.array_equal(array + 1, 8) and array.take([0], axis=None) == [7]
        assert pickle.loads(pickle.dumps(array)) == 7
    assert np.fromfile(path, np.int64)[5] == 7


def test_an_offset_behind_the_end_is_named(path: str, table: Table) -> None:
    with pytest.raises(ValueError, match=f"has {table.nbytes} bytes: the offset 1000000000 is behind its end"):
        aquifer.memmap(path, np.int64, "r", offset=1_000_000_000)


def test_file_objects_are_accepted(path: str, table: Table) -> None:
    with open(path, "r+b") as file:
        array = aquifer.memmap(file, np.int64, "r+", shape=table.shape)
    array[0, 0] = 9
    array.close()
    with open(path, "rb") as file:
        assert array.filename == path and aquifer.memmap(file, np.int64, "r")[0] == 9
        with pytest.raises(aquifer.ReadOnlyError, match="opened for reading"):
            aquifer.memmap(file, np.int64, "r+")
    with tempfile.TemporaryFile() as unnamed:
        unnamed.write(table[:2].tobytes())
        of_unnamed = aquifer.memmap(unnamed, np.int64, "r")
    assert np.array_equal(of_unnamed, table[:2].reshape(-1))
    # As with numpy.memmap, what is open already is not emptied.
    with open(path, "r+b") as file:
        for of in (np.memmap, aquifer.memmap):
            assert of(file, np.int64, "w+", shape=(2, 64))[1, 0] == 64
    with pytest.raises(TypeError, match="BytesIO has no file"):
        aquifer.memmap(io.BytesIO(b"12345678"), np.int64, "r")


def test_an_array_of_a_file_without_a_name_is_pickled_by_value(path: str, table: Table) -> None:
    with tempfile.TemporaryFile() as unnamed:
        table.tofile(unnamed)
        with aquifer.memmap(unnamed, np.int64, "r+", shape=(4096, 64)) as array:
            parts = pickle.dumps((array, array[3:5]))
            number = unnamed.fileno()
    # The number is another file's now.
    descriptor = os.open(path, os.O_RDWR)
    os.dup2(descriptor, number)
    try:
        whole, part = pickle.loads(parts)
        whole[:] = 0
        np.testing.assert_array_equal(part, table[3:5])
        np.testing.assert_array_equal(np.fromfile(path, np.int64).reshape(4096, 64), table)
    finally:
        os.close(descriptor)
        if number != descriptor:
            os.close(number)


def test_it_is_shown_with_its_file(path: str, table: Table) -> None:
    array = opened(path)
    shown = repr(array[0])
    assert shown.startswith("memmap([ 0,  1,") and f"file={path!r}, mode='r', budget='64 MiB')" in shown
    assert "file" not in repr(array.copy()) and "file" not in repr(np.array(array, subok=True))


def test_rows_by_their_numbers(path: str, table: Table) -> None:
    array = opened(path)
    rows = np.random.default_rng(1).integers(-4096, 4096, 1000)
    assert (array.take(rows) == table[rows]).all()
    assert (array[rows] == table[rows]).all() and (array[rows.tolist()] == table[rows]).all()
    assert (array[rows, 3:5] == table[rows, 3:5]).all()
    assert (array[rows.reshape(10, 100)] == table[rows.reshape(10, 100)]).all()
    assert (array[::-3].take([0, -1, 5]) == table[::-3][[0, -1, 5]]).all()
    mask = table[:, 0] % 3 == 0
    assert (array[mask] == table[mask]).all()
    assert (array.take(7) == table[7]).all() and array[:, 0].take([5]) == table[5, 0]
    assert array.take([]).shape == (0, 64) and array[[]].shape == (0, 64)
    # Rows that are not contiguous, and other axes: numpy's own way.
    assert (array[:, ::2].take([1, 2]) == table[[1, 2], ::2]).all()
    assert (np.take(array, [1, 2], axis=1) == table[:, [1, 2]]).all()
    assert (np.take(array, [70]) == [70]).all()
    out = np.empty((2, 64), np.int64)
    assert array.take([9, 8], out) is out and (out == table[[9, 8]]).all()
    # An empty list has no type of its own.
    for part, same in ((array[:, ::2], table[:, ::2]), (array.T, table.T)):
        assert part[[]].shape == part.take([]).shape == same[[]].shape and part[[]].dtype == np.int64


@pytest.mark.parametrize("backend", ["auto", "cache"])
def test_rows_are_read_over_the_array_itself(path: str, table: Table, backend: str) -> None:
    reversed_ = np.arange(4096)[::-1]

    async def over(array: aquifer.memmap) -> None:
        assert await array[:4095].take_async(reversed_[1:], array[1:]) is not None

    with opened(path, "r+", backend=backend) as array:
        out = array[:]
        assert array.take(reversed_, out) is out and (array == table[::-1]).all()
        asyncio.run(over(array))
        assert array[0, 0] == table[4095, 0] and (array[1:] == table[1:]).all()
        del out


def test_wrong_rows_are_errors(path: str, table: Table) -> None:
    array = opened(path)
    for wrong in ([4096], [-4097], [0, 1 << 62]):
        with pytest.raises(IndexError, match="out of bounds for axis 0 with size 4096"):
            array.take(wrong)
    with pytest.raises(TypeError, match="use integers"):
        array.take([1.5])
    out: Any
    for out in (np.empty((1, 64), np.int32), np.empty((2, 64), np.int64), np.empty((1, 128), np.int64)[:, ::2]):
        with pytest.raises(ValueError, match="out must"):
            array.take([1], out)
    with pytest.raises(IndexError):
        array[0:0].take([0])


def test_prefetching_is_a_hint(path: str, table: Table) -> None:
    for mode in ("r", "r+"):
        array = opened(path, mode)
        array.prefetch(np.arange(0, 4096, 7))
        array.prefetch([])
        assert (array.take(np.arange(0, 4096, 7)) == table[::7]).all()
        with pytest.raises(IndexError):
            array.prefetch([4096])


def test_private_stores_are_in_the_file_after_a_flush(path: str, table: Table) -> None:
    array = opened(path, "r+", stores="private")
    array[3] = 7
    array[5:8, 1] = -1
    np.add(array[10], 1, out=array[10])
    assert (np.fromfile(path, np.int64) == table.reshape(-1)).all(), "not before"
    assert array.stats()["dirty_bytes"] > 0
    array.flush()
    assert (np.fromfile(path, np.int64) == np.asarray(array).reshape(-1)).all()
    assert array.stats()["dirty_bytes"] == 0


@pytest.mark.parametrize("stores", ["shared", "private"])
def test_a_flush_writes_exactly_what_changed(path: str, table: Table, stores: str) -> None:
    array = opened(path, "r+", stores=stores)
    array[3] = 7
    # Another program changes other bytes in the meantime.
    with open(path, "r+b") as file:
        file.seek(table.nbytes // 2)
        file.write(b"\xff" * 8)
    array.flush()
    assert np.fromfile(path, np.int64)[table.size // 2] == -1


def test_a_slice_flushes_what_it_covers(path: str, table: Table) -> None:
    array = opened(path, "r+", stores="private")
    array[0, 0] = array[4000, 0] = 5
    array[3000:].flush()
    there = np.fromfile(path, np.int64).reshape(4096, 64)
    assert (there[0, 0], there[4000, 0]) == (0, 5)


def test_stores_that_were_not_flushed_outlive_the_array(path: str, table: Table) -> None:
    array = opened(path, "r+")
    array[3] = 7
    del array
    assert np.fromfile(path, np.int64)[3 * 64] == 7


def test_a_file_is_created(path: str) -> None:
    with aquifer.memmap(path, "f4", "w+", offset=24, shape=(100, 10)) as array:
        assert array[99, 9] == 0
        array[:] = 3
    assert os.path.getsize(path) == 24 + 4000 and (np.fromfile(path, "f4", offset=24) == 3).all()
    again = aquifer.memmap(path, "f4", "r", offset=24)
    assert again.shape == (1000,) and again.sum() == 3000


def test_a_file_that_is_too_short_is_lengthened_for_writing_only(path: str, table: Table) -> None:
    with pytest.raises(ValueError, match="use a smaller shape"):
        opened(path, shape=(4097, 64))
    with opened(path, "r+", shape=(4097, 64)) as array:
        assert array[4096].sum() == 0 and (array[:4096] == table).all()
    assert os.path.getsize(path) == 4097 * 64 * 8


def test_copy_on_write_leaves_the_file_alone(path: str, table: Table) -> None:
    array = opened(path, "c")
    array[3] = 7
    array.flush()
    assert array[3, 0] == 7
    array.close()
    assert (np.fromfile(path, np.int64) == table.reshape(-1)).all()


def test_the_user_backend_is_asked_for(path: str, table: Table) -> None:
    assert opened(path).stats()["backend"] == "kernel"
    with opened(path, "r+", backend="cache") as array:
        assert array.stats()["backend"] == "user"
        array[3] = 7
        array.flush()
        assert np.fromfile(path, np.int64)[3 * 64] == 7
        assert (array.take([1, 3])[:, 0] == [64, 7]).all()
    with pytest.raises(ValueError, match="must not"):
        opened(path, "c", backend="cache")


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_system_calls_work_on_the_memory(path: str, table: Table, mode: str, tmp_path: pathlib.Path) -> None:
    """With pages that are not in memory, and after a flush."""
    for flushed in (False, True):
        array = opened(path, mode)
        if flushed and mode != "r":
            array[0] = array[0]
            array.flush()
        copied = str(tmp_path / "copy")
        array.tofile(copied)
        assert (np.fromfile(copied, np.int64) == table.reshape(-1)).all()
        np.save(copied + ".npy", array)
        assert (np.load(copied + ".npy") == table).all()
        with open(copied, "wb") as file:
            assert os.write(file.fileno(), array.data) == array.nbytes
        assert (np.fromfile(copied, np.int64) == table.reshape(-1)).all()
        left, right = socket.socketpair()
        with left, right:
            sent = left.send(array.data.cast("B")[-4096:])
            assert right.recv(sent) == table.reshape(-1)[-512:].tobytes()[:sent]
        if mode != "r":
            with open(path, "rb") as read:
                assert read.readinto(memoryview(array[100:200]).cast("B")) == 100 * 512
            assert (array[100:200] == table[:100]).all()
        del array
        table.tofile(path)


def test_system_calls_on_the_user_backend_need_a_copy(path: str, table: Table, tmp_path: pathlib.Path) -> None:
    array = opened(path, backend="cache")
    with open(tmp_path / "copy", "wb") as file:
        with pytest.raises(OSError) as raised:
            os.write(file.fileno(), array.data)
        assert raised.value.errno == 14  # EFAULT, as documented
        assert os.write(file.fileno(), array.copy().data) == table.nbytes


def test_closing_is_refused_while_slices_exist(path: str, table: Table) -> None:
    array = opened(path)
    for other in (lambda: array[3:], lambda: np.asarray(array), lambda: np.asarray(array[3:]), lambda: array.T):
        held = other()
        with pytest.raises(BufferError, match="slices or other arrays"):
            array.close()
        assert held.size and array[0, 1] == 1, "nothing has changed"
        del held
    with pytest.raises(ValueError, match="whole array"):
        array[3:].close()
    array.close()
    array.close()
    assert array.closed and array.shape == (4096, 64)
    for call in (lambda: array.take([0]), lambda: array.flush(), lambda: array.stats(), lambda: array.budget):
        with pytest.raises(ValueError, match="is closed"):
            call()


def test_a_slice_that_is_made_during_the_flush_is_seen(path: str, table: Table) -> None:
    array, made = opened(path, "r+"), list[Any]()
    # As another thread does while this one waits for the disk.
    array.flush = lambda: made.append(array[3:])  # type: ignore[method-assign]
    with pytest.raises(BufferError, match="slices or other arrays"):
        array.close()
    assert not array.closed and made[0][0, 0] == table[3, 0]
    del array.flush
    made.clear()
    array.close()


def test_copies_are_not_of_the_file(path: str, table: Table) -> None:
    array = opened(path)
    copies = [array.copy(), array.astype(np.int32), np.sort(array), copy.copy(array), array[3:].T.copy(), np.copy(array, subok=True)]
    copies += [np.empty_like(array), array.take([3]), array[np.ix_([1], [2])], array.T.reshape(-1), array.flatten(), np.array(array, subok=True)]
    for made in copies:
        assert not np.shares_memory(made, array)
        if isinstance(made, aquifer.memmap):
            assert (made.filename, made.mode, made.offset, made.closed) == (None, None, None, False)
            assert (made[1:].filename, made.view(aquifer.memmap).filename) == (None, None)
    views = [array[3:], array.T, array.view(np.uint8), array.reshape(-1), np.broadcast_to(array, (2, 4096, 64), subok=True), array[4096:]]
    for view in views:
        assert isinstance(view, aquifer.memmap) and view.filename == path and view[..., -1:].filename == path
    del views, view
    array.close()
    assert (copies[0] == table).all() and copies[-1].close() is None


def test_an_array_is_closed_when_its_buffers_are_released(path: str, table: Table) -> None:
    array = opened(path)
    view = array.data.cast("B")
    with pytest.raises(BufferError, match="slices or other arrays"):
        array.close()
    assert bytes(view[512:520]) == table[1, :1].tobytes()
    view.release()
    array.close()


def test_an_open_file_is_let_go(path: str, table: Table) -> None:
    def maps() -> int:
        return pathlib.Path("/proc/self/maps").read_text().count(path)

    array = opened(path)
    held = array[5:]
    assert maps() > 0
    del array
    assert maps() > 0 and held[0, 0] == table[5, 0]
    del held
    assert maps() == 0


def test_a_budget_is_read_and_changed(path: str, table: Table) -> None:
    array = opened(path)
    assert array.budget == 64 << 20
    array.budget = "32MiB"
    assert array.budget == 32 << 20 == array.cache.budget
    with pytest.raises(aquifer.InvalidInputError, match="must be between"):
        array.budget = 1
    with pytest.raises(ValueError, match="is no size"):
        array.budget = "much"
    with pytest.raises(ValueError, match="is no size"):
        array.budget = -1
    assert aquifer.Cache(np.int64(16 << 20)).budget == 16 << 20  # type: ignore[arg-type]


def test_arrays_share_a_cache(path: str, table: Table, tmp_path: pathlib.Path) -> None:
    other = str(tmp_path / "other")
    table.tofile(other)
    cache = aquifer.Cache("64MiB", policy="sieve", io_threads=1)
    first = aquifer.memmap(path, np.int64, "r", cache=cache)
    second = aquifer.memmap(other, np.int64, "r", cache=cache)
    assert first.cache is second.cache is cache and (first[:] == second[:]).all()
    assert cache.stats()["policy"] == "sieve"
    with pytest.raises(ValueError, match="one or the other"):
        aquifer.memmap(path, cache=cache, budget=1 << 20)
    assert aquifer.memmap(path, mode="r").cache is aquifer.default_cache()


def test_advice(path: str, table: Table) -> None:
    for mode in ("r", "r+"):
        array = opened(path, mode, advice="random")
        for advice in ("normal", "sequential", "random", "willneed", "dontneed"):
            array[5:].advise(advice)
        assert (array == table).all()
        with pytest.raises(ValueError, match="use normal"):
            array.advise("often")  # type: ignore[arg-type]


def test_wrong_arguments_are_errors(path: str, table: Table) -> None:
    wrong: list[dict[str, Any]] = [
        {"mode": "a"},
        {"dtype": object},
        {"dtype": "S"},
        {"offset": -1},
        {"shape": (-1,)},
        {"shape": (0,)},
        {"offset": 3, "dtype": np.int64},
        {"offset": 1 << 40},
        {"backend": "other"},
        {"policy": "mru", "budget": "16MiB"},
        {"policy": "lru"},
        {"mode": "w+"},
    ]
    for options in wrong:
        with pytest.raises(ValueError):
            aquifer.memmap(path, **{"mode": "r", **options})
    with pytest.raises(aquifer.NotFoundError):
        aquifer.memmap(path + ".not", mode="r")


def test_statistics_are_a_table(path: str, table: Table) -> None:
    array = opened(path)
    shown = array.stats()._repr_html_()
    assert shown.startswith("<table>") and "64 MiB" in shown and path in shown
    assert aquifer.Cache("16MiB").stats()["budget_bytes"] == 16 << 20


def test_arrays_and_slices_are_pickled_by_path(path: str, table: Table) -> None:
    array = opened(path)
    again = pickle.loads(pickle.dumps(array))
    assert isinstance(again, aquifer.memmap) and again.budget == array.budget and len(pickle.dumps(array)) < 1000
    assert (again == table).all()
    part = pickle.loads(pickle.dumps(array[10:2000:3, ::-2]))
    assert (part == table[10:2000:3, ::-2]).all() and part.filename == path
    first, second = pickle.loads(pickle.dumps([array, array[3:]]))
    assert (first[3:] == second).all()


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_file_that_was_truncated_is_not_lengthened_by_unpickling(path: str, table: Table, mode: str) -> None:
    array = opened(path, mode)
    pickled = [pickle.dumps(array), pickle.dumps(array[:2])]
    del array
    os.truncate(path, 4096)
    for one in pickled:
        with pytest.raises(ValueError, match="has 4096 bytes"):
            pickle.loads(one)
    assert os.path.getsize(path) == 4096


def test_private_changes_are_pickled_by_value(path: str, table: Table) -> None:
    array = opened(path, "c")
    array[3] = 7
    again = pickle.loads(pickle.dumps(array))
    assert type(again) is np.ndarray and again[3, 0] == 7 and (again[4:] == table[4:]).all()
    assert type(copy.deepcopy(array)) is np.ndarray


def test_structured_dtypes_and_orders(path: str) -> None:
    kind = np.dtype([("key", "<u8"), ("value", "<f4", (3,))])
    with aquifer.memmap(path, kind, "w+", shape=(50,)) as array:
        array["key"] = np.arange(50)
        array["value"][7] = [1, 2, 3]
        array[8]["key"] = 80
        assert array[[7, 8]]["key"].tolist() == [7, 80]
    assert aquifer.memmap(path, kind, "r").take([7])["value"].tolist() == [[1, 2, 3]]
    with aquifer.memmap(path, "i2", "w+", shape=(6, 5), order="F") as columns:
        columns[:] = np.arange(30).reshape(6, 5)
        assert (columns[[1, 3]] == np.arange(30).reshape(6, 5)[[1, 3]]).all()
    assert np.fromfile(path, "i2").reshape(5, 6)[1, 0] == 1


def test_ranges(path: str, table: Table) -> None:
    flat = table.reshape(-1)
    for mode in ("r", "r+"):
        array = opened(path, mode, shape=(table.size,))
        starts = np.random.default_rng(1).integers(0, table.size - 100, 500)
        assert (array.read_ranges(starts, 100).reshape(-1, 100) == flat[starts[:, None] + np.arange(100)]).all()
        assert array[1000:].read_ranges([0, 70_000, 5], [3, 0, 2]).tolist() == [1000, 1001, 1002, 1005, 1006]
        assert array.read_ranges([], []).size == 0
        for start, length in [(table.size, 1), (-1, 1), (0, -1), (1, 1 << 62), (1 << 62, 1 << 62)]:
            with pytest.raises(IndexError, match="are not in an array"):
                array.read_ranges([start], [length])
    with pytest.raises(ValueError, match="one-dimensional"):
        opened(path).read_ranges([0], [1])
    with pytest.raises(ValueError, match="as many lengths"):
        array._open().region.read_ranges(np.zeros(2, np.int64), np.ones(1, np.int64), np.zeros(1, np.uint8))


def test_ranges_longer_than_all_memory(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        try:
            file.truncate(1 << 43)
        except OSError:
            pytest.skip("this file system has no sparse files of 8 TiB")
    try:
        array = aquifer.memmap(tmp_path / "sparse", np.uint8, "r")
    except OSError as error:
        pytest.skip(f"a file of 8 TiB cannot be mapped: {error}")
    # 2**64 bytes in all, which as a number of 64 bits is none.
    with pytest.raises(ValueError, match="too many bytes"):
        array.read_ranges(np.zeros(1 << 21, np.int64), 1 << 43)


def test_copy_on_write_is_not_written_out(path: str, table: Table) -> None:
    array = aquifer.memmap(path, np.uint8, "c", budget="16MiB")
    array[:] = 7
    assert not np.any(np.fromfile(path, np.uint8)[:8] == 7) and np.all(array == 7)
