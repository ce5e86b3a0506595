"""Errors of Aquifer as exceptions."""

import errno
import pickle

import pytest

import aquifer
from aquifer import _native


def test_an_error_has_errno_path_and_text() -> None:
    with pytest.raises(aquifer.NotFoundError) as raised:
        _native._fail("missing")
    error = raised.value
    assert isinstance(error, FileNotFoundError) and isinstance(error, aquifer.AquiferError)
    assert (error.errno, error.filename, error.offset) == (errno.ENOENT, "/no/such/pool", None)
    assert "/no/such/pool" in str(error)


def test_errors_can_be_pickled() -> None:
    error = aquifer.FaultError(errno.EIO, "cannot read", path="/data", offset=4096)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is aquifer.FaultError
    assert (again.errno, str(again), again.filename, again.offset) == (errno.EIO, "cannot read", "/data", 4096)


def test_the_systems_errors_are_pythons() -> None:
    with pytest.raises(OSError) as raised:
        _native._fail("system")
    assert raised.value.errno == errno.EMFILE


def test_a_fork_is_told_apart() -> None:
    with pytest.raises(aquifer.ForkedError):
        _native._fail("forked")


def test_a_panic_is_an_exception() -> None:
    with pytest.raises(BaseException, match="asked to panic: here") as raised:
        _native._fail("here")
    assert type(raised.value).__name__ == "PanicException"
