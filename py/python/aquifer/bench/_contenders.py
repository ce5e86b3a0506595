"""Ways to read rows of a file, each configured for this as its manual advises.

A contender that is not installed is missing, and the report says so.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import aquifer

from ._harness import Conditions, Contender, Missing, Read, in_child, progress

Numbers = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint8]

# Read at once while a file is filled or warmed up.
_BLOCK = 1 << 20
_THREADS = 16


@dataclass
class File:
    """Rows of random bytes."""

    path: str
    rows: int
    row_bytes: int

    @staticmethod
    def create(path: str, rows: int, row_bytes: int) -> File:
        progress(f"  writes {rows * row_bytes >> 20} MiB")
        random = np.random.default_rng(1)
        left = rows * row_bytes
        with open(path, "wb") as file:
            while left > 0:
                file.write(random.bytes(min(left, 16 * _BLOCK)))
                left -= min(left, 16 * _BLOCK)
            file.flush()
            os.fsync(file.fileno())
        return File(path, rows, row_bytes)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.row_bytes

    def blocks(self) -> Any:
        """All rows, some at a time."""
        each = max(_BLOCK // self.row_bytes, 1)
        plain = np.memmap(self.path, np.uint8, "r", shape=self.shape)
        for start in range(0, self.rows, each):
            yield start, np.asarray(plain[start : start + each])


# ---- warming up -----------------------------------------------------------------------------------


def fill_uniformly(files: list[str], size: int, seed: int) -> None:
    """Reads random blocks of files: what the page cache has after many rows that were asked for alike."""
    random = np.random.default_rng(seed)
    buffer = bytearray(_BLOCK)
    sizes = np.array([os.stat(path).st_size for path in files])
    bounds = np.cumsum(sizes)
    while size > 0:
        place = int(random.integers(0, bounds[-1]))
        which = int(np.searchsorted(bounds, place, side="right"))
        descriptor = os.open(files[which], os.O_RDONLY | os.O_CLOEXEC)
        size -= max(os.preadv(descriptor, [buffer], (place - int(bounds[which] - sizes[which])) // _BLOCK * _BLOCK), 1)
        os.close(descriptor)


def files_in(path: str) -> list[str]:
    if os.path.isfile(path):
        return [path]
    return [os.path.join(at, name) for at, _, names in os.walk(path) for name in names]


# ---- Aquifer --------------------------------------------------------------------------------------


def budget(conditions: Conditions) -> int:
    """Of the limit, which also counts the process's other memory, buffers and page tables."""
    return conditions.limit_bytes * 3 // 4


def take(file: File, conditions: Conditions) -> Callable[[], Read]:
    def open_() -> Read:
        array = aquifer.memmap(file.path, np.uint8, "r", shape=file.shape, budget=budget(conditions))
        return lambda wanted: np.asarray(array.take(wanted))

    return open_


def slices(file: File, conditions: Conditions) -> Callable[[], Read]:
    def open_() -> Read:
        array = aquifer.memmap(file.path, np.uint8, "r", shape=file.shape, budget=budget(conditions))
        return lambda wanted: np.asarray(array[wanted])

    return open_


def rows_take(file: File, conditions: Conditions) -> Callable[[], Read]:
    def open_() -> Read:
        rows = aquifer.Rows(file.path, np.uint8, file.row_bytes, budget=budget(conditions))
        return lambda wanted: np.asarray(rows.take(wanted))

    return open_


# ---- what Python and NumPy have -------------------------------------------------------------------


def plain_memmap(file: File, advice: int | None = None) -> Callable[[], Read]:
    def open_() -> Read:
        plain = np.memmap(file.path, np.uint8, "r", shape=file.shape)
        if advice is not None:
            plain._mmap.madvise(advice)  # type: ignore[attr-defined]
        return lambda wanted: np.asarray(plain[wanted])

    return open_


def willneed_loop(file: File) -> Callable[[], Read]:
    """Asks for all rows of the batch before the first is copied."""

    def open_() -> Read:
        plain = np.memmap(file.path, np.uint8, "r", shape=file.shape)
        map_: mmap.mmap = plain._mmap  # type: ignore[attr-defined]
        map_.madvise(mmap.MADV_RANDOM)

        def read(wanted: Numbers) -> Rows:
            for start in (wanted * file.row_bytes).tolist():
                page = start // mmap.PAGESIZE * mmap.PAGESIZE
                map_.madvise(mmap.MADV_WILLNEED, page, start + file.row_bytes - page)
            return np.asarray(plain[wanted])

        return read

    return open_


def preadv_loop(file: File) -> Callable[[], Read]:
    def open_() -> Read:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

        def read(wanted: Numbers) -> Rows:
            out = np.empty((len(wanted), file.row_bytes), np.uint8)
            for place, start in enumerate((wanted * file.row_bytes).tolist()):
                os.preadv(descriptor, [out[place].data], start)
            return out

        return read

    return open_


def preadv_threads(file: File) -> Callable[[], Read]:
    def open_() -> Read:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        threads = ThreadPoolExecutor(_THREADS)

        def read(wanted: Numbers) -> Rows:
            out = np.empty((len(wanted), file.row_bytes), np.uint8)
            starts = (wanted * file.row_bytes).tolist()

            def part(first: int) -> None:
                for place in range(first, len(starts), _THREADS):
                    os.preadv(descriptor, [out[place].data], starts[place])

            list(threads.map(part, range(_THREADS)))
            return out

        return read

    return open_


