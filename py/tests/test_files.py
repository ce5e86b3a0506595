"""Files of a pool, against those of the system."""

import errno
import io
import os
import random
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aquifer
from aquifer import FileIO, Files, Pool


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool.create(tmp_path / "data.pool", "12MiB") as pool:
        yield pool
    (tmp_path / "data.pool").unlink()


@pytest.fixture
def files(pool: Pool) -> Files:
    return pool.files


def test_text_and_binary(files: Files) -> None:
    with files.open("/text", "w", encoding="utf-16", newline="\r\n") as text:
        assert isinstance(text, io.TextIOWrapper) and isinstance(text.buffer, io.BufferedWriter)
        assert isinstance(text.buffer.raw, FileIO) and text.mode == "w" and text.name == "/text"
        print("grüße", "zeile", sep="\n", file=text)
    assert files.read_bytes("/text").decode("utf-16") == "grüße\r\nzeile\r\n"
    with files.open("/text", encoding="utf-16") as text:
        assert text.readlines() == ["grüße\n", "zeile\n"]
    with files.open("/text", "rb") as binary:
        assert isinstance(binary, io.BufferedReader) and binary.mode == "rb"
    with files.open("/text", "r+b") as binary:
        assert isinstance(binary, io.BufferedRandom)
    with files.open("/text", "wb", 0) as raw:
        assert isinstance(raw, FileIO) and not raw.readable() and raw.writable() and raw.seekable()
        with pytest.raises(io.UnsupportedOperation):
            raw.read(1)
        with pytest.raises(io.UnsupportedOperation):
            raw.fileno()
        assert not raw.isatty()
    with files.open("/text", "rb", 0) as raw:
        with pytest.raises(io.UnsupportedOperation):
            raw.write(b"x")
    assert raw.closed and "closed" in repr(raw)
    for call in (raw.read, raw.tell, raw.readable, raw.size, raw.sync):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert files.write_text("/line", "a\nb") == 3
    assert files.read_text("/line") == "a\nb"


@pytest.mark.parametrize("mode", ["", "rw", "r++", "rbt", "b", "q", "U", "rr"])
def test_modes_that_are_none(files: Files, mode: str) -> None:
    with pytest.raises(ValueError):
        files.open("/f", mode)


def test_arguments_that_contradict_each_other(files: Files) -> None:
    with pytest.raises(ValueError):
        files.open("/f", "w", 0)
    with pytest.raises(ValueError):
        files.open("/f", "wb", encoding="utf-8")
    with pytest.raises(LookupError):
        files.open("/f", "w", encoding="no such encoding")


@pytest.mark.parametrize("mode", ["rb", "r+b", "wb", "w+b", "ab", "a+b", "xb"])
@pytest.mark.parametrize("buffering", [0, 16, 8192])
def test_random_calls_do_what_they_do_on_a_file_of_the_system(
    files: Files, tmp_path: Path, mode: str, buffering: int
) -> None:
    rng = random.Random(f"{mode} {buffering}")
    for round_ in range(10):
        name = f"file{round_}"
        if mode != "xb":
            content = rng.randbytes(rng.randrange(20_000))
            (tmp_path / name).write_bytes(content)
            files.write_bytes(name, content)
        with open(tmp_path / name, mode, buffering) as theirs, files.open(name, mode, buffering) as ours:
            for _ in range(60):
                outcomes: list[object] = []
                seed = rng.random()
                for file in (theirs, ours):
                    choice = random.Random(seed)
                    try:
                        outcomes.append(_call(file, choice))
                    except (OSError, ValueError) as error:
                        outcomes.append((isinstance(error, io.UnsupportedOperation), isinstance(error, OSError)))
                assert outcomes[0] == outcomes[1]
        assert files.read_bytes(name) == (tmp_path / name).read_bytes()


