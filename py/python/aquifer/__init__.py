"""Aquifer: storage as memory, under control.

Arrays of files larger than memory (`memmap`), with a budget, batched random reads, exact flushes, and exceptions in place of
SIGBUS.
"""

from ._array import Array, ArrayInfo, ArrayMismatchError, NotAnArrayError
from ._cache import Cache, Stats, default_cache
from ._errors import *
from ._errors import __all__ as _errors_all
from ._files import FileIO, Files, Path
from ._memmap import memmap
from ._native import __version__
from ._pool import Pool
from ._rows import Rows

__all__ = [
    "__version__",
    *_errors_all,
    "Array",
    "ArrayInfo",
    "ArrayMismatchError",
    "Cache",
    "FileIO",
    "Files",
    "NotAnArrayError",
    "Path",
    "Pool",
    "Rows",
    "Stats",
    "default_cache",
    "memmap",
]
