"""The files of a pool: file objects, paths, views."""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import stat as stat_module
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol, overload

from . import _native
from ._errors import InvalidInputError
from ._progress import Progress, reported

if TYPE_CHECKING:
    from _typeshed import (
        OpenBinaryMode,
        OpenBinaryModeReading,
        OpenBinaryModeUpdating,
        OpenBinaryModeWriting,
        OpenTextMode,
        ReadableBuffer,
        WriteableBuffer,
    )

    from ._pool import Pool

__all__ = ["DirEntry", "FileIO", "Files", "Path"]

COPY_BYTES = 1 << 20


class _HasPath(Protocol):
    def as_posix(self) -> str: ...


AnyBinaryFile = BinaryIO | io.RawIOBase | io.BufferedIOBase
AnyPath = str | bytes | PurePosixPath | _HasPath


def _bytes_of(path: AnyPath) -> bytes:
    if isinstance(path, bytes):
        return path
    if isinstance(path, str):
        return os.fsencode(path)
    return os.fsencode(path.as_posix())


def _checked(count: int | None, least: int, most: int, call: str) -> int:
    """How many bytes a file object of the caller has transferred, as the module io checks it."""
    if count is None:
        raise BlockingIOError(errno.EAGAIN, f"{call} of the open file would wait: give one that waits")
    if not least <= count <= most:
        raise OSError(errno.EIO, f"{call} of the open file returned {count}, for {most} bytes")
    return count


