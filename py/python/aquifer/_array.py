"""Persistent arrays: NumPy arrays in objects of a pool.

An array is an object whose content is a file in NumPy's format `.npy`: a header padded to a page, then the elements. So the
elements are page-aligned, and what reads such files reads an array. The header is written when the object is created and never
changed. What it says is believed only after it was checked, because any process that can write to the pool can write anything
there: a header has at most 4,096 bytes, nothing in it is executed, its brackets are counted before Python parses it, its data type
may not refer to Python objects, and its elements lie inside the object.
"""

from __future__ import annotations

import ast
import errno
import math
import re
import struct
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.lib import format as npy

from . import _native
from ._cache import Stats
from ._errors import AlreadyExistsError, InvalidInputError, NotFoundError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from ._pool import Pool

__all__ = ["Array", "ArrayInfo", "ArrayMismatchError", "NotAnArrayError"]

HEADER_BYTES = 4096
# NumPy 1 has arrays of up to 32 dimensions.
MAX_DIMENSIONS = 32
MAX_BYTES = 1 << 62
# Deeper than any data type of a program, and harmless to Python's parser.
MAX_BRACKETS = 32
_MAGIC = b"\x93NUMPY\x03\x00"  # version 3.0: the header is UTF-8
_STRINGS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_PLAIN = re.compile(r"(?:True|False|[\d\s()\[\]{},:])*", re.ASCII)


class NotAnArrayError(InvalidInputError):
    """The object of this name is not an array, or its header is damaged."""


class ArrayMismatchError(InvalidInputError):
    """The array has another shape or data type than the program expects."""


@dataclass(frozen=True)
class ArrayInfo:
    """An array of a pool, as `Pool.arrays` lists it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: str
    #: The address of its first element, in each process that attaches it.
    address: int
    #: `D` not attached, `R` attached for reading, `W` for writing; `P` and `C` while a `psync` is in progress.
    state: str
    needs_read_key: bool
    needs_write_key: bool
    #: Nanoseconds since 1970.
    created_ns: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Header:
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _invalid(text: str) -> InvalidInputError:
    return InvalidInputError(errno.EINVAL, text)


def key_bytes(key: str | bytes | None) -> bytes | None:
    return key.encode() if isinstance(key, str) else key


def _encode(header: _Header) -> bytes:
    """The header of a new array."""
    dtype = header.dtype
    if dtype.hasobject:
        raise _invalid(f"an array of {dtype} would refer to objects of this process; use a data type of plain values")
    if dtype.itemsize == 0:
        raise _invalid(f"elements of {dtype} have no bytes; give their length, as in 'S8'")
    if len(header.shape) > MAX_DIMENSIONS or any(length < 0 for length in header.shape):
        raise _invalid(f"the shape is {header.shape}; it has up to {MAX_DIMENSIONS} lengths, none of them negative")
    if not _has_size(header):
        raise _invalid(f"the shape is {header.shape}; an array has up to {MAX_BYTES} bytes")
    try:
        description = npy.dtype_to_descr(dtype)
        text = repr({"descr": description, "fortran_order": header.order == "F", "shape": header.shape})
        room = HEADER_BYTES - len(_MAGIC) - 4
        content = _MAGIC + struct.pack("<I", room) + text.encode().ljust(room - 1) + b"\n"
        fits = len(content) == HEADER_BYTES and _decode(content, HEADER_BYTES + header.nbytes) == header
    except ValueError:
        fits = False
    if not fits:
        raise _invalid(
            f"the data type {dtype} cannot be stored: it is one of another library, or its description is too long, or its "
            "fields overlap; store its bytes as another type, and use `view`"
        )
    return content


def _decode(content: bytes, size_bytes: int) -> _Header:
    """What a header says, or `ValueError`. The content is anybody's."""
    start = len(_MAGIC) + 4
    if len(content) < HEADER_BYTES or not content.startswith(_MAGIC):
        raise ValueError("it does not begin with the header of an array")
    if struct.unpack("<I", content[len(_MAGIC) : start])[0] != HEADER_BYTES - start:
        raise ValueError("its header is not one page")
    text = content[start:HEADER_BYTES].decode()
    # What is left without the strings is brackets, commas, numbers without signs, True and False.
    rest = _STRINGS.sub("", text)
    if _PLAIN.fullmatch(rest) is None or _depth(rest) > MAX_BRACKETS:
        raise ValueError("its header is not that of an array")
    try:
        found = ast.literal_eval(text.strip())
        dtype = npy.descr_to_dtype(found["descr"])
        shape, fortran_order = found["shape"], found["fortran_order"]
    except Exception as error:
        raise ValueError(f"its header cannot be read: {error}") from None
    if set(found) != {"descr", "fortran_order", "shape"} or not isinstance(fortran_order, bool):
        raise ValueError("its header has other keys than that of an array")
    if not isinstance(shape, tuple) or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"its shape is {shape!r}")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"it has {len(shape)} dimensions, which is more than {MAX_DIMENSIONS}")
    if not isinstance(dtype, np.dtype) or dtype.hasobject or dtype.itemsize == 0 or dtype.subdtype is not None:
        raise ValueError(f"its data type is {dtype!r}")
    header = _Header(shape, dtype, "F" if fortran_order else "C")
    if not _has_size(header):
        raise ValueError(f"its shape is {shape!r}")
    if header.nbytes > size_bytes - HEADER_BYTES:
        raise ValueError(f"its elements take {header.nbytes} bytes, which it does not have")
    return header


