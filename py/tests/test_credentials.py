"""Credentials that a function of the program supplies."""

from __future__ import annotations

import itertools
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest

import aquifer
from object_server import ObjectServer
from test_remote import wait_until

KEY = "bucket/table.bin"
URL = f"s3://{KEY}"
SHAPE = (4096, 64)
CONTENT = np.arange(SHAPE[0] * SHAPE[1], dtype=np.int64).reshape(SHAPE)

Function = Callable[[], dict[str, Any]]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.delenv("AQUIFER_TIER", raising=False)
    with ObjectServer() as server:
        server.put(KEY, CONTENT.tobytes())
        yield server


def open_array(server: ObjectServer, function: Function | str, **options: Any) -> aquifer.memmap:
    given = {"endpoint_url": server.endpoint, "credentials": function, **options}
    return aquifer.memmap(URL, np.int64, shape=SHAPE, budget="16MiB", storage_options=given)


def named(server: ObjectServer) -> list[str]:
    """The access keys of requests, in their order."""
    found = [re.search("Credential=([^/]*)/", headers["authorization"]) for headers in server.headers]
    return [one[1] for one in found if one]


def of_a_module() -> dict[str, Any]:
    return {"access_key_id": "module", "secret_access_key": "hunter2"}


def test_requests_are_signed_with_them(server: ObjectServer) -> None:
    calls = []

    def function() -> dict[str, Any]:
        calls.append(threading.current_thread())
        return {"access_key_id": "name", "secret_access_key": "hunter2", "session_token": "session", "expiration": None}

    array = open_array(server, function)
    assert (array.take([5, 4000]) == CONTENT[[5, 4000]]).all()
    assert len(calls) == 1 and set(named(server)) == {"name"}
    assert all(headers["x-amz-security-token"] == "session" for headers in server.headers)
    assert "hunter2" not in repr(array.stats())
    rows = aquifer.Rows(URL, np.int64, 64, storage_options={"endpoint_url": server.endpoint, "credentials": function})
    assert (rows[7] == CONTENT[7]).all()
    bearer = {"credentials": lambda: {"token": "hunter3"}, "endpoint_url": server.endpoint}
    assert aquifer.memmap(f"gs://{KEY}", np.int64, shape=SHAPE, storage_options=bearer)[3, 3] == CONTENT[3, 3]
    assert server.headers[-1]["authorization"] == "Bearer hunter3"


def test_two_functions_are_two(server: ObjectServer) -> None:
    class Function:
        def __init__(self, name: str) -> None:
            self.name = name

        def __repr__(self) -> str:
            return "the same"

        def __call__(self) -> dict[str, Any]:
            return {"access_key_id": self.name, "secret_access_key": "x"}

    arrays = [open_array(server, Function(name)) for name in ("first", "second")]
    for array in arrays:
        assert array[9, 9] == CONTENT[9, 9]
    assert set(named(server)) == {"first", "second"}


