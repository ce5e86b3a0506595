"""Credentials from a function: `storage_options={"credentials": function}`.

The function takes nothing and returns a mapping: of an access key (`access_key_id`, `secret_access_key`, and `session_token` if there
is one) for `s3://`, or of a bearer `token` for `gs://` and `az://`; and `expiration`, if they expire: a `datetime` with a time zone, a
text of ISO 8601, or seconds since the epoch. Names of other libraries for the same are not guessed.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

__all__ = ["function_of", "name_of", "supplier"]

# Access key, secret, session token, bearer token, seconds since the epoch.
_Supplied = tuple[str | None, str | None, str | None, str | None, float | None]
_NAMES = ("access_key_id", "secret_access_key", "session_token", "token")


def supplier(given: Callable[[], Mapping[str, Any]]) -> Callable[[], _Supplied]:
    """The function as the native module calls it, which drops what it raises: that may have secrets."""

    def supply() -> _Supplied:
        found = dict(given())
        id, secret, session, token = (found.pop(name, None) for name in _NAMES)
        end = found.pop("expiration", None)
        if found:
            raise ValueError("unknown names in credentials")
        if isinstance(end, str):
            end = datetime.fromisoformat(end)
        if isinstance(end, datetime):
            if end.tzinfo is None:
                raise ValueError("an expiration without a time zone")
            end = end.timestamp()
        return id, secret, session, token, None if end is None else float(end)

    return supply


def name_of(function: object) -> str | None:
    """`module:function`, if another process can import it. An object or a closure could carry secrets along."""
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None)
    if not isinstance(function, types.FunctionType) or module in (None, "__main__"):
        return None
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is function else None


def function_of(given: object) -> Callable[[], Mapping[str, Any]] | None:
    """The function that is given, or named; `None` if it is neither."""
    if isinstance(given, str):
        module, _, name = given.partition(":")
        if not module or not name:
            return None
        given = importlib.import_module(module)
        for part in name.split("."):
            given = getattr(given, part, None)
    return given if callable(given) else None
