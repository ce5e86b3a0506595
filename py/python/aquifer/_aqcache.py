"""Files of object stores for fsspec, read through Aquifer: `aqcache::s3://bucket/key`.

The file system is chained before that of the store, as fsspec's own caches are: `fsspec.open("aqcache::s3://bucket/key")`,
`pandas.read_parquet("aqcache::s3://…", storage_options={"s3": {…}, "aqcache": {…}})`. The other one lists; the bytes are read by
Aquifer, into a cache with a budget of memory that all such files of the process share, and in batches (`cat_ranges`).

Each opening of a file asks the server for its version. Files that are open stay what they were: a read of what has changed is a
`ChangedError`.
"""

from __future__ import annotations

import errno
import io
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NoReturn
from urllib.parse import quote

import fsspec
import numpy as np
from fsspec.implementations.chained import ChainedFileSystem
from fsspec.json import FilesystemJSONEncoder
from fsspec.utils import stringify_path

from . import _native
from ._cache import Cache, default_cache
from ._credentials import name_of
from ._errors import InvalidInputError, NotPicklableError, ReadOnlyError, UnsupportedError
from ._remote import Remote, open_remote, options_of, secret_of
from ._tier import TierArgument

__all__ = ["CachedFileSystem"]

# Schemes of URLs by the protocols of fsspec.
_SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
_SCHEMES |= {"http": "http", "https": "http", "file": "file", "local": "file"}
# Options of file systems that are about their listings, their own caches and their event loops.
_NOT_OURS = frozenset(
    "access asynchronous auto_mkdir block_size cache_options cache_regions cache_type consistency default_block_size "
    "default_cache_type default_fill_cache encoded listings_expiry_time loop max_concurrency max_paths project same_scheme "
    "simple_links size_policy skip_instance_cache use_listings_cache".split()
)
# Those that change what is read, or as who, in ways that only they know.
_ONLY_THEIRS = frozenset(
    "client_kwargs config_kwargs connection_string credential headers profile requester_pays s3_additional_kwargs session "
    "token version_aware".split()
)
# Arguments of the file system, in their order.
_PARAMETERS = ("target_protocol", "target_options", "fs", "budget", "storage_options", "tier", "check_files", "fo")
# Files that stay open, with their pages, for the next time.
_MOST_OPEN = 16
# For answers under way, which the cache takes off its budget: this part of it for all files that stay open, and of each so much.
_BUFFERS_PART = 4
_FILE_BUFFER_BYTES = 16 << 20
_MOST_THREADS = 16
_BUFFER_BYTES = 64 << 10
# How far a file that is read in order is read ahead of.
_AHEAD_BYTES = 8 << 20

_Limits = tuple[int | None, int | None]


def _translated(protocol: str, given: dict[str, Any]) -> dict[str, Any]:
    """Aquifer's storage options for those of the other file system."""
    options = {name: value for name, value in given.items() if name not in _NOT_OURS and value not in (None, {}, False)}
    if "use_ssl" in given:
        options["use_ssl"] = given["use_ssl"]
    scheme = _SCHEMES[protocol]
    if scheme == "gs":
        token = options.pop("token", None)
        if token == "anon":
            options["anonymous"] = True
        elif isinstance(token, str) and os.path.exists(token):
            options["google_application_credentials"] = token
        elif token not in (None, "google_default", "cloud"):
            options["token"] = token
    allowed = {"token"} if scheme == "s3" else set()
    if scheme == "s3" and set(options.get("client_kwargs", {})) <= {"region_name", "endpoint_url"}:
        allowed.add("client_kwargs")
    for name in options.keys() & (_ONLY_THEIRS - allowed):
        raise UnsupportedError(
            errno.EOPNOTSUPP,
            f"aqcache: the option {name!r} of {protocol!r} is one that only that file system knows: set credentials and the region "
            "in the environment, or read without aqcache::",
        )
    return options


