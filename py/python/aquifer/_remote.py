"""Objects of stores and HTTP servers: their URLs, options and versions.

An object is open once in a process for all arrays and rows of one URL, options, environment and version: they share the pages that
are in memory. What travels to other processes is the URL, the version and the options without secrets.
"""

from __future__ import annotations

import errno
import hashlib
import operator
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

from . import _native
from ._credentials import function_of, name_of, supplier
from ._errors import ChangedError, InvalidInputError, NotPicklableError
from ._sizes import bytes_of
from ._tier import TierArgument, tier_of

__all__ = ["Remote", "is_url", "open_remote", "open_version", "recipe_of"]

# `(ETag or None, length)`.
Version = tuple[str | None, int]
# What another process opens the same version by: URL, storage options, whether with a tier, version.
Recipe = tuple[str, dict[str, Any], bool | None, Version]

_URL = re.compile(r"(?:s3|gs|az|https?|file)://", re.IGNORECASE)
# Unpickled objects that stay open, so that task after task does not ask for the version anew.
_KEPT = 16
# Of a cache that leaves a device its buffers as they are by default.
_LARGE_BUDGET = 256 << 20

_PLAIN = frozenset(
    [
        "endpoint",
        "region",
        "allow_http",
        "anonymous",
        "unversioned",
        "timeout",
        "retries",
        "in_flight",
        "largest_request_bytes",
        "buffer_bytes",
        "hedge",
        "prices",
        "credentials",
    ]
)
_FLAGS = frozenset(["allow_http", "anonymous", "unversioned", "hedge"])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _count(value: Any) -> int:
    count = operator.index(value)
    if isinstance(value, bool) or not 0 <= count < 1 << 31:
        raise ValueError
    return count


def _number(value: Any) -> float:
    if isinstance(value, (str, bool)):
        raise TypeError
    return float(value)


def _prices(value: Any) -> tuple[float, float]:
    per_million, per_gib = value
    return _number(per_million), _number(per_gib)


# What makes an option of what is given, and what that is to be.
_TYPES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "endpoint": (_text, "a text, the URL of a server"),
    "region": (_text, "a text"),
    "timeout": (_number, "a number of seconds above 0"),
    "retries": (_count, "a number of retries"),
    "in_flight": (_count, "a number of requests"),
    "largest_request_bytes": (bytes_of, "a number of bytes, or a text like '4MiB'"),
    "buffer_bytes": (bytes_of, "a number of bytes, or a text like '4MiB'"),
    "prices": (_prices, "two numbers: the prices of a million requests and of a GiB"),
}
# What file systems of fsspec (s3fs, gcsfs, adlfs) call the same.
_SYNONYMS = {
    "s3": {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token"},
    "az": {"sas_token": "azure_storage_sas_key"},
}


def is_url(path: object) -> bool:
    """Whether it names an object of a store or a server, and not a file of this machine.

    Raises
    ------
    InvalidInputError:
        It is a URL of another kind.
    """
    if not isinstance(path, str):
        return False
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path)
    if scheme is not None and _URL.match(path) is None and not os.path.exists(path):
        raise _invalid(
            path, f"URLs of {scheme[0]} are not read; these are: s3://, gs://, az://, http://, https://, file://"
        )
    return scheme is not None and _URL.match(path) is not None


def _invalid(url: str, text: str) -> InvalidInputError:
    shown = shown_url(url)
    return InvalidInputError(errno.EINVAL, f"{shown}: {text}", path=shown)


def shown_url(url: str) -> str:
    """A URL without what may be secret, for messages."""
    # A password may have any characters, written as they are: all up to the last @ goes, unless the colon is that of a port.
    has_password = re.match(r"(?!https?:)[^/?#]*//[^/?#@]*:|[^/?#]*//[^/?#@\[]*:(?!\d{1,5}(?:[/?#]|$))", url, re.IGNORECASE)
    plain = re.sub(r"//.*@" if has_password else r"//[^/?#]*@", "//", url, count=1, flags=re.DOTALL)
    return re.sub(r"[?#].*", "?…", plain, count=1, flags=re.DOTALL)


