"""Arrays and rows of objects on a server: what they read, their errors, their pickles."""

from __future__ import annotations

import gc
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aquifer
from object_server import ObjectServer
from test_processes import in_child, interrupted_after

Table = npt.NDArray[np.int64]
KEY = "bucket/dir/table.bin"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.delenv("AQUIFER_TIER", raising=False)
    with ObjectServer() as server:
        yield server


@pytest.fixture
def content() -> Table:
    return np.arange(4096 * 64, dtype=np.int64).reshape(4096, 64)


@pytest.fixture
def url(server: ObjectServer, content: Table) -> str:
    return server.put(KEY, content.tobytes())


def open_array(url: str, **options: Any) -> aquifer.memmap:
    return aquifer.memmap(url, np.int64, shape=(4096, 64), budget="16MiB", **options)


def test_an_object_is_an_array(server: ObjectServer, url: str, content: Table) -> None:
    array = open_array(url)
    assert isinstance(array, aquifer.memmap) and isinstance(array, np.ndarray)
    assert (array.shape, array.dtype, array.mode, array.filename) == ((4096, 64), np.dtype(np.int64), "r", url)
    assert array[7, 3] == content[7, 3] and type(array[7, 3]) is np.int64
    assert (array[5] == content[5]).all() and (array[100:300:7] == content[100:300:7]).all()
    assert (array[:, 3] == content[:, 3]).all() and (array[-1, ::-1] == content[-1, ::-1]).all()
    assert (array[[5, -1]] == content[[5, -1]]).all() and (array[content[:, 0] % 3 == 0] == content[content[:, 0] % 3 == 0]).all()
    assert (array[[1, 2], [3, 4]] == content[[1, 2], [3, 4]]).all() and array[..., 3].shape == (4096,)
    assert array[None, 3].shape == (1, 64) and array[3:4][0, 0] == content[3, 0]
    assert array.sum() == content.sum() and np.concatenate([array, array]).shape == (8192, 64)
    assert [int(row[0]) for row in array[:20]] == content[:20, 0].tolist()
    whole = aquifer.memmap(url, np.int64)
    assert whole.shape == (content.size,) and whole[-1] == content[-1, -1]
    assert (aquifer.memmap(url, np.int64, offset=8)[:2] == [1, 2]).all()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_batches_are_few_requests(server: ObjectServer, url: str, content: Table) -> None:
    array = open_array(url)
    rows = np.random.default_rng(1).integers(-4096, 4096, 2000)
    server.forget()
    assert (array.take(rows) == content[rows]).all()
    assert 0 < server.requests(KEY) < 200
    before = server.requests(KEY)
    assert (array.take(rows) == content[rows]).all() and (array[rows[3]] == content[rows[3]]).all()
    assert server.requests(KEY) == before, "they are in memory"
    stats = array.stats()
    assert stats["requests"] == before + 1 and stats["received_bytes"] >= server.sent_bytes(KEY)
    assert stats["cost"] == pytest.approx(stats["requests"] * 0.4e-6) and stats["path"] == url


def test_slices_are_read_when_they_are_made(server: ObjectServer, url: str, content: Table) -> None:
    array = open_array(url)
    part = array[1000:2000]
    server.forget()
    assert part.sum() == content[1000:2000].sum() and np.asarray(part)[3, 3] == content[1003, 3]
    assert server.requests(KEY) == 0
    first, last = array[10], array[4000]
    server.statuses[KEY] = 503
    assert first[3] == content[10, 3] and last[3] == content[4000, 3]


