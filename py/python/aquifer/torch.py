"""Data sets for PyTorch, JAX and others: rows of an array of a file, read in batches.

It does not need torch; with torch, `MemmapDataset` works with `torch.utils.data.DataLoader`, with any number of workers and any
way to start them, and gives tensors.
"""

from __future__ import annotations

import importlib
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, SupportsIndex, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ._sizes import bytes_of
from ._memmap import memmap
from ._remote import is_url, open_remote, open_version, options_of, recipe_of
from ._rows import Rows
from ._tier import TierArgument

__all__ = ["MemmapDataset"]

Sample = TypeVar("Sample")


class MemmapDataset(Generic[Sample]):
    """Rows of a file as samples: a map-style data set with batches.

    Parameters
    ----------
    path:
        The file; or the URL of an object, as for `memmap`, whose version is that of now in all workers.
    dtype:
        Type of its elements.
    shape:
        Shape of a sample, for samples of one length: `()` for single elements.
    offsets:
        For samples of several lengths, instead of `shape`: sample `i` has the elements from `offsets[i]` to
        `offsets[i + 1]`. An array of integers, also one of a file.
    transform:
        Makes a sample of an array; by default it is the array, or a tensor if torch is imported.
    budget:
        Memory for pages, or rows, in all workers together: bytes or a text. The workers of a `DataLoader` divide it.
    rows:
        Keeps single samples in memory instead of pages, as `aquifer.Rows`: for samples of one length below a page of which
        some are read often.
    pin_memory:
        Batches of samples of one length are read into pinned memory of torch, from which copies to a device need not wait.
    storage_options, tier:
        For a URL, as for `memmap`. Workers of a node share its tier.

    `dataset[i]` is one sample; `dataset.__getitems__(indices)` reads many at once, which `DataLoader` calls for each batch. It
    pickles by path, or by URL and version. A process that is forked opens the file again by itself.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        dtype: npt.DTypeLike,
        shape: Sequence[int] | None = None,
        *,
        offsets: npt.ArrayLike | None = None,
        transform: Callable[[np.ndarray[Any, Any]], Sample] | None = None,
        budget: int | str = "1GiB",
        pin_memory: bool = False,
        rows: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        tier: TierArgument = None,
    ) -> None:
        if (shape is None) == (offsets is None):
            raise ValueError("give the shape of a sample, or offsets of samples of several lengths")
        if rows and shape is None:
            raise ValueError("rows=True needs samples of one length: give their shape")
        # URL, storage options, tier, version: what each worker opens.
        self._recipe: tuple[str, Mapping[str, Any], TierArgument, tuple[str | None, int]] | None = None
        if is_url(path):
            url, options = cast(str, path), dict(storage_options or {})
            remote = open_remote(url, options, tier, bytes_of(budget))
            self._recipe = url, options, tier, remote.version
            self.path, size = remote.shown, remote.version[1]
        elif storage_options is not None or tier is not None:
            raise ValueError("storage options and tiers are for URLs, such as s3://bucket/key")
        else:
            self.path = os.path.abspath(os.fspath(path))
            size = os.path.getsize(self.path)
        self.dtype = np.dtype(dtype)
        self.shape = None if shape is None else tuple(operator.index(length) for length in shape)
        # One of a file stays one: it pickles by path, and its memory is there in forked workers.
        in_file = isinstance(offsets, memmap) and offsets.dtype == np.int64 and offsets._is_inherited()
        self.offsets: np.ndarray[Any, Any] | None
        if offsets is None or in_file:
            self.offsets = offsets  # type: ignore[assignment]
        else:
            self.offsets = np.asarray(offsets, dtype=np.int64)
        self.transform = transform
        self.budget = bytes_of(budget)
        self.pin_memory = pin_memory
        self.rows = rows
        elements = size // self.dtype.itemsize
        if self.offsets is not None:
            steps = np.diff(self.offsets)
            if self.offsets.ndim != 1 or len(self.offsets) == 0 or self.offsets[0] < 0 or (steps < 0).any():
                raise ValueError("offsets must be a list of numbers that do not decrease")
            if self.offsets[-1] > elements:
                raise ValueError(f"the last sample ends at element {self.offsets[-1]}, and the file has {elements}")
            self._length = len(steps)
        else:
            assert self.shape is not None
            each = math.prod(self.shape)
            if each == 0 or elements < each:
                raise ValueError(f"a sample of shape {self.shape} does not fit into a file of {elements} elements")
            self._length = elements // each
        self._opened: tuple[int, memmap | Rows] | None = None

    def _source(self) -> memmap | Rows:
        """The array or the rows of this process."""
        if self._opened is None or self._opened[0] != os.getpid():
            # Each worker has a part of the budget, of a size that a cache can work with.
            budget = max(self.budget // _workers(), 16 << 20)
            source: memmap | Rows
            file = self.path if self._recipe is None else open_version(*self._recipe, budget)
            if self.rows:
                assert self.shape is not None
                source = Rows(file, self.dtype, self.shape, budget=budget)
            else:
                if self.shape is not None:
                    shape: tuple[int, ...] = (self._length, *self.shape)
                else:
                    assert self.offsets is not None
                    shape = (max(int(self.offsets[-1]), 1),)
                source = memmap(file, self.dtype, "r", 0, shape, budget=budget)
            self._opened = (os.getpid(), source)
        return self._opened[1]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: SupportsIndex) -> Sample:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """The samples, read at once."""
        rows = np.asarray(indices, dtype=np.int64)
        wrong = rows[(rows < -self._length) | (rows >= self._length)]
        if len(wrong):
            raise IndexError(f"sample {wrong[0]} of {self._length}")
        source = self._source()
        if self.offsets is None or isinstance(source, Rows):
            read = source.take(rows, self._pinned(len(rows)))
            return [self._made(sample) for sample in read]
        rows = np.where(rows < 0, rows + self._length, rows)
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        read = source.read_ranges(starts, lengths)
        ends = np.cumsum(lengths)
        return [self._made(read[end - length : end]) for end, length in zip(ends, lengths)]

    def __iter__(self) -> Iterator[Sample]:
        """All samples in order, for programs without a loader."""
        for start in range(0, self._length, 256):
            yield from self.__getitems__(range(start, min(start + 256, self._length)))

    def _pinned(self, count: int) -> np.ndarray[Any, Any] | None:
        if not self.pin_memory or self.shape is None:
            return None
        torch = importlib.import_module("torch")
        shape = (count, *self.shape)
        size = math.prod(shape) * self.dtype.itemsize
        pinned: np.ndarray[Any, Any] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned.view(self.dtype).reshape(shape)

    def _made(self, sample: np.ndarray[Any, Any]) -> Any:
        if self.transform is not None:
            return self.transform(sample)
        # Not imported here: a process that does not use it need not pay for it.
        torch = sys.modules.get("torch")
        if torch is None or sample.dtype.kind not in "biufc" or not sample.dtype.isnative:
            return sample
        return torch.from_numpy(sample if sample.ndim else sample.reshape(()))

    def __getstate__(self) -> dict[str, Any]:
        recipe = self._recipe
        if recipe is not None:
            url, given, tier, version = recipe
            recipe = recipe_of(url, options_of(url, given), tier, version)
        return {**self.__dict__, "_opened": None, "_recipe": recipe}


def _workers() -> int:
    data = sys.modules.get("torch.utils.data")
    if data is None:
        return 1
    info = data.get_worker_info()
    return 1 if info is None else int(info.num_workers)
