"""The exceptions of Aquifer. The native module raises them; see `src/error.rs`."""

from __future__ import annotations

import pickle

__all__ = [
    "AccessDeniedError",
    "AlreadyExistsError",
    "AquiferError",
    "BusyError",
    "ChangedError",
    "DamagedError",
    "FaultError",
    "ForkedError",
    "InterruptedCallError",
    "InvalidInputError",
    "IsDirectoryError",
    "LimitReachedError",
    "NoSpaceError",
    "NotDirectoryError",
    "NotDurableError",
    "NotFoundError",
    "NotPicklableError",
    "ReadOnlyError",
    "TimedOutError",
    "UnsupportedError",
]


class AquiferError(OSError):
    """Any failure of Aquifer: `errno`, `strerror`, `filename` (or None), and `offset`.

    `offset` is the first byte concerned, counted from the beginning of the file or device, or None. The text says what to
    do next.
    """

    offset: int | None

    def __init__(self, errno: int, text: str, *, path: str | None = None, offset: int | None = None) -> None:
        super().__init__(errno, text)
        self.filename = path
        self.offset = offset

    def __str__(self) -> str:
        # The text names the path and the offset itself.
        return str(self.strerror)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (type(self), self.errno, self.strerror, self.filename, self.offset)


def _rebuilt(kind: type[AquiferError], errno: int, text: str, path: str | None, offset: int | None) -> AquiferError:
    return kind(errno, text, path=path, offset=offset)


class NotFoundError(AquiferError, FileNotFoundError):
    """Nothing has this name, or there is nothing at the path."""


class AlreadyExistsError(AquiferError, FileExistsError):
    """The name is taken, or a directory is not empty."""


class AccessDeniedError(AquiferError, PermissionError):
    """Not allowed: permissions, or a wrong key."""


class ReadOnlyError(AquiferError, PermissionError):
    """Opened or mapped for reading only, or on read-only media."""


class BusyError(AquiferError):
    """In use elsewhere; it works once the other use has ended."""


class TimedOutError(AquiferError, TimeoutError):
    """Another process holds what is needed, and makes no progress; or a server did not answer within the timeout."""


class InterruptedCallError(AquiferError, InterruptedError):
    """A signal ended a wait; try again."""


class InvalidInputError(AquiferError, ValueError):
    """The arguments are wrong: a range, a size, an option, a name, a file of another kind."""


class IsDirectoryError(InvalidInputError, IsADirectoryError):
    """A directory of a pool, where something else is needed."""


class NotDirectoryError(InvalidInputError, NotADirectoryError):
    """Something in a pool that is no directory, where one is needed."""


class NotPicklableError(InvalidInputError, pickle.PicklingError):
    """What would be pickled contains secrets; they are not sent to other processes."""


class UnsupportedError(AquiferError):
    """Not possible here: with this device, file system, kernel or version of the format."""


class NoSpaceError(AquiferError):
    """The device, file system, pool, object or heap is full."""


class LimitReachedError(AquiferError):
    """A limit of this process or machine is reached: memory, mappings, pins. Release some, or raise the limit."""


class FaultError(AquiferError):
    """Bytes could not be read or written: the file was truncated (errno ENODATA), or a transfer failed (EIO).

    `filename` and `offset` say where.
    """


class ChangedError(FaultError):
    """The object of a URL is not the version any more that was opened, or pickled; open it again."""


class DamagedError(AquiferError):
    """The bytes on the media are inconsistent."""


class NotDurableError(AquiferError):
    """Data written earlier may not be durable, and trying again does not make it so."""


class ForkedError(AquiferError):
    """The process is a fork of the one that opened it; open it again here."""