def _has_size(header: _Header) -> bool:
    # NumPy multiplies the lengths of empty arrays, too.
    return math.prod(length for length in header.shape if length > 0) * header.dtype.itemsize <= MAX_BYTES


def _depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _read(name: str, content: bytes, size_bytes: int) -> _Header:
    try:
        return _decode(content, size_bytes)
    except ValueError as error:
        raise NotAnArrayError(errno.EINVAL, f"the object {name!r} is no array: {error}") from None


class Attached:
    """An attached object, with what its arrays share. It is attached as long as something refers to its memory: an array, or
    also a plain array or `memoryview` of it."""

    def __init__(self, pool: Pool, native: _native.Object, name: str, header: _Header, key: bytes | None) -> None:
        self.pool = pool
        self.memory = weakref.ref(native)
        self.name = name
        self.header = header
        self.key = key
        self.writable = native.is_writable
        self.transaction = Lock()

    @property
    def native(self) -> _native.Object:
        """For calls of its arrays, which refer to the memory."""
        native = self.memory()
        assert native is not None
        return native

    def array(self, native: _native.Object) -> Array:
        # By way of `frombuffer`, which holds the buffer as long as an array refers to the memory: `ndarray` gives it back
        # at once, and only refers to the object.
        memory = np.frombuffer(memoryview(native), np.uint8)[HEADER_BYTES : HEADER_BYTES + self.header.nbytes]
        array = np.ndarray.__new__(
            Array,
            self.header.shape,
            self.header.dtype,
            memory,
            order="F" if self.header.order == "F" else "C",
        )
        array._attached = self
        return array


