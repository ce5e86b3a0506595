"""Arrays of objects in stores."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable, Iterator
from types import EllipsisType
from typing import Any, SupportsIndex, cast

import numpy as np

from ._errors import ForkedError
from ._memmap import _arrays_of, _bounds, _faulted, _Source, memmap
from ._remote import Version, open_version

__all__ = ["RemoteArray"]

# Slices up to this length are read when they are made, if they are not longer than this part of the budget.
_AT_ONCE_BYTES = 128 << 20
_AT_ONCE_PART = 4
# A page, more or less: what each element brings in, however far it is from the next.
_APART_BYTES = 4096


class RemoteArray(memmap):
    """An array of an object in a store; `aquifer.memmap` of a URL makes one.

    Indices and slices are read when they are made, with many requests at once, as long as they are not longer than a quarter of
    the budget and 128 MiB: what cannot be read is an exception then, and not a signal when it is used.
    """

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if self._backed() is None:
            return super().__getitem__(index)
        if not all(map(_is_basic, parts)):
            if not self._are_rows(parts) and not (len(parts) == 1 and np.size(parts[0]) == 0):
                self._bring()
            return self._index(index)
        # With an ellipsis an index of one element is an array without axes, and loads nothing.
        has_ellipsis = any(part is Ellipsis for part in parts)
        found = cast(RemoteArray, np.ndarray.__getitem__(self, parts if has_ellipsis else (*parts, Ellipsis)))
        found._bring()
        # Which may have been evicted again.
        value = found if has_ellipsis or found.ndim > 0 else np.ndarray.__getitem__(found, ())
        if _faulted():
            self._raise_fault()
        return value

    def _are_rows(self, parts: tuple[Any, ...]) -> bool:
        """Whether an index names rows, which are read by themselves, or fields, which are slices."""
        first = np.asarray(parts[0])
        if first.dtype.kind == "b":
            return len(parts) == 1 and first.shape == self.shape[:1]
        return first.dtype.kind == "U" or first.dtype.kind in "iu" and all(isinstance(part, slice) for part in parts[1:])

    def _open(self) -> _Source:
        source = super()._open()
        if source.forked:
            raise ForkedError(errno.ECHILD, f"{source.path}: the array is of the parent of this process; open it again here")
        return source

    def _bring(self) -> None:
        source = self._backed()
        if source is None or self.size == 0:
            return
        self._open()
        begin, end = _bounds(self, source)
        at_once = min(_AT_ONCE_BYTES, source.budget // _AT_ONCE_PART)
        # Elements that are far apart are better read one by one.
        if end - begin <= min(at_once, self.size * max(self.itemsize, _APART_BYTES)):
            source.region.bring(begin, end - begin)

    def __iter__(self) -> Iterator[Any]:
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d array")
        return (self[row] for row in range(len(self)))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        _bring_all((*inputs, *kwargs.values()))
        return super().__array_ufunc__(ufunc, method, *inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        _bring_all((*args, *kwargs.values()))
        return super().__array_function__(func, types, args, kwargs)

    def __reduce__(self) -> Any:
        source = self._backed()
        if source is None:
            return super().__reduce__()
        assert source.remote is not None
        return _unpickled, (*source.remote.pickled(), *self._made_of(source))

    def __dask_tokenize__(self) -> Any:
        """What Dask names tasks by, instead of a hash of all elements."""
        source = self._backed()
        if source is None:
            return sys.modules["dask.tokenize"].normalize_token(self.view(np.ndarray))
        assert source.remote is not None
        return (*source.remote.token, self._place(source), self.shape, self.strides, str(self.dtype))


def _is_basic(part: object) -> bool:
    """Whether an index of this part is a slice, without a copy."""
    if isinstance(part, (slice, EllipsisType)) or part is None:
        return True
    # NumPy takes a bool for a mask without axes.
    return isinstance(part, SupportsIndex) and not isinstance(part, (bool, np.bool_, np.ndarray))


def _bring_all(values: Iterable[Any]) -> None:
    for array in _arrays_of(values):
        if isinstance(array, RemoteArray):
            array._bring()


def _unpickled(
    url: str, options: dict[str, Any], tier: bool | None, version: Version, made_of: dict[str, Any], place: Any
) -> Any:
    budget = made_of.get("budget") or (made_of["cache"].budget if made_of.get("cache") is not None else None)
    array = memmap(open_version(url, options, tier, version, budget), mode="r", **made_of)
    return array if place is None else array._at(place)