class FileIO(io.RawIOBase):
    """An open file of a pool, without a buffer: what `io.FileIO` is for files of the system.

    `Files.open` makes one, and puts a buffer in front; `raw` of a buffered file is this. Offsets and lengths are in bytes.
    It has no descriptor. Threads: any; each call is one step, but the position is one for all.
    """

    def __init__(self, native: _native.File, name: str, mode: str) -> None:
        """For `Files.open`."""
        super().__init__()
        self._native = native
        self.name = name
        self.mode = mode
        self._reads = "r" in mode or "+" in mode
        self._writes = mode != "rb"

    def __repr__(self) -> str:
        return f"<aquifer.FileIO {self.name!r} mode={self.mode!r}{' closed' if self.closed else ''}>"

    def readable(self) -> bool:
        self._check_open()
        return self._reads

    def writable(self) -> bool:
        self._check_open()
        return self._writes

    def seekable(self) -> bool:
        self._check_open()
        return True

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")

    def _check_reads(self) -> None:
        self._check_open()
        if not self._reads:
            raise io.UnsupportedOperation("the file is not open for reading")

    def _check_writes(self) -> None:
        self._check_open()
        if not self._writes:
            raise io.UnsupportedOperation("the file is not open for writing")

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        self._check_reads()
        return self._native.readinto(buffer)

    def readall(self) -> bytes:
        self._check_reads()
        return self._native.readall()

    def write(self, buffer: ReadableBuffer, /) -> int:
        self._check_writes()
        return self._native.write(buffer)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._check_open()
        return self._native.seek(offset, whence)

    def tell(self) -> int:
        return self.seek(0, os.SEEK_CUR)

    def truncate(self, size: int | None = None, /) -> int:
        self._check_writes()
        length = self.tell() if size is None else size
        self._native.truncate(length)
        return length

    def pread(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes at an offset. The position stays."""
        self._check_reads()
        return self._native.pread(size, offset)

    def preadinto(self, buffer: WriteableBuffer, offset: int) -> int:
        """Reads at an offset into a buffer, and returns the number of bytes. The position stays."""
        self._check_reads()
        return self._native.preadinto(buffer, offset)

    def pwrite(self, buffer: ReadableBuffer, offset: int) -> int:
        """Writes all of a buffer at an offset. The position stays."""
        self._check_writes()
        return self._native.pwrite(buffer, offset)

    def write_atomic(self, buffer: ReadableBuffer, offset: int) -> None:
        """Writes all of a buffer at an offset, atomically: other processes, and a crash, find all of it or nothing."""
        self._check_writes()
        self._native.write_atomic(buffer, offset)

    def size(self) -> int:
        """The length of the file."""
        self._check_open()
        return self._native.size()

    def sync(self, *, data_only: bool = False) -> None:
        """Makes the content that was written so far durable, and with it name and metadata. Flush a buffer in front first,
        or use `Files.fsync`."""
        self._check_open()
        self._native.sync(data_only)

    def lock(self, *, shared: bool = False, wait: bool = True) -> bool:
        """Locks the file, as flock(2), against other handles in all processes. Without `wait`, returns whether it did."""
        self._check_open()
        return self._native.lock(shared, wait)

    def unlock(self) -> None:
        """Gives the lock back; closing does, too."""
        self._check_open()
        self._native.unlock()

    def close(self) -> None:
        if not self.closed:
            try:
                super().close()
            finally:
                self._native.close()


class DirEntry:
    """A name in a directory, as `os.DirEntry`."""

    __slots__ = ("_files", "_inode", "_kind", "name", "path")

    def __init__(self, files: Files, directory: str, name: str, inode: int, kind: int) -> None:
        self._files = files
        self._inode = inode
        self._kind = kind
        self.name = name
        self.path = directory.rstrip("/") + "/" + name

    def __repr__(self) -> str:
        return f"<aquifer.DirEntry {self.name!r}>"

    def inode(self) -> int:
        return self._inode

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat_module.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat_module.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return stat_module.S_ISLNK(self._kind)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._files.stat(self.path, follow_symlinks=follow_symlinks)

    def _is(self, test: Callable[[int], bool], follow: bool) -> bool:
        if follow and self.is_symlink():
            try:
                return test(self.stat().st_mode)
            except FileNotFoundError:
                return False
        return test(self._kind)


def _mode_of(mode: str) -> tuple[str, bool]:
    """The mode without `b` and `t`, and whether it is text."""
    kinds = [letter for letter in mode if letter in "rwxa"]
    rest = mode.replace("b", "").replace("t", "")
    if len(kinds) != 1 or set(rest) - set("rwxa+") or len(set(mode)) != len(mode) or ("b" in mode and "t" in mode):
        raise ValueError(f"the mode is {mode!r}; it has one of r, w, x, a, and may have +, and b or t")
    return kinds[0] + ("+" if "+" in mode else ""), "b" not in mode


class Files:
    """The files of a pool: `Pool.files`.

    Paths begin at the root of the pool, with or without a slash. They are text, bytes, `pathlib.PurePosixPath`, or `Path` of this
    module. Changes are visible to all processes at once, survive the death of any of them, and are durable after `Pool.sync` or
    `fsync`. Errors are those of the system calls: `NotFoundError` is a `FileNotFoundError`, and so on.
    """

    def __init__(self, pool: Pool) -> None:
        """For `Pool`."""
        self._pool = pool
        self._native = _native.Files(pool._native)

    def __repr__(self) -> str:
        return f"<aquifer.Files of {self._pool.path!r}>"

    @property
    def pool(self) -> Pool:
        """Their pool."""
        return self._pool

    # ---- open files --------------------------------------------------------------------------------

    @overload
    def open(
        self,
        path: AnyPath,
        mode: OpenTextMode = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        *,
        permissions: int = 0o666,
    ) -> io.TextIOWrapper: ...
    @overload
    def open(
        self, path: AnyPath, mode: OpenBinaryMode, buffering: Literal[0], *, permissions: int = 0o666
    ) -> FileIO: ...
    @overload
    def open(
        self, path: AnyPath, mode: OpenBinaryModeUpdating, buffering: Literal[-1, 1] = -1, *, permissions: int = 0o666
    ) -> io.BufferedRandom: ...
    @overload
    def open(
        self, path: AnyPath, mode: OpenBinaryModeWriting, buffering: Literal[-1, 1] = -1, *, permissions: int = 0o666
    ) -> io.BufferedWriter: ...
    @overload
    def open(
        self, path: AnyPath, mode: OpenBinaryModeReading, buffering: Literal[-1, 1] = -1, *, permissions: int = 0o666
    ) -> io.BufferedReader: ...
    @overload
    def open(
        self,
        path: AnyPath,
        mode: str,
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        *,
        permissions: int = 0o666,
    ) -> Any: ...
    def open(
        self,
        path: AnyPath,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        *,
        permissions: int = 0o666,
    ) -> Any:
        """Opens a file, as the built-in `open`, and with the same classes of the module `io`: text by default, buffered.

        A large read of a binary file goes from the pool to its place in one copy, without the interpreter's lock.
        `permissions`, less the umask, are those of a new file.

        Raises
        ------
        NotFoundError, AlreadyExistsError, IsADirectoryError, ReadOnlyError, NoSpaceError
        """
        kind, is_text = _mode_of(mode)
        if buffering == 0 and is_text:
            raise ValueError("text cannot be unbuffered")
        if not is_text and (encoding, errors, newline) != (None, None, None):
            raise ValueError("encoding, errors and newline are for text")
        raw = self._open_raw(path, kind, permissions)
        opened: Any = raw
        try:
            if buffering != 0:
                size = io.DEFAULT_BUFFER_SIZE if buffering in (-1, 1) else buffering
                if "+" in kind:
                    opened = io.BufferedRandom(raw, size)
                else:
                    opened = io.BufferedReader(raw, size) if kind == "r" else io.BufferedWriter(raw, size)
            if is_text:
                opened = io.TextIOWrapper(opened, io.text_encoding(encoding), errors, newline, buffering == 1)
                opened.mode = mode
        except BaseException:
            opened.close()
            raise
        self._pool._opened.add(opened)
        return opened

    def _open_raw(self, path: AnyPath, kind: str, permissions: int = 0o666, truncates: bool = True) -> FileIO:
        """A file without a buffer, which closing the pool does not close. `kind` is a mode without `b` and `t`."""
        both = "+" in kind
        how = {
            "read": kind[0] == "r" or both,
            "write": kind[0] in "wx" or both,
            "append": kind[0] == "a",
            "truncate": kind[0] == "w" and truncates,
            "create": kind[0] in "wa",
            "create_new": kind[0] == "x",
            "mode": permissions,
        }
        # As `io.FileIO` calls it.
        shown = "rb+" if both and kind[0] == "w" else kind[0] + "b" + ("+" if both else "")
        raw = FileIO(self._native.open_file(_bytes_of(path), how), os.fsdecode(_bytes_of(path)), shown)
        if kind[0] == "a":
            raw.seek(0, os.SEEK_END)
        return raw

    def fsync(self, file: Any) -> None:
        """Flushes an open file, and makes it durable, with its name. Without names of other files it is faster than
        `Pool.sync`.

        Raises
        ------
        NotDurableError
        """
        file.flush()
        raw = file
        while not isinstance(raw, FileIO):
            raw = getattr(raw, "buffer", None) or getattr(raw, "raw", None)
            if raw is None:
                raise TypeError(f"{file!r} is no file of a pool")
        raw.sync()

    def view(self, path: AnyPath, start: int = 0, stop: int | None = None) -> memoryview:
        """The bytes of a file in place: a read-only memoryview, without a copy, whatever its length.

        Its pages are kept, also if the file is changed, truncated or removed, until the view and all slices of it are released
        (`memoryview.release`, a `with` block, or no reference). Until then the pool cannot be closed. Bytes that are
        written in place show in the view, also those of other processes. Not for a forked child, where an access ends it by
        SIGSEGV. If the pool's file is truncated, an access raises SIGBUS, as with mmap.

        Raises
        ------
        LimitReachedError
            The file is in more than 1,024 pieces, or in several where the media cannot be mapped in pieces: `defragment` it.
        InvalidInputError
            The range is not inside the file.
        """
        if start < 0 or (stop is not None and stop < 0):
            raise InvalidInputError(errno.EINVAL, f"a range from {start} to {stop} is not inside the file")
        return memoryview(self._native.view_file(_bytes_of(path), start, stop))

    def defragment(self, path: AnyPath) -> tuple[int, int]:
        """Joins the pieces of a file where there is room. Returns how many there were, and how many there are."""
        return self._native.defragment(_bytes_of(path))

    # ---- contents ----------------------------------------------------------------------------------

    def read_bytes(self, path: AnyPath) -> bytes:
        """The whole content."""
        with self.open(path, "rb", 0) as file:
            return file.readall()

    def read_text(self, path: AnyPath, encoding: str | None = None, errors: str | None = None) -> str:
        """The whole content as text."""
        with self.open(path, "r", -1, io.text_encoding(encoding), errors) as file:
            return file.read()

    def write_bytes(self, path: AnyPath, data: ReadableBuffer) -> int:
        """Makes a file with this content, or replaces its content."""
        with self.open(path, "wb", 0) as file:
            return file.write(data)

    def write_text(
        self,
        path: AnyPath,
        data: str,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> int:
        """Makes a file with this text, or replaces its content."""
        with self.open(path, "w", -1, io.text_encoding(encoding), errors, newline) as file:
            return file.write(data)

    def copy(self, source: AnyPath, target: AnyPath) -> int:
        """Copies a file inside the pool, with its permissions. Returns the number of bytes.

        Raises
        ------
        InvalidInputError
            Both paths lead to the same file, which stays as it is.
        """
        return self._native.copy_file(_bytes_of(source), _bytes_of(target))

    def copy_in(
        self, source: str | os.PathLike[str] | AnyBinaryFile, target: AnyPath, *, progress: Progress = False
    ) -> int:
        """Copies a file of the system, or what an open binary file has left, to the pool. Returns the number of bytes.

        `progress=True` shows a bar, by tqdm; a function is called after each piece with the bytes that are done and all of
        them (None if `source` is an open file).

        A copy that fails leaves what it has copied, before what else the target had.
        """
        if not isinstance(source, (str, os.PathLike)):
            return self._copy_in(source, target, progress, None)
        with open(source, "rb", 0) as file:
            return self._copy_in(file, target, progress, os.fstat(file.fileno()).st_size)

    def _copy_in(self, source: Any, target: AnyPath, progress: Progress, total: int | None) -> int:
        count, buffer = 0, memoryview(bytearray(COPY_BYTES))
        name = os.fsdecode(_bytes_of(target))
        # Truncated at the end: the source may be the same file, opened before or found on a mount of the pool.
        with self._open_raw(target, "w", truncates=False) as file, reported(progress, total, name) as done:
            while got := _checked(source.readinto(buffer), 0, COPY_BYTES, "readinto"):
                file.write(buffer[:got])
                count += got
                done(got)
            file.truncate()
        return count

    def copy_out(
        self, source: AnyPath, target: str | os.PathLike[str] | AnyBinaryFile, *, progress: Progress = False
    ) -> int:
        """Copies a file of the pool to the system, or to an open binary file. Returns the number of bytes.

        `progress` is that of `copy_in`, and so is what a copy that fails leaves.
        """
        if not isinstance(target, (str, os.PathLike)):
            return self._copy_out(source, target, progress)
        # Opened first: a file that is not there leaves nothing at the target.
        with self.open(source, "rb", 0):
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb", 0) as file:
            count = self._copy_out(source, file, progress)
            # At the end: the target may be the same file, found on a mount of the pool.
            if stat_module.S_ISREG(os.fstat(descriptor).st_mode):
                file.truncate()
        return count

    def _copy_out(self, source: AnyPath, target: Any, progress: Progress) -> int:
        count, buffer = 0, memoryview(bytearray(COPY_BYTES))
        name = os.fsdecode(_bytes_of(source))
        with self.open(source, "rb", 0) as file, reported(progress, file.size(), name) as done:
            while got := file.readinto(buffer):
                piece = buffer[:got]
                while piece:
                    piece = piece[_checked(target.write(piece), 1, len(piece), "write") :]
                count += got
                done(got)
        return count

    # ---- names -------------------------------------------------------------------------------------

    def path(self, *parts: AnyPath) -> Path:
        """A path in this pool: `files.path("/a/b")`, `files.path("a", "b")`."""
        return Path(self, *(os.fsdecode(_bytes_of(part)) for part in parts))

    def stat(self, path: AnyPath, *, follow_symlinks: bool = True) -> os.stat_result:
        """As `os.stat`. `st_dev` is 0: a pool is no device."""
        mode, inode, links, uid, gid, size, times, allocated = self._native.stat(_bytes_of(path), follow_symlinks)
        named: dict[str, float] = {}
        for name, time_ns in zip(("atime", "mtime", "ctime"), times):
            named[f"st_{name}"] = time_ns / 1e9
            named[f"st_{name}_ns"] = time_ns
        named["st_blksize"] = 4096
        named["st_blocks"] = allocated // 512
        whole = [time_ns // 10**9 for time_ns in times]
        return os.stat_result((mode, inode, 0, links, uid, gid, size, *whole), named)

    def exists(self, path: AnyPath) -> bool:
        """Whether there is something at a path. A symbolic link is followed."""
        return self._mode(path) is not None

    def is_file(self, path: AnyPath) -> bool:
        """Whether it is a regular file, or a link to one."""
        return stat_module.S_ISREG(self._mode(path) or 0)

    def is_dir(self, path: AnyPath) -> bool:
        """Whether it is a directory, or a link to one."""
        return stat_module.S_ISDIR(self._mode(path) or 0)

    def is_symlink(self, path: AnyPath) -> bool:
        """Whether it is a symbolic link."""
        return stat_module.S_ISLNK(self._mode(path, follow=False) or 0)

    def _mode(self, path: AnyPath, follow: bool = True) -> int | None:
        try:
            mode: int = self._native.stat(_bytes_of(path), follow)[0]
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise
        return mode

    def listdir(self, path: AnyPath = "/") -> list[str]:
        """The names in a directory, in no particular order."""
        return [os.fsdecode(name) for name, _, _ in self._native.read_dir(_bytes_of(path))]

    def scandir(self, path: AnyPath = "/") -> Iterator[DirEntry]:
        """The entries of a directory, with their kinds."""
        directory = os.fsdecode(_bytes_of(path))
        for name, inode, kind in self._native.read_dir(_bytes_of(path)):
            yield DirEntry(self, directory, os.fsdecode(name), inode, kind)

    def walk(
        self,
        top: AnyPath = "/",
        topdown: bool = True,
        onerror: Callable[[OSError], object] | None = None,
        followlinks: bool = False,
    ) -> Iterator[tuple[str, list[str], list[str]]]:
        """As `os.walk`."""
        top = os.fsdecode(_bytes_of(top))
        directories: list[str] = []
        others: list[str] = []
        try:
            for entry in self.scandir(top):
                (directories if entry.is_dir() else others).append(entry.name)
        except OSError as error:
            if onerror is not None:
                onerror(error)
            return
        if topdown:
            yield top, directories, others
        for name in directories:
            below = top.rstrip("/") + "/" + name
            if followlinks or not self.is_symlink(below):
                yield from self.walk(below, topdown, onerror, followlinks)
        if not topdown:
            yield top, directories, others

    def mkdir(self, path: AnyPath, mode: int = 0o777) -> None:
        """Makes a directory."""
        self._native.make_dir(_bytes_of(path), mode)

    def makedirs(self, path: AnyPath, mode: int = 0o777, exist_ok: bool = False) -> None:
        """Makes a directory, and those above it."""
        self.path(path).mkdir(mode, parents=True, exist_ok=exist_ok)

    def rmdir(self, path: AnyPath) -> None:
        """Removes an empty directory."""
        self._native.remove_dir(_bytes_of(path), False)

    def rmtree(self, path: AnyPath) -> None:
        """Removes a directory and all in it."""
        self._native.remove_dir(_bytes_of(path), True)

    def unlink(self, path: AnyPath, missing_ok: bool = False) -> None:
        """Removes a name of a file, or a symbolic link. Processes that have it open keep it."""
        try:
            self._native.remove_file(_bytes_of(path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    remove = unlink

    def rename(self, source: AnyPath, target: AnyPath, *, replace: bool = True) -> None:
        """Gives something another name, atomically. Without `replace`, `AlreadyExistsError` if there is something."""
        self._native.rename_file(_bytes_of(source), _bytes_of(target), replace)

    replace = rename

    def link(self, source: AnyPath, target: AnyPath) -> None:
        """Gives a file one more name."""
        self._native.link_file(_bytes_of(source), _bytes_of(target))

    def symlink(self, target: AnyPath, path: AnyPath) -> None:
        """Makes a symbolic link at `path`."""
        self._native.symlink(_bytes_of(target), _bytes_of(path))

    def readlink(self, path: AnyPath) -> str:
        """What a symbolic link refers to."""
        return os.fsdecode(self._native.read_link(_bytes_of(path)))

    def realpath(self, path: AnyPath) -> str:
        """The path without symbolic links, `.` and `..`."""
        return os.fsdecode(self._native.real_path(_bytes_of(path)))

    def chmod(self, path: AnyPath, mode: int) -> None:
        """Sets permissions. They are stored, not enforced: who can open the pool can do everything in it."""
        self._native.chmod(_bytes_of(path), mode)

    def utime(self, path: AnyPath, *, ns: tuple[int, int]) -> None:
        """Sets the times of the last access and the last change, in nanoseconds since 1970."""
        self._native.set_times(_bytes_of(path), *ns)


class Path:
    """A path in a pool, with the methods of `pathlib.Path`. `Files.path` makes one.

    It is no `os.PathLike`: as a path of the system it would name another file.
    """

    __slots__ = ("_files", "_path")

    def __init__(self, files: Files, *parts: str) -> None:
        self._files = files
        self._path = PurePosixPath("/", *parts)

    def _of(self, path: PurePosixPath) -> Path:
        return Path(self._files, str(path))

    # ---- as text -----------------------------------------------------------------------------------

    def __str__(self) -> str:
        return str(self._path)

    def as_posix(self) -> str:
        """The path as text."""
        return str(self._path)

    def __repr__(self) -> str:
        return f"<aquifer.Path {str(self)!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Path) and (self._files, self._path) == (other._files, other._path)

    def __lt__(self, other: Path) -> bool:
        return self._path < other._path

    def __hash__(self) -> int:
        return hash((id(self._files), self._path))

    def __truediv__(self, part: str) -> Path:
        return self._of(self._path / part)

    def joinpath(self, *parts: str) -> Path:
        """This path and more parts."""
        return self._of(self._path.joinpath(*parts))

    @property
    def files(self) -> Files:
        """The files that it is a path of."""
        return self._files

    @property
    def parts(self) -> tuple[str, ...]:
        return self._path.parts

    @property
    def parent(self) -> Path:
        return self._of(self._path.parent)

    @property
    def parents(self) -> tuple[Path, ...]:
        return tuple(self._of(parent) for parent in self._path.parents)

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def stem(self) -> str:
        return self._path.stem

    @property
    def suffix(self) -> str:
        return self._path.suffix

    @property
    def suffixes(self) -> list[str]:
        return self._path.suffixes

    def with_name(self, name: str) -> Path:
        return self._of(self._path.with_name(name))

    def with_stem(self, stem: str) -> Path:
        return self._of(self._path.with_stem(stem))

    def with_suffix(self, suffix: str) -> Path:
        return self._of(self._path.with_suffix(suffix))

    def relative_to(self, other: Path | str) -> PurePosixPath:
        return self._path.relative_to(str(other))

    def is_relative_to(self, other: Path | str) -> bool:
        return self._path.is_relative_to(str(other))

    def match(self, pattern: str) -> bool:
        return self._path.match(pattern)

    # ---- the file ----------------------------------------------------------------------------------

    def open(
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> Any:
        """As `Files.open`."""
        return self._files.open(self, mode, buffering, encoding, errors, newline)

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """As `Files.view`."""
        return self._files.view(self, start, stop)

    def read_bytes(self) -> bytes:
        return self._files.read_bytes(self)

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        return self._files.read_text(self, encoding, errors)

    def write_bytes(self, data: ReadableBuffer) -> int:
        return self._files.write_bytes(self, data)

    def write_text(
        self, data: str, encoding: str | None = None, errors: str | None = None, newline: str | None = None
    ) -> int:
        return self._files.write_text(self, data, encoding, errors, newline)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._files.stat(self, follow_symlinks=follow_symlinks)

    def lstat(self) -> os.stat_result:
        return self.stat(follow_symlinks=False)

    def exists(self) -> bool:
        return self._files.exists(self)

    def is_file(self) -> bool:
        return self._files.is_file(self)

    def is_dir(self) -> bool:
        return self._files.is_dir(self)

    def is_symlink(self) -> bool:
        return self._files.is_symlink(self)

    def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
        """Makes an empty file, or sets the times of one that is there to now."""
        try:
            self._files.open(self, "xb", 0, permissions=mode).close()
        except FileExistsError:
            if not exist_ok:
                raise
            import time

            now = time.time_ns()
            self._files.utime(self, ns=(now, now))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        try:
            self._files.mkdir(self, mode)
        except FileNotFoundError:
            if not parents or self.parent == self:
                raise
            self.parent.mkdir(parents=True, exist_ok=True)
            self.mkdir(mode, parents=False, exist_ok=exist_ok)
        except FileExistsError:
            if not exist_ok or not self.is_dir():
                raise

    def rmdir(self) -> None:
        self._files.rmdir(self)

    def unlink(self, missing_ok: bool = False) -> None:
        self._files.unlink(self, missing_ok)

    def rename(self, target: Path | str) -> Path:
        """Gives it another name, and returns that. What has that name is replaced."""
        new = target if isinstance(target, Path) else Path(self._files, target)
        self._files.rename(self, new)
        return new

    replace = rename

    def chmod(self, mode: int) -> None:
        self._files.chmod(self, mode)

    def symlink_to(self, target: Path | str) -> None:
        self._files.symlink(str(target), self)

    def hardlink_to(self, target: Path | str) -> None:
        self._files.link(str(target), self)

    def readlink(self) -> str:
        return self._files.readlink(self)

    def resolve(self) -> Path:
        return Path(self._files, self._files.realpath(self))

    # ---- directories -------------------------------------------------------------------------------

    def iterdir(self) -> Iterator[Path]:
        """The paths in a directory, in no particular order."""
        for name in self._files.listdir(self):
            yield self / name

    def glob(self, pattern: str) -> Iterator[Path]:
        """The paths below that match a pattern of `*`, `?`, `[…]`, and `**` for any number of directories, which are not
        followed if they are symbolic links. A pattern that ends with `**` finds directories."""
        parts = PurePosixPath(pattern).parts
        if not parts or pattern.startswith("/"):
            raise ValueError(f"the pattern is {pattern!r}; it is relative, and not empty")
        seen: set[PurePosixPath] = set()
        for found in self._glob(parts, only_directories=pattern.endswith("/")):
            if found._path not in seen:
                seen.add(found._path)
                yield found

    def rglob(self, pattern: str) -> Iterator[Path]:
        """`glob` of the pattern below each directory below."""
        return self.glob("**/" + pattern)

    def _glob(self, parts: tuple[str, ...], only_directories: bool) -> Iterator[Path]:
        if not parts:
            if not only_directories or self.is_dir():
                yield self
            return
        first, rest = parts[0], parts[1:]
        if first == "**":
            # On its own at the end it stands for directories, as in pathlib before Python 3.13.
            yield from self._glob(rest, only_directories or not rest)
            for entry in self._entries():
                if entry.is_dir(follow_symlinks=False):
                    yield from (self / entry.name)._glob(parts, only_directories)
        elif first == ".." or not set(first) & set("*?["):
            below = self._of(self._path / first)
            if below.exists() or below.is_symlink():
                yield from below._glob(rest, only_directories)
        else:
            for entry in self._entries():
                if fnmatch.fnmatchcase(entry.name, first) and (not rest or entry.is_dir()):
                    yield from (self / entry.name)._glob(rest, only_directories)

    def _entries(self) -> list[DirEntry]:
        try:
            return list(self._files.scandir(self))
        except (FileNotFoundError, NotADirectoryError):
            return []
