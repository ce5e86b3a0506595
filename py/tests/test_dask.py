"""Dask over objects of a server: a cluster of worker processes on the loopback address, two of them on each of two "nodes", which are
two directories of a tier."""

from __future__ import annotations

import io
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aquifer
from object_server import ObjectServer

pytest.importorskip("dask", reason="dask is not installed: python3 -m pip install 'dask[array,dataframe]' distributed")
distributed = pytest.importorskip("distributed", reason="distributed is not installed: python3 -m pip install distributed")

import dask.array
import dask.tokenize

from aquifer.dask import from_array

SHAPE = (8192, 64)
CONTENT = np.arange(SHAPE[0] * SHAPE[1], dtype=np.int64).reshape(SHAPE)
KEY = "bucket/table.bin"
NODES = 2
TIMEOUT = 60
# Bytes that processes ask for to open an object, one each.
OPENINGS = 1000


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    return [tmp_path_factory.mktemp("tier") / str(node) for node in range(NODES)]


@pytest.fixture(scope="module")
def client(tiers: list[pathlib.Path]) -> Iterator[Any]:
    """Two worker processes on each node."""
    loopback = {"host": "127.0.0.1"}
    workers = {
        f"{node}-{number}": {
            "cls": distributed.Nanny,
            "options": {"nthreads": 1, "env": {"AQUIFER_TIER": str(tier)}, "dashboard_address": None, **loopback},
        }
        for node, tier in enumerate(tiers)
        for number in range(2)
    }
    scheduler = {"cls": distributed.Scheduler, "options": {"dashboard_address": None, "port": 0, **loopback}}
    settings = {"distributed.scheduler.allowed-failures": 10, "distributed.comm.timeouts.connect": f"{TIMEOUT}s"}
    processes: dict[str, int] = {}
    with dask.config.set(settings):
        try:
            with distributed.SpecCluster(workers, scheduler) as cluster, distributed.Client(cluster) as client:
                client.wait_for_workers(len(workers), timeout=TIMEOUT)
                processes = client.run(os.getpid)
                yield client
        finally:
            for process in processes.values():
                # The nannies have ended them, unless something failed.
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    # This process has none.
    monkeypatch.delenv("AQUIFER_TIER", raising=False)
    with ObjectServer() as server:
        yield server


def open_table(server: ObjectServer) -> aquifer.memmap:
    # Of another length and ETag each time, so that no test finds what another has downloaded.
    return aquifer.memmap(server.put(KEY, CONTENT.tobytes() + os.urandom(8)), np.int64, shape=SHAPE, budget="64MiB")


def check_downloads(server: ObjectServer, path: str = KEY) -> None:
    """Each block was downloaded once for each node."""
    assert server.most_sent(path, 4096) <= NODES
    assert server.sent_bytes(path) <= NODES * len(server.objects[path]) + OPENINGS


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_an_array_in_blocks(client: Any, server: ObjectServer) -> None:
    table = open_table(server)
    array = from_array(table, chunks=(512, 64))
    assert array.name == from_array(table, chunks=(512, 64)).name
    assert server.sent_bytes(KEY) < OPENINGS, "what this process names the array by is not a hash of it"
    assert (client.compute(array.sum(axis=1)).result(TIMEOUT) == CONTENT.sum(axis=1)).all()
    doubled = array.map_blocks(lambda block: block * 2, dtype=np.int64)
    assert client.compute(doubled.sum()).result(TIMEOUT) == 2 * CONTENT.sum()
    assert (client.compute(array[[5, 8000, 3]]).result(TIMEOUT) == CONTENT[[5, 8000, 3]]).all()
    check_downloads(server)


def test_blocks_are_copies(client: Any, server: ObjectServer) -> None:
    # Two blocks, of more than a quarter of the budget, sent as they are, without a function of them.
    content = np.concatenate([CONTENT] * 2)
    table = aquifer.memmap(server.put(KEY, content.tobytes() + os.urandom(8)), np.int64, shape=content.shape, budget="16MiB")
    array = from_array(table, chunks=SHAPE)
    assert (client.compute(array[:512]).result(TIMEOUT) == CONTENT[:512]).all()
    assert (client.compute(array).result(TIMEOUT) == content).all()
    with dask.config.set(scheduler="synchronous"):
        block = array.blocks[0, 0].compute()
        assert not np.may_share_memory(block, table) and type(block) is np.ndarray
        server.statuses[KEY] = 404
        with pytest.raises(aquifer.NotFoundError):
            array.blocks[1, 0].compute()


