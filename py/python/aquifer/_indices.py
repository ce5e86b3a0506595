"""Row numbers and targets as calls with many rows take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.ArrayLike


def row_numbers(indices: Indices) -> npt.NDArray[np.int64]:
    """Integers of any shape, as contiguous and aligned numbers. They are not compared with a number of rows here."""
    rows = np.asarray(indices)
    if rows.size == 0:
        rows = rows.astype(np.int64)
    if rows.dtype.kind not in "iu":
        raise TypeError(f"indices of type {rows.dtype}: use integers")
    # Unsigned numbers beyond would wrap to rows that exist.
    if rows.dtype == np.uint64 and rows.size and int(rows.max()) > np.iinfo(np.int64).max:
        raise IndexError(f"index {rows.max()} is out of bounds")
    # An array that another process has sent may lie anywhere.
    return np.require(rows, np.int64, ["C", "A"]).reshape(rows.shape)


def target_of(
    shape: tuple[int, ...], dtype: np.dtype[Any], out: np.ndarray[Any, Any] | None
) -> np.ndarray[Any, np.dtype[Any]]:
    """An array of this shape to read into: `out`, which is checked, or a new one."""
    if out is None:
        return np.empty(shape, dtype)
    if not isinstance(out, np.ndarray) or out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out must be an array of shape {shape} and dtype {dtype}")
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError("out must be writable and C-contiguous")
    return out.view(np.ndarray)


def bytes_in(target: np.ndarray[Any, Any]) -> npt.NDArray[np.uint8]:
    """The bytes of a contiguous array."""
    return target.reshape(-1).view(np.uint8)


def taken(
    rows: npt.NDArray[np.int64], target: np.ndarray[Any, Any], out: np.ndarray[Any, Any] | None
) -> Any:
    """What a call returns that has read these rows into `target`: `out`, if the caller gave one."""
    if out is None:
        return target if rows.ndim else target[()]
    if not np.may_share_memory(out, target):
        np.copyto(out.view(np.ndarray), target)
    return out


def checked_rows(rows: npt.NDArray[np.int64], count: int) -> None:
    """Raises NumPy's own error for a row that does not exist, where nothing is read that would."""
    np.take(np.empty(count, np.bool_), rows)
