"""The files of a pool for fsspec: pandas, pyarrow, DuckDB, zarr, xarray, dask open them by URL.

Which pool, and which path in it, is said in one of these ways:

* `aquifer:///abs/data.pool::/path`;
* `aquifer:///path` or `/path`, with `pool="/abs/data.pool"` in the storage options;
* `aquifer:///path::/abs/data.pool`, the order in which fsspec's own containers (`zip`) are chained.

fsspec splits URLs at `::` into a chain of file systems before it asks any of them, and takes what comes behind for the path of
another one. Of the first form this class is given the first part alone. It tells a pool by the magic number in the file, and then has
no path: for a file system that is made to be chained, fsspec takes the path of the next part instead, which is what is wanted, also
for patterns. So the path of a file that is a pool cannot be that of a file in a pool, in a URL of the second form.

A pool is opened once in a process for all file systems of it: for writing where that is possible, otherwise for reading. A forked child
opens it anew. It is closed when the process ends.
"""

from __future__ import annotations

import atexit
import io
import os
import stat
import threading
from datetime import datetime, timezone
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import fsspec

if tuple(map(int, fsspec.__version__.split(".")[:2])) < (2025, 12):
    # Earlier ones take the path of the next part of a chain also where there is no next part.
    raise ImportError(
        f"files of pools need fsspec 2025.12 or later, and {fsspec.__version__} is installed: "
        "python3 -m pip install --upgrade fsspec"
    )

from fsspec.implementations.chained import ChainedFileSystem
from fsspec.utils import stringify_path

from ._errors import AccessDeniedError, BusyError, ReadOnlyError
from ._files import Files
from ._pool import Pool

__all__ = ["AquiferFileSystem"]

_PREFIX = "aquifer://"
_MAGIC = b"AQUIFER"
_BUFFER_BYTES = 64 << 10

_opened: WeakValueDictionary[tuple[object, ...], Pool] = WeakValueDictionary()
_lock = threading.Lock()


def _reset_in_child() -> None:
    global _lock
    # Another thread of the parent may have held it.
    _lock = threading.Lock()
    _opened.clear()


os.register_at_fork(after_in_child=_reset_in_child)


@atexit.register
def _close_all() -> None:
    for pool in list(_opened.values()):
        try:
            pool.close()
        except (BufferError, OSError):
            # In use to the end: then it is as if the process were killed.
            pass


def _pool_at(path: str, read_only: bool, shared_memory: str | None) -> Pool:
    """The one handle of this process, for these options."""
    status = os.stat(path)
    key = (status.st_dev, status.st_ino, read_only, shared_memory)
    with _lock:
        pool = _opened.get(key)
        if pool is None or pool.closed:
            if not read_only:
                try:
                    pool = Pool.open(path, shared_memory=shared_memory)
                except (AccessDeniedError, BusyError, ReadOnlyError):
                    # Not permitted, or another process is its only writer.
                    pool = Pool.open(path, read_only=True, shared_memory=shared_memory)
            else:
                pool = Pool.open(path, read_only=True, shared_memory=shared_memory)
            _opened[key] = pool
        return pool


def _is_pool(path: str) -> bool:
    """Whether a path of the system is that of a pool."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISCHR(mode):
            return path.startswith("/dev/dax")
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            return False
        with open(path, "rb", 0) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, ValueError):
        return False


def _parts(url: str) -> tuple[str | None, str | None]:
    """The pool that a URL names, and the path in it."""
    rest = url.removeprefix(_PREFIX)
    if "::" in rest:
        first, second = rest.split("::", 1)
        other = second.removeprefix("file://")
        return (other, first) if not _is_pool(first) and _is_pool(other) else (first, second)
    return (rest, None) if _is_pool(rest) else (None, rest)


class _Details:
    """What fsspec's own open files have."""

    fs: AquiferFileSystem
    path: str

    @property
    def full_name(self) -> str:
        return self.path

    @property
    def details(self) -> Any:
        return self.fs.info(self.path)

    @property
    def size(self) -> int:
        size: int = self.fs.size(self.path)
        return size


class _Reader(_Details, io.BufferedReader):
    pass


class _Updater(_Details, io.BufferedRandom):
    pass


class _Writer(_Details, io.BufferedWriter):
    """A file that is written. In a transaction it gets its name when that is committed."""

    staged: str | None = None

    def commit(self) -> None:
        self.close()
        if self.staged is not None:
            self.fs.files.rename(self.staged, self.path)

    def discard(self) -> None:
        self.close()
        if self.staged is not None:
            self.fs.files.unlink(self.staged)