def test_blocks_that_dask_chooses(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "data", "wb") as file:
        file.truncate(256 << 20)
    array = aquifer.memmap(tmp_path / "data", np.int64, "r", shape=(1 << 19, 64), budget="64MiB")
    with dask.config.set({"array.chunk-size": "1GiB"}):
        blocks = from_array(array)
    assert 1 << 20 < np.prod(blocks.chunksize) * 8 <= 64 << 20


def test_a_file_is_named_without_its_bytes(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(CONTENT.tobytes())
    array = aquifer.memmap(path, np.int64, "r", shape=SHAPE, budget="16MiB")
    token, of_slice = array.__dask_tokenize__(), array[1:].__dask_tokenize__()
    assert str(path) in token and token == array.__dask_tokenize__() != of_slice
    assert from_array(array).name == from_array(aquifer.memmap(path, np.int64, "r", shape=SHAPE)).name
    os.utime(path, ns=(1, 1))
    assert array.__dask_tokenize__() != token
    with aquifer.memmap(path, np.int64, "c", shape=SHAPE) as private:
        before = from_array(private).name
        private[0, 0] = 7
        assert from_array(private).name != before


def test_arrays_of_two_files_of_one_path_have_two_names(tmp_path: pathlib.Path) -> None:
    path, new = tmp_path / "data", tmp_path / "new"
    path.write_bytes(CONTENT.tobytes())
    new.write_bytes((CONTENT + 1).tobytes())
    old = aquifer.memmap(path, np.int64, "r", shape=SHAPE)
    os.replace(new, path)
    replaced = aquifer.memmap(path, np.int64, "r", shape=SHAPE)
    assert dask.tokenize.tokenize(old) != dask.tokenize.tokenize(replaced)
    path.unlink()
    assert dask.tokenize.tokenize(old) != dask.tokenize.tokenize(replaced)


def test_naming_an_array_downloads_nothing(server: ObjectServer, tmp_path: pathlib.Path) -> None:
    table = open_table(server)
    # Slices are read when they are made.
    named = [table, table[:8:2], table.T, table]
    server.forget()
    assert len({dask.tokenize.tokenize(one) for one in named}) == 3
    dask.delayed(np.sum)(table)
    assert server.sent_bytes(KEY) == 0
    # Of an unchanged file on this disk as well: by what its inode says.
    path = tmp_path / "data"
    path.write_bytes(CONTENT.tobytes())
    array = aquifer.memmap(path, np.int64, "r", shape=SHAPE)
    before = dask.tokenize.tokenize(array)
    assert before == dask.tokenize.tokenize(array) != dask.tokenize.tokenize(CONTENT)
    os.utime(path, ns=(1, 1))
    assert dask.tokenize.tokenize(array) != before
    # What can be stored to is named by its elements.
    with aquifer.memmap(path, np.int64, "r+", shape=SHAPE) as writable:
        before = dask.tokenize.tokenize(writable)
        writable[3, 4] += 1
        assert dask.tokenize.tokenize(writable) != before
    # A copy is an array like any other.
    assert dask.tokenize.tokenize(array[:2].copy()) == dask.tokenize.tokenize(np.array(array[:2]))


@pytest.mark.parametrize("imported", ["dask.tokenize", "dask.array", "distributed"])
def test_dask_may_be_imported_later(server: ObjectServer, imported: str) -> None:
    url = server.put(KEY, CONTENT.tobytes() + os.urandom(8))
    program = f"""
import sys
import numpy as np
import aquifer
table = aquifer.memmap({url!r}, np.int64, shape={SHAPE}, budget="64MiB")
assert not any(name.partition(".")[0] in ("dask", "distributed") for name in sys.modules)
if {imported!r} == "dask.array":
    # As if the module had been loaded twice.
    from aquifer import _with_dask
    sys.meta_path.insert(0, _with_dask._Lookout(aquifer.memmap))
import {imported}
import dask.tokenize
print(dask.tokenize.tokenize(table))
if "distributed" in sys.modules:
    from distributed.protocol import deserialize, serialize
    header, frames = serialize(table)
    assert sum(map(len, frames)) < 10_000
    assert (deserialize(header, frames)[:2] == np.arange({2 * SHAPE[1]}).reshape(2, -1)).all()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT)
    assert ran.returncode == 0, ran.stderr
    assert server.sent_bytes(KEY) < (len(CONTENT.tobytes()) // 2), "naming it has read it"
    table = aquifer.memmap(url, np.int64, shape=SHAPE, budget="64MiB")
    assert dask.tokenize.tokenize(table) == ran.stdout.strip()


def test_blocks_of_any_slices(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "data"
    for order in ("C", "F"):
        content = np.arange(12 * 10 * 8, dtype=np.int32).reshape(12, 10, 8, order=order)
        path.write_bytes(b"head" + content.tobytes("A"))
        array = aquifer.memmap(path, np.int32, "r", offset=4, shape=(12, 10, 8), order=order)
        for of, same in [(array, content), (array[::-1, 2:, ::3], content[::-1, 2:, ::3]), (array.T, content.T)]:
            blocks = from_array(of, chunks=(5, 4, 3))
            assert (blocks.compute(scheduler="synchronous") == same).all()
            assert (blocks[1::2, ::-1, 1].compute(scheduler="synchronous") == same[1::2, ::-1, 1]).all()
            assert blocks[3:3].compute(scheduler="synchronous").shape == same[3:3].shape
            assert (blocks[[3, 1], :, 2:].compute(scheduler="synchronous") == same[[3, 1], :, 2:]).all()


def test_rows_in_tasks(client: Any, server: ObjectServer) -> None:
    table = open_table(server)
    rows = aquifer.Rows(table.filename or "", np.int64, 64, budget="16MiB")
    assert (client.compute(dask.array.from_array(rows, chunks=(1024, 64)).max()).result(TIMEOUT)) == CONTENT.max()
    wanted = np.random.default_rng(1).integers(0, SHAPE[0], (16, 256))
    found = client.gather(client.map(lambda batch, of: of.take(batch).sum(), list(wanted), [rows] * len(wanted)))
    assert found == [CONTENT[batch].sum() for batch in wanted]
    check_downloads(server)


def holders(server: ObjectServer) -> set[int]:
    """Processes whose requests are held, by the ports of their connections."""
    ports = {f"{port:04X}" for port in server.held_ports()}
    inodes = {
        fields[9]
        for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]
        if (fields := line.split())[1].split(":")[1] in ports
    }
    found = set()
    for link in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] in inodes:
            found.add(int(link.parts[2]))
    return found - {os.getpid()}


def test_a_worker_is_killed(client: Any, server: ObjectServer) -> None:
    table = open_table(server)
    rows = aquifer.Rows(table.filename or "", np.int64, 64, budget="16MiB")
    server.hold(after=12)

    def total(start: int, of: aquifer.Rows) -> tuple[int, int]:
        return os.getpid(), int(of.take(np.arange(start, start + 128)).sum())

    starts = range(0, SHAPE[0], 128)
    futures = client.map(total, list(starts), [rows] * len(starts))
    wait_until(lambda: server.is_holding)
    before = client.run(os.getpid)
    # One that waits for the server.
    wait_until(lambda: bool(set(before.values()) & holders(server)))
    killed = next(iter(set(before.values()) & holders(server)))
    os.kill(killed, signal.SIGKILL)
    server.released.set()
    found = client.gather(futures)
    assert [sum_of for _, sum_of in found] == [CONTENT[start : start + 128].sum() for start in starts]
    # What the killed worker had asked for was downloaded by another one of its node.
    assert server.most_sent(KEY, 4096) <= NODES + 1
    client.wait_for_workers(len(before), timeout=TIMEOUT)
    assert killed not in client.run(os.getpid).values()


def test_another_version_is_refused(client: Any, server: ObjectServer) -> None:
    table = open_table(server)
    rows = aquifer.Rows(table.filename or "", np.int64, 64, budget="16MiB")
    blocks = from_array(table, chunks=(4096, 64))
    server.put(KEY, CONTENT[::-1].tobytes())
    for future in [client.submit(lambda of: of.take([3]), rows), client.compute(blocks.sum())]:
        with pytest.raises(aquifer.ChangedError, match="has changed since it was pickled"):
            future.result(TIMEOUT)


def test_a_table_of_parquet(client: Any, server: ObjectServer) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed: python3 -m pip install pandas")
    for name in ("pyarrow", "s3fs"):
        pytest.importorskip(name, reason=f"{name} is not installed: python3 -m pip install {name}")
    import dask.dataframe

    table = pandas.DataFrame({"key": np.arange(100_000) % 7, "value": np.random.default_rng(1).random(100_000)})
    for part in range(4):
        content = io.BytesIO()
        table[part::4].to_parquet(content, row_group_size=5000)
        server.put(f"bucket/table/{part}.parquet", content.getvalue())
    options = {"s3": {"anon": True, "endpoint_url": server.endpoint, "client_kwargs": {"region_name": "us-east-1"}}}
    frame = dask.dataframe.read_parquet("aqcache::s3://bucket/table/*.parquet", storage_options=options)
    found = client.compute(frame.groupby("key").value.sum()).result(TIMEOUT)
    assert np.allclose(found.sort_index(), table.groupby("key").value.sum())
    for part in range(4):
        # This process has no tier, and reads the footers.
        assert server.most_sent(f"bucket/table/{part}.parquet", 4096) <= NODES + 1
