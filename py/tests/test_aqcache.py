"""Files of stores for fsspec: `aqcache::`."""

from __future__ import annotations

import io
import pathlib
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest

import aquifer
from object_server import ObjectServer
from test_processes import in_child
from test_remote import wait_until

pytest.importorskip("fsspec", minversion="2025.12", reason="fsspec 2025.12 is not installed: python3 -m pip install fsspec")

import fsspec

from aquifer._aqcache import CachedFileSystem

CONTENT = np.random.default_rng(1).bytes(3 << 20)
KEY = "bucket/dir/a b.bin"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.delenv("AQUIFER_TIER", raising=False)
    with ObjectServer() as server:
        server.put(KEY, CONTENT)
        yield server
    CachedFileSystem.clear_instance_cache()


@pytest.fixture
def s3(server: ObjectServer) -> dict[str, Any]:
    """Storage options of both parts of a chain."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: python3 -m pip install s3fs")
    client = {"region_name": "us-east-1"}
    return {"s3": {"anon": True, "endpoint_url": server.endpoint, "client_kwargs": client}, "aqcache": {"budget": "64MiB"}}


@pytest.fixture
def http(server: ObjectServer) -> CachedFileSystem:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: python3 -m pip install aiohttp")
    return CachedFileSystem("http", budget="64MiB")


@pytest.fixture
def local(tmp_path: pathlib.Path) -> tuple[CachedFileSystem, str]:
    path = tmp_path / "a b.bin"
    path.write_bytes(CONTENT)
    return CachedFileSystem("file", budget="64MiB"), str(path)


def test_the_entry_point_names_the_class() -> None:
    found = [one for one in entry_points(group="fsspec.specs") if one.name == "aqcache"]
    assert found and all(one.load() is CachedFileSystem for one in found)
    assert fsspec.get_filesystem_class("aqcache") is CachedFileSystem
    program = """
