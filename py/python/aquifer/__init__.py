"""Aquifer: storage as memory, under control.

Arrays of files larger than memory (`memmap`), with a budget, batched random reads, and exceptions in place of
SIGBUS.
"""

import sys as _sys

from ._array import Array, ArrayInfo, ArrayMismatchError, NotAnArrayError
from ._cache import Cache, Stats, default_cache
from ._errors import *
from ._errors import __all__ as _errors_all
from ._files import FileIO, Files, Path
from ._memmap import memmap
from ._native import __version__
from ._pool import Pool
from ._rows import Rows
from ._tier import Tier

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
    "Tier",
    "default_cache",
    "memmap",
]

if (_fsspec := _sys.modules.get("fsspec")) is not None:
    # Also where the package is not installed, and has no entry points.
    _fsspec.register_implementation("aqcache", "aquifer._aqcache.CachedFileSystem", clobber=True)