def options_of(url: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Storage options by Aquifer's names: plain ones, and the configuration keys of the store in `config`."""
    scheme = url.split(":", 1)[0].lower()
    options: dict[str, Any] = dict.fromkeys(_PLAIN)
    config: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if value is None:
            return
        if name == "client_kwargs" and isinstance(value, Mapping):
            # What s3fs passes on to boto.
            for inner, inner_value in value.items():
                add("region" if inner == "region_name" else inner, inner_value)
        elif name == "config" and isinstance(value, Mapping):
            config.update({key: str(of_key) for key, of_key in value.items()})
        elif name == "anon":
            add("anonymous", value)
        elif name == "endpoint_url":
            # Its users have no option for plain HTTP.
            add("endpoint", value)
            options["allow_http"] = options["allow_http"] or str(value).startswith("http://")
        elif name == "use_ssl":
            options["allow_http"] = options["allow_http"] or not flag(name, value)
        elif name == "credentials":
            if function_of(value) is None:
                text = "is no function; it is one without arguments that returns a mapping, or its name: 'module:function'"
                raise _invalid(url, f"storage option 'credentials' {text}")
            options[name] = value
        elif name in _FLAGS:
            options[name] = flag(name, value)
        elif name in _PLAIN:
            of_type, wanted = _TYPES[name]
            try:
                options[name] = of_type(value)
            except (TypeError, ValueError, OverflowError):
                text = f"storage option {name!r} is a {type(value).__name__} that does not fit; it is {wanted}"
                raise _invalid(url, text) from None
        elif isinstance(value, (str, int, float)):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            config[_SYNONYMS.get(scheme, {}).get(name, name)] = text
        else:
            raise _invalid(url, f"storage option {name!r} is a {type(value).__name__}; options are texts, numbers and flags")

    def flag(name: str, value: Any) -> bool:
        # A text would be true, "false" too.
        if value not in (False, True):
            raise _invalid(url, f"storage option {name!r} is a {type(value).__name__}; it is a flag: True or False")
        return bool(value)

    if given is not None and not isinstance(given, Mapping):
        raise _invalid(url, f"storage options are a {type(given).__name__}; they are a dictionary")
    for name, value in (given or {}).items():
        if not isinstance(name, str):
            raise _invalid(url, f"storage option {name!r} is no text; options are named by texts")
        add(name, value)
    if options["timeout"] is not None and not options["timeout"] > 0:
        raise _invalid(url, f"a timeout of {options['timeout']} seconds; it is a number of seconds above 0")
    options["config"] = sorted(config.items())
    return options


def token_of(url: str, options: Mapping[str, Any], tier: TierArgument, version: Version) -> tuple[object, ...]:
    """What tells the content of an object from that of others: secrets, of which a query or an account may be part, as a digest."""
    unknown = uuid4().hex if version[0] is None else None
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") if url.lower().startswith("az:") else None
    of_what = repr((url, options.get("endpoint"), options.get("config") or [], account))
    return ("aquifer", shown_url(url), hashlib.sha256(of_what.encode()).hexdigest(), *version, unknown)


def secret_of(options: Mapping[str, Any]) -> str | None:
    """What of these options must not travel to other processes, and what to do instead; `None` without such."""
    if options["config"]:
        names = ", ".join(repr(name) for name, _ in options["config"])
        return f"storage options may be secrets ({names}): set them in the environment of each process, and leave them out"
    if not isinstance(options["credentials"], str | None) and name_of(options["credentials"]) is None:
        return (
            "its credentials come from a function that other processes cannot import: pass one that a module defines, "
            "or its name, 'module:function'"
        )
    if re.search(r"[@?]", options["endpoint"] or ""):
        return "its endpoint has a password or a query: set it in the environment of each process"
    return None


class Remote:
    """An open object, shared by the arrays and rows of it in this process."""

    __slots__ = ("__weakref__", "native", "options", "tier", "token", "url", "version")

    def __init__(self, url: str, options: dict[str, Any], tier: TierArgument) -> None:
        self.url = url
        self.options = options
        self.tier = tier
        own = tier_of(tier)
        function = function_of(options["credentials"])
        supply = None if function is None else supplier(function)
        natives = {"tier": None if own is None else own._native, "credentials": supply}
        self.native = _native.RemoteObject.open(url, {**options, **natives})
        self.version: Version = self.native.version
        self.token = token_of(url, options, None, self.version)

    @property
    def shown(self) -> str:
        """The URL without its query."""
        return self.native.url

    def pickled(self) -> Recipe:
        """What another process opens the same version by: with a tier of its own, if this one has one.

        Raises
        ------
        NotPicklableError:
            It would have to contain secrets.
        """
        return recipe_of(self.url, self.options, self.tier, self.version)


def recipe_of(url: str, options: dict[str, Any], tier: TierArgument, version: Version) -> Recipe:
    """As `Remote.pickled`, of an object that need not be open."""
    problem = secret_of(options)
    if "?" in url:
        problem = "its URL has a query, which may be a signature: pass the URL itself, and open it there"
    if problem is not None:
        shown = shown_url(url)
        raise NotPicklableError(errno.EINVAL, f"{shown} cannot be pickled: {problem}", path=shown)
    options = {name: value for name, value in options.items() if value not in (None, [])}
    if callable(options.get("credentials")):
        options["credentials"] = name_of(options["credentials"])
    return url, options, None if tier is None else tier is not False, version


_opened: WeakValueDictionary[tuple[object, ...], Remote] = WeakValueDictionary()
_kept: deque[Remote] = deque(maxlen=_KEPT)
_lock = threading.Lock()


def _in_child() -> None:
    # Another thread of the parent may have held it.
    global _lock
    _lock = threading.Lock()
    _opened.clear()
    _kept.clear()


os.register_at_fork(after_in_child=_in_child)


def _environment_of(url: str) -> str:
    """A digest of what the environment says about a kind of store. A device reads it once, when it is opened."""
    prefix = {"s3": "AWS_", "az": "AZURE_", "gs": "GOOGLE_"}.get(url.split(":", 1)[0].lower())
    found = sorted((name, value) for name, value in os.environ.items() if prefix is not None and name.startswith(prefix))
    return hashlib.sha256(repr(found).encode("utf-8", "surrogateescape")).hexdigest()


def _key(url: str, options: dict[str, Any], tier: TierArgument, budget: int | None) -> tuple[object, ...]:
    # A small cache lowers the buffers of what it reads from, which is therefore not shared with caches of very other budgets.
    budget_class = min(budget or _LARGE_BUDGET, _LARGE_BUDGET).bit_length() // 2
    # A function is one of its own, whatever it looks like; the object keeps it, so that no other has its number.
    given = sorted((name, id(value) if callable(value) else repr(value)) for name, value in options.items())
    return (budget_class, url, repr(tier), os.environ.get("AQUIFER_TIER"), _environment_of(url), *given)


def open_remote(
    url: str, storage_options: Mapping[str, Any] | None, tier: TierArgument, budget: int | None = None
) -> Remote:
    """The object as it is now, for a cache of this budget."""
    options = options_of(url, storage_options)
    fresh = Remote(url, options, tier)
    with _lock:
        return _shared(_key(url, options, tier, budget), fresh)


def _shared(key: tuple[object, ...], fresh: Remote) -> Remote:
    """The one that is open already, if it is of the same version. Not where versions cannot be told."""
    known = _opened.get(key)
    if known is not None and known.version == fresh.version and fresh.version[0] is not None:
        return known
    _opened[key] = fresh
    return fresh


def open_version(
    url: str, storage_options: Mapping[str, Any], tier: TierArgument, version: Version, budget: int | None = None
) -> Remote:
    """The object that was pickled, or `ChangedError` if it is another version now."""
    options = options_of(url, storage_options)
    key = _key(url, options, tier, budget)
    with _lock:
        known = _opened.get(key)
    if known is None or known.version != version or version[0] is None:
        fresh = Remote(url, options, tier)
        if fresh.version != version:
            raise ChangedError(
                errno.EIO,
                f"{fresh.shown}: the object has changed since it was pickled (then {_described(version)}, now "
                f"{_described(fresh.version)}); open the URL again and send that",
                path=fresh.shown,
            )
        with _lock:
            known = _shared(key, fresh)
    if known not in _kept:
        _kept.append(known)
    return known


def _described(version: Version) -> str:
    etag, length = version
    return f"{length} bytes" if etag is None else f"{length} bytes, ETag {etag}"