import fsspec
from fsspec.registry import known_implementations
known_implementations.pop("aqcache")  # as if nothing were installed
import aquifer
print(fsspec.get_filesystem_class("aqcache").__name__)
"""
    assert subprocess.check_output([sys.executable, "-c", program], timeout=120).split() == [b"CachedFileSystem"]


@pytest.mark.parametrize("name", ["read", "readinto", "read1", "peek"])
def test_threads_share_a_file(tmp_path: pathlib.Path, name: str) -> None:
    """Each byte is read by one of them, and what a call returns lies together in the file."""
    numbers = np.arange(1 << 18, dtype=np.uint32)
    path = tmp_path / "numbers"
    path.write_bytes(numbers.tobytes())
    file = CachedFileSystem("file", budget="64MiB").open(str(path), block_size=1 << 10)
    start, found = threading.Barrier(8), queue.SimpleQueue[bytes]()

    def call(wanted: int) -> bytes:
        if name == "readinto":
            target = bytearray(wanted)
            return bytes(target[: file.readinto(target)])
        if name == "peek":
            # Reads nothing, and moves what the buffer has.
            assert file.tell() <= path.stat().st_size and len(file.peek(8)) % 4 == 0
        return bytes(file.read1(wanted) if name == "read1" else file.read(wanted))

    def read(seed: int) -> None:
        sizes = np.random.default_rng(seed)
        start.wait()
        # Shorter and longer than its buffer.
        while part := call(4 * int(sizes.integers(1, 1500))):
            found.put(part)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(8)))
    parts = [np.frombuffer(found.get(), np.uint32) for _ in range(found.qsize())]
    assert all((np.diff(part) == 1).all() for part in parts)
    parts.sort(key=lambda part: part[0])
    assert np.array_equal(np.concatenate(parts), numbers)


def test_a_child_reads_a_file_that_a_thread_of_its_parent_was_in(local: tuple[CachedFileSystem, str]) -> None:
    file = local[0].open(local[1])
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with file._alone():
            held.set()
            done.wait(60)

    with ThreadPoolExecutor(1) as threads:
        holding = threads.submit(hold)
        held.wait(60)
        try:
            # Its lock is not waited for.
            in_child(lambda: file.tell())
        finally:
            done.set()
        holding.result()


def test_a_chain_before_s3(server: ObjectServer, s3: dict[str, Any]) -> None:
    server.put("bucket/dir/sub/other.bin", b"other")
    url = "aqcache::s3://bucket/dir/a b.bin"
    with fsspec.open(url, **s3) as file:
        assert file.read(10) == CONTENT[:10] and file.size == len(CONTENT) and file.path == KEY
        assert file.seek(-5, io.SEEK_END) and file.read() == CONTENT[-5:]
    fs, path = fsspec.url_to_fs(url, **s3)
    assert isinstance(fs, CachedFileSystem) and path == KEY and fs.unstrip_protocol(path) == f"aqcache::s3://{KEY}"
    assert fs.cat(url) == CONTENT and fs.cat_file(path, -3) == CONTENT[-3:]
    assert sorted(fs.ls("bucket/dir", detail=False)) == [KEY, "bucket/dir/sub"]
    assert sorted(fs.find("bucket")) == [KEY, "bucket/dir/sub/other.bin"] == sorted(fs.glob("bucket/**/*.bin"))
    assert fs.info(KEY)["size"] == fs.size(KEY) == len(CONTENT) and fs.isfile(KEY) and fs.isdir("bucket/dir")
    assert not fs.exists("bucket/none") and fs.checksum(KEY) is not None
    assert fs.cat("bucket/dir", recursive=True) == {KEY: CONTENT, "bucket/dir/sub/other.bin": b"other"}
    with pytest.raises(FileNotFoundError):
        fs.cat_file("bucket/none")
    again = pickle.loads(pickle.dumps(fs))
    assert again.cat_file(path, 0, 4) == CONTENT[:4]


def test_a_stale_listing_is_forgotten(server: ObjectServer, s3: dict[str, Any]) -> None:
    fs = CachedFileSystem("s3", s3["s3"], budget="64MiB")
    assert [one["size"] for one in fs.ls("bucket/dir")] == [len(CONTENT)]
    server.put(KEY, CONTENT[:1000])
    assert fs.cat_file(KEY) == CONTENT[:1000]
    assert [one["size"] for one in fs.ls("bucket/dir")] == [1000] and fs.info(KEY)["size"] == 1000


def test_files_are_read_in_any_way(local: tuple[CachedFileSystem, str]) -> None:
    fs, path = local
    with fs.open(path) as file:
        assert file.readable() and file.seekable() and not file.writable() and file.full_name == path
        for start, length in [(0, 7), (100, 300_000), (3_000_000, 200_000), (5, 0), (len(CONTENT) + 5, 3)]:
            file.seek(start)
            assert file.read(length) == CONTENT[start : start + length] and file.tell() == start + len(CONTENT[start : start + length])
        file.seek(2)
        target = bytearray(200_000)
        assert file.readinto(target) > 0 and target.startswith(CONTENT[2:1000])
        file.seek(1_000_000)
        assert file.read() == CONTENT[1_000_000:] and file.read() == b"" == file.read(5)
        file.seek(0)
        assert b"".join(iter(lambda: file.read(10_000), b"")) == CONTENT
        with pytest.raises(ValueError, match="negative"):
            file.seek(-1)
    with pytest.raises(ValueError, match="closed"):
        file.read()
    with fs.open(path, "rt", encoding="latin-1", newline="") as text:
        assert text.read() == CONTENT.decode("latin-1")


def test_ranges_are_one_batch(server: ObjectServer, http: CachedFileSystem) -> None:
    url = server.put("bucket/file", CONTENT)
    other = server.put("bucket/other", b"0123456789")
    starts = [int(start) for start in np.random.default_rng(2).integers(0, len(CONTENT) - 100, 300)]
    found = http.cat_ranges([url] * 300, starts, [start + 100 for start in starts])
    assert found == [CONTENT[start : start + 100] for start in starts]
    assert server.requests("bucket/file") < 150
    mixed = http.cat_ranges([other, url, url + "2", other], [1, None, 0, -3], [3, 4, 1, None])
    assert mixed[:2] + mixed[3:] == [b"12", CONTENT[:4], b"789"] and isinstance(mixed[2], FileNotFoundError)
    with pytest.raises(aquifer.NotFoundError):
        http.cat_ranges([url + "2"], 0, 1, on_error="raise")
    with pytest.raises(ValueError, match="different lengths"):
        http.cat_ranges([url], [0, 1], 1)
    assert http.stats(url)["requests"] > 0


def test_long_reads_are_of_what_is_asked_for(server: ObjectServer, http: CachedFileSystem) -> None:
    url = server.put("bucket/file", CONTENT)
    with http.open(url) as file:
        server.forget()
        file.seek(1 << 20)
        assert file.read(300_000) == CONTENT[1 << 20 : (1 << 20) + 300_000]
    assert server.sent_bytes("bucket/file") <= 300_000 + 2 * 4096


def test_what_a_server_has(server: ObjectServer, http: CachedFileSystem) -> None:
    url = server.put("bucket/file", CONTENT)
    assert http.exists(url) and http.isfile(url) and not http.isdir(url) and not http.exists(url + "2")
    assert http.info(url) == {"name": url, "size": len(CONTENT), "type": "file", "ETag": server.etag("bucket/file")}
    assert server.sent_bytes("bucket/file") < 10, "nothing was downloaded for that"


def test_many_open_files_leave_pages_of_a_small_budget(server: ObjectServer, http: CachedFileSystem) -> None:
    urls = [server.put(f"bucket/{number}", CONTENT[: 1 << 20]) for number in range(20)]
    files = [http.open(url) for url in urls]
    for _ in range(2):
        for file in files:
            file.seek(0)
            assert file.read() == CONTENT[: 1 << 20]
    for file in files:
        file.close()
    assert sum(server.sent_bytes(f"bucket/{number}") for number in range(20)) < 25 << 20, "they are in memory the second time"


def test_names_of_files_have_no_query(server: ObjectServer, http: CachedFileSystem) -> None:
    url = server.put("bucket/file", CONTENT)
    with http.open(url + "?signature=hunter2") as file:
        assert file.read(5) == CONTENT[:5]
        with pytest.raises(ValueError, match="negative") as raised:
            file.seek(-1)
        assert "hunter2" not in str(raised.value) + repr(file) + file.name + str(file)
    with pytest.raises(ValueError, match="closed") as raised:
        file.read()
    assert "hunter2" not in str(raised.value) + repr(file)


def test_a_file_that_changes(server: ObjectServer, http: CachedFileSystem) -> None:
    url = server.put("bucket/file", CONTENT)
    with http.open(url) as file:
        assert file.read(5) == CONTENT[:5]
        server.put("bucket/file", CONTENT[::-1])
        file.seek(2 << 20)
        with pytest.raises(aquifer.ChangedError):
            file.read(5)
    with http.open(url) as file:
        assert file.read(5) == CONTENT[::-1][:5]
    unchecked = CachedFileSystem("http", budget="64MiB", check_files=False)
    assert unchecked.cat_file(url) == CONTENT[::-1]
    server.forget()
    assert unchecked.cat_file(url) == CONTENT[::-1] and server.requests("bucket/file") == 0
    unchecked.invalidate_cache()
    assert unchecked.cat_file(url, 0, 1) == CONTENT[-1:] and server.requests("bucket/file") > 0


def test_a_forked_child_opens_files_anew(server: ObjectServer, http: CachedFileSystem) -> None:
    url = server.put("bucket/file", CONTENT)
    assert http.cat_file(url, 0, 9) == CONTENT[:9]

    def body() -> None:
        http.invalidate_cache()
        assert http.cat_file(url, 100, 200) == CONTENT[100:200]

    # As by another thread of this process.
    with http._lock:
        in_child(body)


def test_what_it_does_not_do(local: tuple[CachedFileSystem, str]) -> None:
    fs, path = local
    calls: list[Callable[[], object]] = [
        lambda: fs.open(path, "wb"),
        lambda: fs.rm(path),
        lambda: fs.mkdir(path + "2"),
        lambda: fs.pipe_file(path, b""),
    ]
    for call in calls:
        with pytest.raises(aquifer.ReadOnlyError, match="only reads"):
            call()
    with pytest.raises(aquifer.UnsupportedError, match="blockcache or filecache"):
        fsspec.open("aqcache::memory://x").open()
    with pytest.raises(aquifer.UnsupportedError, match="before nothing"):
        fsspec.filesystem("aqcache")
    with pytest.raises(aquifer.InvalidInputError, match="under its name"):
        fsspec.open(f"aqcache::file://{path}", anon=True).open()


@pytest.mark.parametrize("options", [{"profile": "x"}, {"requester_pays": True}, {"client_kwargs": {"verify": False}}])
def test_options_that_only_the_store_knows(s3: dict[str, Any], options: dict[str, Any]) -> None:
    with pytest.raises(aquifer.UnsupportedError, match="without aqcache::"):
        CachedFileSystem("s3", {**s3["s3"], **options})


def test_pickles_have_no_secrets(server: ObjectServer, s3: dict[str, Any]) -> None:
    signed = {"key": "name", "secret": "hunter2", "endpoint_url": server.endpoint}
    fs = CachedFileSystem("s3", signed)
    assert fs.cat_file(KEY, 0, 3) == CONTENT[:3]
    with pytest.raises(aquifer.NotPicklableError, match="environment of each process") as raised:
        pickle.dumps(fs)
    assert "hunter2" not in str(raised.value)
    with_password = server.endpoint.replace("//", "//user:hunter2@")
    others = [
        fs,
        CachedFileSystem("s3", {"anon": True, "endpoint_url": with_password}),
        CachedFileSystem("s3", {"anon": True}, None, None, {"endpoint": with_password}),
    ]
    for other in others:
        calls: list[Callable[[], object]] = [lambda: pickle.dumps(other), other.to_json, other.to_dict]
        for call in calls:
            with pytest.raises(aquifer.NotPicklableError) as raised:
                call()
            assert "hunter2" not in str(raised.value)


def test_a_tier_is_each_nodes_own(server: ObjectServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: python3 -m pip install aiohttp")
    url = server.put("bucket/file", CONTENT)
    # By place as well as by name.
    by_place = CachedFileSystem("http", None, None, "64MiB", None, str(tmp_path / "first"))
    assert str(tmp_path).encode() not in pickle.dumps(by_place) and str(tmp_path) not in by_place.to_json()
    assert CachedFileSystem.from_json(by_place.to_json()).storage_options["tier"] is True
    fs = CachedFileSystem("http", budget="64MiB", tier=str(tmp_path / "first"))
    assert fs.cat_file(url) == CONTENT
    data = pickle.dumps(fs)
    assert str(tmp_path).encode() not in data
    monkeypatch.setenv("AQUIFER_TIER", str(tmp_path / "second"))
    other = pickle.loads(data)
    assert other is not fs and other.cat_file(url) == CONTENT
    # Written behind the calls.
    for name in ("first", "second"):
        tier = aquifer.Tier(tmp_path / name)
        wait_until(lambda: [one["present_bytes"] for one in tier.info()["objects"]] == [len(CONTENT)])
    assert server.most_sent("bucket/file", 65_536) == 2
