"""`Pool`: one file that holds arrays and files, which many processes use at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any, Iterator
from weakref import WeakSet

from . import _native
from ._cache import Stats
from ._files import Files
from ._sizes import bytes_of

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from ._array import Array, ArrayInfo, Attached

__all__ = ["Pool"]

StrPath = str | os.PathLike[str]


def _options(
    *,
    read_only: bool = False,
    exclusive: bool = False,
    overwrite: bool = False,
    mode: int = 0o600,
    log_size: int | str | None = None,
    inodes: int | None = None,
    shared_memory: StrPath | None = None,
    stall_timeout: float | None = None,
) -> dict[str, Any]:
    return {
        "read_only": read_only,
        "exclusive": exclusive,
        "overwrite": overwrite,
        "mode": mode,
        "log_bytes": None if log_size is None else bytes_of(log_size),
        "inodes": inodes,
        "shared_memory": None if shared_memory is None else os.fspath(shared_memory),
        "stall_timeout": stall_timeout,
    }


class Pool:
    """An open pool: `Pool.create` makes one, `Pool.open` opens it.

    Any number of processes can have it open. It is closed by `close`, or at the end of a `with` block.

    Threads: any. In a forked child, calls raise `ForkedError`: open the pool there again.

    >>> import aquifer, tempfile
    >>> directory = tempfile.TemporaryDirectory()
    >>> with aquifer.Pool.create(f"{directory.name}/data.pool", "16MiB") as pool:
    ...     weights = pool.array("weights", shape=(2, 3), dtype="f4")
    ...     weights[:] = 1
    ...     weights.psync()  # from here on they survive
    ...     _ = pool.files.write_text("/notes", "some text")
    ...     pool.sync()  # the files as well
    ...     del weights  # a pool is not closed under an array
    """

    def __init__(self, native: _native.Pool, path: str) -> None:
        """For `create` and `open`."""
        self._native = native
        self._path = path
        self._attached: dict[str, Attached] = {}
        # So that threads that attach one array get one attachment. A finalizer may attach one meanwhile.
        self._attaching = RLock()
        # What `close` has to flush.
        self._opened: WeakSet[Any] = WeakSet()
        self._files = Files(self)

    @classmethod
    def create(
        cls,
        path: StrPath,
        size: int | str,
        *,
        exclusive: bool = False,
        overwrite: bool = False,
        mode: int = 0o600,
        log_size: int | str | None = None,
        inodes: int | None = None,
        shared_memory: StrPath | None = None,
        stall_timeout: float | None = None,
    ) -> Pool:
        """Creates a pool in a new file, and opens it for writing. A killed process leaves no file.

        Parameters
        ----------
        path : str or path
            Of the file, which must not exist.
        size : int or str
            Of the file, in bytes, or as text such as `"4GiB"`. All of it is allocated.
        exclusive : bool
            Keep other processes out. Then no shared memory is needed.
        overwrite : bool
            Replace a file that is there.
        mode : int
            Permissions of the file, less the umask.
        log_size : int or str
            Of the log; by default a quarter of the pool, between 64 KiB and 128 MiB.
        inodes : int
            How many arrays, files and directories it has room for, at most; by default one for each 16 KiB.
        shared_memory : str or path
            Directory for the memory that processes share; `/dev/shm` by default.
        stall_timeout : float
            Seconds to wait for a process that holds a lock and makes no progress; 10 by default.

        Raises
        ------
        AlreadyExistsError, NoSpaceError, AccessDeniedError, InvalidInputError
        """
        options = _options(
            exclusive=exclusive,
            overwrite=overwrite,
            mode=mode,
            log_size=log_size,
            inodes=inodes,
            shared_memory=shared_memory,
            stall_timeout=stall_timeout,
        )
        return cls(_native.Pool.create(os.fspath(path), bytes_of(size), options), os.fspath(path))

    @classmethod
    def open(
        cls,
        path: StrPath,
        *,
        read_only: bool = False,
        exclusive: bool = False,
        shared_memory: StrPath | None = None,
        stall_timeout: float | None = None,
    ) -> Pool:
        """Opens a pool, and recovers it if its last process was killed.

        Parameters
        ----------
        path : str or path
            Of the file.
        read_only : bool
            Open it only to read, which needs no permission to write.
        exclusive, shared_memory, stall_timeout
            As for `create`.

        Raises
        ------
        NotFoundError, AccessDeniedError, BusyError
            `BusyError` if a process has it open exclusively.
        InvalidInputError, DamagedError, UnsupportedError
            It is no pool, or a damaged one, or of a later version.
        """
        options = _options(
            read_only=read_only, exclusive=exclusive, shared_memory=shared_memory, stall_timeout=stall_timeout
        )
        return cls(_native.Pool.open(os.fspath(path), options), os.fspath(path))

    def close(self) -> None:
        """Closes the pool, and the files that are open in it. Closing it again does nothing; in a forked child neither.

        Stores to arrays since their last `psync` are lost. The last process that closes a pool makes changes of its
        files durable.

        Raises
        ------
        BufferError
            Arrays or views of its memory are in use: delete them, or release the views. Nothing is closed then.
        NotDurableError
            An earlier `psync` failed, and none since has succeeded. The pool is closed.
        """
        if self._native.is_forked:
            return
        try:
            self._native.refuse_buffers()
            for file in list(self._opened):
                file.close()
        except BaseException:
            self._native.allow_buffers()
            raise
        self._native.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._native.is_closed

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<aquifer.Pool {self._path!r}{', closed' if self.closed else ''}>"

    @property
    def path(self) -> str:
        """The path that it was opened by."""
        return self._path

    @property
    def writable(self) -> bool:
        """Whether it was opened for writing."""
        return self._native.is_writable

    @property
    def files(self) -> Files:
        """The files of the pool."""
        return self._files

    def stats(self) -> Stats:
        """What the pool holds and has room for; lengths are in bytes. Takes time in proportion to the number of files. A table
        in a notebook."""
        return Stats(self._native.info())

    def sync(self) -> None:
        """Makes all changes of files and directories so far durable, those of other processes as well.

        Arrays are made durable by `psync`.

        Raises
        ------
        NotDurableError
            The media failed. The pool is read-only from then on.
        """
        self._native.sync()

    # ---- arrays -----------------------------------------------------------------------------------

    def array(
        self,
        name: str,
        shape: int | Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        *,
        mode: str | None = None,
        order: str = "C",
        key: str | bytes | None = None,
        read_key: str | bytes | None = None,
        write_key: str | bytes | None = None,
        shadow_budget: int | str | None = None,
    ) -> Array:
        """Attaches a persistent array, or creates it, zeroed.

        The array is at the same address in each process that attaches it. It has one writer or many readers: a pool
        that was opened for writing attaches it for writing. Stores are private to this process, and lost at its end,
        until `psync`. The array is detached when nothing refers to it any more. Attaching it again in the meantime
        gives another array of the same memory.

        Parameters
        ----------
        name : str
            Of the array, up to 255 bytes of UTF-8.
        shape : int or tuple of int
            Required to create it; otherwise compared, if it is given.
        dtype : data-type
            Of its elements; `float64` by default when it is created, otherwise compared, if it is given. Any but those
            that refer to Python objects.
        mode : str
            `None` creates the array if it is not there; `"r"` attaches it for reading, `"r+"` for writing, and both
            require that it exists; `"x"` requires that it does not.
        order : str
            `"C"` or `"F"`, the order of the elements of a new array.
        key : str or bytes
            Its key. The write key permits everything, the read key only reading.
        read_key, write_key : str or bytes
            Keys of a new array, which attaching it requires from then on.
        shadow_budget : int or str
            For copies of pages that were stored to, in bytes or as text; by default a quarter of the memory. See
            `Array.psync`.

        Raises
        ------
        BusyError
            Another process has it attached, and one of both for writing.
        ArrayMismatchError
            It has another shape or dtype.
        NotAnArrayError
            There is an object of this name that is no array.
        NotFoundError
            It does not exist, and there is no `shape`, or a `mode` that does not create it.
        AccessDeniedError, ReadOnlyError, NoSpaceError
        """
        from ._array import attach

        return attach(
            self,
            name,
            shape,
            dtype,
            mode=mode,
            order=order,
            key=key,
            read_key=read_key,
            write_key=write_key,
            shadow_budget=None if shadow_budget is None else bytes_of(shadow_budget),
        )

    def arrays(self) -> list[ArrayInfo]:
        """The arrays of the pool, by name, also those that other processes have attached."""
        from ._array import arrays

        return arrays(self)

    def remove(self, name: str, *, key: str | bytes | None = None) -> None:
        """Removes an array that no process has attached. Durable on return.

        Raises
        ------
        NotFoundError, AccessDeniedError, BusyError, NotAnArrayError
        """
        from ._array import check_is_array, key_bytes

        check_is_array(self, name)
        self._native.remove_object(name, key_bytes(key))

    def rename(self, name: str, new_name: str, *, key: str | bytes | None = None) -> None:
        """Gives an array that no process has attached another name. Durable on return.

        Raises
        ------
        NotFoundError, AlreadyExistsError, AccessDeniedError, BusyError, NotAnArrayError
        """
        from ._array import check_is_array, key_bytes

        check_is_array(self, name)
        self._native.rename_object(name, new_name, key_bytes(key))

    def _writable(self) -> list[Attached]:
        return [one for one in list(self._attached.values()) if one.writable]

    def psync(self) -> None:
        """Makes all stores to all arrays that this pool has attached durable at once: after a crash, all of them or none.

        See `Array.psync` for what other threads must not do meanwhile, and for errors.
        """
        from ._array import natives_of

        self._native.psync_many(natives_of(self._writable()))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """As `Array.transaction`, of all arrays that this pool has attached for writing when the block begins."""
        from ._array import transaction

        with transaction(self, self._writable()):
            yield
