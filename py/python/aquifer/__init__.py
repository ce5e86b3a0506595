"""Aquifer: storage as memory, under control.

Arrays of files larger than memory (`memmap`), with a budget, batched random reads, exact flushes, and exceptions in place of
SIGBUS.
"""

from ._cache import Cache, Stats, default_cache
from ._errors import *
from ._errors import __all__ as _errors_all
from ._memmap import memmap
from ._native import __version__

__all__ = ["Cache", "Stats", "__version__", "default_cache", "memmap", *_errors_all]
