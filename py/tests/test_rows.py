"""Single rows of a file, kept by themselves."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pathlib
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings

import aquifer
from aquifer import _memmap
from aquifer.torch import MemmapDataset
from test_processes import in_child, interrupted_after

Table = npt.NDArray[np.int64]


@pytest.fixture
def rows(path: str, table: Table) -> aquifer.Rows:
    return aquifer.Rows(path, np.int64, 64, budget="1MiB")


def test_what_it_is(rows: aquifer.Rows, path: str, table: Table) -> None:
    assert (len(rows), rows.shape, rows.ndim, rows.dtype, rows.filename) == (4096, (4096, 64), 2, np.dtype(np.int64), path)
    assert repr(rows) == f"aquifer.Rows({path!r}, dtype=int64, shape=(4096, 64))"
    assert (np.asarray(rows) == table).all() and np.asarray(rows, np.float32).dtype == np.float32
    assert sum(1 for row, expected in zip(rows, table, strict=True) if (row == expected).all()) == 4096
    with pytest.raises(ValueError, match="copy"):
        rows.__array__(copy=False)


def test_popular_rows_stay_in_memory(rows: aquifer.Rows, table: Table) -> None:
    for _ in range(5):
        assert (rows.take([7, 9]) == table[[7, 9]]).all()
    stats = rows.stats()
    assert (stats["misses"], stats["hits"], stats["rows"], stats["row_bytes"]) == (2, 8, 4096, 512)
    assert stats["path"] == rows.filename and stats["resident_bytes"] == 512 * stats["resident_rows"] > 0
    assert "<table>" in stats._repr_html_()
    for start in range(0, 4096, 256):
        rows.take(np.arange(start, start + 256))
    stats = rows.stats()
    assert stats["resident_bytes"] < 1 << 20 and stats["evictions"] > 0


def test_prefetched_rows_come(rows: aquifer.Rows) -> None:
    rows.prefetch([5, -1])

    def have_come() -> bool:
        stats = rows.stats()
        return bool(stats["reads"] == 2 and stats["resident_bytes"] == stats["read_bytes"])

    # With their neighbours in the sectors.
    wait_until(have_come)
    hits = rows.stats()["hits"]
    rows.take([5, 4095])
    assert rows.stats()["hits"] == hits + 2
    with pytest.raises(IndexError):
        rows.prefetch([4096])


def test_indices_lie_anywhere(rows: aquifer.Rows, table: Table, path: str) -> None:
    wanted = np.frombuffer(b"x" + np.array([7, -1], np.int64).tobytes(), np.int64, offset=1)
    assert not wanted.flags.aligned and (rows.take(wanted) == table[[7, -1]]).all()
    array = aquifer.memmap(path, np.int64, "r", shape=table.shape)
    assert (array.take(wanted) == table[[7, -1]]).all() and (array[wanted] == table[[7, -1]]).all()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def sparse(path: str, count: int, row_bytes: int, **options: Any) -> aquifer.Rows:
    """Rows of zeros."""
    pathlib.Path(path).touch()
    os.truncate(path, count * row_bytes)
    return aquifer.Rows(path, np.uint8, row_bytes, **options)


def test_prefetches_are_bounded_by_the_budget(path: str) -> None:
    rows = sparse(path, 4096, 65536, budget="4MiB")
    capacity = rows.stats()["capacity_rows"]
    for _ in range(3):
        rows.prefetch(np.arange(4095))

    def last_has_come() -> bool:
        # Left out as long as the others are still to be read.
        rows.prefetch([4095])
        return bool(rows.stats()["misses"] > capacity)

    wait_until(last_has_come)
    assert rows.stats()["misses"] < 1000


def test_closing_ends_prefetches(path: str) -> None:
    for _ in range(20):
        rows = sparse(path, 1 << 20, 8, budget="64MiB")
        native = rows._native
        assert native is not None
        rows.prefetch(np.arange(len(rows)))
        rows.close()
        if native.stats()["misses"] < len(rows):
            break
    else:
        pytest.fail("all rows were read each time")
    misses = native.stats()["misses"]
    native.prefetch(np.arange(100))
    assert native.stats()["misses"] == misses


async def _awaited(rows: aquifer.Rows, indices: Any) -> Any:
    return await rows.take_async(indices)


@pytest.mark.parametrize(
    ("shape", "dtype", "offset"),
    [((), np.int64, 0), (3, np.int16, 5), ((4, 8), np.float64, 100), ((), "i4,f8", 17), ((1000,), "S1", 0), ((9000,), np.uint8, 3)],
)
def test_any_layout(path: str, table: Table, shape: Any, dtype: Any, offset: int) -> None:
    size = np.dtype((dtype, shape)).itemsize
    count = (table.nbytes - offset) // size
    plain = np.memmap(path, dtype, "r", offset, (count, *np.empty(shape, np.bool_).shape))
    rows = aquifer.Rows(path, dtype, shape, offset=offset, budget="1MiB")
    assert rows.shape == plain.shape
    wanted = np.random.default_rng(1).integers(-count, count, 100)
    # As bytes: some are no numbers.
    assert rows.take(wanted).tobytes() == np.asarray(plain[wanted]).tobytes()
    assert rows[count - 1].tobytes() == plain[count - 1].tobytes()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_it_indexes_as_numpy_does(rows: aquifer.Rows, table: Table, data: st.DataObject) -> None:
    number = st.integers(-4096, 4095)
    place = st.none() | st.integers(-5000, 5000)
    first = data.draw(
        number
        | number.map(np.int16)
        | st.builds(slice, place, place, st.none() | st.sampled_from([-700, -3, 2, 1000]))
        | st.lists(number, max_size=40)
        | st.lists(number, min_size=6, max_size=6).map(lambda list_: np.array(list_, np.int32).reshape(2, 3))
        | st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).random(4096) < 0.01)
    )
    parts = st.integers(-64, 63) | st.builds(slice, st.none() | st.integers(-70, 70), st.none() | st.integers(-70, 70)) | st.just(...)
    index = (first, data.draw(parts)) if data.draw(st.booleans()) else first
    expected = table[index]
    found = rows[index]
    assert type(found) is type(expected) and found.dtype == expected.dtype
    assert np.shape(found) == expected.shape and (found == expected).all()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changes_are_seen_after_an_invalidation(tmp_path: pathlib.Path, data: st.DataObject) -> None:
    path = tmp_path / "changes"
    model = np.zeros((64, 5), np.int32)
    model.tofile(path)
    with aquifer.Rows(path, np.int32, 5, budget=data.draw(st.sampled_from([400, 1 << 20]))) as rows:
        row = st.integers(0, 63)
        for value in range(1, data.draw(st.integers(1, 6))):
            first, last = sorted(data.draw(st.tuples(row, row)))
            model[first : last + 1] = value
            model.tofile(path)
            rows.invalidate(first, last + 1)
            wanted = data.draw(st.lists(row))
            assert (rows.take(wanted) == model[wanted]).all()


def test_hostile_indices_are_those_of_take(rows: aquifer.Rows, path: str, table: Table) -> None:
    array = aquifer.memmap(path, np.int64, "r", shape=table.shape, budget="64MiB")
    hostile: list[Any] = [
        [4096], [-4097], [2**62], [-(2**63)], np.array([2**64 - 1], np.uint64), [2**70], [1.0], ["1"], [None], [0, 5000], np.ones(3, bool)
    ]  # fmt: skip
    for indices in hostile:
        with pytest.raises((IndexError, TypeError)) as expected:
            array.take(indices)
        for call in (rows.take, rows.prefetch, lambda indices: asyncio.run(_awaited(rows, indices))):
            with pytest.raises(expected.type):
                call(indices)
    assert rows.stats()["misses"] == 0, "nothing is read"
    assert rows.take([]).shape == (0, 64) and rows.take(np.empty((2, 0))).shape == (2, 0, 64)
    for index in (1.0, None, True, "a", (0, [1]), (0, None), np.ones(3, bool), ..., ()):
        with pytest.raises((IndexError, TypeError)):
            rows[index]


def test_out(rows: aquifer.Rows, table: Table) -> None:
    out = np.zeros((3, 64), np.int64)
    assert rows.take([1, 2, -1], out) is out and (out == table[[1, 2, -1]]).all()
    read_only = np.zeros((3, 64), np.int64)
    read_only.flags.writeable = False
    for wrong in (np.zeros((2, 64), np.int64), np.zeros((3, 64), np.int32), np.zeros((64, 3), np.int64).T, read_only, [0]):
        with pytest.raises(ValueError, match="out"):
            rows.take([1, 2, -1], wrong)  # type: ignore[arg-type]


def test_wrong_arguments_are_errors(path: str, table: Table, tmp_path: pathlib.Path) -> None:
    wrong: list[tuple[Any, Any, dict[str, Any]]] = [
        (object, 1, {}),
        (np.uint8, 0, {}),
        (np.uint8, (-1, -1), {}),
        ("S0", 1, {}),
        (np.uint8, 2**63, {}),
        (np.uint8, 1, {"offset": -1}),
        (np.uint8, 1, {"offset": 2**63}),
        (np.uint8, 1, {"offset": table.nbytes + 1}),
        (np.uint8, 1, {"budget": 8}),
        (np.uint8, 1, {"budget": "much"}),
    ]
    for dtype, shape, options in wrong:
        with pytest.raises(ValueError):
            aquifer.Rows(path, dtype, shape, **options)
    with pytest.raises(aquifer.NotFoundError):
        aquifer.Rows(tmp_path / "missing", np.uint8, 1)
    with pytest.raises(OSError):
        aquifer.Rows(tmp_path, np.uint8, 1)
    assert len(aquifer.Rows(path, np.uint8, 100, offset=table.nbytes - 99, budget="1MiB")) == 0


def test_a_truncated_file_is_an_error(rows: aquifer.Rows, path: str, table: Table) -> None:
    rows.take([4095])
    os.truncate(path, 512 * 1000 + 7)
    assert (rows.take([4095, 999]) == table[[4095, 999]]).all(), "one is in memory, the other still there"
    with pytest.raises(aquifer.FaultError) as caught:
        rows.take([5, 1000])
    assert caught.value.filename == path and caught.value.offset == 512_000
    with pytest.raises(aquifer.FaultError):
        asyncio.run(_awaited(rows, [2000]))
    rows.invalidate()
    with pytest.raises(aquifer.FaultError):
        rows.take([4095])
    assert (rows.take([5]) == table[5]).all()


def test_closed_rows_raise(rows: aquifer.Rows, table: Table) -> None:
    with rows:
        rows.take([1])
    assert rows.closed and len(rows) == 4096
    rows.close()
    for call in (lambda: rows.take([1]), lambda: rows[1], rows.stats, rows.invalidate, lambda: rows.prefetch([1]), lambda: pickle.dumps(rows)):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_it_pickles_by_path(path: str, table: Table) -> None:
    rows = aquifer.Rows(path, np.int64, (8, 8), offset=512, budget="1MiB")
    rows.take(np.arange(100))
    pickled = pickle.dumps(rows)
    assert len(pickled) < 1000
    again = pickle.loads(pickled)
    assert again.shape == (4095, 8, 8) and (again[4] == table[5].reshape(8, 8)).all()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert (pool.apply(rows.take, ([3],))[0] == table[4].reshape(8, 8)).all()


def test_pickled_rows_are_as_many_as_there_were(path: str, table: Table) -> None:
    pickled = pickle.dumps(aquifer.Rows(path, np.int64, 64, budget="1MiB"))
    with open(path, "ab") as file:
        file.write(bytes(512))
    again = pickle.loads(pickled)
    assert again.shape == (4096, 64) and again.stats()["rows"] == 4096 and (again[-1] == table[-1]).all()
    with pytest.raises(IndexError):
        again.take([4096])
    os.truncate(path, 1000)
    with pytest.raises(ValueError, match="truncated"):
        pickle.loads(pickled)
    os.unlink(path)
    with pytest.raises(aquifer.NotFoundError):
        pickle.loads(pickled)


def test_arguments_as_numpy_takes_them(path: str, table: Table) -> None:
    rows = aquifer.Rows(os.fsencode(path), (np.int64, (2,)), np.array([8, 4]), budget="1MiB")
    assert rows.shape == (4096, 8, 4, 2) and rows.dtype == np.int64
    out = np.empty((1, 8, 4, 2), np.int64)
    assert rows.take([7], out) is out and (out.reshape(-1) == table[7]).all()
    array = aquifer.memmap(os.fsencode(path), np.int64, "r", shape=np.array([2, 3]))  # type: ignore[arg-type]
    assert array.shape == (2, 3) and array.filename == path


def test_a_forked_child_opens_its_own(rows: aquifer.Rows, path: str, table: Table) -> None:
    rows.take([1])
    asyncio.run(_awaited(rows, [2]))

    def body() -> None:
        for call in (lambda: rows.take([1]), lambda: rows.prefetch([1]), rows.stats, rows.invalidate):
            with pytest.raises(aquifer.ForkedError):
                call()
        with pytest.raises(aquifer.ForkedError):
            asyncio.run(_awaited(rows, [1]))
        again = pickle.loads(pickle.dumps(rows))
        assert (again.take([1, 2]) == table[1:3]).all()
        rows.close()
        gc.collect()

    in_child(body)
    assert (rows.take([1]) == table[1]).all()


def test_threads_together(rows: aquifer.Rows, table: Table) -> None:
    wrong: list[int] = []

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(50):
            wanted = (random.random(300) ** 4 * 4096).astype(np.int64)
            if not (rows.take(wanted) == table[wanted]).all():
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_rows_for_asyncio(rows: aquifer.Rows, table: Table) -> None:
    async def read() -> None:
        batches = [np.random.default_rng(seed).integers(-4096, 4096, 200) for seed in range(20)]
        for batch, found in zip(batches, await asyncio.gather(*map(rows.take_async, batches))):
            assert (found == table[batch]).all()
        out = np.empty((2, 64), np.int64)
        assert await rows.take_async([5, 6], out) is out and (out == table[5:7]).all()
        assert (await rows.take_async(5)).shape == (64,) and (await rows.take_async([])).shape == (0, 64)
        task = asyncio.create_task(rows.take_async(np.arange(4096)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        rows.close()
        completions = _memmap.queue_of_loop().completions
        while len(completions) > 0:
            await asyncio.sleep(0)

    asyncio.run(read())


def test_a_signal_interrupts_a_long_call(path: str, table: Table) -> None:
    rows = aquifer.Rows(path, np.int64, budget="1MiB")
    wanted = np.random.default_rng(1).integers(0, table.size, 4_000_000)
    out = np.full(len(wanted), -1, np.int64)

    with interrupted_after(0.02):
        rows.take(wanted, out)
    assert (out == -1).any(), "it ended before it had all rows"
    assert (rows.take(wanted[:9]) == wanted[:9]).all()


def test_a_signal_interrupts_a_call_of_long_rows(path: str) -> None:
    rows = sparse(path, 2048, 128 << 10, budget="4MiB")
    out = np.ones((2048, 128 << 10), np.uint8)

    with interrupted_after(0.005):
        rows.take(np.arange(2048), out)
    assert out[:, 0].any(), "it ended before it had all rows"


def test_the_data_set_keeps_rows(path: str, table: Table) -> None:
    dataset: MemmapDataset[Any] = MemmapDataset(path, np.int64, (8, 8), budget="64MiB", rows=True)
    assert len(dataset) == 4096 and (dataset[-1] == table[-1].reshape(8, 8)).all()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for read in pool.map(dataset.__getitems__, [[1, 2], [4000, -1]]):
            assert len(read) == 2 and all((sample == table[sample[0, 0] // 64].reshape(8, 8)).all() for sample in read)
    with pytest.raises(ValueError, match="one length"):
        MemmapDataset(path, np.int64, offsets=[0, 1], rows=True)
