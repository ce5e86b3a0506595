"""Pools: creating, opening, closing, sharing."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aquifer
from aquifer import Pool


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.pool"


@pytest.fixture
def pool(path: Path) -> Iterator[Pool]:
    with Pool.create(path, "8MiB") as pool:
        yield pool
    path.unlink()


def python(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs another interpreter."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def test_a_pool_is_created_opened_and_closed(path: Path) -> None:
    with Pool.create(path, 8 << 20, log_size="1MiB", inodes=100) as pool:
        assert path.stat().st_size == 8 << 20
        assert pool.writable and not pool.closed
        assert pool.path == str(path) and repr(str(path)) in repr(pool)
        stats = pool.stats()
        assert stats["path"] == path and stats["processes"] == [os.getpid()]
        assert 0 < stats["free_bytes"] <= stats["total_bytes"] < 8 << 20
    assert pool.closed and "closed" in repr(pool)
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.stats()
    with Pool.open(str(path), read_only=True) as reader:
        assert not reader.writable
        with pytest.raises(aquifer.ReadOnlyError):
            reader.files.mkdir("/d")


def test_statistics_are_tables(pool: Pool) -> None:
    for shown in (pool.stats()._repr_html_(), pool.array("numbers", 3).stats()._repr_html_()):
        assert shown.startswith("<table>") and "_bytes" in shown


def test_sizes_are_numbers_or_text(path: Path) -> None:
    Pool.create(path, "1.5 MiB").close()
    assert path.stat().st_size == 3 << 19
    with pytest.raises(ValueError, match="no size"):
        Pool.create(path, "much", overwrite=True)
    with pytest.raises(aquifer.InvalidInputError):
        Pool.create(path, 1, overwrite=True)
    with pytest.raises(ValueError, match="no size"):
        Pool.create(path, -1, overwrite=True)


def test_errors_are_typed(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        Pool.open(path)
    assert missing.value.filename == str(path)
    (tmp_path / "text").write_text("no pool" * 10_000)
    with pytest.raises(aquifer.InvalidInputError):
        Pool.open(tmp_path / "text")
    Pool.create(path, "2MiB").close()
    with pytest.raises(FileExistsError):
        Pool.create(path, "2MiB")
    with Pool.open(path, exclusive=True):
        program = "import aquifer, sys; aquifer.Pool.open(sys.argv[1])"
        assert "aquifer._errors.BusyError" in python(program, path).stderr


def test_a_pool_is_not_closed_under_memory_in_use(pool: Pool) -> None:
    array = pool.array("numbers", 100)
    pool.files.write_bytes("/file", b"some text")
    view = pool.files.view("/file")
    with pytest.raises(BufferError, match="2 arrays or views"):
        pool.close()
    assert not pool.closed and pool.files.read_bytes("/file") == b"some text"
    part = array[3:5]
    del array
    view.release()
    with pytest.raises(BufferError, match="1 arrays or views"):
        pool.close()
    assert part[0] == 0
    del part
    pool.close()


def test_no_memory_is_given_out_while_a_pool_is_closed(path: Path) -> None:
    """Threads take buffers while another one closes: a buffer is counted, so that closing is refused, or it is refused."""
    program = """
import aquifer, sys, threading

sys.setswitchinterval(1e-5)
path, count, rounds, late = sys.argv[1], 40, 20, []
with aquifer.Pool.create(path, "8MiB") as pool:
    for number in range(count):
        pool.array(f"a{number}", 1024, "u8")

def use(pool, attached, ready):
    ready.wait()
    for _ in range(300):
        closed = pool.closed
        try:
            view = memoryview(attached)
        except ValueError:
            return
        late.extend([view] if closed else [])
        for place in range(0, len(view), 512):
            view[place] = 1
        if not closed:
            view.release()

for _ in range(rounds):
    pool = aquifer.Pool.open(path)
    # Of many, so that the last ones are detached after a while.
    attached = [pool._native.attach(f"a{number}", True, None, None) for number in range(count)]
    ready = threading.Barrier(4)
    threads = [threading.Thread(target=use, args=(pool, one, ready)) for one in attached[-3:]]
    for thread in threads:
        thread.start()
    ready.wait()
    while not pool.closed:
        try:
            pool.close()
        except BufferError:
            pass
    for thread in threads:
        thread.join()
    for view in late:
        # Dangling: this ends the process.
        view[0] = 1