def _call(file: Any, choice: random.Random) -> object:
    size = choice.randrange(9000)
    match choice.randrange(8):
        case 0:
            return file.read(size)
        case 1:
            return file.read()
        case 2:
            buffer = bytearray(size)
            return file.readinto(buffer), buffer
        case 3:
            return file.write(choice.randbytes(size))
        case 4:
            return file.seek(choice.randrange(-100, 30_000), choice.choice([0, 0, 0, 1, 2]))
        case 5:
            return file.tell()
        case 6:
            return file.truncate(choice.choice([None, size]))
        case _:
            return file.flush(), file.readable(), file.writable(), file.seekable(), file.mode


def test_large_reads_and_writes_go_to_their_place(files: Files) -> None:
    content = random.Random(1).randbytes(5 << 20)
    assert files.write_bytes("/big", content) == len(content)
    target = bytearray(len(content) + 10)
    with files.open("/big", "rb") as file:
        assert file.readinto(target) == len(content)
        assert target[: len(content)] == content and file.read(1) == b""
        raw: Any = file.raw
        assert raw.pread(10, 100) == content[100:110] and raw.pread(10, len(content) - 3) == content[-3:]
        assert raw.pread(10, len(content) + 5) == b""
        small = bytearray(4)
        assert raw.preadinto(small, 7) == 4 and small == content[7:11]
        with pytest.raises(BufferError):
            raw.readinto(b"read-only")
        with pytest.raises(BufferError):
            raw.readinto(memoryview(bytearray(10))[::2])
    with files.open("/big", "r+b", 0) as raw:
        assert raw.pwrite(b"here", 1 << 20) == 4 and raw.tell() == 0
        raw.write_atomic(b"all or nothing", 2 << 20)
        assert raw.pread(4, 1 << 20) == b"here" and raw.pread(14, 2 << 20) == b"all or nothing"
        assert raw.size() == len(content)


def test_appending_goes_to_the_end(files: Files) -> None:
    with files.open("/log", "ab", 0) as one, files.open("/log", "ab", 0) as other:
        for number in range(10):
            one.write(b"a%d" % number)
            other.write(b"b%d" % number)
    assert files.read_bytes("/log") == b"".join(b"a%db%d" % (number, number) for number in range(10))


def test_errors_are_those_of_the_system(files: Files, pool: Pool) -> None:
    files.mkdir("/d")
    files.write_bytes("/f", b"")
    calls: list[tuple[type[Exception], Any]] = [
        (FileNotFoundError, lambda: files.open("/none")),
        (FileNotFoundError, lambda: files.unlink("/none")),
        (FileExistsError, lambda: files.open("/f", "x")),
        (FileExistsError, lambda: files.mkdir("/d")),
        (IsADirectoryError, lambda: files.open("/d")),
        (IsADirectoryError, lambda: files.open("/d", "w")),
        (IsADirectoryError, lambda: files.read_bytes("/d")),
        (NotADirectoryError, lambda: files.listdir("/f")),
        (NotADirectoryError, lambda: files.open("/f/g", "w")),
        (OSError, lambda: files.write_bytes("/d/../" + "x" * 300, b"")),
        (ValueError, lambda: files.open("/f").seek(-1)),
    ]
    for kind, call in calls:
        with pytest.raises(kind) as raised:
            call()
        assert isinstance(raised.value, (aquifer.AquiferError, ValueError))
    with pytest.raises(FileNotFoundError) as missing:
        files.read_text("/no/such")
    assert missing.value.filename == "/no/such"
    files.write_bytes("/d/g", b"")
    with pytest.raises(OSError):
        files.rmdir("/d")
    with pytest.raises(aquifer.NoSpaceError):
        with files.open("/full", "wb", 0) as raw:
            while True:
                raw.write(bytes(8 << 20))
    files.unlink("/full")


