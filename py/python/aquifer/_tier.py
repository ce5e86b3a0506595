"""`Tier`: a directory on a local disk that keeps what was downloaded."""

from __future__ import annotations

import os
from typing import Any

from . import _native
from ._cache import Stats
from ._sizes import bytes_of

__all__ = ["Tier", "tier_of"]

_VARIABLE = "AQUIFER_TIER"


class Tier:
    """A directory on a local disk in which arrays, rows and files of stores keep what they download, for all processes of a user
    on a node, and over restarts. Removing it loses downloads only.

    Parameters
    ----------
    path:
        The directory, which is made if there is none, for its owner alone. By default that of the environment:
        `AQUIFER_TIER`, or `aquifer/tier` in `XDG_CACHE_HOME`, or `~/.cache/aquifer/tier`.
    budget:
        Bytes of the disk for all processes together, as a number or a text like `"200GiB"`; it is kept in the directory. By
        default what was set before, or a quarter of the space that was free when the directory was made.

    Raises
    ------
    AccessDeniedError:
        The directory belongs to another user, or other users may access it.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, budget: int | str | None = None) -> None:
        path = path or os.environ.get(_VARIABLE) or None
        self._native = _native.NativeTier.open(None if path is None else os.path.expanduser(os.fspath(path)))
        if budget is not None:
            self.budget = bytes_of(budget)

    @property
    def path(self) -> str:
        """The directory."""
        return os.fspath(self._native.path)

    @property
    def budget(self) -> int:
        """Bytes of the disk. Setting it, to a number or a text, takes effect at once, and for all processes."""
        return int(self._native.info()["budget_bytes"])

    @budget.setter
    def budget(self, budget: int | str) -> None:
        self._native.set_budget_bytes(bytes_of(budget))

    def info(self) -> Stats:
        """Its budget, the bytes that it takes, and the objects of which it has something. A table in a notebook."""
        return Stats({"path": self.path, **self._native.info()})

    def __repr__(self) -> str:
        return f"aquifer.Tier({self.path!r})"

    def __reduce__(self) -> Any:
        # Each node has its own.
        return Tier, ()


# What arguments of this name take.
TierArgument = Tier | str | os.PathLike[str] | bool | None


def tier_of(tier: TierArgument) -> Tier | None:
    """The tier that an argument means: without one, that of `AQUIFER_TIER` if it is set."""
    if isinstance(tier, Tier):
        return tier
    if tier is None:
        tier = bool(os.environ.get(_VARIABLE))
    if isinstance(tier, bool):
        return Tier() if tier else None
    return Tier(tier)
