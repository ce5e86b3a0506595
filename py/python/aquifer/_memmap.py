"""`memmap`: a file as a NumPy array, larger than memory."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import functools
import itertools
import math
import operator
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Literal, Self, SupportsIndex, cast, get_args

import numpy as np
import numpy.typing as npt

from . import _native
from ._cache import Cache, Stats, _shown, default_cache
from ._errors import FaultError, ForkedError, NotFoundError, ReadOnlyError
from ._indices import Indices, bytes_in, checked_rows, row_numbers, taken, target_of
from ._remote import Remote, is_url, open_remote
from ._sizes import bytes_of, lengths_of
from ._tier import TierArgument
from ._with_dask import tell_dask

__all__ = ["memmap"]

Advice = Literal["normal", "sequential", "random", "willneed", "dontneed"]

# First byte in the file, shape, strides, type.
_Place = tuple[int, tuple[int, ...], tuple[int, ...], np.dtype[Any]]

_MODES = {"readonly": "r", "readwrite": "r+", "write": "w+", "copyonwrite": "c"}
_BACKENDS = ("auto", "kernel", "cache")
_ADVICE = (None, *get_args(Advice))
# Paths of files without a name.
_DESCRIPTORS = "/proc/self/fd/"

# Looked up once: indexing is the hot path.
_getitem = np.ndarray.__getitem__
_setitem = np.ndarray.__setitem__
_faulted = _native.faulted


class _Source:
    """A mapped file, shared by an array and its slices."""

    __slots__ = (
        "__weakref__",
        "begin",
        "budget",
        "cache",
        "closed",
        "forked",
        "made_of",
        "mode",
        "own_cache",
        "path",
        "region",
        "remote",
        "root",
        "whole",
    )

    # Weak, as the array refers to this.
    whole: weakref.ref[memmap] | None

    def __init__(
        self,
        cache: Cache,
        own_cache: bool,
        region: _native.Region,
        begin: int,
        path: str,
        mode: str,
        made_of: dict[str, Any],
        remote: Remote | None,
    ) -> None:
        self.cache = cache
        # When it was mapped: asking the cache takes longer than an index.
        self.budget = cache.budget
        self.own_cache = own_cache
        self.region = region
        # Of the region, in the file.
        self.begin = begin
        self.path = path
        self.mode = mode
        self.made_of = made_of
        # What is mapped, if it is no file.
        self.remote = remote
        self.closed = False
        # By a parent of this process.
        self.forked = False
        # It holds the export of the memory. The base of the array, and of plain arrays that are views of it.
        self.root: npt.NDArray[np.uint8] = np.frombuffer(cast(Any, region), np.uint8)
        self.whole = None

    def array(
        self,
        cls: type[memmap],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        offset: int,
        order: Literal["C", "F"] = "C",
        strides: tuple[int, ...] | None = None,
    ) -> memmap:
        """An array over the memory, from `offset` in the file on."""
        made = np.ndarray.__new__(
            cls, shape, dtype, buffer=self.root, offset=offset - self.begin, strides=strides, order=order
        )
        made._source = self
        return made

    def holds(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether the elements lie in the memory."""
        start, address = self.region.address, int(array.__array_interface__["data"][0])
        # An empty slice may begin at the end.
        return start <= address < start + len(self.region) or (array.size == 0 and address == start + len(self.region))


def _in_child() -> None:
    """What np.memmap's users rely on: arrays of the parent can be used in a forked child.

    Shared stores are inherited, as with np.memmap. Other arrays of the kernel show the file, without stores that the parent has not
    flushed, and cannot be stored to. Those of the user backend are not there.
    """
    for region in list(_regions):
        with contextlib.suppress(OSError):
            region.map_in_child()
    for source in list(_sources):
        source.forked = True
        whole = source.whole() if source.whole is not None else None
        if whole is not None and source.region.stores != "shared":
            whole.flags.writeable = False


os.register_at_fork(after_in_child=_in_child)