def test_opening_again_takes_those_of_the_environment_now(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(name: str) -> aquifer.memmap:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", name)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
        return aquifer.memmap(URL, np.int64, shape=SHAPE, budget="16MiB", storage_options={"endpoint_url": server.endpoint})

    old = opened("first")
    assert (old.take([5]) == CONTENT[5]).all() and named(server)[-1] == "first"
    new = opened("second")
    assert (new.take([2000]) == CONTENT[2000]).all() and named(server)[-1] == "second"
    again = opened("second")
    # They are one object, of which the page is there.
    before = len(server.headers)
    assert (again.take([2000]) == CONTENT[2000]).all() and len(server.headers) == before + 1


@pytest.mark.parametrize("form", ["datetime", "text", "seconds"])
def test_they_are_replaced_before_they_expire(server: ObjectServer, form: str) -> None:
    numbers = itertools.count()
    calls = 0

    def function() -> dict[str, Any]:
        nonlocal calls
        calls += 1
        end = datetime.now(timezone.utc) + timedelta(seconds=4)
        forms = {"datetime": end, "text": end.isoformat(), "seconds": end.timestamp()}
        return {"access_key_id": f"name{next(numbers)}", "secret_access_key": "x", "expiration": forms[form]}

    array = open_array(server, function)
    assert array[0, 0] == 0 and named(server)[0] == "name0"
    # By a thread, also when nothing is read.
    wait_until(lambda: calls > 1)
    rows = iter(range(SHAPE[0] - 1, 0, -8))

    def is_replaced() -> bool:
        row = next(rows)
        assert (array.take([row]) == CONTENT[row]).all()
        return named(server)[-1] != "name0"

    wait_until(is_replaced)


def test_a_function_that_fails(server: ObjectServer) -> None:
    key = {"access_key_id": "hunter2", "secret_access_key": "hunter2"}
    past = datetime.now(timezone.utc) - timedelta(seconds=1)

    def raises() -> dict[str, Any]:
        raise RuntimeError("hunter2")

    functions: list[Any] = [
        raises,
        dict,
        lambda: None,
        lambda: {"access_key_id": "hunter2"},
        lambda: {"AccessKeyId": "hunter2", "SecretAccessKey": "hunter2"},
        lambda: {**key, "token": "hunter2"},
        lambda: {"token": "hunter2"},
        lambda: {**key, "expiration": past},
        lambda: {**key, "expiration": datetime.now()},
        lambda: {**key, "expiration": "hunter2"},
        lambda: {**key, "expiration": float("nan")},
    ]
    for function in functions:
        with pytest.raises(aquifer.AccessDeniedError, match="credentials") as raised:
            open_array(server, function)
        assert raised.value.filename == URL and raised.value.__cause__ is raised.value.__context__ is None
        assert "hunter2" not in str(raised.value)
    for wrong in ["no_module", "os:no_such_function", 7]:
        with pytest.raises(aquifer.InvalidInputError, match="is no function"):
            open_array(server, wrong)  # type: ignore[arg-type]


def test_a_failure_later_keeps_the_old_ones(server: ObjectServer) -> None:
    failures = 0

    def function() -> dict[str, Any]:
        nonlocal failures
        if array is not None:
            failures += 1
            raise RuntimeError("hunter2")
        return {"access_key_id": "name", "secret_access_key": "x", "expiration": time.time() + 12}

    array: aquifer.memmap | None = None
    array = open_array(server, function, timeout=60)
    wait_until(lambda: failures > 0)
    assert array[7, 7] == CONTENT[7, 7]
    wait_until(lambda: failures > 1)

    def is_refused() -> bool:
        try:
            array.take([next(rows)])
        except aquifer.AccessDeniedError as error:
            assert "hunter2" not in str(error)
            return True
        return False

    # They have an end.
    rows = iter(range(SHAPE[0] - 1, 0, -1))
    wait_until(is_refused)


def test_a_function_that_takes_long(server: ObjectServer) -> None:
    go_on = threading.Event()

    def function() -> dict[str, Any]:
        go_on.wait(60)
        return of_a_module()

    with pytest.raises(aquifer.TimedOutError):
        open_array(server, function, timeout=0.5)
    go_on.set()
    assert open_array(server, function)[1, 1] == CONTENT[1, 1]


def test_threads_share_them(server: ObjectServer) -> None:
    calls = 0

    def function() -> dict[str, Any]:
        nonlocal calls
        calls += 1
        time.sleep(0.01)
        return {"access_key_id": "name", "secret_access_key": "x", "expiration": time.time() + 6}

    arrays = [open_array(server, function) for _ in range(2)]
    wanted = np.random.default_rng(1).integers(0, SHAPE[0], (64, 32))

    def read(place: int) -> None:
        rows = wanted[place]
        assert (arrays[place % 2].take(rows) == CONTENT[rows]).all()
        assert arrays[place % 2][rows[0], 3] == CONTENT[rows[0], 3]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(64)))
    wait_until(lambda: calls > 2)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(64)))