# ---- other libraries ------------------------------------------------------------------------------


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"pip install {name} ({error})") from None


def _sorted_once(wanted: Numbers, read: Callable[[Numbers], Rows]) -> Rows:
    """These want their rows in order, each once."""
    once, places = np.unique(wanted, return_inverse=True)
    return read(once)[places]


def h5py_create(file: File, path: str) -> None:
    with _library("h5py").File(path, "w") as target:
        # Contiguous: there are no chunks to read around a row.
        data = target.create_dataset("rows", file.shape, np.uint8)
        for start, block in file.blocks():
            data[start : start + len(block)] = block


def h5py_open(file: File, path: str) -> Read:
    data = _library("h5py").File(path, "r")["rows"]
    return lambda wanted: _sorted_once(wanted, lambda rows: np.asarray(data[rows]))


_ZARR_ROWS = 32


def zarr_create(file: File, path: str) -> None:
    zarr = _library("zarr")
    data = zarr.create_array(
        store=path, shape=file.shape, chunks=(_ZARR_ROWS, file.row_bytes), dtype="uint8", compressors=None, filters=None
    )
    each = _BLOCK // file.row_bytes // _ZARR_ROWS * _ZARR_ROWS
    plain = np.memmap(file.path, np.uint8, "r", shape=file.shape)
    for start in range(0, file.rows, each):
        data[start : start + each] = plain[start : start + each]


def zarr_open(file: File, path: str) -> Read:
    data = _library("zarr").open_array(store=path, mode="r")
    return lambda wanted: _sorted_once(wanted, lambda rows: np.asarray(data.oindex[rows]))


def _key(row: int) -> bytes:
    return row.to_bytes(4, "big")


def lmdb_create(file: File, path: str) -> None:
    environment = _library("lmdb").open(path, map_size=4 * file.rows * file.row_bytes + (64 << 20), sync=False)
    for start, block in file.blocks():
        with environment.begin(write=True) as transaction:
            with transaction.cursor() as cursor:
                cursor.putmulti([(_key(start + place), row.tobytes()) for place, row in enumerate(block)], append=True)
    environment.sync(True)
    environment.close()


def lmdb_open(file: File, path: str) -> Read:
    environment = _library("lmdb").open(path, readonly=True, lock=False, readahead=False)
    transaction = environment.begin(buffers=True)
    cursor = transaction.cursor()

    def read(rows: Numbers) -> Rows:
        out = np.empty((len(rows), file.row_bytes), np.uint8)
        for place, (_, value) in enumerate(cursor.getmulti([_key(row) for row in rows.tolist()])):
            out[place] = np.frombuffer(value, np.uint8)
        return out

    return lambda wanted: _sorted_once(wanted, read)


def pyarrow_create(file: File, path: str) -> None:
    arrow = _library("pyarrow")
    plain = np.memmap(file.path, np.uint8, "r", shape=file.shape)
    column = arrow.FixedSizeBinaryArray.from_buffers(arrow.binary(file.row_bytes), file.rows, [None, arrow.py_buffer(plain)])
    batch = arrow.record_batch([column], ["rows"])
    with arrow.OSFile(path, "wb") as sink, arrow.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def pyarrow_open(file: File, path: str) -> Read:
    arrow = _library("pyarrow")
    importlib.import_module("pyarrow.ipc")
    column = arrow.ipc.open_file(arrow.memory_map(path)).get_batch(0).column(0)
    # Arrow gives no advice; without it the kernel reads ahead of every row.
    values = column.buffers()[1]
    page = values.address // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    advised = libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(values.address + values.size - page), mmap.MADV_RANDOM)
    assert advised == 0, os.strerror(ctypes.get_errno())

    def read(wanted: Numbers) -> Rows:
        found = column.take(arrow.array(wanted))
        return np.frombuffer(found.buffers()[1], np.uint8, len(wanted) * file.row_bytes).reshape(-1, file.row_bytes)

    return read


_LIBRARIES: dict[str, tuple[Callable[[File, str], None], Callable[[File, str], Read]]] = {
    "h5py": (h5py_create, h5py_open),
    "zarr": (zarr_create, zarr_open),
    "lmdb": (lmdb_create, lmdb_open),
    "pyarrow": (pyarrow_create, pyarrow_open),
}


def libraries(file: File, conditions: Conditions, seed: int) -> tuple[list[Contender], dict[str, str]]:
    """Contenders with files of their own, and what is missing."""
    found: list[Contender] = []
    missing: dict[str, str] = {}
    for name, (create, open_) in _LIBRARIES.items():
        path = os.path.join(conditions.directory, f"rows.{name}")
        needed = file.rows * file.row_bytes * 2
        if shutil.disk_usage(conditions.directory).free < needed:
            missing[name] = f"needs {needed >> 20} MiB of free space"
            continue
        progress(f"  writes the file of {name}")
        try:
            # The libraries start threads: not in the process that forks.
            in_child(lambda create=create, path=path: create(file, path))  # type: ignore[misc]
        except Missing as reason:
            missing[name] = str(reason)
            continue
        # Once, and not before every turn: dirty pages are not dropped.
        os.sync()
        files = files_in(path)
        found.append(
            Contender(
                name,
                lambda open_=open_, path=path: open_(file, path),  # type: ignore[misc]
                [path],
                lambda read, files=files: fill_uniformly(files, conditions.limit_bytes, seed),  # type: ignore[misc]
            )
        )
    return found, missing