def test_views_are_the_bytes_in_place(files: Files, pool: Pool) -> None:
    files.write_bytes("/f", b"some text")
    view = files.view("/f", 5)
    assert view.readonly and bytes(view) == b"text" and bytes(files.view("/f", 1, 4)) == b"ome"
    with files.open("/f", "r+b", 0) as raw:
        raw.pwrite(b"T", 5)
    assert bytes(view) == b"Text", "written in place"
    files.unlink("/f")
    files.write_bytes("/f", b"x" * 4096)
    assert bytes(view) == b"Text", "its pages are kept"
    part = view[1:3]
    with pytest.raises(TypeError):
        view[0] = 1
    assert pool._native.exports() == 1
    view.release()
    assert bytes(part) == b"ex" and pool._native.exports() == 1
    part.release()
    assert pool._native.exports() == 0
    with pytest.raises(aquifer.InvalidInputError):
        files.view("/f", 0, 5000)
    with pytest.raises(FileNotFoundError):
        files.view("/g")
    files.write_bytes("/empty", b"")
    assert bytes(files.view("/empty")) == b""
    for _ in range(3000):
        with files.view("/f") as view:
            assert len(view) == 4096
    assert pool.stats()["pins"] <= 1


def test_a_file_in_very_many_pieces_has_no_view_until_it_is_defragmented(files: Files) -> None:
    with files.open("/a", "wb", 0) as raw:
        raw.truncate(1100 * 4096)
        # A hole, filled at every other page first.
        for number in [*range(0, 1100, 2), *range(1, 1100, 2)]:
            raw.pwrite(bytes([number % 255]) * 4096, number * 4096)
    with pytest.raises(aquifer.LimitReachedError, match="pieces"):
        files.view("/a")
    assert bytes(files.view("/a", 0, 8192)) == bytes(4096) + b"\1" * 4096
    before, after = files.defragment("/a")
    assert before > 1024 and after < before
    view = files.view("/a")
    assert [view[number * 4096] for number in range(1100)] == [number % 255 for number in range(1100)]
    view.release()


def test_names(files: Files) -> None:
    files.makedirs("/a/b/c")
    files.makedirs("/a/b", exist_ok=True)
    with pytest.raises(FileExistsError):
        files.makedirs("/a/b")
    files.write_text("/a/one", "1")
    files.write_text("/a/b/two", "22")
    files.symlink("one", "/a/link")
    files.link("/a/one", "/a/hard")
    assert sorted(files.listdir("/a")) == ["b", "hard", "link", "one"]
    assert sorted(files.listdir()) == ["a"] == files.listdir(b"/.")
    entries = {entry.name: entry for entry in files.scandir("/a/")}
    assert entries["b"].is_dir() and not entries["b"].is_file()
    assert entries["link"].is_symlink() and entries["link"].is_file() and not entries["link"].is_file(follow_symlinks=False)
    assert entries["one"].path == "/a/one" and entries["one"].inode() == files.stat("/a/one").st_ino
    status = files.stat("/a/one")
    assert (status.st_size, status.st_nlink, status.st_blksize) == (1, 2, 4096) and stat.S_ISREG(status.st_mode)
    files.utime("/a/one", ns=(1, 1_700_000_000_123_456_789))
    status = files.stat("/a/one")
    assert (status.st_atime_ns, status.st_mtime_ns, status.st_mtime) == (1, 1_700_000_000_123_456_789, 1_700_000_000.1234568)
    files.chmod("/a/one", 0o640)
    assert stat.S_IMODE(files.stat("/a/one").st_mode) == 0o640
    assert files.readlink("/a/link") == "one" and files.realpath("a/b/../link") == "/a/one"
    assert files.stat("/a/link", follow_symlinks=False).st_ino != status.st_ino
    with pytest.raises(FileExistsError):
        files.rename("/a/one", "/a/b/two", replace=False)
    files.rename("/a/one", "/a/b/two")
    assert files.read_text("/a/b/two") == "1" and not files.exists("/a/one") and not files.exists("/a/link")
    assert files.copy("/a/hard", "/copy") == 1 and files.read_bytes("/copy") == b"1"
    with pytest.raises(aquifer.InvalidInputError, match="same file"):
        files.copy("/copy", "/copy")
    with files.open("/copy", "rb") as itself:
        assert files.copy_in(itself, "/copy") == 1
    assert files.read_bytes("/copy") == b"1"
    files.write_bytes("/copy", b"longer")
    assert files.copy_in(io.BytesIO(b"1"), "/copy") == 1 and files.read_bytes("/copy") == b"1"
    assert [(top, sorted(below), sorted(names)) for top, below, names in files.walk("/a")] == [
        ("/a", ["b"], ["hard", "link"]),
        ("/a/b", ["c"], ["two"]),
        ("/a/b/c", [], []),
    ]
    assert [top for top, _, _ in files.walk("/a", topdown=False)] == ["/a/b/c", "/a/b", "/a"]
    assert list(files.walk("/none")) == []
    files.rmdir("/a/b/c")
    files.rmtree("/a")
    files.remove("/copy")
    files.unlink("/copy", missing_ok=True)
    assert files.listdir("/") == []