def test_a_load_that_holds_the_lock_does_not_wait_for_the_function(server: ObjectServer) -> None:
    server.put(KEY, bytes(256 << 20))
    program = f"""
import ctypes, time
import numpy as np
import aquifer
ends = []
def function():
    ends.append(time.time() + 10)
    return {{"access_key_id": "name", "secret_access_key": "x", "expiration": ends[-1]}}
options = {{"endpoint_url": {server.endpoint!r}, "credentials": function, "timeout": 20}}
array = aquifer.memmap({URL!r}, np.uint8, budget="64MiB", storage_options=options, advice="random")
# It keeps the interpreter's lock, as C code does.
load = ctypes.PyDLL(None).memcmp
load.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
address = array.__array_interface__["data"][0]
place, end = 0, ends[0]
# Half of their life over, and new ones here.
while time.time() < end - 4:
    assert load(address + place, address + place + 1, 1) == 0
    place = (place + 4096) % (len(array) - 4096)
assert len(ends) > 1
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_a_load_that_holds_the_lock_over_their_end_tries_the_expired_ones(server: ObjectServer) -> None:
    server.put(KEY, bytes(16 << 20))
    program = f"""
import ctypes, time
import numpy as np
import aquifer
end = 0
def function():
    global end
    end = time.time() + 6
    return {{"access_key_id": "name", "secret_access_key": "x", "expiration": end}}
options = {{"endpoint_url": {server.endpoint!r}, "credentials": function, "timeout": 8}}
array = aquifer.memmap({URL!r}, np.uint8, budget="64MiB", storage_options=options, advice="random")
load = ctypes.PyDLL(None).memcmp
load.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
address = array.__array_interface__["data"][0]
input()
print(end, flush=True)
# Two pages, one after the other, in one call that keeps the interpreter's lock.
assert load(address, address + (8 << 20), 1) == 0
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        wait_until(lambda: len(server.headers) > 0)
        server.hold(0)
        child.stdin.write("\n")  # type: ignore[union-attr]
        child.stdin.flush()  # type: ignore[union-attr]
        end = float(child.stdout.readline())  # type: ignore[union-attr]
        wait_until(lambda: time.time() > end + 1)
        server.released.set()
        _, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors


def test_they_are_pickled_by_name(server: ObjectServer) -> None:
    array = open_array(server, of_a_module)
    pickled = pickle.dumps(array)
    assert b"hunter2" not in pickled and f"{__name__}:of_a_module".encode() in pickled
    again = pickle.loads(pickled)
    assert again[3, 4] == CONTENT[3, 4] and pickle.loads(pickle.dumps(again))[3, 5] == CONTENT[3, 5]
    assert set(named(server)) == {"module"}
    assert open_array(server, f"{__name__}:of_a_module")[3, 4] == CONTENT[3, 4]
    secret = "hunter2"
    for function in (lambda: {**of_a_module(), "session_token": secret}, type("Of", (), {"__call__": lambda self: of_a_module()})()):
        with pytest.raises(aquifer.NotPicklableError, match="module:function"):
            pickle.dumps(open_array(server, function))


def test_files_of_fsspec(server: ObjectServer) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed: python3 -m pip install s3fs")
    from aquifer._aqcache import CachedFileSystem

    target = {"anon": True, "endpoint_url": server.endpoint, "client_kwargs": {"region_name": "us-east-1"}}

    def opened(function: Function) -> CachedFileSystem:
        return CachedFileSystem("s3", target, budget="16MiB", storage_options={"anonymous": False, "credentials": function})

    try:
        system = opened(of_a_module)
        assert system.cat_file(KEY, 8, 16) == CONTENT.tobytes()[8:16] and set(named(server)) == {"module"}
        pickled = pickle.dumps(system)
        assert b"of_a_module" in pickled and b"hunter2" not in pickled
        CachedFileSystem.clear_instance_cache()
        assert pickle.loads(pickled).cat_file(KEY, 0, 8) == CONTENT.tobytes()[:8]
        assert "of_a_module" in system.to_json()
        with pytest.raises(aquifer.NotPicklableError):
            pickle.dumps(opened(lambda: of_a_module()))
    finally:
        CachedFileSystem.clear_instance_cache()