class Array(np.ndarray[Any, Any]):
    """A persistent array: a NumPy array in a pool. `Pool.array` makes one.

    Views of it (slices, `reshape`) are persistent arrays as well, and `psync` of a view is that of the whole array. Copies,
    and results of arithmetic, are ordinary arrays.

    Its memory is not there in a forked child: an access ends the child by SIGSEGV, and methods raise `ForkedError`.
    Open the pool and attach the array there again. Pickling it, as for `multiprocessing`, copies its elements.
    """

    _attached: Attached | None = None

    def __array_finalize__(self, parent: object) -> None:
        # A copy is made from an array as well, and is not in the pool.
        attached = getattr(parent, "_attached", None)
        if attached is not None and np.may_share_memory(self, cast("Array", parent)):
            self._attached = attached

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        if self is array or (isinstance(array, Array) and array._attached is not None):
            return array  # the result was stored in it: `out=`
        plain = np.asarray(array)
        return plain[()] if return_scalar or plain.shape == () else plain

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if type(found) is Array and found._attached is None:
            return found.view(np.ndarray)
        return found

    def __reduce__(self) -> Any:
        return np.array(self, subok=False).__reduce__()

    def _there(self) -> Attached:
        if self._attached is None:
            raise ValueError("this array is not in a pool: it is a copy of one that is")
        return self._attached

    @property
    def name(self) -> str:
        """The name of the array in its pool."""
        return self._there().name

    @property
    def pool(self) -> Pool:
        """Its pool."""
        return self._there().pool

    def psync(self) -> None:
        """Makes all stores to the array so far durable, atomically: after a crash it has the elements of this `psync`, or,
        if it had not returned, possibly those of the one before.

        It takes time for the pages that were stored to, not for the whole array, and one write and sync of the media.
        Without the interpreter's lock: no other thread may store to the array meanwhile. If one does, its stores may be
        durable in part, or be lost if copies of pages exceed the shadow budget.

        Raises
        ------
        NoSpaceError
            The changes are too large for the log, and the pool has no room to put them aside. Nothing is forgotten: make
            room, and call it again.
        NotDurableError
            The media failed. The pool is read-only from then on, and after a restart the array is as of this `psync` or
            the one before.
        ReadOnlyError
            The array is attached for reading.
        """
        self._writer().native.psync()

    def rollback(self) -> None:
        """Undoes all stores to the array since its last `psync`. No other thread may use the array meanwhile.

        Raises
        ------
        ReadOnlyError, NotDurableError
        """
        self._writer().native.rollback()

    def _writer(self) -> Attached:
        attached = self._there()
        if not attached.writable:
            from ._errors import ReadOnlyError

            raise ReadOnlyError(errno.EROFS, f"the array {attached.name!r} is attached for reading")
        return attached

    @contextmanager
    def transaction(self) -> Iterator[Array]:
        """A block whose stores become durable at its end, all at once; if it raises an exception, they are undone.

        What was stored before the block becomes durable when it begins. Blocks cannot be nested, nor run in several
        threads at once.

        >>> import aquifer, tempfile
        >>> directory = tempfile.TemporaryDirectory()
        >>> pool = aquifer.Pool.create(f"{directory.name}/data.pool", "16MiB")
        >>> balances = pool.array("balances", shape=2, dtype="i8")
        >>> try:
        ...     with balances.transaction():
        ...         balances[0] -= 5
        ...         raise RuntimeError("something went wrong")
        ... except RuntimeError:
        ...     pass
        >>> int(balances[0])
        0

        Raises
        ------
        RuntimeError
            Another transaction of the array is in progress.
        """
        with transaction(self.pool, [self._writer()]):
            yield self

    def stats(self) -> Stats:
        """Figures of its psyncs: `psyncs`, `psync_pages`, `psync_bytes`; and `shadow_bytes`, the memory of its private
        copies of pages. A table in a notebook."""
        return Stats(self._there().native.stats())


def natives_of(attached: Iterable[Attached]) -> list[_native.Object]:
    """Those that are attached still."""
    return [native for native in (one.memory() for one in attached) if native is not None]


@contextmanager
def transaction(pool: Pool, attached: Iterable[Attached]) -> Iterator[None]:
    """One transaction of several arrays."""
    # In one order, so that two threads do not wait for each other's failure.
    ordered = sorted(attached, key=lambda one: one.name)
    begun: list[Attached] = []
    try:
        for one in ordered:
            if not one.transaction.acquire(blocking=False):
                raise RuntimeError(f"a transaction of the array {one.name!r} is in progress")
            begun.append(one)
        natives = natives_of(ordered)
        pool._native.psync_many(natives)
        try:
            yield
        except BaseException:
            for native in natives:
                native.rollback()
            raise
        pool._native.psync_many(natives)
    finally:
        for one in begun:
            one.transaction.release()


def _expected(shape: int | Sequence[int] | None, dtype: DTypeLike | None) -> tuple[tuple[int, ...] | None, np.dtype[Any] | None]:
    lengths: tuple[int, ...] | None = None
    if shape is not None:
        lengths = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(length) for length in shape)
    return lengths, None if dtype is None else np.dtype(dtype)