def test_names_are_any_bytes(files: Files) -> None:
    names: list[str | bytes] = ["grün", "a b", b"\xff\xfe", "new\nline", "-", "*", "日本"]
    for name in names:
        files.write_bytes(name, b"x")
    assert sorted(map(os.fsencode, files.listdir())) == sorted(map(os.fsencode, names))
    for name_ in files.listdir():
        assert files.read_bytes("/" + name_) == b"x"
    assert (files.path(b"\xff\xfe")).read_bytes() == b"x"


def test_copies_in_and_out(files: Files, tmp_path: Path) -> None:
    content = random.Random(2).randbytes(3_000_001)
    (tmp_path / "source").write_bytes(content)
    assert files.copy_in(tmp_path / "source", "/in") == len(content)
    assert files.copy_out("/in", tmp_path / "target") == len(content)
    assert (tmp_path / "target").read_bytes() == content
    assert files.copy_in(io.BytesIO(content[:5]), "/stream") == 5
    out = io.BytesIO()
    assert files.copy_out("/stream", out) == 5 and out.getvalue() == content[:5]
    with pytest.raises(FileNotFoundError):
        files.copy_out("/none", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(FileNotFoundError):
        files.copy_in(tmp_path / "none", "/none")
    assert not files.exists("/none")


@pytest.fixture
def large(files: Files, tmp_path: Path) -> Path:
    """A file of two pieces and a half, also at /large."""
    path = tmp_path / "large"
    path.write_bytes(bytes(5 << 19))
    files.copy_in(path, "/large")
    return path


def test_a_function_is_told_of_progress(files: Files, large: Path) -> None:
    told: list[tuple[int, int | None]] = []

    def tell(done: int, total: int | None) -> None:
        told.append((done, total))

    pieces = [1 << 20, 2 << 20, 5 << 19]
    files.copy_in(large, "/again", progress=tell)
    files.copy_out("/large", large, progress=tell)
    assert told == [(done, 5 << 19) for done in pieces] * 2
    told.clear()
    with open(large, "rb") as source:
        files.copy_in(source, "/again", progress=tell)
    assert told == [(done, None) for done in pieces]
    with pytest.raises(ZeroDivisionError):
        files.copy_out("/large", large, progress=lambda done, total: 1 // 0)


def test_what_is_replaced_is_cut_at_the_end(files: Files, large: Path, tmp_path: Path) -> None:
    """It may be the source, by another way to it."""
    sizes: list[int] = []
    target = tmp_path / "target"
    target.write_bytes(b"x" * (6 << 19))
    files.copy_out("/large", target, progress=lambda done, total: sizes.append(target.stat().st_size))
    assert sizes == [6 << 19] * 3 and target.read_bytes() == bytes(5 << 19)
    assert files.copy_out("/large", os.devnull) == 5 << 19
    with pytest.raises(IsADirectoryError):
        files.copy_out("/large", tmp_path)


def test_progress_is_a_bar_of_tqdm(files: Files, large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed: python3 -m pip install tqdm")
    assert files.copy_in(large, "/again", progress=True) == 5 << 19
    assert files.copy_out("/again", large, progress=True) == 5 << 19
    shown = capsys.readouterr().err
    assert shown.count("/again: 100%") == 2 and "2.50M/2.50M" in shown
    files.copy_out("/again", large)
    assert capsys.readouterr().err == ""


def test_without_tqdm_there_is_a_warning(files: Files, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.warns(UserWarning, match="python3 -m pip install tqdm") as warned:
        assert files.copy_in(large, "/again", progress=True) == 5 << 19
    assert warned[0].filename == __file__


class Trickle(io.RawIOBase):
    """A pipe that does not wait: it has, or takes, a few bytes at a time, and then none."""

    def __init__(self, ready: Iterable[int | None]) -> None:
        self.ready = iter(ready)
        self.taken = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        return next(self.ready)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int | None:
        count = next(self.ready)
        self.taken += bytes(data)[: count or 0]
        return count


def test_files_that_do_not_wait_are_not_taken_for_the_end(files: Files) -> None:
    assert files.copy_in(Trickle([10, 1, 0]), "/in") == 11
    with pytest.raises(BlockingIOError):
        files.copy_in(Trickle([10, None, 10, 0]), "/in")
    out = Trickle([3, 5, 3])
    # What it had behind the copied bytes stays until all are copied.
    assert files.copy_out("/in", out) == 11 and out.taken == bytes(11)
    with pytest.raises(BlockingIOError):
        files.copy_out("/in", Trickle([3, None]))
    for wrong in ([0], [12], [-1]):
        with pytest.raises(OSError, match="returned"):
            files.copy_out("/in", Trickle(wrong))
    with pytest.raises(OSError, match="returned"):
        files.copy_in(Trickle([1 << 30]), "/in")


def test_negative_numbers_are_errors_of_the_system(files: Files) -> None:
    files.write_bytes("/file", b"0123456789")
    with files.open("/file", "r+b", 0) as raw:
        calls: list[Any] = [
            lambda: raw.truncate(-1),
            lambda: raw.pread(-1, 0),
            lambda: raw.pread(5, -1),
            lambda: raw.preadinto(bytearray(3), -1),
            lambda: raw.pwrite(b"x", -1),
            lambda: raw.write_atomic(b"x", -1),
            lambda: raw.seek(-1),
            lambda: files.view("/file", -1),
            lambda: files.view("/file", 0, -1),
        ]
        for call in calls:
            with pytest.raises(OSError) as raised:
                call()
            assert raised.value.errno == errno.EINVAL
        # As of the module io.
        for call in (lambda: raw.truncate(1 << 70), lambda: raw.seek(1 << 70)):
            with pytest.raises(OverflowError):
                call()
    assert files.read_bytes("/file") == b"0123456789"


def test_paths_are_like_those_of_pathlib(files: Files, tmp_path: Path) -> None:
    ours, theirs = files.path("/work"), tmp_path / "work"
    for root in (ours, theirs):
        (root / "src" / "deep" / "er").mkdir(parents=True)
        (root / "doc").mkdir()
        for name in ["src/a.py", "src/b.txt", "src/deep/c.py", "src/deep/er/d.py", "doc/.hidden", "doc/e.md", "top.py"]:
            (root / name).write_text(name)
        (root / "src" / "loop").symlink_to("..")

    def names(root: Any, found: Any) -> list[str]:
        return sorted(str(path.relative_to(root)) for path in found)

    for pattern in ["*", "*.py", "**/*.py", "**", "src/*", "*/*.py", "s?c/[ab].*", "src/deep/c.py", "none/*", "**/er/*", "*/"]:
        expected = [path for path in theirs.glob(pattern) if "loop" not in path.parts[:-1]]
        if pattern.endswith("/"):
            # pathlib honours the slash from 3.11 on, and follows links.
            expected = [path for path in expected if path.is_dir()]
        if pattern.endswith("**"):
            # From 3.13 on pathlib finds files and links as well.
            expected = [path for path in expected if path.is_dir() and not path.is_symlink()]
        assert names(ours, ours.glob(pattern)) == names(theirs, expected), pattern
    assert names(ours, ours.rglob("*.py")) == names(theirs, theirs.rglob("*.py"))
    assert names(ours, ours.iterdir()) == names(theirs, theirs.iterdir())
    path = ours / "src" / "a.py"
    assert (path.name, path.stem, path.suffix, path.suffixes) == ("a.py", "a", ".py", [".py"])
    assert str(path) == path.as_posix() == "/work/src/a.py" and path.parts == ("/", "work", "src", "a.py")
    assert path.parent == ours / "src" and path.parents[-1] == files.path("/") and path in {files.path("work/src", "a.py")}
    assert str(path.with_suffix(".c")) == "/work/src/a.c" and path.with_stem("z").name == "z.py"
    assert path.with_name("q").joinpath("r", "s") == ours / "src/q/r/s" and path.match("*.py")
    assert path.is_relative_to(ours) and sorted([path, ours]) == [ours, path] and path.files is files
    assert path.read_text() == "src/a.py" and path.read_bytes() == b"src/a.py" and bytes(path.view(4)) == b"a.py"
    assert path.exists() and path.is_file() and not path.is_dir() and not path.is_symlink()
    assert path.stat().st_size == 8 and path.lstat().st_size == 8
    with path.open("a") as file:
        file.write("!")
    moved = path.rename(ours / "moved.py")
    assert moved.read_text() == "src/a.py!" and not path.exists()
    moved.chmod(0o600)
    (ours / "hard").hardlink_to(moved)
    assert (ours / "hard").stat().st_nlink == 2
    assert (ours / "src" / "loop").readlink() == ".." and (ours / "src" / "loop").resolve() == ours
    (ours / "new").touch()
    (ours / "new").touch()
    with pytest.raises(FileExistsError):
        (ours / "new").touch(exist_ok=False)
    (ours / "new").unlink()
    (ours / "new").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (ours / "new").unlink()
    with pytest.raises(FileNotFoundError):
        (ours / "x" / "y").mkdir()
    with pytest.raises(FileExistsError):
        moved.mkdir(exist_ok=True)
    with pytest.raises(TypeError):
        os.fspath(moved)  # type: ignore[call-overload]
    (ours / "doc" / "e.md").replace(ours / "doc" / ".hidden")
    assert names(ours, (ours / "doc").iterdir()) == ["doc/.hidden"]


def test_syncs(files: Files, pool: Pool) -> None:
    with files.open("/f", "w") as text:
        text.write("buffered")
        files.fsync(text)
        assert files.read_text("/f") == "buffered"
        raw: Any = text.buffer
        raw.raw.sync(data_only=True)
    pool.sync()
    with pytest.raises(TypeError):
        files.fsync(io.BytesIO())


LOCKER = """
import aquifer, sys
files = aquifer.Pool.open(sys.argv[1]).files
with files.open("/f", "r+b", 0) as raw:
    print(raw.lock(wait=False), raw.lock(shared=True, wait=False))
"""


def test_locks(files: Files, pool: Pool) -> None:
    def tried() -> str:
        return subprocess.run([sys.executable, "-c", LOCKER, pool.path], capture_output=True, text=True, timeout=120).stdout

    files.write_bytes("/f", b"")
    with files.open("/f", "r+b", 0) as raw:
        assert raw.lock() and tried() == "False False\n"
        assert raw.lock(shared=True) and tried() == "False True\n"
        raw.unlock()
        assert tried() == "True True\n"
        assert raw.lock()
    assert tried() == "True True\n"


def test_signals_are_handled_while_a_lock_is_waited_for(files: Files) -> None:
    class Enough(Exception):
        pass

    handled = 0

    def handler(*_: object) -> None:
        nonlocal handled
        handled += 1
        if handled == 3:
            raise Enough
        # The next one comes while the wait goes on.
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    files.write_bytes("/f", b"")
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with files.open("/f", "r+b", 0) as holder, files.open("/f", "r+b", 0) as waiter:
            assert holder.lock()
            with pytest.raises(Enough):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                waiter.lock()
            assert handled == 3 and not waiter.lock(wait=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_threads(files: Files) -> None:
    content = random.Random(3).randbytes(1 << 20)
    files.write_bytes("/f", content)
    wrong: list[int] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        with files.open("/f", "rb", 0) as raw:
            for _ in range(200):
                at, size = rng.randrange(1 << 20), rng.randrange(10_000)
                if raw.pread(size, at) != content[at : at + size]:
                    wrong.append(at)
                with files.view("/f", at) as view:
                    if view[:1] != content[at : at + 1]:
                        wrong.append(at)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