# Open ones.
_sources: weakref.WeakSet[_Source] = weakref.WeakSet()
# What views of any kind keep, also where the array and its source are gone.
_regions: weakref.WeakSet[_native.Region] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Stores that nothing has flushed when the interpreter ends belong into their files, as with an ordinary mapping."""
    for region in list(_regions):
        try:
            region.write_out()
        except ForkedError:
            # The parent's.
            continue
        except OSError as error:
            print(f"aquifer: {os.fspath(region.path)}: stores were not written: {error}", file=sys.stderr)


class memmap(_native.Buffered):
    """A file as an array: `numpy.memmap`, under a budget of memory, with batches and exceptions.

    Parameters
    ----------
    filename:
        Path of a regular file, or an open file object, which may be closed afterwards; or the URL of an object in a store or on a server: `s3://`, `gs://`, `az://`, `http://`,
        `https://` or `file://`.
    dtype:
        Type of the elements, without Python objects.
    mode:
        `"r"`: read. `"r+"`: read and write; other processes see stores at once (`stores`). `"w+"`: create or overwrite, then as
        `"r+"`. `"c"`: copy on write: stores stay in this array. Permission to write the file is needed for all but `"r"`. By default `"r+"`, and `"r"` for a URL, for
        which it is the only one.
    offset:
        Where the array begins in the file, in bytes.
    shape:
        Shape of the array; by default what the file holds from `offset` on. `"r+"` lengthens a file that is too short.
    order:
        `"C"` or `"F"`.
    budget:
        Memory for this array's pages: bytes, or a text like `"4GiB"`. Without it the array shares the budget of `cache`, or
        of one cache for the process with a quarter of the memory. It bounds what `"r"` and `backend="cache"` keep in memory,
        and, separately, the page cache of `"r+"` and `"w+"`: beyond it pages are written to the file and dropped. Stores of
        `"c"` and of `stores="private"` come on top.
    cache:
        A `Cache` that the array shares with others.
    policy:
        With `budget`: an eviction policy, for `backend="cache"`.
    advice:
        How the array is read: `"normal"` (detected), `"sequential"`, `"random"`.
    backend:
        `"auto"`: pages are served by the kernel, and system calls work on the memory in every mode. `"cache"`: by Aquifer,
        with an exact budget, and write-back of stores under it; but system calls on pages that are not in memory fail with
        EFAULT (`tofile`, `os.write` and `readinto` on this memory; a copy is safe). Objects of a URL are always served so.
    stores:
        For `"r+"` and `"w+"`: `"shared"`, the default, maps the file as `numpy.memmap` does: other processes see stores at once,
        and keep their own to the same page. `"private"` keeps a copy of each page stored to in this process, until `flush`
        writes exactly these pages: for few stores, scattered over a large file. No other process may store to the file
        meanwhile, as the last version of a page wins, and the copies use memory beyond the budget until the end of the array.
        A file system that refuses shared writable mappings gets `"private"`; `repr` says so.
    allocate:
        For `"r+"` and `"w+"`: reserves the blocks of the array on disk at the opening, so that no store finds the disk full.
        Without it a new file is sparse.
    storage_options:
        For a URL: a dictionary with `endpoint`, `region`, `allow_http`, `anonymous`, `unversioned`, `timeout` in seconds,
        `retries`, `in_flight`, `largest_request_bytes`, `buffer_bytes`, `hedge`, `prices` (of a million requests and of a GiB),
        and configuration keys of the store such as `aws_access_key_id`; also by the names that s3fs and adlfs have for them.
        `credentials` is a function that supplies them, see docs/python.md; without, those of the environment, or of the
        machine, are used.

    tier:
        For a URL: a `Tier`, or a directory of one, that keeps what is downloaded on a local disk; `True` for the one that is this
        node's by default. Without this argument the one of the environment variable `AQUIFER_TIER` is used, if that is set;
        `False`: none.
    on_error:
        What code that touches the memory itself finds where bytes of a URL, or of `backend="cache"` in mode `"r"`, cannot be
        read. `"signal"`: SIGBUS, which ends the process. `"zeros"`: zeros, and the next call here raises, in whatever thread;
        until then all bytes that are not in memory are zeros, also for other arrays of the object in the same cache. Arrays of the
        default backend always do that, each for the bytes concerned.

    Raises
    ------
    NoSpaceError:
        A store found no room on the disk. Nothing is lost: the pages are copies in this process, which each flush tries to
        write. With `allocate`, at the opening.
    FaultError:
        A call, an index or a ufunc met bytes that the file does not have any more, or that cannot be read. `filename` and
        `offset` say where. Other code that touches such bytes sees zeros, and the next call here raises. With
        `backend="cache"` only the methods raise: code that touches them itself, also by a plain index, ends the process by
        SIGBUS, unless `on_error` says otherwise.
    InvalidInputError, ValueError:
        Arguments that do not fit the file.
    ChangedError:
        The object of a URL is not the one any more that was opened.
    OSError:
        The file or object cannot be opened: `NotFoundError`, `AccessDeniedError`, `TimedOutError` and others.

    Notes
    -----
    A plain index of bytes that are not in memory waits for the disk with the interpreter's lock held. `take`, indexing with
    an array and `take_async` release it, and read many rows at once.

    Stores of `"r+"` and `"w+"` are in the page cache: they outlive the process, and a `flush` makes them durable. Those of
    `stores="private"` stay in this process until `flush`, `close` or the end of the array.

    Arrays pickle by path. In a forked child, shared arrays of `"r+"` and `"w+"` can be loaded from, stored to and flushed as
    before. Other arrays of `backend="auto"` can be read: they show the file, without stores that the parent has not flushed, and
    cannot be stored to. Bytes that the file does not have any more, and stores that find the disk full, end the child by SIGBUS.
    Other calls raise `ForkedError`. Memory of `backend="cache"` is not there in a child. Open the file again there for anything else.
    """

    _source: _Source | None

    def __new__(
        cls,
        filename: str | bytes | os.PathLike[str] | os.PathLike[bytes] | IO[Any] | Remote,
        dtype: npt.DTypeLike = np.uint8,
        mode: str | None = None,
        offset: int = 0,
        shape: int | Sequence[int] | None = None,
        order: Literal["C", "F"] = "C",
        *,
        budget: int | str | None = None,
        cache: Cache | None = None,
        policy: str | None = None,
        advice: Advice | None = None,
        backend: Literal["auto", "kernel", "cache"] = "auto",
        storage_options: Mapping[str, Any] | None = None,
        tier: TierArgument = None,
        on_error: Literal["signal", "zeros"] = "signal",
        stores: Literal["shared", "private"] | None = None,
        allocate: bool = False,
    ) -> Self:
        remote: Remote | None = filename if isinstance(filename, Remote) else None
        is_open = False
        is_remote = remote is not None or is_url(filename)
        if mode is None:
            mode = "r" if is_remote else "r+"
        mode = _MODES.get(mode, mode)
        if mode not in _MODES.values():
            raise ValueError(f'mode {mode!r}: use "r", "r+", "w+" or "c"')
        if order not in ("C", "F"):
            raise ValueError(f'order {order!r}: use "C" or "F"')
        if advice not in _ADVICE:
            raise ValueError(f"advice {advice!r}: use normal, sequential, random, willneed or dontneed")
        if cache is not None and not isinstance(cache, Cache):
            raise TypeError(f"cache is a {type(cache).__name__}; it is an aquifer.Cache")
        if backend not in _BACKENDS:
            raise ValueError(f'backend {backend!r}: use "auto", "kernel" or "cache"')
        if backend == "kernel" and mode != "r":
            raise ValueError('backend="kernel" is for mode "r"')
        if backend == "cache" and mode == "c":
            raise ValueError('backend="cache" writes stores back, which mode "c" must not: use the other backend')
        if is_remote and mode != "r":
            raise ReadOnlyError(errno.EROFS, f'mode {mode!r}: an object of a URL can only be read; use mode "r", or download it')
        if is_remote and backend == "kernel":
            raise ValueError('backend="kernel" is for files: leave it out')
        if (storage_options is not None or tier is not None) and not is_remote:
            raise ValueError("storage options and tiers are for URLs, such as s3://bucket/key")
        if on_error not in ("signal", "zeros"):
            raise ValueError(f'on_error {on_error!r}: use "signal" or "zeros"')
        if on_error == "zeros" and backend == "cache" and mode != "r":
            raise ValueError('on_error="zeros" is for arrays that are only read, as stores to zeros would be lost')
        if stores not in (None, "shared", "private"):
            raise ValueError(f'stores {stores!r}: use "shared" or "private"')
        if (stores is not None or allocate) and (mode not in ("r+", "w+") or backend == "cache"):
            raise ValueError('`stores` and `allocate` are for modes "r+" and "w+" of the default backend')
        if allocate not in (False, True):
            raise TypeError(f"allocate is a {type(allocate).__name__}; it is a flag: True or False")
        if cache is not None and (budget is not None or policy is not None):
            raise ValueError("a cache has its own budget and policy: give one or the other")
        if policy is not None and budget is None:
            raise ValueError("a policy needs a budget of its own")
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise ValueError("an array of a file cannot hold Python objects")
        if dtype.itemsize == 0:
            raise ValueError(f"elements of dtype {dtype!r} have no bytes: give it a length")
        offset = operator.index(offset)
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        if is_remote and remote is None:
            own_bytes = bytes_of(budget) if budget is not None else None if cache is None else cache.budget
            remote = open_remote(cast(str, filename), storage_options, tier, own_bytes)
        if remote is not None:
            path, present = remote.shown, remote.version[1]
        else:
            path, is_open = _path_of(filename, mode)
            # As numpy.memmap does, the content of a file that is open already is kept.
            present = _size_of(path) if mode != "w+" or is_open else 0

        if shape is None and mode == "w+":
            raise ValueError('mode "w+" needs a shape')
        if shape is None:
            if present < offset:
                raise ValueError(f"{path} has {present} bytes: the offset {offset} is behind its end")
            count, rest = divmod(present - offset, dtype.itemsize)
            if rest:
                raise ValueError(f"{present - offset} bytes behind the offset are no whole elements of {dtype.itemsize} bytes")
            shape = (count,)
        else:
            shape = lengths_of(shape)
        if any(length < 0 for length in shape):
            raise ValueError(f"shape {shape} has a negative length")
        needed = offset + math.prod(shape) * dtype.itemsize
        if needed == offset:
            raise ValueError("an array of a file cannot be empty")
        # What is wrong is refused before the file is changed.
        np.broadcast_to(np.empty((), dtype), shape)
        own_cache = budget is not None
        if own_cache:
            cache = Cache(budget, policy=policy)
        elif cache is None:
            cache = default_cache()
        if needed > present:
            if mode in ("r", "c"):
                raise ValueError(f"{path} has {present} bytes, and shape {shape} needs {needed}: use a smaller shape")
            _lengthen(path, needed, created=mode == "w+" and not is_open)
        made_of = {
            "dtype": dtype,
            "offset": offset,
            "shape": shape,
            "order": order,
            "advice": advice,
            "backend": backend,
            "on_error": on_error,
            "stores": stores,
        }
        # A mapping of a cache is one of the whole file.
        is_view = mode != "r" and backend == "auto"
        begin = offset if is_view else 0
        kind: type[memmap] = cls
        tell_dask(memmap)
        if remote is not None:
            from ._remote_array import RemoteArray

            kind = RemoteArray
            region = _native.Region.open_remote(cache._native, remote.native, on_error == "zeros")
        else:
            is_private = mode == "c" or stores == "private"
            region = _native.Region.open(
                cache._native, path, mode, backend, (begin, needed - begin), on_error == "zeros", is_private, allocate
            )
        if advice is not None:
            region.advise(0, len(region), advice)
        source = _Source(cache, own_cache, region, begin, path, mode, made_of, remote)
        array = source.array(kind, shape, dtype, offset, order)
        source.whole = weakref.ref(array)
        _sources.add(source)
        _regions.add(region)
        return cast(Self, array)

    # ---- what it is -----------------------------------------------------------------------------

    def __array_finalize__(self, obj: object) -> None:
        source: _Source | None = getattr(obj, "_source", None)
        if source is not None:
            # A copy is made from an array as well. What is a view of one of the file's arrays need not be asked.
            base = self.base
            if base is not obj and getattr(base, "_source", None) is not source and not source.holds(self):
                source = None
        self._source = source

    def _backed(self) -> _Source | None:
        """What the elements lie in; None for an array in memory, such as a copy."""
        source = self._source
        return source if source is not None and not source.closed and source.holds(self) else None

    def _open(self) -> _Source:
        source = self._source
        if source is not None and source.closed:
            raise ValueError(f"the array of {source.path} is closed")
        source = self._backed()
        if source is None:
            raise ValueError("this array lies in memory, and not in a file: use numpy's own functions")
        return source

    def _held(self) -> _Source | None:
        """What a call refers to while NumPy copies without the interpreter's lock: `close` in another thread finds that."""
        source = self._source
        if source is not None and source.closed:
            raise ValueError(f"the array of {source.path} is closed")
        return source

    def _is_in_memory(self) -> bool:
        """Whether it is no array of a file: what code has made of one that keeps subclasses, such as `numpy.array(…, subok=True)`."""
        source = self._source
        return source is None or not (source.closed or source.holds(self))

    @property
    def filename(self) -> str | None:
        """The file's absolute path; None for an array in memory."""
        return None if self._source is None else self._source.path

    @property
    def mode(self) -> str | None:
        """How the file was opened."""
        return None if self._source is None else self._source.mode

    @property
    def offset(self) -> int | None:
        """Where this array or slice begins in the file, in bytes; for a reversed slice, its first element."""
        source = self._backed()
        return None if source is None else self._place(source)

    def _place(self, source: _Source) -> int:
        return source.begin + int(self.__array_interface__["data"][0]) - source.region.address

    @property
    def stores(self) -> str | None:
        """Where stores of `"r+"` and `"w+"` go: `"shared"` or `"private"`. Private also where the file system refuses shared ones."""
        return None if self._source is None or self._source.mode not in ("r+", "w+") else self._source.region.stores

    def __repr__(self) -> str:
        shown, source = super().__repr__(), self._backed()
        if source is None:
            return shown
        stores = f", stores={self.stores!r}" if self.stores is not None else ""
        budget = _shown("budget_bytes", source.cache.budget or source.budget)
        return f"{shown.removesuffix(')')}, file={source.path!r}, mode={source.mode!r}{stores}, budget={budget!r})"

    @property
    def cache(self) -> Cache:
        """The cache whose budget the array uses."""
        return self._open().cache

    @property
    def budget(self) -> int:
        """The budget in bytes, of the array's cache. It can be set, to a number or a text."""
        return self._open().cache.budget

    @budget.setter
    def budget(self, budget: int | str) -> None:
        self._open().cache.budget = bytes_of(budget)

    # ---- views that close sees ------------------------------------------------------------------

    def _exported(self) -> np.ndarray[Any, np.dtype[Any]]:
        """A plain array of the same memory. What is made of it refers to the memory, and not to this object."""
        return np.ndarray.view(self, np.ndarray)

    def view(self, *args: Any, **kwargs: Any) -> Any:
        for kind in (*args, kwargs.get("type")):
            if isinstance(kind, type) and issubclass(kind, np.ndarray) and not issubclass(kind, memmap):
                return self._exported().view(*args, **kwargs)
        return super().view(*args, **kwargs)

    @property
    def flat(self) -> Any:
        """As that of `numpy.ndarray`."""
        return self._exported().flat

    @flat.setter
    def flat(self, value: Any) -> None:
        self._exported().flat = value  # type: ignore[misc]

    def __dlpack__(self, **options: Any) -> Any:
        return self._exported().__dlpack__(**options)

    # ---- indexing -------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        kind = type(index)
        if kind is int or kind is slice:
            found = _getitem(self, index)
            if _faulted():
                self._raise_fault()
            return found
        return self._index(index)

    def _index(self, index: Any) -> Any:
        if isinstance(index, (list, np.ndarray)) and self.ndim > 0 and self._backed() is not None:
            rows = np.asarray(index)
            if rows.dtype == np.bool_ and rows.shape == self.shape[:1]:
                rows = np.flatnonzero(rows)
            if rows.dtype.kind in "iu" or rows.size == 0 and isinstance(index, list):
                return self.take(rows)
        elif isinstance(index, tuple) and index and isinstance(index[0], (list, np.ndarray)) and self.ndim > 0:
            first = np.asarray(index[0])
            # Only where the other axes are sliced is this the same as one index after the other.
            if first.dtype.kind in "iu" and all(isinstance(other, slice) for other in index[1:]) and len(index) <= self.ndim:
                if self._backed() is not None:
                    rows = self.take(first)
                    # One element of text has indices of its own.
                    return rows[(slice(None),) * first.ndim + index[1:]] if len(index) > 1 else rows
        _held = self._held()
        found = _getitem(self, index)
        if _faulted():
            self._raise_fault()
        # As numpy.memmap does: what was copied is an ordinary array.
        if isinstance(found, memmap) and found._backed() is None:
            return found.view(np.ndarray)
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, memmap):
            value = value.view(np.ndarray)
        _held = self._held()
        _setitem(self, index, value)
        if _faulted():
            self._raise_fault()

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        arrays = [array for array in inputs if isinstance(array, memmap)]
        plain = [_plain(value) for value in inputs]
        out = kwargs.get("out")
        if out:
            arrays += [array for array in out if isinstance(array, memmap)]
            kwargs["out"] = tuple(_plain(array) for array in out)
        if "where" in kwargs:
            arrays += [kwargs["where"]] if isinstance(kwargs["where"], memmap) else []
            kwargs["where"] = _plain(kwargs["where"])
        result = getattr(ufunc, method)(*plain, **kwargs)
        if _faulted():
            for array in arrays:
                array._raise_fault()
        if out and result is not NotImplemented:
            results = result if isinstance(result, tuple) else (result,)
            given = tuple(made if place is None else place for place, made in zip(out, results))
            return given if isinstance(result, tuple) else given[0]
        return result

    def __array_wrap__(
        self, array: np.ndarray[Any, Any], context: Any = None, return_scalar: bool = False
    ) -> Any:
        if return_scalar:
            return array[()]
        return array.view(np.ndarray)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        operands = (*args, *kwargs.values())
        _held = [array._held() for array in _arrays_of(operands)]
        result = super().__array_function__(func, types, args, kwargs)
        if _faulted():
            # It may have loaded bytes without a ufunc.
            for array in _arrays_of(operands):
                array._raise_fault()
        return _ordinary(result, operands)

    # ---- many rows at once ----------------------------------------------------------------------

    def _layout(self) -> tuple[int, int, int, int] | None:
        """First byte, rows, bytes of a row, distance; None if a row is not contiguous."""
        source = self._open()
        base = int(self.__array_interface__["data"][0]) - source.region.address
        expected = self.itemsize
        for length, stride in zip(self.shape[:0:-1], self.strides[:0:-1]):
            if length != 1 and stride != expected:
                return None
            expected *= length
        return base, self.shape[0], expected, self.strides[0]

    _rows = staticmethod(row_numbers)

    def _target(self, rows: npt.NDArray[np.int64], out: np.ndarray[Any, Any] | None) -> np.ndarray[Any, np.dtype[Any]]:
        target = target_of(rows.shape + self.shape[1:], self.dtype, out)
        # Rows that were read would change rows that are read later.
        return np.empty_like(target) if out is not None and np.may_share_memory(out, self) else target

    def take(  # type: ignore[override]
        self,
        indices: Indices,
        out: np.ndarray[Any, Any] | None = None,
        *,
        axis: SupportsIndex | None = 0,
        mode: str = "raise",
    ) -> Any:
        """Rows by their numbers, in a new array: many reads at once, without the interpreter's lock.

        The rows are read sorted, neighbours together; a batch is several times as fast as indexing row by row. Ctrl-C
        interrupts it.

        Parameters
        ----------
        indices:
            Integers of any shape; negative ones count from the end.
        out:
            A C-contiguous array of shape `indices.shape + self.shape[1:]` to read into. It must not be changed meanwhile.
        axis, mode:
            Rows are along axis 0, and an index outside raises; with others it is `numpy.take`, without batches.

        Returns
        -------
        An array of shape `indices.shape + self.shape[1:]`; `out` if that was given.

        Raises
        ------
        IndexError:
            A row that does not exist; nothing is read.
        FaultError:
            A row that could not be read; `out` may have others already.
        """
        if self._is_in_memory():
            return np.take(self.view(np.ndarray), cast(Any, indices), axis, cast(Any, out), cast(Any, mode))
        source = self._open()
        along = None if axis is None else operator.index(axis)
        if along is None and self.ndim == 1:
            along = 0
        # In a forked child the memory can be read, and the engine is the parent's.
        batches = along == 0 and mode == "raise" and self.ndim > 0 and not source.forked
        layout = self._layout() if batches else None
        if layout is None:
            # An empty list is one of floating-point numbers to NumPy.
            wanted = self._rows(indices) if along == 0 else indices
            found = np.take(self.view(np.ndarray), cast(Any, wanted), axis, cast(Any, out), cast(Any, mode))
            if _faulted():
                self._raise_fault()
            return found
        rows = self._rows(indices)
        target = self._target(rows, out)
        if _faulted():
            self._raise_fault()
        if target.size:
            source.region.take(layout, rows.reshape(-1), bytes_in(target))
        elif rows.size:
            checked_rows(rows, self.shape[0])
        return taken(rows, target, out)

    def prefetch(self, indices: Indices) -> None:
        """Starts reading rows, and returns at once. It is a hint: the access that needs a row reads it if this did not."""
        source = self._open()
        layout = self._layout()
        if layout is None:
            raise ValueError("rows of this slice are not contiguous")
        source.region.prefetch(layout, self._rows(indices).reshape(-1))

    def read_ranges(self, starts: Indices, lengths: Indices) -> np.ndarray[Any, np.dtype[Any]]:
        """Ranges of a one-dimensional array, one after the other in a new one: windows of tokens, sequences of several lengths.

        They are read as the rows of `take` are, and may overlap.

        Parameters
        ----------
        starts, lengths:
            First elements, not negative, and numbers of elements: lists of the same length, or one number for all.

        Returns
        -------
        An array of `sum(lengths)` elements; with equal lengths, `.reshape(-1, length)` has a row for each range.

        Raises
        ------
        IndexError:
            A range that ends behind the array; nothing is read.
        """
        source = self._open()
        if self.ndim != 1 or self.strides[0] != self.itemsize:
            raise ValueError("ranges are of one-dimensional arrays, or slices of them without a step")
        first, counts = np.broadcast_arrays(self._rows(starts), self._rows(lengths))
        first, counts = first.reshape(-1), counts.reshape(-1)
        # Compared so that nothing overflows.
        wrong = np.flatnonzero((first < 0) | (counts < 0) | (counts > len(self)) | (first > len(self) - counts))
        if len(wrong):
            place = wrong[0]
            raise IndexError(f"{counts[place]} elements from {first[place]} on are not in an array of {len(self)}")
        out = np.empty(int(counts.sum()), self.dtype)
        if _faulted():
            self._raise_fault()
        base = int(self.__array_interface__["data"][0]) - source.region.address
        begins = np.ascontiguousarray(base + first * self.itemsize)
        source.region.read_ranges(begins, np.ascontiguousarray(counts * self.itemsize), bytes_in(out))
        return out

    async def take_async(self, indices: Indices, out: np.ndarray[Any, Any] | None = None) -> Any:
        """As `take`, for `asyncio`: other tasks run meanwhile.

        The loop watches one descriptor for all such calls; no thread waits. A task that is cancelled leaves at once; `out`
        is kept, and may be written to, until the reads under way have ended.
        """
        source = self._open()
        layout = self._layout()
        if layout is None:
            raise ValueError("rows of this slice are not contiguous")
        rows = self._rows(indices)
        target = self._target(rows, out)
        if target.size:
            queue, flat = queue_of_loop(), rows.reshape(-1)
            await queue.run(lambda token: queue.completions.take_rows(token, source.region, layout, flat, bytes_in(target)))
        elif rows.size:
            checked_rows(rows, self.shape[0])
        return taken(rows, target, out)

    # ---- the file -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Writes what was changed in this array or slice to the file, and makes it durable.

        With `stores="private"` exactly the pages that were stored to. Mode `"c"` and arrays in memory have nothing to flush. Waits
        for the device without the interpreter's lock.

        Raises
        ------
        NoSpaceError:
            Stores for which the disk has no room stay changed, and the next flush tries again.
        NotDurableError:
            The device has failed, and stores since the last flush may be lost. So every later flush of the array raises as well:
            write the array to another file.
        FaultError:
            The file ends before the array. With `stores="private"` also where the device has failed: the pages stay changed, and the
            next flush tries again.
        """
        if self._is_in_memory():
            return
        source = self._open()
        if source.mode in ("r+", "w+"):
            begin, end = _bounds(self, source)
            try:
                source.region.flush_range(begin, end - begin)
            except FaultError:
                # A load or a store that met the end of the file names the place.
                self.check()
                raise
        self.check()

    def advise(self, advice: Advice) -> None:
        """Says how this array or slice is accessed: `"normal"`, `"sequential"`, `"random"`, `"willneed"`, `"dontneed"`."""
        source = self._open()
        begin, end = _bounds(self, source)
        source.region.advise(begin, end - begin, advice)

    def check(self) -> None:
        """Raises what code without exceptions has met in this array's file since the last call here: bytes that cannot be read, or
        a store without room on the disk."""
        self._open().region.check()

    def _raise_fault(self) -> None:
        source = self._backed()
        if source is not None:
            source.region.check()

    def stats(self) -> Stats:
        """Figures of the array's cache and of the file: bytes, counts, latencies in nanoseconds. A table in a notebook.

        Of an object in a store also `requests`, `received_bytes` and an estimate of their `cost`, since it was opened.
        """
        source = self._open()
        of_object = {} if source.remote is None else source.remote.native.stats()
        return Stats({"path": source.path, "mode": source.mode, **source.cache.stats(), **source.region.stats(), **of_object})

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._source is not None and self._source.closed

    def close(self) -> None:
        """Flushes, and ends the array: any other use of it raises `ValueError` from then on. Closing twice is fine.

        The file is unmapped. Code that has the address of the memory and that `close` cannot see (a `numpy.nditer`, a tensor made
        by a C extension, `numpy.asarray` of the closed array) reads zeros there, and its stores are discarded, until the last
        object that refers to the array is gone. The pages of `backend="cache"` and of a URL belong to all arrays of the file
        or object in the cache, and stay for such code as they are.

        Raises
        ------
        BufferError:
            A slice, another array, a `memoryview` or a DLPack tensor over the memory still exists. Nothing has changed.
        FaultError and others of `flush`:
            The array stays open.
        """
        source = self._source
        if source is None or source.closed:
            return
        if not _is_whole(self, source):
            raise ValueError("only the whole array can be closed, not a slice")
        if _references(source) != _ALONE:
            raise BufferError(f"cannot close {source.path}: slices or other arrays over its memory exist")
        self.flush()
        if source.mode == "r":
            # Gives the memory back now, also that of a backend which cannot be retired.
            source.region.advise(0, len(source.region), "dontneed")
        is_of = type(self)
        self.__class__ = _closed_class(cast(Any, is_of))
        source.closed = True
        try:
            # Once more: a flush lets other threads run. From here on they find the array closed.
            if _references(source) != _ALONE:
                raise BufferError(f"cannot close {source.path}: slices or other arrays over its memory exist")
            source.region.retire()
        except (BufferError, OSError):
            self.__class__ = is_of
            source.closed = False
            raise
        # After Ctrl-C it stays closed: its memory may be gone.
        _sources.discard(source)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BufferError:
            # What has raised the error may refer to the array: it ends with the error.
            if error is None:
                raise

    # ---- copies ---------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        source = self._backed()
        if source is None or source.mode == "c" or source.path.startswith(_DESCRIPTORS):
            # Stores of mode "c" are nowhere else; and a descriptor's number is another file's, elsewhere and later.
            return self.view(np.ndarray).copy().__reduce__()
        mode = "r" if source.mode == "r" else "r+"
        return _opened, (source.path, mode, *self._made_of(source))

    def _is_inherited(self) -> bool:
        """Whether the memory can be read in a forked child."""
        source = self._backed()
        return source is None or (source.remote is None and source.made_of["backend"] != "cache")

    def _made_of(self, source: _Source) -> tuple[dict[str, Any], _Place | None]:
        """Arguments of an array of the same memory, and where this slice lies in it."""
        made_of = dict(source.made_of)
        if source.own_cache:
            # In a forked child the cache knows no budget.
            made_of["budget"] = source.cache.budget or source.budget
        else:
            made_of["cache"] = None if _is_default(source.cache) else source.cache
        return made_of, None if _is_whole(self, source) else (self._place(source), self.shape, self.strides, self.dtype)

    def __dask_tokenize__(self) -> Any:
        """What Dask names tasks by, instead of a hash of all elements: the file as it is, and the place in it. What may be other than
        the file, as stores that were not flushed, is hashed."""
        normalize = sys.modules["dask.tokenize"].normalize_token
        source = self._backed()
        if source is None or source.mode != "r":
            return normalize(self.view(np.ndarray))
        try:
            status = os.stat(source.path)
        except OSError:
            return normalize(self.view(np.ndarray))
        if (status.st_dev, status.st_ino) != source.region.identity:
            # Another file has taken its place.
            return normalize(self.view(np.ndarray))
        # A tool may set the time of a change back; not that of the inode.
        times = status.st_mtime_ns, status.st_ctime_ns
        of_file = source.path, status.st_dev, status.st_ino, *times, status.st_size
        return ("aquifer", *of_file, self._place(source), self.shape, self.strides, str(self.dtype))

    def _at(self, place: _Place) -> memmap:
        """A slice of this array."""
        offset, shape, strides, dtype = place
        source = self._open()
        return source.array(type(self), shape, dtype, offset, strides=strides)

    def __deepcopy__(self, memo: object) -> np.ndarray[Any, Any]:  # type: ignore[override]
        return self._exported().copy()


# What can be asked of a closed array.
_OF_CLOSED = {
    "__array_finalize__",
    "__class_getitem__",
    "__delattr__",
    "__doc__",
    "__exit__",
    "__getattribute__",
    "__hash__",
    "__len__",
    "__new__",
    "__repr__",
    "__setattr__",
    "__sizeof__",
    "__str__",
    "base",
    "dtype",
    "flags",
    "itemsize",
    "nbytes",
    "ndim",
    "shape",
    "size",
    "strides",
}


@functools.cache
def _closed_class(kind: Any) -> type[memmap]:
    """The class of closed arrays of a class: everything that reaches elements raises. An open array need not be asked at each
    index whether it is open."""

    def refuse(self: memmap, *_args: Any, **_kwargs: Any) -> Any:
        assert self._source is not None
        raise ValueError(f"the array of {self._source.path} is closed")

    def finalize(self: memmap, _obj: object) -> None:
        # A copy of zeros, made by code that asks no array.
        self.__class__ = kind
        self._source = None

    def shown(self: memmap) -> str:
        assert self._source is not None
        return f"<closed {kind.__name__} of {self._source.path}>"

    members: dict[str, Any] = {"__repr__": shown, "__str__": shown, "__array_finalize__": finalize, "__slots__": (), "__doc__": kind.__doc__}
    for name in {*vars(np.ndarray), "__array_function__", "__array_ufunc__", "__enter__", "__reduce_ex__", "_exported"} - _OF_CLOSED:
        members[name] = refuse if callable(getattr(np.ndarray, name, refuse)) else property(refuse, refuse)
    members["__module__"] = kind.__module__
    members["__qualname__"] = kind.__qualname__
    return type(kind.__name__, (kind,), members)


def _is_whole(array: memmap, source: _Source) -> bool:
    return source.whole is not None and source.whole() is array


def _references(source: _Source) -> tuple[int, int]:
    """References to the memory: of plain arrays, and of slices of the array."""
    return sys.getrefcount(source.root), sys.getrefcount(source)


def _references_of_one() -> tuple[int, int]:
    """Those that `close` finds if nothing but the array itself refers to its memory. Versions of Python differ in them."""

    class OfOne:
        def __init__(self) -> None:
            self.source = cast(_Source, types.SimpleNamespace(root=object()))
            self.base = self.source.root

        def close(self) -> tuple[int, int]:
            source = self.source
            return _references(source)

    return OfOne().close()


_ALONE = _references_of_one()


def _arrays_of(values: Iterable[Any]) -> Iterator[memmap]:
    """The arrays of files among operands."""
    for value in values:
        if isinstance(value, memmap):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _arrays_of(value)


def _ordinary(found: Any, given: Iterable[Any]) -> Any:
    """What a call has computed, as ordinary arrays: all that does not lie in a file, and was not given to the call, as `out` is."""
    if isinstance(found, memmap):
        if found._backed() is not None or any(found is one for one in given):
            return found
        return found.view(np.ndarray)
    if isinstance(found, (list, tuple)) and any(isinstance(one, memmap) for one in found):
        made = (_ordinary(one, given) for one in found)
        return cast(Any, found)._make(made) if hasattr(found, "_make") else type(found)(made)
    return found


def _making_ordinary(name: str) -> Callable[..., Any]:
    method = getattr(np.ndarray, name)

    @functools.wraps(method)
    def called(self: memmap, *args: Any, **kwargs: Any) -> Any:
        _held = self._held()
        found = method(self, *args, **kwargs)
        if _faulted():
            self._raise_fault()
        return _ordinary(found, (*args, *kwargs.values()))

    return called


# The methods of `numpy.ndarray` that make arrays of the class of their array, which need not be in its file. The others are
# ufuncs and functions.
for _name in (
    "__copy__",
    "argpartition",
    "argsort",
    "astype",
    "byteswap",
    "choose",
    "compress",
    "conj",
    "conjugate",
    "copy",
    "diagonal",
    "dot",
    "flatten",
    "ravel",
    "repeat",
    "reshape",
):
    setattr(memmap, _name, _making_ordinary(_name))


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, memmap) else value


def _bounds(array: memmap, source: _Source) -> tuple[int, int]:
    """The bytes of the region between which the elements lie."""
    first = int(array.__array_interface__["data"][0]) - source.region.address
    if array.size == 0:
        return first, first
    spans = [(length - 1) * stride for length, stride in zip(array.shape, array.strides)]
    return first + sum(min(span, 0) for span in spans), first + sum(max(span, 0) for span in spans) + array.itemsize


def _is_default(cache: Cache) -> bool:
    from . import _cache

    return _cache._default is not None and _cache._default[1] is cache


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError as error:
        raise NotFoundError(errno.ENOENT, f"there is no file {path}", path=path) from error


def _path_of(filename: Any, mode: str) -> tuple[str, bool]:
    """The absolute path of a file, and whether it was given as a file object."""
    if not hasattr(filename, "read") or isinstance(filename, os.PathLike):
        return os.path.abspath(os.fsdecode(filename)), False
    try:
        descriptor = filename.fileno()
    except (AttributeError, OSError):
        raise TypeError(f"a {type(filename).__name__} has no file that can be mapped: give a path, a URL or an open file") from None
    if mode in ("r+", "w+") and not filename.writable():
        raise ReadOnlyError(errno.EROFS, f"mode {mode!r}: the file object was opened for reading; open it for writing as well")
    if filename.writable():
        filename.flush()
    name, status = getattr(filename, "name", None), os.fstat(descriptor)
    if isinstance(name, (str, bytes)):
        path = os.path.abspath(os.fsdecode(name))
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), status):
                return path, True
    # It has no name, or another file has that now.
    return f"{_DESCRIPTORS}{descriptor}", True


def _lengthen(path: str, length: int, *, created: bool) -> None:
    """Creates a file, empty before, or makes it longer."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if created else 0), 0o666)
    try:
        # First, as a length that is refused must not cost the content.
        os.ftruncate(descriptor, max(length, os.fstat(descriptor).st_size))
        if created:
            os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, length)
    finally:
        os.close(descriptor)


