"""Arrays and rows for Dask: `dask.array.from_array` without a copy.

`dask.array.from_array` copies what is an array, `numpy.memmap` too, so that it holds all of it in memory. What is made here has
shape, type and slices of an array, and is read a block at a time, in the processes that compute with the blocks.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np

from ._memmap import memmap
from ._rows import Rows

__all__ = ["from_array"]


class _Blocks:
    """What Dask takes slices of. It is opened where a block is read, and not where a graph passes by, as in the scheduler."""

    def __init__(self, array: memmap | Rows | None, pickled: bytes, shape: tuple[int, ...], dtype: np.dtype[Any], token: Any) -> None:
        self.array = array
        self.pickled = pickled
        self.shape = shape
        self.dtype = dtype
        self.ndim = len(shape)
        self.token = token
        self.opening = threading.Lock()

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        with self.opening:
            if self.array is None:
                self.array = pickle.loads(self.pickled)
        return np.asarray(self.array[index])

    def __dask_tokenize__(self) -> Any:
        return "aquifer.dask", self.token

    def __reduce__(self) -> Any:
        return _Blocks, (None, self.pickled, self.shape, self.dtype, self.token)


def from_array(array: memmap | Rows, chunks: Any = "auto", **options: Any) -> Any:
    """A `dask.array.Array` of an array or of rows, which pickle by URL and version, or by path: workers read their blocks
    themselves, each through the cache of its process and the tier of its node.

    `chunks` and the other arguments are those of `dask.array.from_array`. Blocks of up to 128 MiB, and up to a quarter of the
    array's budget, are read with many requests at once.
    """
    import dask.array
    from dask.tokenize import normalize_token

    blocks = _Blocks(array, pickle.dumps(array), array.shape, array.dtype, normalize_token(array))
    make: Any = dask.array.from_array
    return make(blocks, chunks=chunks, **options)