class _Opened:
    """A file of one version, and its pages in the cache."""

    def __init__(self, remote: Remote, cache: Cache) -> None:
        self.remote = remote
        self.reader = _native.RemoteReader.open(cache._native, remote.native)
        self.size = len(self.reader)

    def read_into(self, limits: Sequence[tuple[int, int]], target: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Copies the bytes between these limits, one after the other."""
        ranges = np.array(limits, np.int64).reshape(-1, 2)
        starts = np.ascontiguousarray(ranges[:, 0])
        self.reader.read_ranges(starts, np.ascontiguousarray(ranges[:, 1] - starts), target)

    def read(self, limits: Sequence[_Limits]) -> list[bytes]:
        """The bytes between limits as `cat_file` takes them."""
        exact = [_exact(start, end, self.size) for start, end in limits]
        target = np.empty(sum(end - start for start, end in exact), np.uint8)
        self.read_into(exact, target)
        ends = np.cumsum([end - start for start, end in exact])
        return [part.tobytes() for part in np.split(target, ends[:-1])]


def _exact(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


class _Raw(io.RawIOBase):
    def __init__(self, opened: _Opened) -> None:
        self.opened = opened
        # In messages and in the text of the file, neither of which may have a signature.
        self.name = opened.remote.shown
        self.position = 0
        # Where it goes on if it is read in order, how far it is read ahead of, and up to where that was asked for.
        self.expected = 0
        self.ahead = 0
        self.asked = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.opened.size}[whence]
        if base + offset < 0:
            raise ValueError(f"{self.name}: position {base + offset} is negative")
        self.position = base + operator.index(offset)
        return self.position

    def readinto(self, buffer: Any) -> int:
        if self.closed:
            raise ValueError(f"{self.name}: the file is closed")
        target = np.frombuffer(buffer, np.uint8)
        start, size = self.position, self.opened.size
        end = min(start + len(target), size)
        if start >= end:
            return 0
        is_next = start == self.expected
        self.opened.read_into([(start, end)], target[: end - start])
        self._read_ahead(end, len(target), is_next and start > 0)
        self.position = self.expected = end
        return end - start


    def _read_ahead(self, end: int, length: int, in_order: bool) -> None:
        """Twice as far each time."""
        self.ahead = min(max(2 * self.ahead, 4 * length), _AHEAD_BYTES) if in_order else 0
        begin = max(end, self.asked if in_order else 0)
        if begin < end + self.ahead // 2:
            self.opened.reader.prefetch(begin, end + self.ahead - begin)
            self.asked = end + self.ahead


class _File(io.BufferedReader):
    """An open file, as fsspec's own. Its calls are made one after the other, whatever thread makes them."""

    raw: _Raw
    mode = "rb"

    def __init__(self, fs: CachedFileSystem, path: str, opened: _Opened, buffer_bytes: int) -> None:
        super().__init__(_Raw(opened), buffer_bytes)
        self.fs = fs
        self.path = path
        self._buffer_bytes = buffer_bytes
        self._calls = os.getpid(), threading.RLock()

    @property
    def size(self) -> int:
        return self.raw.opened.size

    @property
    def full_name(self) -> str:
        return self.path

    @property
    def details(self) -> Any:
        return self.fs.info(self.path)

    def _alone(self) -> threading.RLock:
        if self._calls[0] != os.getpid():
            # Another thread of the parent of this process may have held it.
            self._calls = os.getpid(), threading.RLock()
        return self._calls[1]

    def read(self, size: int | None = -1) -> bytes:
        # Long reads are exactly what is asked for: a buffer would read on. They move the position in several steps.
        with self._alone():
            position = self.tell()
            wanted = max(self.size - position, 0) if size is None or size < 0 else size
            if wanted <= self._buffer_bytes:
                return super().read(wanted)
            self.seek(position)
            target = bytearray(min(wanted, max(self.size - position, 0)))
            self.raw.seek(position)
            count = self.raw.readinto(target)
            self.seek(position + count)
            return bytes(target)

    def read1(self, size: int = -1) -> bytes:
        with self._alone():
            return super().read1(size)

    def readinto(self, buffer: Any) -> int:
        with self._alone():
            return super().readinto(buffer)

    def readinto1(self, buffer: Any) -> int:
        with self._alone():
            return super().readinto1(buffer)

    def readline(self, size: int | None = -1) -> bytes:
        with self._alone():
            return super().readline(size)

    def peek(self, size: int = 0) -> bytes:
        with self._alone():
            return super().peek(size)

    def seek(self, target: int, whence: int = io.SEEK_SET) -> int:
        with self._alone():
            return super().seek(target, whence)

    def tell(self) -> int:
        with self._alone():
            return super().tell()


def _read_only(name: str) -> Callable[..., NoReturn]:
    def refused(self: CachedFileSystem, *_: Any, **__: Any) -> NoReturn:
        raise ReadOnlyError(errno.EROFS, f"aqcache: {name}: it only reads; write with the file system of the store itself")

    return refused


class CachedFileSystem(ChainedFileSystem):  # type: ignore[misc]
    """Files of object stores and HTTP servers, read through a cache: `fsspec.filesystem("aqcache", target_protocol="s3")`.

    Parameters
    ----------
    target_protocol, target_options, fs
        The file system that lists: `s3`, `gs`, `az` (also by their other names), `http`, `https`, `file`. Its options are those
        of Aquifer as well, as far as it has them; others are an `UnsupportedError`.
    budget
        Memory for pages of this file system's files: bytes, or a text like `"4GiB"`. By default it uses the cache of the
        process, as arrays do.
    storage_options
        More options for Aquifer, as for `aquifer.memmap`.
    tier
        As for `aquifer.memmap`.
    check_files
        Ask the server for the version each time a file is opened. Without that, a file that was read before is as it was, as
        far as it is in memory.
    fo
        What fsspec says of the rest of a chain.
    """

    protocol: ClassVar[str] = "aqcache"
    root_marker = ""

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        fs: Any = None,
        budget: int | str | None = None,
        storage_options: dict[str, Any] | None = None,
        tier: TierArgument = None,
        check_files: bool = True,
        fo: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        for name in options.keys() - _NOT_OURS:
            raise InvalidInputError(
                errno.EINVAL,
                f"aqcache has no option {name!r}; options of a part of a chain are under its name: "
                f'storage_options={{"s3": {{{name!r}: …}}, "aqcache": {{"budget": "1GiB"}}}}',
            )
        if fs is not None:
            target_protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
            target_options = fs.storage_options
        if target_protocol not in _SCHEMES:
            of_what = "nothing" if target_protocol is None else repr(target_protocol)
            raise UnsupportedError(
                errno.EOPNOTSUPP,
                f"aqcache is chained before {of_what}: it reads s3, gs, az, http, https and file, as in aqcache::s3://bucket/key; "
                "for others use fsspec's own blockcache or filecache",
            )
        self.target_protocol = target_protocol
        self.target_options = dict(target_options or {})
        self.check_files = check_files
        self.fs = fs if fs is not None else fsspec.filesystem(target_protocol, **self.target_options)
        translated = _translated(target_protocol, self.target_options)
        self._given = {**translated, **(storage_options or {})}
        self._budget = budget
        self._tier = tier
        self._cache: Cache | None = None
        self._files: OrderedDict[str, _Opened] = OrderedDict()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._strip_protocol = self._stripped  # type: ignore[method-assign]

    # ---- URLs --------------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        # Of a chain this is the part without a path: fsspec takes that of the next one.
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = str(stringify_path(path))
        return text.removeprefix("aqcache://")

    def _stripped(self, path: Any) -> Any:
        if isinstance(path, list):
            return [self._stripped(one) for one in path]
        text = str(stringify_path(path))
        return self.fs._strip_protocol(text.removeprefix("aqcache::").removeprefix("aqcache://"))

    def unstrip_protocol(self, name: str) -> str:
        return f"aqcache::{self.fs.unstrip_protocol(name)}"

    def _url(self, path: str) -> str:
        scheme = _SCHEMES[self.target_protocol]
        if scheme == "http":
            return path
        return f"{scheme}://{quote(path, safe='/')}"

    # ---- what is there: the other file system's -------------------------------------------------------

    def _is_lone(self, path: str) -> bool:
        """Whether it is a file of an HTTP server, of which the other file system reads the whole to tell that it is none of links."""
        return _SCHEMES[self.target_protocol] == "http" and not path.endswith("/")

    def info(self, path: Any, **options: Any) -> Any:
        path = self._stripped(path)
        if self._is_lone(path):
            opened = self._opened(path)
            return {"name": path, "size": opened.size, "type": "file", "ETag": opened.remote.version[0]}
        return self.fs.info(path, **options)

    def ls(self, path: Any, detail: bool = True, **options: Any) -> Any:
        return self.fs.ls(self._stripped(path), detail=detail, **options)

    def find(self, path: Any, *arguments: Any, **options: Any) -> Any:
        return self.fs.find(self._stripped(path), *arguments, **options)

    def glob(self, path: Any, *arguments: Any, **options: Any) -> Any:
        return self.fs.glob(self._stripped(path), *arguments, **options)

    def exists(self, path: Any, **options: Any) -> Any:
        path = self._stripped(path)
        if not self._is_lone(path):
            return self.fs.exists(path, **options)
        try:
            self._opened(path)
        except FileNotFoundError:
            return False
        return True

    def isfile(self, path: Any) -> Any:
        path = self._stripped(path)
        return self.exists(path) if self._is_lone(path) else self.fs.isfile(path)

    def isdir(self, path: Any) -> Any:
        path = self._stripped(path)
        return not self._is_lone(path) and self.fs.isdir(path)

    def created(self, path: Any) -> Any:
        return self.fs.created(self._stripped(path))

    def modified(self, path: Any) -> Any:
        return self.fs.modified(self._stripped(path))

    def ukey(self, path: Any) -> Any:
        return self.fs.ukey(self._stripped(path))

    def checksum(self, path: Any) -> Any:
        return self.fs.checksum(self._stripped(path))

    def invalidate_cache(self, path: Any = None) -> None:
        """Forgets listings, and closes files that are kept open for the next time."""
        self._leave_parent()
        with self._lock:
            self._files.clear()
        self.fs.invalidate_cache(None if path is None else self._stripped(path))

    # ---- reading ---------------------------------------------------------------------------------------

    def _leave_parent(self) -> None:
        """In a forked child: nothing of the parent's is there, and another thread of it may have held the lock."""
        if self._process != os.getpid():
            self._lock, self._files, self._cache, self._process = threading.Lock(), OrderedDict(), None, os.getpid()

    def _opened(self, path: str) -> _Opened:
        self._leave_parent()
        with self._lock:
            known = self._files.get(path)
        if known is not None and not self.check_files:
            return known
        with self._lock:
            if self._cache is None:
                self._cache = default_cache() if self._budget is None else Cache(self._budget)
            cache = self._cache
        buffer_bytes = min(cache.budget // (_BUFFERS_PART * _MOST_OPEN), _FILE_BUFFER_BYTES)
        remote = open_remote(self._url(path), {"buffer_bytes": buffer_bytes, **self._given}, self._tier, cache.budget)
        with self._lock:
            known = self._files.pop(path, None)
            if known is None or known.remote is not remote:
                known = _Opened(remote, cache)
            self._files[path] = known
            while len(self._files) > _MOST_OPEN:
                self._files.popitem(last=False)
        self._forget_stale(path, known)
        return known

    def _forget_stale(self, path: str, opened: _Opened) -> None:
        """Forgets the other file system's listing, where that has another length or ETag of the file."""
        listed = getattr(self.fs, "dircache", {}).get(self.fs._parent(path), [])
        for entry in listed:
            same = (entry.get("size") in (None, opened.size)) and entry.get("ETag") in (None, opened.remote.version[0])
            if entry.get("name") == path and not same:
                self.fs.invalidate_cache(path)
                return

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> _File:
        if mode != "rb":
            raise ReadOnlyError(errno.EROFS, f"aqcache: mode {mode!r}: it only reads; write with the file system of the store itself")
        buffer_bytes = block_size if isinstance(block_size, int) and block_size > 0 else _BUFFER_BYTES
        return _File(self, path, self._opened(path), buffer_bytes)

    def cat_file(self, path: Any, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return self._opened(self._stripped(path)).read([(start, end)])[0]

    def cat_ranges(
        self,
        paths: list[Any],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **options: Any,
    ) -> list[Any]:
        """Ranges of files: all of a file are one batch, of which gaps are read along where that is cheaper (`max_gap` is not
        needed), and several files are read at once."""
        if not isinstance(paths, list):
            raise TypeError("paths must be a list")
        starts = starts if isinstance(starts, list) else [starts] * len(paths)
        ends = ends if isinstance(ends, list) else [ends] * len(paths)
        if len(starts) != len(paths) or len(ends) != len(paths):
            raise ValueError("paths, starts and ends have different lengths")
        places: dict[str, list[int]] = {}
        for place, path in enumerate(paths):
            places.setdefault(self._stripped(path), []).append(place)

        def read(path: str) -> list[Any]:
            try:
                found: list[Any] = self._opened(path).read([(starts[place], ends[place]) for place in places[path]])
            except Exception as error:
                if on_error != "return":
                    raise
                found = [error] * len(places[path])
            return found

        results: list[Any] = [None] * len(paths)
        for path, found in zip(places, _all(read, list(places))):
            for place, one in zip(places[path], found):
                results[place] = one
        return results

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **options: Any) -> Any:
        if recursive:
            given = path if isinstance(path, list) else [path]
            paths = sorted({found for one in given for found in self.find(one)})
        else:
            paths = self.expand_path(path)
        if len(paths) == 1 and not isinstance(path, list) and paths[0] == self._stripped(path):
            return self.cat_file(paths[0], **options)
        found = self.cat_ranges(paths, None, None, on_error="raise" if on_error == "raise" else "return")
        pairs = zip(paths, found)
        return {name: one for name, one in pairs if on_error == "return" or not isinstance(one, Exception)}

    def stats(self, path: Any) -> dict[str, Any]:
        """Requests, bytes and an estimate of their cost, of a file since it was opened."""
        return self._opened(self._stripped(path)).remote.native.stats()

    def _check_secrets(self) -> None:
        """Fails if what another process would make it of has secrets."""
        problem = secret_of(options_of(self._url("x"), self._given))
        if problem is not None:
            raise NotPicklableError(errno.EINVAL, f"aqcache: {problem}")

    def _travelling(self) -> dict[str, Any]:
        """Arguments that make it in another process, by their names: of a tier only whether there is one, as each node has its own."""
        options: dict[str, Any] = dict(zip(_PARAMETERS, self.storage_args)) | self.storage_options
        if options.get("tier") is not None:
            options["tier"] = options["tier"] is not False
        given = options.get("storage_options") or {}
        if callable(given.get("credentials")):
            options["storage_options"] = {**given, "credentials": name_of(given["credentials"])}
        return options

    def __reduce__(self) -> Any:
        self._check_secrets()
        make, (kind, _, _) = super().__reduce__()
        return make, (kind, (), self._travelling())

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        # `to_json` is made of this.
        self._check_secrets()
        given = {name: value for name, value in self._travelling().items() if value is not None}
        encoded = FilesystemJSONEncoder().make_serializable(given)
        return {"cls": f"{type(self).__module__}:{type(self).__name__}", "protocol": self.protocol, "args": [], **encoded}

    # ---- writing ---------------------------------------------------------------------------------------

    mkdir = _read_only("mkdir")
    makedirs = _read_only("makedirs")
    rmdir = _read_only("rmdir")
    rm = _read_only("rm")
    rm_file = _read_only("rm_file")
    _rm = _read_only("rm")
    cp_file = _read_only("cp_file")
    mv = _read_only("mv")
    pipe_file = _read_only("pipe_file")
    put_file = _read_only("put_file")
    touch = _read_only("touch")


def _all(read: Callable[[str], list[Any]], paths: Iterable[str]) -> Iterable[list[Any]]:
    """What `read` returns of each path, several at once."""
    paths = list(paths)
    if len(paths) < 2:
        return [read(path) for path in paths]
    threads = ThreadPoolExecutor(min(_MOST_THREADS, len(paths)), "aqcache")
    try:
        return list(threads.map(read, paths))
    finally:
        # After an error, or Ctrl-C, what is under way ends by itself.
        threads.shutdown(wait=False, cancel_futures=True)


fsspec.register_implementation("aqcache", CachedFileSystem, clobber=True)
