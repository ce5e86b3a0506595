"""Sizes as text."""

from __future__ import annotations

import operator
import re
from typing import Any, SupportsIndex, cast

import numpy as np

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def lengths_of(shape: Any) -> tuple[int, ...]:
    """A shape that is given as a number, a sequence of numbers or an array of them."""
    lengths = (shape,) if isinstance(shape, SupportsIndex) and np.ndim(cast(Any, shape)) == 0 else shape
    return tuple(operator.index(length) for length in lengths)


def bytes_of(size: SupportsIndex | str) -> int:
    """A size in bytes: a number, or a text as `"4GiB"`, `"512M"` (powers of 1024)."""
    if not isinstance(size, str):
        number = operator.index(size)
        if number < 0:
            raise ValueError(f"{number} is no size: it is negative")
        return number
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", size, re.IGNORECASE)
    if found is None:
        raise ValueError(f'{size!r} is no size: use a number of bytes, or a text like "4GiB" or "512M"')
    return int(float(found[1]) * _UNITS[found[2].upper()])