def test_prefetches_come(server: ObjectServer, url: str) -> None:
    array = open_array(url)
    array.prefetch(np.arange(64))
    wait_until(lambda: array.stats()["delivered_bytes"] >= 64 * 512)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_rows_of_an_object(server: ObjectServer, url: str, content: Table) -> None:
    rows = aquifer.Rows(url, np.int64, 64, budget="1MiB")
    assert rows.shape == (4096, 64) and rows.filename == url and url in repr(rows)
    wanted = np.random.default_rng(1).integers(-4096, 4096, 500)
    assert (rows.take(wanted) == content[wanted]).all() and (rows[10:20] == content[10:20]).all()
    rows.prefetch([3])
    stats = rows.stats()
    assert stats["requests"] > 0 and stats["hits"] + stats["misses"] >= 500 and stats["cost"] > 0
    assert (aquifer.Rows(url, np.int64, 64, offset=8)[0] == np.arange(1, 65)).all()
    with pickle.loads(pickle.dumps(rows)) as again:
        assert again.shape == rows.shape and (again.take([5]) == content[[5]]).all()


@pytest.mark.parametrize("mode", ["r+", "w+", "c", "readwrite"])
def test_an_object_is_only_read(url: str, mode: str) -> None:
    with pytest.raises(aquifer.ReadOnlyError, match="can only be read"):
        aquifer.memmap(url, np.int64, mode)


def test_arguments_that_do_not_fit(url: str, path: str, table: Table) -> None:
    with pytest.raises(ValueError, match="use a smaller shape"):
        aquifer.memmap(url, np.int64, shape=10**9)
    with pytest.raises(ValueError, match="for files"):
        aquifer.memmap(url, np.int64, backend="kernel")
    calls: list[Callable[[], object]] = [
        lambda: aquifer.memmap(path, np.int64, "r", storage_options={}),
        lambda: aquifer.Rows(path, np.int64, storage_options={}),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="for URLs"):
            call()
    wrong_options: list[dict[str, Any]] = [
        {"timeout": 0},
        {"timeout": -1.0},
        {"region": "eu"},
        {"anon": True},
        {"unversioned": "false"},
        {"headers": {}},
        {"no_such": "x"},
    ]
    for wrong in wrong_options:
        with pytest.raises(aquifer.InvalidInputError):
            aquifer.memmap(url, np.int64, storage_options=wrong)
    for wrong_url in ["s3://bucket", "http://user:hunter2@127.0.0.1/x", "s3://b/k?hunter2"]:
        with pytest.raises(aquifer.InvalidInputError) as raised:
            aquifer.memmap(wrong_url, np.int64)
        assert "hunter2" not in str(raised.value) + str(raised.value.filename)


def test_storage_options_of_the_wrong_type_are_named(url: str) -> None:
    wrong: list[tuple[str, Any]] = [
        ("endpoint", 5),
        ("region", b"eu"),
        ("timeout", "soon"),
        ("timeout", [1]),
        ("retries", "many"),
        ("retries", -1),
        ("retries", 1.5),
        ("in_flight", 1 << 70),
        ("largest_request_bytes", "big"),
        ("largest_request_bytes", -1),
        ("buffer_bytes", 1.5),
        ("prices", (1,)),
        ("prices", "ab"),
        ("prices", 3),
        ("allow_http", "no"),
        ("credentials", 5),
    ]
    for name, value in wrong:
        with pytest.raises(aquifer.InvalidInputError, match=f"storage option '{name}'"):
            aquifer.memmap(url, np.int64, storage_options={name: value})
    for given in ([("timeout", 5)], "timeout", {5: 5}):
        with pytest.raises(aquifer.InvalidInputError, match="storage option"):
            aquifer.memmap(url, np.int64, storage_options=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "http", "https", "ftp"])
def test_secrets_with_a_slash_are_not_shown(scheme: str) -> None:
    for secret in ["hun/ter2", "hun?ter2", "hun#ter2", "12/ter2", "hun@ter2/ter2", "hun:ter2/"]:
        if scheme in ("http", "https") and secret[0] == "1":
            # A port, and a path that may have an @.
            continue
        for options in ({}, {"timeout": 0}):
            with pytest.raises(aquifer.InvalidInputError) as raised:
                aquifer.memmap(f"{scheme}://user:{secret}@bucket/key", np.int64, storage_options=options)
            assert "ter2" not in f"{raised.value} {raised.value.filename}", secret


