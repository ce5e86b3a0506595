"""Sizes as text."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def bytes_of(size: int | str) -> int:
    """A size in bytes: a number, or a text as `"4GiB"`, `"512M"` (powers of 1024)."""
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", size, re.IGNORECASE)
    if found is None:
        raise ValueError(f'{size!r} is no size: use a number of bytes, or a text like "4GiB" or "512M"')
    return int(float(found[1]) * _UNITS[found[2].upper()])