class AquiferFileSystem(ChainedFileSystem):  # type: ignore[misc]
    """The files of a pool, as a file system of fsspec: `fsspec.filesystem("aquifer", pool="/abs/data.pool")`.

    Paths begin with `/`, the root of the pool. Changes are visible to other processes at once, and durable after `sync`, or
    when the last process that has the pool open has ended.

    Parameters
    ----------
    pool : str or path
        The pool's file.
    read_only : bool
        Open it only to read, also where writing is possible.
    shared_memory : str or path
        As for `aquifer.Pool.open`.
    auto_mkdir : bool
        Make the directories above a file that is created, as programs for object stores (zarr) expect. Otherwise they must exist.
    fo, target_protocol, target_options
        What fsspec says of the rest of a chain.
    """

    protocol = "aquifer"
    root_marker = "/"

    def __init__(
        self,
        pool: str | os.PathLike[str] | None = None,
        read_only: bool = False,
        shared_memory: str | os.PathLike[str] | None = None,
        auto_mkdir: bool = True,
        fo: str | None = None,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if pool is None:
            if fo is None:
                raise ValueError(
                    "which pool? name it in the URL, as in aquifer:///abs/data.pool::/path, or by pool= in the storage options"
                )
            if target_protocol not in (None, "file", "local"):
                raise ValueError(f"a pool is a file of this machine; it cannot be opened by {target_protocol!r}")
            pool = fo
        self.pool_path = os.path.abspath(os.fspath(pool))
        self.read_only = read_only
        self.shared_memory = None if shared_memory is None else os.fspath(shared_memory)
        self.auto_mkdir = auto_mkdir
        self._pool: Pool | None = None
        self._process = 0
        # fsspec asks the class for the path in a URL before there is a file system, and the file system for what it is given.
        self._strip_protocol = self._inside  # type: ignore[method-assign]

    @property
    def pool(self) -> Pool:
        """The open pool, shared by all file systems of it in this process."""
        pool = self._pool
        if pool is None or self._process != os.getpid() or pool.closed:
            pool = _pool_at(self.pool_path, self.read_only, self.shared_memory)
            self._pool, self._process = pool, os.getpid()
        return pool

    @property
    def files(self) -> Files:
        """`aquifer.Files` of the pool."""
        return self.pool.files

    @property
    def fsid(self) -> str:
        return f"aquifer_{self.pool.stats()['uuid']}"

    # ---- URLs --------------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = path.as_posix() if hasattr(path, "as_posix") else str(stringify_path(path))
        if text.startswith(_PREFIX):
            pool, inside = _parts(text)
            if inside is None:
                # Part of a chain: the path is in the next one.
                return ""
            text = inside
        return "/" + text.strip("/")

    def _inside(self, path: Any) -> Any:
        """`_strip_protocol` of this file system: what names another pool is refused, as DuckDB asks one for all URLs."""
        for one in path if isinstance(path, list) else [path]:
            pool = _parts(one)[0] if isinstance(one, str) and one.startswith(_PREFIX) else None
            if pool is not None and os.path.abspath(pool) != self.pool_path and not os.path.samefile(pool, self.pool_path):
                raise ValueError(f"{one} is in another pool than that of this file system, {self.pool_path}")
        return type(self)._strip_protocol(path)

    @classmethod
    def _get_kwargs_from_urls(cls, url: str) -> dict[str, Any]:
        pool = _parts(url)[0] if url.startswith(_PREFIX) else None
        return {} if pool is None else {"pool": pool}

    def unstrip_protocol(self, name: str) -> str:
        return f"{_PREFIX}{self.pool_path}::{self._strip_protocol(name)}"

    # ---- what is there -----------------------------------------------------------------------------

    def info(self, path: Any, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        status = self.files.stat(path, follow_symlinks=False)
        link = stat.S_ISLNK(status.st_mode)
        found = {"name": path, "islink": link, "created": status.st_ctime}
        if link:
            found["destination"] = self.files.readlink(path)
            try:
                status = self.files.stat(path)
            except FileNotFoundError:
                pass
        if stat.S_ISDIR(status.st_mode):
            kind = "directory"
        elif stat.S_ISREG(status.st_mode):
            kind = "file"
        else:
            kind = "link" if link else "other"
        found.update(
            type=kind,
            size=0 if kind == "directory" else status.st_size,
            mode=status.st_mode,
            uid=status.st_uid,
            gid=status.st_gid,
            mtime=status.st_mtime,
            ino=status.st_ino,
            nlink=status.st_nlink,
        )
        return found

    def ls(self, path: Any, detail: bool = False, **options: Any) -> Any:
        path = self._strip_protocol(path)
        if not self.files.is_dir(path):
            return [self.info(path)] if detail else [self.info(path)["name"]]
        names = [entry.path for entry in self.files.scandir(path)]
        if not detail:
            return names
        infos = []
        for name in names:
            try:
                info = self.info(name)
            except FileNotFoundError:
                # Removed meanwhile.
                continue
            if info["islink"] and info["type"] == "directory":
                # Nothing goes through it: what is removed with its directory is the link, and a link upwards has an end.
                info["type"] = "link"
            infos.append(info)
        return infos

    def exists(self, path: Any, **options: Any) -> bool:
        return self.files.exists(self._strip_protocol(path))

    def lexists(self, path: Any, **options: Any) -> bool:
        path = self._strip_protocol(path)
        return self.files.exists(path) or self.files.is_symlink(path)

    def isfile(self, path: Any) -> bool:
        return self.files.is_file(self._strip_protocol(path))

    def isdir(self, path: Any) -> bool:
        return self.files.is_dir(self._strip_protocol(path))

    def islink(self, path: Any) -> bool:
        return self.files.is_symlink(self._strip_protocol(path))

    def created(self, path: Any) -> datetime:
        return datetime.fromtimestamp(self.info(path)["created"], tz=timezone.utc)

    def modified(self, path: Any) -> datetime:
        return datetime.fromtimestamp(self.info(path)["mtime"], tz=timezone.utc)

    # ---- changes -----------------------------------------------------------------------------------

    def mkdir(self, path: Any, create_parents: bool = True, **options: Any) -> None:
        path = self._strip_protocol(path)
        if create_parents:
            self.makedirs(self._parent(path), exist_ok=True)
        self.files.mkdir(path)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        self.files.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    def rmdir(self, path: Any) -> None:
        self.files.rmdir(self._strip_protocol(path))

    def rm_file(self, path: Any) -> None:
        self.files.unlink(self._strip_protocol(path))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        for found in reversed(self.expand_path(path, recursive=recursive, maxdepth=maxdepth)):
            if self.isdir(found) and not self.islink(found):
                self.rmdir(found)
            else:
                self.rm_file(found)

    def cp_file(self, path1: Any, path2: Any, **options: Any) -> None:
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.auto_mkdir:
            self.makedirs(self._parent(path2), exist_ok=True)
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
        else:
            self.files.copy(path1, path2)

    def mv(self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **options: Any) -> None:
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.isdir(path2):
            path2 = f"{path2.rstrip('/')}/{path1.rsplit('/', 1)[1]}"
        elif self.auto_mkdir:
            self.makedirs(self._parent(path2), exist_ok=True)
        self.files.rename(path1, path2)

    def link(self, src: Any, dst: Any, **options: Any) -> None:
        self.files.link(self._strip_protocol(src), self._strip_protocol(dst))

    def symlink(self, src: Any, dst: Any, **options: Any) -> None:
        self.files.symlink(self._strip_protocol(src), self._strip_protocol(dst))

    def chmod(self, path: Any, mode: int) -> None:
        self.files.chmod(self._strip_protocol(path), mode)

    def touch(self, path: Any, truncate: bool = True, **options: Any) -> None:
        path = self._strip_protocol(path)
        if self.auto_mkdir:
            self.makedirs(self._parent(path), exist_ok=True)
        self.files.path(path).touch()
        if truncate:
            self.files.write_bytes(path, b"")

    def sync(self) -> None:
        """Makes all changes of files so far durable."""
        self.pool.sync()

    # ---- contents ----------------------------------------------------------------------------------

    def cat_file(self, path: Any, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        with self.files.open(self._strip_protocol(path), "rb", 0) as file:
            if start is None and end is None:
                return file.readall()
            size = file.size()
            first = 0 if start is None else start if start >= 0 else max(size + start, 0)
            last = size if end is None else end if end >= 0 else size + end
            return file.pread(max(last - first, 0), first)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **options: Any,
    ) -> Any:
        kind = mode.replace("b", "").replace("t", "")
        writes = kind != "r"
        if writes and self.auto_mkdir:
            self.makedirs(self._parent(path), exist_ok=True)
        staged = None
        if writes and not autocommit:
            if mode != "wb":
                raise ValueError(f"in a transaction a file is written anew, not opened with mode {mode!r}")
            staged = f"{path}.{uuid4().hex}.staged"
        raw = self.files._open_raw(staged or path, kind)
        size = block_size if isinstance(block_size, int) and block_size > 0 else _BUFFER_BYTES
        file: _Reader | _Updater | _Writer
        if "+" in mode:
            file = _Updater(raw, size)
        elif writes:
            file = _Writer(raw, size)
            file.staged = staged
        else:
            file = _Reader(raw, size)
        file.fs, file.path = self, path
        # Flushed when the pool is closed.
        self.pool._opened.add(file)
        return file
