"""`Rows`: a cache of single rows of a file, for rows shorter than a page."""

from __future__ import annotations

import math
import operator
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType, TracebackType
from typing import Any, Self, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from . import _native
from ._cache import Stats
from ._indices import Indices, bytes_in, row_numbers, taken, target_of
from ._memmap import queue_of_loop
from ._remote import Recipe, Remote, is_url, open_remote, open_version, token_of
from ._sizes import bytes_of, lengths_of
from ._tier import TierArgument

__all__ = ["Rows"]

# What iterating reads at once.
_BATCH_BYTES = 1 << 20


class Rows:
    """Rows of a file, of which those that are asked for often stay in memory one by one, without the pages they lie on.

    For lookups of rows below a page of which some are popular: embeddings, features, samples of text. A page of 4 KiB keeps
    sixteen rows of 256 bytes, also if one of them is popular; `Rows` keeps only that one, so that a budget holds more of what
    is asked for. A missing row is read past the page cache, in the device's sectors, many at once. For rows of a page or
    more, and where rows must be slices without a copy, use `memmap`.

    Parameters
    ----------
    path:
        Path of a regular file or a block device; or the URL of an object, as for `memmap`.
    dtype:
        Type of the elements, without Python objects.
    shape:
        Shape of a row: a number or a tuple; `()` if each element is a row.
    offset:
        Where the first row begins in the file, in bytes.
    budget:
        Memory for rows and their bookkeeping (10 bytes a row): bytes, or a text like `"4GiB"`; a quarter of the memory by
        default. Each call that reads takes up to 4 MiB besides, or a row if that is longer, and 4 bytes for each row
        of a long list, of up to 8 million at once.
    storage_options, tier:
        For a URL, as for `memmap`.

    There are as many rows as the file has whole ones behind `offset` when it is opened. Rows are for reading, and what a call
    returns is an ordinary array of its own. A row is kept as it was when it was read: after a change of the file, call
    `invalidate`; of a file that another one has taken the place of (`os.replace`), open it again. Any thread may use it. It pickles by path; in a forked child its calls raise `ForkedError`.

    Raises
    ------
    InvalidInputError, ValueError:
        Arguments that do not fit the file; a budget for less than eight rows.
    NotFoundError and other errors of `OSError`:
        The file cannot be opened.
    """

    def __init__(
        self,
        path: str | bytes | os.PathLike[str] | os.PathLike[bytes] | Remote,
        dtype: npt.DTypeLike,
        shape: SupportsIndex | Sequence[SupportsIndex] = (),
        *,
        offset: int = 0,
        budget: int | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        tier: TierArgument = None,
    ) -> None:
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise ValueError("rows of a file cannot hold Python objects")
        row_shape = lengths_of(shape) + dtype.shape
        dtype = dtype.base
        row_bytes = math.prod(row_shape) * dtype.itemsize
        if any(length < 0 for length in row_shape) or row_bytes == 0:
            raise ValueError(f"a row of shape {row_shape} and dtype {dtype!r} has no bytes")
        offset = operator.index(offset)
        if offset < 0 or offset + row_bytes > np.iinfo(np.int64).max:
            raise ValueError(f"no file has a row of {row_bytes} bytes at offset {offset}")
        remote = path if isinstance(path, Remote) else None
        if is_url(path):
            of_budget = None if budget is None else bytes_of(budget)
            remote = open_remote(cast(str, path), storage_options, tier, of_budget)
        elif remote is None and (storage_options is not None or tier is not None):
            raise ValueError("storage options and tiers are for URLs, such as s3://bucket/key")
        self._remote = remote
        # Of rows that were pickled, until they are first used.
        self._recipe: Recipe | None = None
        self._opening = os.getpid(), threading.Lock()
        self._filename = os.path.abspath(os.fsdecode(cast(Any, path))) if remote is None else remote.shown
        self._dtype = dtype
        self._row_shape = row_shape
        self._row_bytes = row_bytes
        self._offset = offset
        self._budget = None if budget is None else bytes_of(budget)
        self._native: _native.NativeRows | None = (
            _native.NativeRows.open(self._filename, row_bytes, offset, self._budget, None)
            if remote is None
            else _native.NativeRows.open_remote(remote.native, row_bytes, offset, self._budget)
        )
        self._count = len(self._native)

    # ---- what it is -----------------------------------------------------------------------------

    @property
    def filename(self) -> str:
        """The file's absolute path, or the URL without its query."""
        return self._filename

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows, and the shape of one."""
        return (self._count, *self._row_shape)

    @property
    def ndim(self) -> int:
        """The number of axes, that of the rows included."""
        return 1 + len(self._row_shape)

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"aquifer.Rows({self._filename!r}, dtype={self._dtype!s}, shape={self.shape})"

    def _open(self) -> _native.NativeRows:
        if self._recipe is not None:
            self._open_pickled()
        if self._native is None:
            raise ValueError(f"the rows of {self._filename} are closed")
        return self._native

    def _open_pickled(self) -> None:
        if self._opening[0] != os.getpid():
            # Another thread of the parent of this process may have held it.
            self._opening = os.getpid(), threading.Lock()
        with self._opening[1]:
            recipe = self._recipe
            if recipe is None:
                return
            remote = open_version(*recipe, self._budget)
            native = _native.NativeRows.open_remote(remote.native, self._row_bytes, self._offset, self._budget)
            with _changing:
                # `close` may have been called meanwhile.
                if self._recipe is not None:
                    self._remote, self._native, self._recipe = remote, native, None

    # ---- reading --------------------------------------------------------------------------------

    def take(self, indices: Indices, out: np.ndarray[Any, Any] | None = None) -> Any:
        """Rows by their numbers, in a new array; without the interpreter's lock, and Ctrl-C interrupts it.

        Parameters
        ----------
        indices:
            Integers of any shape; negative ones count from the end.
        out:
            A C-contiguous array of shape `indices.shape + self.shape[1:]` to read into. It must not be changed meanwhile.

        Returns
        -------
        An array of shape `indices.shape + self.shape[1:]`; `out` if that was given.

        Raises
        ------
        IndexError:
            A row that does not exist; nothing is read.
        FaultError:
            A row that could not be read, also because the file was truncated; `out` may have others already.
        """
        native = self._open()
        rows = row_numbers(indices)
        target = target_of(rows.shape + self._row_shape, self._dtype, out)
        native.take(rows.reshape(-1), bytes_in(target))
        return taken(rows, target, out)

    async def take_async(self, indices: Indices, out: np.ndarray[Any, Any] | None = None) -> Any:
        """As `take`, for `asyncio`: other tasks run meanwhile.

        One thread of these rows reads the batches, one after the other: many rows in a batch are faster than many batches. A
        task that is cancelled leaves at once; `out` is kept, and may be written to, until the batch has been read.
        """
        native = self._open()
        rows = row_numbers(indices)
        target = target_of(rows.shape + self._row_shape, self._dtype, out)
        queue, flat = queue_of_loop(), rows.reshape(-1)
        await queue.run(lambda token: queue.completions.take_single_rows(token, native, flat, bytes_in(target)))
        return taken(rows, target, out)

    def prefetch(self, indices: Indices) -> None:
        """Starts reading rows in a thread, and returns at once. It is a hint: what cannot be read is an error of the call that
        needs it, and what the budget does not hold, with the rows of prefetches before that are still to be read, is left out."""
        self._open().prefetch(row_numbers(indices).reshape(-1))

    def __getitem__(self, index: Any) -> Any:
        """Rows by a number, a slice, a list or array of numbers, or a mask of all rows; always copies.

        In a tuple the first index chooses rows, and the others, numbers and slices, parts of them.
        """
        if isinstance(index, tuple) and index:
            first, parts = index[0], index[1:]
            if not all(_is_number(part) or isinstance(part, (slice, EllipsisType)) for part in parts):
                raise IndexError("behind the first index only numbers and slices: take the rows first, and index the result")
        else:
            first, parts = index, ()
        rows = self._chosen(first)
        found = self.take(rows)
        return found[(slice(None),) * np.ndim(rows) + parts] if parts else found

    def _chosen(self, index: Any) -> Any:
        """The row numbers that an index along the first axis means."""
        if isinstance(index, slice):
            return np.arange(*index.indices(self._count))
        if _is_number(index):
            return operator.index(index)
        if isinstance(index, (list, np.ndarray)):
            rows = np.asarray(index)
            if rows.dtype != np.bool_:
                return rows
            if rows.shape == (self._count,):
                return np.flatnonzero(rows)
            raise IndexError(f"a mask of shape {rows.shape} for {self._count} rows")
        raise IndexError(f"rows have no index {index!r}: use a number, a slice, a list or array of numbers, or a mask")

    def __iter__(self) -> Iterator[Any]:
        """All rows in order."""
        each = max(_BATCH_BYTES // self._row_bytes, 1)
        for start in range(0, self._count, each):
            yield from self[start : start + each]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("rows of a file are an array only as a copy")
        found: np.ndarray[Any, Any] = self[:]
        return found if dtype is None else found.astype(dtype, copy=False)

    # ---- the file -------------------------------------------------------------------------------

    def invalidate(self, start: int = 0, stop: int | None = None) -> None:
        """Forgets the rows from `start` to `stop`, because the file has changed: calls that begin afterwards read them anew."""
        begin, end, _ = slice(start, stop).indices(self._count)
        self._open().invalidate(begin, max(begin, end))

    def stats(self) -> Stats:
        """Figures since it was opened: rows in memory, hits, misses, transfers; of an object in a store also `requests`,
        `received_bytes` and an estimate of their `cost`. A table in a notebook."""
        native = self._open()
        of_object = {} if self._remote is None else self._remote.native.stats()
        return Stats({"path": self._filename, **native.stats(), **of_object})

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._native is None and self._recipe is None

    def close(self) -> None:
        """Gives the memory back. Calls under way end first, in their threads; prefetches do not go on. Closing twice is fine."""
        with _changing:
            native, self._native, self._recipe = self._native, None, None
        if native is not None:
            native.end_prefetches()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __dask_tokenize__(self) -> Any:
        """What Dask names tasks by, instead of a pickle."""
        if self._recipe is not None:
            token: tuple[object, ...] = token_of(*self._recipe)
        elif self._remote is not None:
            token = self._remote.token
        else:
            status = os.stat(self._filename)
            token = self._filename, status.st_ino, status.st_mtime_ns, status.st_size
        return (*token, str(self._dtype), self._row_shape, self._offset)

    def __reduce__(self) -> Any:
        recipe = self._recipe
        if recipe is None:
            self._open()
            recipe = None if self._remote is None else self._remote.pickled()
        if recipe is not None:
            return _unpickled, (recipe, self._dtype, self._row_shape, self._offset, self._budget)
        return _opened, (self._filename, self._dtype, self._row_shape, self._offset, self._budget, self._count)


def _is_number(index: object) -> bool:
    # NumPy takes a bool for a mask without axes.
    return isinstance(index, SupportsIndex) and not isinstance(index, (bool, np.bool_, np.ndarray))


def _opened(path: str, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, budget: int | None, count: int) -> Rows:
    """Rows that were pickled: as many as there were."""
    rows = Rows(path, dtype, shape, offset=offset, budget=budget)
    if len(rows) < count:
        raise ValueError(f"{path} has {len(rows)} rows, and had {count} when they were pickled: it was truncated since")
    if len(rows) > count:
        rows._native = _native.NativeRows.open(path, rows._row_bytes, offset, budget, count)
        rows._count = count
    return rows


# Held for moments, by what opens rows that were pickled, and what closes them.
_changing = threading.Lock()


def _in_child() -> None:
    # Another thread of the parent may have held it.
    global _changing
    _changing = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def _unpickled(recipe: Recipe, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, budget: int | None) -> Rows:
    """Rows of an object that were pickled. They are opened when they are first used: what passes a task on, such as a scheduler, may
    have no access to the object, and an error belongs to the task."""
    rows = Rows.__new__(Rows)
    rows._recipe = recipe
    # One thread opens them, in this process.
    rows._opening = os.getpid(), threading.Lock()
    rows._remote = None
    rows._native = None
    # Without a query, as it was pickled.
    rows._filename = recipe[0]
    rows._dtype = dtype
    rows._row_shape = shape
    rows._row_bytes = math.prod(shape) * dtype.itemsize
    rows._offset = offset
    rows._budget = budget
    rows._count = (recipe[-1][1] - offset) // rows._row_bytes
    return rows
