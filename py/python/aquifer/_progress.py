"""Progress of long calls: a bar, or a function of the caller."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Progress"]

# Whether to show a bar, or what is called with the bytes that are done, and all of them, or None where that is not known.
Progress = bool | Callable[[int, int | None], object]


@contextmanager
def reported(progress: Progress, total: int | None, what: str) -> Iterator[Callable[[int], object]]:
    """What is to be called with each number of bytes that was done."""
    if callable(progress):
        report, done = progress, 0

        def add(count: int) -> None:
            nonlocal done
            done += count
            report(done, total)

        yield add
        return
    if progress:
        try:
            bar = importlib.import_module("tqdm.auto").tqdm
        except ImportError:
            # Nothing that the call does depends on it.
            warnings.warn("a progress bar needs tqdm: python3 -m pip install tqdm", stacklevel=5)
        else:
            with bar(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024) as shown:
                yield shown.update
            return
    yield lambda count: None
