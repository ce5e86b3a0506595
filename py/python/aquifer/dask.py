"""Arrays and rows for Dask: `dask.array.from_array` without a copy.

`dask.array.from_array` copies what is an array, `numpy.memmap` too, so that it holds all of it in memory. What is made here has
shape, type and slices of an array, and is read a block at a time, in the processes that compute with the blocks.

Blocks are copies in ordinary memory: Dask sends them to other processes, and system calls do not work on all memory of arrays.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any, cast

import numpy as np

from ._indices import bytes_in
from ._memmap import memmap
from ._rows import Rows

__all__ = ["from_array"]

# Of a block, in one call: a range takes some bytes for its bookkeeping.
_MOST_RANGES = 1 << 20
# Most bytes of a block that Dask chooses.
_CHUNK_BYTES = 64 << 20


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
            array = self.array
        if isinstance(array, Rows):
            return np.asarray(array[index])
        return _copied(array, index)

    def __dask_tokenize__(self) -> Any:
        return "aquifer.dask", self.token

    def __reduce__(self) -> Any:
        return _Blocks, (None, self.pickled, self.shape, self.dtype, self.token)


def _copied(array: memmap, index: Any) -> np.ndarray[Any, Any]:
    """What an index means, without a load or a fault of the array's memory where it is of slices and numbers."""
    parts = index if isinstance(index, tuple) else (index,)
    source = array._backed()
    if source is None or not all(isinstance(part, (slice, int, np.integer)) for part in parts):
        return np.array(array[index], subok=False)
    part = cast(memmap, np.ndarray.__getitem__(array, (*parts, Ellipsis)))
    # Bytes that follow each other, from the axis of the shortest steps on.
    order = sorted(range(part.ndim), key=lambda axis: -abs(part.strides[axis]))
    run, outer = part.itemsize, list(order)
    while outer and (part.strides[outer[-1]] == run or part.shape[outer[-1]] == 1):
        run *= part.shape[outer.pop()]
    starts = np.array([part._place(source) - source.begin], np.int64)
    for axis in outer:
        starts = np.add.outer(starts, np.arange(part.shape[axis]) * part.strides[axis]).reshape(-1)
    made = np.empty([part.shape[axis] for axis in order], part.dtype)
    target = bytes_in(made)
    if len(target) > 0:
        for first in range(0, len(starts), _MOST_RANGES):
            some = starts[first : first + _MOST_RANGES]
            place = target[first * run : (first + len(some)) * run]
            array._open().region.read_ranges(some, np.full(len(some), run, np.int64), place)
    return made.transpose(np.argsort(order))


def from_array(array: memmap | Rows, chunks: Any = "auto", **options: Any) -> Any:
    """A `dask.array.Array` of an array or of rows, which pickle by URL and version, or by path: workers read their blocks
    themselves, each through the cache of its process and the tier of its node.

    `chunks` and the other arguments are those of `dask.array.from_array`. Blocks are copies, read with many requests at once;
    those that Dask chooses have 64 MiB at most.
    """
    import dask
    import dask.array
    from dask.tokenize import normalize_token
    from dask.utils import parse_bytes

    # Dask hashes all elements of what it knows as NumPy's.
    blocks = _Blocks(array, pickle.dumps(array), array.shape, array.dtype, normalize_token(array.__dask_tokenize__()))
    make: Any = dask.array.from_array
    most = min(parse_bytes(dask.config.get("array.chunk-size")), _CHUNK_BYTES)
    with dask.config.set({"array.chunk-size": most}):
        return make(blocks, chunks=chunks, **options)