print(len(late))
"""
    done = python(program, path)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_a_pool_whose_closing_is_interrupted_goes_on(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __init__(self, native: Any) -> None:
            self.native = native

        def __getattr__(self, name: str) -> Any:
            return getattr(self.native, name)

        def refuse_buffers(self) -> None:
            self.native.refuse_buffers()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool, "_native", Interrupted(pool._native))
        with pytest.raises(KeyboardInterrupt):
            pool.close()
    assert pool.array("a", 3).sum() == 0


def test_a_pool_that_cannot_be_closed_goes_on(pool: Pool) -> None:
    file = pool.files.open("/large", "wb", 64 << 20)
    file.write(bytes(16 << 20))
    with pytest.raises(aquifer.NoSpaceError):
        pool.close()
    assert not pool.closed and not pool.array("numbers", 3).any()


def test_closing_a_pool_closes_its_files(pool: Pool, path: Path) -> None:
    text = pool.files.open("/text", "w")
    text.write("buffered")
    pool.close()
    assert text.closed
    with Pool.open(path) as again:
        assert again.files.read_text("/text") == "buffered"


def test_calls_after_closing_are_errors(pool: Pool) -> None:
    files, path = pool.files, pool.files.path("/x")
    raw = files.open("/raw", "wb", 0)
    pool.close()
    calls: list[Callable[[], object]] = [
        files.listdir,
        path.read_bytes,
        path.exists,
        pool.arrays,
        pool.sync,
        pool.psync,
        lambda: raw.write(b"x"),
        lambda: pool.array("a", 1),
        lambda: pool.remove("a"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()


def test_processes_share_a_pool(pool: Pool, path: Path) -> None:
    program = """
import aquifer, sys
with aquifer.Pool.open(sys.argv[1]) as pool:
    pool.files.write_text("/from", "another process")
    array = pool.array("theirs", 3, "i4")
    array[:] = 7
    array.psync()
    del array
"""
    done = python(program, path)
    assert done.returncode == 0, done.stderr
    assert pool.files.read_text("/from") == "another process"
    assert pool.array("theirs").tolist() == [7, 7, 7]


def test_a_forked_child_is_refused(pool: Pool, path: Path) -> None:
    array = pool.array("numbers", 1000, "u8")
    array[:] = 1
    array.psync()
    pool.files.write_bytes("/file", b"parent")
    file = pool.files.open("/file", "r+b", 0)
    buffered = pool.files.open("/buffered", "w")
    buffered.write("the parent's")
    view = pool.files.view("/file")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            calls: list[Callable[[], object]] = [
                pool.stats,
                pool.psync,
                pool.sync,
                array.psync,
                array.rollback,
                pool.files.listdir,
                lambda: file.write(b"child!"),
                lambda: file.read(),
                lambda: pool.array("numbers"),
                lambda: pool.array("others", 3),
                lambda: pool.files.view("/file"),
                lambda: memoryview(pool._attached["numbers"].native),
            ]
            for number, call in enumerate(calls):
                try:
                    call()
                    os.write(write, f"call {number} worked; ".encode())
                except aquifer.ForkedError:
                    pass
            # Harmless, and without effect in the parent.
            pool.close()
            # What the child opens itself works.
            with Pool.open(path) as own:
                own.files.write_bytes("/child", b"child")
                try:
                    own.array("numbers")
                    os.write(write, b"the array has two writers; ")
                except aquifer.BusyError:
                    pass
            status = 0
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(status)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with open(read) as told:
        assert (told.read(), status) == ("", 0)
    # The parent goes on.
    array[0] = 2
    array.psync()
    assert file.read() == b"parent" and bytes(view) == b"parent"
    assert pool.files.read_bytes("/child") == b"child" and pool.files.read_bytes("/buffered") == b""
    buffered.close()
    assert pool.files.read_text("/buffered") == "the parent's"
    assert array.sum() == 1001