def _opened(path: str, mode: str, made_of: dict[str, Any], place: _Place | None) -> Any:
    """An array that was pickled."""
    present, needed = _size_of(path), made_of["offset"] + math.prod(made_of["shape"]) * made_of["dtype"].itemsize
    if present < needed:
        # Not lengthened, as a new one: what is missing was there.
        raise ValueError(f"{path} has {present} bytes, and had {needed} when the array was pickled: it was truncated since")
    array = memmap(path, mode=mode, **made_of)
    return array if place is None else array._at(place)


# ---- asyncio --------------------------------------------------------------------------------------


class _Waiting(dict[int, "asyncio.Future[None]"]):
    """Futures by token: a dictionary with weak references."""


class _Queue:
    """The reads of one event loop.

    The loop has the futures, as a future refers to its loop: a queue that referred to them would keep a loop that has ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.completions = _native.Completions()
        self.tokens = itertools.count()
        waiting = _Waiting()
        self.waiting = weakref.ref(waiting)
        self.loop = weakref.ref(loop)
        self.pid = os.getpid()
        # The loop refers to the function, which must not keep the loop.
        loop.add_reader(self.completions.fileno(), _Queue._completed, weakref.proxy(self), waiting)

    def run(self, begin: Callable[[int], None]) -> asyncio.Future[None]:
        """Calls `begin` with the token of a call of `completions`; the future is done when that has completed."""
        loop, waiting = self.loop(), self.waiting()
        assert loop is not None and waiting is not None
        token = next(self.tokens)
        future = loop.create_future()
        waiting[token] = future
        try:
            begin(token)
        except BaseException:
            del waiting[token]
            raise
        return future

    def _completed(self, waiting: _Waiting) -> None:
        for token, error in self.completions.completed():
            future = waiting.pop(token)
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


_queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = weakref.WeakKeyDictionary()


def queue_of_loop() -> _Queue:
    loop = asyncio.get_running_loop()
    queue = _queues.get(loop)
    if queue is None or queue.pid != os.getpid():
        queue = _queues[loop] = _Queue(loop)
    return queue
