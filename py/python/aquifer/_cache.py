"""`Cache`: one budget of memory for many arrays."""

from __future__ import annotations

import html
import os
import threading
from typing import Any

from . import _native
from ._sizes import bytes_of

__all__ = ["Cache", "Stats", "default_cache"]


class Stats(dict[str, Any]):
    """Figures by name; a table in a notebook."""

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:right'>{html.escape(_shown(name, value))}</td></tr>"
            for name, value in self.items()
        )
        return f"<table>{rows}</table>"


def _shown(name: str, value: object) -> str:
    if isinstance(value, int) and name.endswith("_bytes"):
        size, units = float(value), ["B", "KiB", "MiB", "GiB", "TiB"]
        while size >= 1024 and len(units) > 1:
            size /= 1024
            units.pop(0)
        return f"{size:.4g} {units[0]}"
    return f"{value:,}" if isinstance(value, int) else str(value)


class Cache:
    """A budget of memory that many arrays share.

    Parameters
    ----------
    budget:
        Bytes of memory for pages of the arrays: a number, or a text like `"4GiB"`. A quarter of the memory by default.
        Bookkeeping comes on top: about 0.6 % of the budget, and up to 22 MiB of buffers for transfers. It is exceeded for
        moments while a fast device reads.
    policy:
        An eviction policy for arrays with `backend="cache"`: `"clock"`, `"loop-clock"`, `"lru"`, `"s3-fifo"` or `"sieve"`.
    page_bytes:
        Size of a page of arrays with `backend="cache"`: a power of two from 4096 to 65536.
    io_threads:
        Threads that run prefetches and asynchronous reads; 2 by default.

    Any thread may use it. In a forked child its calls raise `ForkedError`.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        policy: str | None = None,
        page_bytes: int | None = None,
        io_threads: int | None = None,
    ) -> None:
        self._made_of = (budget, policy, page_bytes, io_threads)
        bytes_ = None if budget is None else bytes_of(budget)
        self._native = _native.NativeCache(bytes_, policy, page_bytes, io_threads)

    @property
    def budget(self) -> int:
        """The budget in bytes. Setting it (a number, or a text) takes effect at once when it grows, else within about a second."""
        return self._native.budget_bytes

    @budget.setter
    def budget(self, budget: int | str) -> None:
        self._native.resize(bytes_of(budget))

    def stats(self) -> Stats:
        """Figures since the cache was made: bytes, counts of pages and of events, and latencies of faults in nanoseconds."""
        return Stats(self._native.stats())

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has its own: the same settings, with the budget as it is now.
        _, policy, page_bytes, io_threads = self._made_of
        return _cache_of, (self.budget, policy, page_bytes, io_threads)

    def __repr__(self) -> str:
        return f"aquifer.Cache(budget={self.budget})"


def _cache_of(budget: int, policy: str | None, page_bytes: int | None, io_threads: int | None) -> Cache:
    return Cache(budget, policy=policy, page_bytes=page_bytes, io_threads=io_threads)


_default: tuple[int, Cache] | None = None
_making = threading.Lock()


def default_cache() -> Cache:
    """The cache of arrays that are made without one: one for each process, with a quarter of the memory as its budget."""
    global _default
    with _making:
        if _default is None or _default[0] != os.getpid():
            _default = (os.getpid(), Cache())
        return _default[1]


def _in_child() -> None:
    # Another thread of the parent may have held it.
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_in_child)