def test_plain_addresses_are_shown() -> None:
    for plain in ["http://127.0.0.1:80/a@b", "s3://bucket/a@b", "https://[::1]:80/a", "https://host/a:b@c"]:
        with pytest.raises(aquifer.InvalidInputError) as raised:
            aquifer.memmap(plain, np.int64, storage_options={"timeout": 0})
        assert raised.value.filename == plain


def test_it_is_told_which_option_is_missing(server: ObjectServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    s3 = f"s3://{KEY}"
    with pytest.raises(aquifer.InvalidInputError, match="allow_http"):
        aquifer.memmap(s3, np.int64, storage_options={"endpoint": server.endpoint, "anonymous": True})
    without: dict[str, Any] = {"endpoint": server.endpoint, "allow_http": True, "retries": 0}
    # Instead of the address that machines of Amazon have.
    without["aws_metadata_endpoint"] = "http://127.0.0.1:1"
    with pytest.raises(aquifer.AquiferError, match="there are no credentials.*`anonymous`") as raised:
        aquifer.memmap(s3, np.int64, storage_options=without)
    assert "bytes" not in str(raised.value)


def test_errors_of_an_open_name_no_bytes(server: ObjectServer, url: str) -> None:
    for status in (400, 403, 500):
        server.statuses[KEY] = status
        with pytest.raises(aquifer.AquiferError) as raised:
            aquifer.memmap(url, np.int64, storage_options={"retries": 0})
        assert "bytes 0 to 1" not in str(raised.value)


def test_a_tier_in_the_home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert aquifer.Tier("~/given").path == str(tmp_path / "given")
    monkeypatch.setenv("AQUIFER_TIER", "~/named")
    assert aquifer.Tier().path == str(tmp_path / "named")
    assert sorted(os.listdir(tmp_path)) == ["given", "named"]


def test_the_interface_of_s3(server: ObjectServer, url: str, content: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    s3 = f"s3://{KEY}"
    anonymous = {"endpoint": server.endpoint, "allow_http": True, "anonymous": True}
    assert open_array(s3, storage_options=anonymous)[3, 3] == content[3, 3]
    as_s3fs = {"anon": True, "client_kwargs": {"endpoint_url": server.endpoint, "region_name": "eu-west-1"}}
    array = open_array(s3, storage_options=as_s3fs)
    assert array[3, 3] == content[3, 3] and array.filename == s3
    assert (pickle.loads(pickle.dumps(array))[5] == content[5]).all()
    assert all("authorization" not in headers for headers in server.headers)
    signed = {"key": "name", "secret": "hunter2", "endpoint_url": server.endpoint}
    array = open_array(s3, storage_options=signed)
    assert array[3, 3] == content[3, 3] and "Credential=name/" in server.headers[-1]["authorization"]
    with pytest.raises(aquifer.InvalidInputError, match="no_such"):
        open_array(s3, storage_options={"endpoint": server.endpoint, "no_such": "hunter2"})


def test_other_stores_are_opened(server: ObjectServer, url: str, content: Table, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x y.bin"
    path.write_bytes(content.tobytes())
    array = open_array(f"file://{tmp_path}/x%20y.bin")
    assert (array.take([3]) == content[[3]]).all() and array.stats()["requests"] == 0
    google = {"endpoint_url": server.endpoint, "anon": True}
    assert open_array(f"gs://{KEY}", storage_options=google)[3, 3] == content[3, 3]
    server.put(f"account/{KEY}", content.tobytes())
    azure = {"endpoint_url": f"{server.endpoint}/account", "anon": True, "account_name": "account"}
    assert open_array(f"az://{KEY}", storage_options=azure)[3, 3] == content[3, 3]


def test_what_cannot_be_opened(server: ObjectServer, url: str) -> None:
    with pytest.raises(aquifer.NotFoundError) as missing:
        aquifer.memmap(url + "2?sig=hunter2", np.int64)
    assert isinstance(missing.value, FileNotFoundError) and missing.value.filename == url + "2?…"
    assert "hunter2" not in str(missing.value)
    for status, kind in [(403, PermissionError), (401, aquifer.AccessDeniedError)]:
        server.statuses[KEY] = status
        with pytest.raises(kind, match="permission denied"):
            aquifer.memmap(url, np.int64)
    del server.statuses[KEY]
    server.unversioned = True
    with pytest.raises(aquifer.UnsupportedError, match="unversioned"):
        aquifer.memmap(url, np.int64)
    assert open_array(url, storage_options={"unversioned": True})[0, 1] == 1
    assert (pickle.loads(pickle.dumps(open_array(url, storage_options={"unversioned": True})))[0, :3] == [0, 1, 2]).all()


def test_an_object_that_changes(server: ObjectServer, url: str, content: Table) -> None:
    array, rows = open_array(url), aquifer.Rows(url, np.int64, 64)
    first = array[0]
    server.put(KEY, content[::-1].tobytes())
    calls: list[Callable[[], object]] = [
        lambda: array.take([4000]),
        lambda: array[4000],
        lambda: array[4000, 3],
        lambda: array.sum(),
        lambda: rows[7],
    ]
    for call in calls:
        with pytest.raises(aquifer.ChangedError, match="open it again") as raised:
            call()
        assert isinstance(raised.value, aquifer.FaultError) and raised.value.filename == url
    assert (first == content[0]).all() and (array.take([0]) == content[:1]).all(), "what is in memory stays"
    assert (open_array(url)[4000] == content[::-1][4000]).all()


def test_a_server_that_does_not_answer(server: ObjectServer, url: str) -> None:
    opened: list[aquifer.memmap] = []

    def is_open() -> bool:
        # A machine that is busy may take longer than the timeout.
        try:
            opened.append(open_array(url, storage_options={"timeout": 0.5}))
        except aquifer.TimedOutError:
            return False
        return True

    wait_until(is_open)
    array = opened[0]
    server.held[KEY] = threading.Event()
    calls: list[Callable[[], object]] = [lambda: array.take([9]), lambda: array[9]]
    for call in calls:
        with pytest.raises(aquifer.TimedOutError, match="raise the timeout") as raised:
            call()
        assert isinstance(raised.value, TimeoutError) and raised.value.filename == url


@pytest.fixture
def apart(content: Table, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """An object's URL, and the process of its server, which needs nothing of this one."""
    monkeypatch.delenv("AQUIFER_TIER", raising=False)
    content.tofile(tmp_path / "content")
    program = f"""
import pathlib, sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
from object_server import ObjectServer
with ObjectServer() as server:
    print(server.put({KEY!r}, pathlib.Path({str(tmp_path / "content")!r}).read_bytes()), flush=True)
    sys.stdin.read()
"""
    # It ends with this process, too.
    with subprocess.Popen([sys.executable, "-c", program], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip(), server
        finally:
            server.kill()


def test_a_server_that_ends(apart: tuple[str, subprocess.Popen[str]], content: Table) -> None:
    """Calls raise; nothing ends the process."""
    url, server = apart
    options: dict[str, Any] = {"storage_options": {"retries": 0}}
    array, rows = open_array(url, **options, advice="random"), aquifer.Rows(url, np.int64, 64, **options)
    known, flat = array[:8], aquifer.memmap(url, np.int64, budget="16MiB", **options)
    server.kill()
    server.wait()
    calls: list[Callable[[], object]] = [
        lambda: array.take([4000]),
        lambda: flat.read_ranges([4000 * 64], [64]),
        lambda: array[4000],
        lambda: array[3000:4000],
        lambda: array[4000, 3],
        lambda: array[[4000, 3]],
        lambda: array[content[:, 0] == content[4000, 0]],
        lambda: array + 1,
        lambda: array.sum(),
        lambda: np.concatenate([array, array]),
        lambda: list(array),
        lambda: pickle.loads(pickle.dumps(array)).take([4000]),
        lambda: rows.take([4000]),
        lambda: rows[4000],
        lambda: open_array(url, **options),
    ]
    for call in calls:
        with pytest.raises(OSError) as raised:
            call()
        assert isinstance(raised.value, aquifer.AquiferError) and raised.value.filename == url
    assert (known == content[:8]).all() and (array.take([5]) == content[5]).all()


def test_code_that_knows_nothing_of_the_server(apart: tuple[str, subprocess.Popen[str]], content: Table) -> None:
    """With zeros for an answer, of which the next call tells."""
    url, server = apart
    array = open_array(url, on_error="zeros", advice="random", storage_options={"retries": 0})
    plain = array.view(np.ndarray)
    # Loads with the interpreter's lock.
    assert plain[5, 5] == content[5, 5]
    array.check()
    assert pickle.loads(pickle.dumps(array))._source.made_of["on_error"] == "zeros"
    # Near the end, so that nothing is read ahead of it.
    assert (plain[3900:4000] == content[3900:4000]).all()
    pair = [array[3900], array[3901]]
    server.kill()
    server.wait()
    assert plain[2500, 3] == 0 and plain[3000, 1] == 0 and (plain[1000:1100] == 0).all()
    assert plain[5, 5] == content[5, 5], "what is in memory stays"
    with pytest.raises(aquifer.FaultError) as raised:
        array.check()
    assert raised.value.filename == url
    array.check()
    calls: list[Callable[[], object]] = [
        lambda: array.take([2]),
        lambda: array[3900],
        lambda: array[3900:3905] + 1,
        lambda: np.concatenate(pair),
        array.check,
    ]
    for place, call in enumerate(calls):
        assert plain[3100 + place, 1] == 0
        with pytest.raises(aquifer.FaultError):
            call()
        array.check()


def test_a_file_of_the_cache_may_be_truncated(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * (1 << 20))
    array = aquifer.memmap(path, np.uint8, "r", budget="16MiB", backend="cache", on_error="zeros")
    assert array[0] == ord("x")
    os.truncate(path, 4096)
    with pytest.raises(aquifer.FaultError):
        array[500_000:500_010] + 1
    for wrong in [{"on_error": "zeros", "backend": "cache", "mode": "r+"}, {"on_error": "raise"}]:
        with pytest.raises(ValueError, match="on_error"):
            aquifer.memmap(path, np.uint8, **wrong)  # type: ignore[arg-type]


def test_signals_interrupt_waits(server: ObjectServer, url: str) -> None:
    array, rows = open_array(url), aquifer.Rows(url, np.int64, 64)
    event = server.held[KEY] = threading.Event()
    calls: list[Callable[[], object]] = [
        lambda: array.take([9]),
        lambda: array[9],
        lambda: array[100:4000],
        lambda: rows.take([9]),
        lambda: aquifer.memmap(url, np.int64),
    ]
    for call in calls:
        with interrupted_after(0.1):
            call()
    event.set()
    assert array[9, 0] == 9 * 64 and rows[9][0] == 9 * 64


def test_nothing_is_written_after_an_interrupt(server: ObjectServer, url: str) -> None:
    array, rows = open_array(url), aquifer.Rows(url, np.int64, 64)
    wanted = np.arange(1, 4096, 16)
    calls: list[Callable[[Table], object]] = [lambda out: array.take(wanted, out), lambda out: rows.take(wanted, out)]
    for call in calls:
        event = server.held[KEY] = threading.Event()
        out = np.full((256, 64), -1, np.int64)
        with interrupted_after(0.1):
            call(out)
        kept = out.copy()
        event.set()
        del server.held[KEY]
        # What works on has it as well.
        wait_until(lambda: sys.getrefcount(out) == 2)
        assert (out == kept).all(), "the program has its memory again"


def test_other_threads_run_meanwhile(server: ObjectServer, url: str) -> None:
    array = open_array(url)
    event = server.held[KEY] = threading.Event()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(array.take([9])))
    thread.start()
    # The server answers because this thread runs: were the lock held, it would not.
    event.set()
    thread.join()
    assert found[0][0, 0] == 9 * 64


def test_pickles_are_of_one_version(server: ObjectServer, url: str, content: Table) -> None:
    array = open_array(url)
    data = pickle.dumps(array)
    slice_data = pickle.dumps(array[10:20, ::2])
    assert len(data) < 2000
    opened = server.requests(KEY)
    again = pickle.loads(data)
    assert server.requests(KEY) == opened, "the object is open in this process"
    assert (again[5] == content[5]).all() and (pickle.loads(slice_data) == content[10:20, ::2]).all()
    del array, again
    gc.collect()
    program = "import pickle, sys; array = pickle.load(sys.stdin.buffer); print(type(array).__name__, array[5].sum(), array.budget)"
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, timeout=120, check=False)
    assert done.stdout.decode().split() == ["RemoteArray", str(content[5].sum()), str(16 << 20)], done.stderr
    server.put(KEY, content[::-1].tobytes())
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, timeout=120, check=False)
    assert b"ChangedError: " in done.stderr and b"has changed since it was pickled" in done.stderr
    assert pickle.loads(pickle.dumps(open_array(url)))[0, 0] == content[-1, 0]


def test_pickles_have_no_secrets(server: ObjectServer, url: str) -> None:
    secret: list[tuple[str, dict[str, Any]]] = [
        (url + "?signature=hunter2", {}),
        (f"s3://{KEY}", {"key": "name", "secret": "hunter2", "endpoint_url": server.endpoint}),
        (f"s3://{KEY}", {"config": {"aws_session_token": "hunter2"}, "endpoint_url": server.endpoint, "anon": True}),
    ]
    for of_secret, options in secret:
        opened: list[Any] = [
            open_array(of_secret, storage_options=options),
            aquifer.Rows(of_secret, np.int64, 64, storage_options=options),
        ]
        for one in opened:
            with pytest.raises(pickle.PicklingError) as raised:
                pickle.dumps(one)
            assert isinstance(raised.value, aquifer.NotPicklableError) and "hunter2" not in str(raised.value)
            assert "hunter2" not in repr(one.stats()) + str(one.filename)


def test_pickles_have_the_options(server: ObjectServer, url: str) -> None:
    array = open_array(url, storage_options={"retries": 0, "hedge": False, "timeout": 7})
    options = array.__reduce__()[1][1]
    assert (options["retries"], options["hedge"], options["timeout"]) == (0, False, 7.0)
    again = pickle.loads(pickle.dumps(array))
    server.statuses[KEY] = 503
    with pytest.raises(OSError):
        again.take([9])


def test_names_for_dask_tell_objects_apart(server: ObjectServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def token(of: str, **options: Any) -> Any:
        return aquifer.Rows(of, np.int64, 64, storage_options=options).__dask_tokenize__()

    assert token(url) == token(url) != token(url + "?version=1") != token(url + "?version=2")
    assert "hunter2" not in repr(token(url + "?signature=hunter2"))
    server.put(f"account/{KEY}", server.objects[KEY])
    azure: dict[str, Any] = {"endpoint_url": f"{server.endpoint}/account", "anon": True}
    by_account = [token(f"az://{KEY}", **azure, account_name=name) for name in ("account", "other")]
    for name in ("account", "other"):
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", name)
        by_account.append(token(f"az://{KEY}", **azure))
    assert len(set(by_account)) == 4


def test_a_small_cache_leaves_others_their_buffers(url: str) -> None:
    large = aquifer.memmap(url, np.int64, budget="256MiB")
    small = aquifer.memmap(url, np.int64, budget="16MiB")
    again = pickle.loads(pickle.dumps(large))
    other, of_large, of_small, of_again = (one._open().remote for one in (open_array(url), large, small, again))
    assert of_large is of_again and of_small is other and of_large is not of_small


def test_urls_of_other_kinds_are_refused() -> None:
    for of in ["ftp://user:hunter2@host/x", "hdfs://host/x"]:
        calls: list[Callable[[], object]] = [lambda: aquifer.memmap(of, np.int64, "r"), lambda: aquifer.Rows(of, np.int64)]
        for call in calls:
            with pytest.raises(aquifer.InvalidInputError, match="are not read") as raised:
                call()
            assert "hunter2" not in str(raised.value)


def test_no_rows_bring_nothing(server: ObjectServer, url: str) -> None:
    array = open_array(url)
    server.statuses[KEY] = 503
    assert array[[]].shape == (0, 64) and array[np.zeros(0, np.int64), 2:].shape == (0, 62)


def test_pickled_rows_open_by_themselves(server: ObjectServer, url: str, content: Table) -> None:
    other = server.put("bucket/other.bin", content.tobytes())
    data = [pickle.dumps(aquifer.Rows(of, np.int64, 64)) for of in (url, other)]
    gc.collect()
    held, free = (pickle.loads(one) for one in data)
    event = server.held[KEY] = threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            held.take([3])
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert (free.take([3]) == content[[3]]).all(), "it does not wait for the other one"
    held.close()
    event.set()
    thread.join()
    assert held.closed and [str(error) for error in errors] == [f"the rows of {url} are closed"]


def test_a_forked_child(server: ObjectServer, url: str, content: Table) -> None:
    array, rows = open_array(url), aquifer.Rows(url, np.int64, 64)
    assert array[3, 0] == 192

    def body() -> None:
        calls: list[Callable[[], object]] = [
            lambda: array[3],
            lambda: array.take([3]),
            lambda: array.sum(),
            lambda: rows.take([3]),
        ]
        for call in calls:
            with pytest.raises(aquifer.ForkedError):
                call()
        again = pickle.loads(pickle.dumps(array))
        assert (again.take([5, 4000]) == content[[5, 4000]]).all()

    in_child(body)
    assert (array.take([5]) == content[[5]]).all()


def test_a_tier_keeps_downloads(
    server: ObjectServer, url: str, content: Table, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    tier = aquifer.Tier(first, budget="100MiB")
    assert (tier.path, tier.budget, repr(tier)) == (str(first), 100 << 20, f"aquifer.Tier({str(first)!r})")
    tiers: list[aquifer.Tier | pathlib.Path | str] = [tier, first, str(first)]
    for given in tiers:
        array = open_array(url, tier=given)
        assert (array.take(np.arange(4096)) == content).all()
        rows = aquifer.Rows(url, np.int64, 64, budget="1MiB", tier=given)
        assert (rows.take([5, 4000]) == content[[5, 4000]]).all()
    assert server.sent_bytes(KEY) < content.nbytes + 100, "it was downloaded once"
    assert array.stats()["tier_bytes"] >= content.nbytes and array.stats()["tier_problem"] is None
    info = tier.info()
    assert info["used_bytes"] >= content.nbytes and [one["url"] for one in info["objects"]] == [url]
    assert "<table>" in info._repr_html_()
    # Each process uses its own: that of its environment.
    monkeypatch.setenv("AQUIFER_TIER", str(second))
    for pickled in [pickle.dumps(array), pickle.dumps(rows), pickle.dumps(tier)]:
        assert str(first).encode() not in pickled
    assert pickle.loads(pickle.dumps(tier)).path == str(second)
    assert (pickle.loads(pickle.dumps(array)).take([9]) == content[[9]]).all()
    # Written behind the call.
    wait_until(lambda: any(one["present_bytes"] > 0 for one in aquifer.Tier(second).info()["objects"]))
    # The variable is enough, and can be overruled.
    server.forget()
    assert (open_array(url).take([9]) == content[[9]]).all() and server.sent_bytes(KEY) < 100
    assert (open_array(url, tier=False).take([9]) == content[[9]]).all() and server.sent_bytes(KEY) > 100
    second.chmod(0o777)
    with pytest.raises(aquifer.AccessDeniedError, match="chmod it to 0700"):
        open_array(url)


def test_a_tier_that_is_no_directory(url: str, tmp_path: pathlib.Path, path: str, table: Table) -> None:
    with pytest.raises(OSError) as raised:
        aquifer.Tier(path)
    assert isinstance(raised.value, aquifer.AquiferError) and raised.value.filename is not None
    with pytest.raises(ValueError, match="for URLs"):
        aquifer.memmap(path, np.int64, "r", tier=tmp_path)