def _compare(name: str, found: _Header, shape: tuple[int, ...] | None, dtype: np.dtype[Any] | None) -> None:
    if shape is not None and shape != found.shape:
        text = f"the array {name!r} has the shape {found.shape}, not {shape}"
        raise ArrayMismatchError(errno.EINVAL, text)
    if dtype is not None and dtype != found.dtype:
        text = f"the array {name!r} has the data type {found.dtype}, not {dtype}"
        raise ArrayMismatchError(errno.EINVAL, text)


def attach(
    pool: Pool,
    name: str,
    shape: int | Sequence[int] | None,
    dtype: DTypeLike | None,
    *,
    mode: str | None,
    order: str,
    key: str | bytes | None,
    read_key: str | bytes | None,
    write_key: str | bytes | None,
    shadow_budget: int | None,
) -> Array:
    """`Pool.array`."""
    if mode not in (None, "r", "r+", "x"):
        raise ValueError(f"the mode is {mode!r}; it is 'r', 'r+', 'x' or None")
    if order not in ("C", "F"):
        raise ValueError(f"the order is {order!r}; it is 'C' or 'F'")
    lengths, expected = _expected(shape, dtype)
    # Raises in a forked child: there a thread of the parent may have the lock.
    pool_writable = pool.writable
    writable = mode in ("r+", "x") or (mode is None and pool_writable)
    keys = [key_bytes(one) for one in (key, read_key, write_key)]
    # Of a new array, the key that permits writing.
    given = next((one for one in (keys[0], keys[2], keys[1]) if one is not None), None)

    with pool._attaching:
        there = pool._attached.get(name)
        native = None if there is None else there.memory()
        if there is not None and native is not None and there.key == given and there.writable == writable and mode != "x":
            _compare(name, there.header, lengths, expected)
            return there.array(native)

        if mode in (None, "x") and lengths is not None and writable:
            new = _Header(lengths, np.dtype(np.float64) if expected is None else expected, order)
            if mode == "x" or not pool._native.has_object(name):
                content = _encode(new)
                try:
                    pool._native.create_object(name, HEADER_BYTES + new.nbytes, content, keys[1], keys[2])
                except AlreadyExistsError:
                    # Another process was first.
                    if mode == "x":
                        raise
        elif mode == "x":
            raise InvalidInputError(errno.EINVAL, f"the new array {name!r} needs a shape")
        try:
            native = pool._native.attach(name, writable, given, shadow_budget)
        except NotFoundError as error:
            if mode is None and lengths is None:
                text = f"there is no array {name!r}; give its shape to create it"
                raise NotFoundError(errno.ENOENT, text) from error
            raise
        with memoryview(native) as memory:
            header = _read(name, bytes(memory[:HEADER_BYTES]), len(memory))
        _compare(name, header, lengths, expected)
        pool._attached = {other: one for other, one in pool._attached.items() if one.memory() is not None}
        attached = pool._attached[name] = Attached(pool, native, name, header, given)
        return attached.array(native)


def _found(pool: Pool) -> Iterator[tuple[dict[str, Any], bytes]]:
    yield from pool._native.objects(HEADER_BYTES)


def arrays(pool: Pool) -> list[ArrayInfo]:
    """`Pool.arrays`."""
    infos = []
    for found, content in _found(pool):
        try:
            header = _decode(content, found["size_bytes"])
        except ValueError:
            continue
        infos.append(
            ArrayInfo(
                name=found["name"],
                shape=header.shape,
                dtype=header.dtype,
                order=header.order,
                address=found["address"] + HEADER_BYTES,
                state=found["state"],
                needs_read_key=found["needs_read_key"],
                needs_write_key=found["needs_write_key"],
                created_ns=found["created_ns"],
            )
        )
    return infos


def check_is_array(pool: Pool, name: str) -> None:
    """Fails for objects of other kinds: they belong to other programs."""
    found = pool._native.object(name, HEADER_BYTES)
    if found is None:
        raise NotAnArrayError(errno.EINVAL, f"the object {name!r} holds a heap, no array")
    info, content = found
    _read(name, content, info["size_bytes"])
