"""The file system of fsspec: its own abstract test suite, URLs, chains, processes."""

import gc
import os
import pickle
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import aquifer
from aquifer import Pool

pytest.importorskip("fsspec", minversion="2025.12", reason="fsspec 2025.12 is not installed: python3 -m pip install fsspec")

import fsspec
import fsspec.callbacks
from fsspec.tests import abstract

from aquifer._fsspec import AquiferFileSystem, _close_all


@pytest.fixture
def pool_path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "data.pool"
    Pool.create(path, "8MiB").close()
    yield path
    AquiferFileSystem.clear_instance_cache()
    gc.collect()
    _close_all()
    path.unlink()


@pytest.fixture
def files(pool_path: Path) -> Iterator[aquifer.Files]:
    with Pool.open(pool_path) as pool:
        yield pool.files


class AquiferFixtures(abstract.AbstractFixtures):  # type: ignore[misc]
    @pytest.fixture
    def fs(self, pool_path: Path) -> Any:
        return fsspec.filesystem("aquifer", pool=pool_path)

    @pytest.fixture
    def fs_path(self) -> str:
        return "/work"

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(map(str, parts))


class TestCopy(abstract.AbstractCopyTests, AquiferFixtures):  # type: ignore[misc]
    pass


class TestGet(abstract.AbstractGetTests, AquiferFixtures):  # type: ignore[misc]
    pass


class TestPut(abstract.AbstractPutTests, AquiferFixtures):  # type: ignore[misc]
    pass


class TestPipe(abstract.AbstractPipeTests, AquiferFixtures):  # type: ignore[misc]
    pass


class TestOpen(abstract.AbstractOpenTests, AquiferFixtures):  # type: ignore[misc]
    pass


def test_the_entry_point_names_the_class() -> None:
    found = [one for one in entry_points(group="fsspec.specs") if one.name == "aquifer"]
    assert found and all(one.load() is AquiferFileSystem for one in found)
    assert fsspec.get_filesystem_class("aquifer") is AquiferFileSystem


def test_an_fsspec_that_is_too_old_is_refused() -> None:
    program = "import fsspec; fsspec.__version__ = '2025.10.0'; import aquifer._fsspec"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "ImportError: files of pools need fsspec 2025.12 or later, and 2025.10.0 is installed" in done.stderr


def test_urls(pool_path: Path, files: aquifer.Files) -> None:
    files.makedirs("/dir/sub")
    files.write_text("/dir/one.txt", "1")
    files.write_text("/dir/two.txt", "2")
    chained = f"aquifer://{pool_path}::/dir/one.txt"
    urls: list[tuple[str, dict[str, Any]]] = [
        (chained, {}),
        ("aquifer:///dir/one.txt", {"pool": pool_path}),
        ("aquifer://dir/one.txt", {"pool": str(pool_path)}),
        (f"aquifer:///dir/one.txt::{pool_path}", {}),
        (f"aquifer:///dir/one.txt::file://{pool_path}", {}),
    ]
    for url, options in urls:
        with fsspec.open(url, "rt", **options) as file:
            assert file.read() == "1", url
        fs, inside = fsspec.url_to_fs(url, **options)
        assert isinstance(fs, AquiferFileSystem) and inside == "/dir/one.txt"
        assert fs.pool_path == str(pool_path) and fs.cat(url) == b"1"
        assert fs.unstrip_protocol(inside) == chained
    patterns: list[tuple[str, dict[str, Any]]] = [
        (f"aquifer://{pool_path}::/dir/*.txt", {}),
        ("aquifer:///dir/*.txt", {"pool": pool_path}),
    ]
    for url, options in patterns:
        opened = fsspec.open_files(url, "rb", **options)
        assert [file.path for file in opened] == ["/dir/one.txt", "/dir/two.txt"]
    for url in ["aquifer:///dir/one.txt", f"aquifer://{pool_path}.none::/dir/one.txt"]:
        with pytest.raises((ValueError, FileNotFoundError)):
            fsspec.open(url).open()
    with pytest.raises(ValueError, match="cannot be opened by 'memory'"):
        fsspec.open("aquifer:///x::memory://pool").open()
    # As part of longer chains.
    with fsspec.open(f"simplecache::{chained}", "rb") as file:
        assert file.read() == b"1"
    with files.open("/made.zip", "wb") as raw, zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("inside.txt", "in a zip")
    with fsspec.open(f"zip://inside.txt::aquifer://{pool_path}::/made.zip", "rb") as file:
        assert file.read() == b"in a zip"


def test_a_url_of_another_pool_is_refused(pool_path: Path, tmp_path: Path) -> None:
    other, link = tmp_path / "other.pool", tmp_path / "link.pool"
    with Pool.create(other, "8MiB") as pool:
        pool.files.write_bytes("/f", b"of the other")
    link.symlink_to(pool_path)
    fs = fsspec.filesystem("aquifer", pool=pool_path)
    fs.pipe("/f", b"of this one")
    assert fs.cat(f"aquifer://{pool_path}::/f") == fs.cat(f"aquifer://{link}::/f") == b"of this one"
    assert pickle.loads(pickle.dumps(fs)) == fs
    calls: list[Callable[[str], object]] = [fs.cat, fs.open, fs.info, fs.ls, fs.glob, fs.exists, lambda url: fs.rm([url])]
    for call in calls:
        with pytest.raises(ValueError, match="is in another pool"):
            call(f"aquifer://{other}::/f")
    assert fsspec.open(f"aquifer://{other}::/f").open().read() == b"of the other"
    other.unlink()


def test_the_file_system(pool_path: Path, files: aquifer.Files) -> None:
    fs = fsspec.filesystem("aquifer", pool=pool_path)
    fs.makedirs("/a/b")
    fs.pipe("/a/f", b"0123456789")
    files.symlink("f", "/a/link")
    files.symlink("nowhere", "/a/broken")
    assert fs.ls("/a", detail=False) == sorted(fs.ls("/a", detail=False), key=fs.ls("/a", detail=False).index)
    assert {one["name"]: (one["type"], one["size"]) for one in fs.ls("/a", detail=True)} == {
        "/a/b": ("directory", 0),
        "/a/f": ("file", 10),
        "/a/link": ("file", 10),
        "/a/broken": ("link", 7),
    }
    assert fs.ls("/a/f", detail=False) == ["/a/f"] and fs.info("/a/link")["destination"] == "f"
    assert fs.isdir("a") and fs.isfile("/a/f") and fs.islink("/a/link") and not fs.exists("/a/broken")
    assert fs.lexists("/a/broken") and fs.exists("/") and fs.isdir("")
    assert fs.cat_file("/a/f", 2, 5) == b"234" and fs.cat_file("/a/f", -3) == b"789" and fs.cat_file("/a/f", 1, -7) == b"12"
    assert fs.cat_file("/a/f", 20, 30) == b"" and fs.head("/a/f", 3) == b"012" and fs.tail("/a/f", 3) == b"789"
    with fs.open("/a/f", "rb") as file:
        assert file.size == 10 and file.path == "/a/f" and file.details["type"] == "file" and file.full_name == "/a/f"
        assert file.seek(5) == 5 and file.read() == b"56789"
    with fs.open("/a/f", "ab") as file:
        file.write(b"!")
    with fs.open("/a/f", "r+b") as file:
        file.write(b"X")
    with fs.open("/a/f", "r") as file:
        assert file.read() == "X123456789!"
    assert fs.created("/a/f").tzinfo and fs.modified("/a/f") >= fs.created("/a/b")
    assert fs.find("/") == ["/a/broken", "/a/f", "/a/link"] and fs.du("/a/f") == 11
    assert fs.glob("/a/*") == ["/a/b", "/a/broken", "/a/f", "/a/link"] or "/a/f" in fs.glob("/a/*")
    fs.mv("/a/f", "/a/g")
    fs.mv("/a/g", "/a/b")
    assert files.read_bytes("/a/b/g") == b"X123456789!"
    fs.link("/a/b/g", "/a/hard")
    fs.symlink("/a/hard", "/a/soft")
    fs.chmod("/a/hard", 0o600)
    assert files.stat("/a/soft").st_nlink == 2
    fs.touch("/a/new", truncate=False)
    fs.touch("/a/hard")
    assert fs.size("/a/b/g") == 0
    with pytest.raises(FileNotFoundError):
        fs.open("/a/none")
    strict = fsspec.filesystem("aquifer", pool=pool_path, auto_mkdir=False)
    with pytest.raises(FileNotFoundError):
        strict.pipe("/no/directory", b"")
    fs.pipe("/now/one", b"")
    assert strict.isdir("/now")
    fs.rm("/now", recursive=True)
    with pytest.raises(FileExistsError):
        fs.makedirs("/a/b")
    with pytest.raises(OSError):
        fs.rmdir("/a")
    fs.mkdir("/c/d/e")
    fs.rm("/c", recursive=True)
    fs.rm(["/a/soft", "/a/new"])
    fs.rm("/a", recursive=True)
    assert fs.ls("/", detail=False) == []
    fs.sync()
    assert fs.fsid.startswith("aquifer_")


def test_transactions(pool_path: Path, files: aquifer.Files) -> None:
    fs = fsspec.filesystem("aquifer", pool=pool_path)
    fs.pipe("/f", b"old")
    with fs.transaction:
        with fs.open("/f", "wb") as file:
            file.write(b"new")
        with fs.open("/g", "wb") as file:
            file.write(b"more")
        assert files.read_bytes("/f") == b"old" and not files.exists("/g")
    assert files.read_bytes("/f") == b"new" and files.read_bytes("/g") == b"more"
    with pytest.raises(KeyError):
        with fs.transaction:
            with fs.open("/f", "wb") as file:
                file.write(b"newer")
            raise KeyError
    assert files.read_bytes("/f") == b"new" and sorted(files.listdir()) == ["f", "g"]


def test_one_handle_of_a_pool_in_a_process(pool_path: Path) -> None:
    one = fsspec.filesystem("aquifer", pool=pool_path)
    other = fsspec.filesystem("aquifer", pool=pool_path, auto_mkdir=False)
    assert one is not other and one.pool is other.pool
    assert fsspec.filesystem("aquifer", pool=pool_path) is one
    reader = fsspec.filesystem("aquifer", pool=pool_path, read_only=True)
    assert reader.pool is not one.pool and not reader.pool.writable
    with pytest.raises(PermissionError):
        reader.pipe("/f", b"")
    one.pool.close()
    one.pipe("/f", b"opened again")
    assert reader.cat("/f") == b"opened again"
    assert pickle.loads(pickle.dumps(other)) == other
    found: list[Pool] = []
    threads = [threading.Thread(target=lambda: found.append(AquiferFileSystem(pool=pool_path, skip_instance_cache=True).pool))]
    threads *= 1
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [one.pool]


def test_a_pool_that_has_its_only_writer_elsewhere_is_read(pool_path: Path) -> None:
    program = "import aquifer, sys; aquifer.Pool.open(sys.argv[1]).files.write_text('/f', 'text')"
    subprocess.run([sys.executable, "-c", program, str(pool_path)], check=True, timeout=120)
    pool_path.chmod(0o400)
    fs = fsspec.filesystem("aquifer", pool=pool_path)
    if os.geteuid() != 0:
        assert not fs.pool.writable
    assert fs.cat("/f") == b"text"
    pool_path.chmod(0o600)


def test_a_forked_child_opens_it_anew(pool_path: Path) -> None:
    fs = fsspec.filesystem("aquifer", pool=pool_path)
    fs.pipe("/f", b"parent")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            assert fs.cat("/f") == b"parent"
            fs.pipe("/child", b"child")
            again = fsspec.filesystem("aquifer", pool=pool_path)
            assert again.pool is fs.pool
            fs.pool.close()
            os.write(write, b"well")
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read) as told:
        assert told.read() == "well"
    assert fs.cat("/child") == b"child"


def test_the_end_of_a_process_closes_its_pools(pool_path: Path) -> None:
    program = """
import fsspec, sys, threading
file = fsspec.open(f"aquifer://{sys.argv[1]}::/f", "wb").open()
file.write(b"not flushed by the program")
# It has a reference that is never dropped.
threading.Thread(target=lambda file: threading.Event().wait(), args=(file,), daemon=True).start()
"""
    before = set(os.listdir("/dev/shm"))
    subprocess.run([sys.executable, "-c", program, str(pool_path)], check=True, timeout=120)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(f"aquifer-{_uuid(pool_path)}")}
    with Pool.open(pool_path) as pool:
        assert pool.stats()["recovered_records"] == 0
        assert pool.files.read_bytes("/f") == b"not flushed by the program"


def _uuid(pool_path: Path) -> str:
    with Pool.open(pool_path, read_only=True) as pool:
        return str(pool.stats()["uuid"]).replace("-", "")


def needed(module: str, package: str | None = None) -> Any:
    return pytest.importorskip(module, reason=f"{module} is not installed: python3 -m pip install {package or module}")


def test_pandas_and_pyarrow(pool_path: Path) -> None:
    pandas = needed("pandas")
    table = pandas.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "z"]})
    table.to_csv(f"aquifer://{pool_path}::/table.csv", index=False)
    assert pandas.read_csv("aquifer:///table.csv", storage_options={"pool": str(pool_path)}).equals(table)
    needed("pyarrow")
    table.to_parquet(f"aquifer://{pool_path}::/table.parquet")
    assert pandas.read_parquet(f"aquifer://{pool_path}::/table.parquet").equals(table)
    from pyarrow import dataset, parquet

    # Its own prefix for what fsspec opens.
    assert parquet.read_table(f"fsspec+aquifer://{pool_path}::/table.parquet").num_rows == 3
    system = fsspec.filesystem("aquifer", pool=pool_path)
    assert dataset.dataset("/table.parquet", filesystem=system).to_table().num_rows == 3


def test_zarr(pool_path: Path) -> None:
    zarr = needed("zarr")
    url = f"aquifer://{pool_path}::/deep/group.zarr"
    group = zarr.open_group(url, mode="w")
    group.create_array("x", shape=(10, 10), chunks=(5, 5), dtype="i4")[:] = 3
    again = zarr.open_group(url, mode="r+")
    assert again["x"][:].sum() == 300
    del again["x"]
    assert list(zarr.open_group(url, mode="r")) == []


def test_xarray(pool_path: Path) -> None:
    needed("zarr")
    xarray = needed("xarray")
    url = f"aquifer://{pool_path}::/set.zarr"
    data = xarray.Dataset({"v": (("x", "y"), [[1, 2], [3, 4]])})
    data.to_zarr(url)
    data.to_zarr(url, append_dim="x")
    assert xarray.open_zarr(url)["v"].values.tolist() == [[1, 2], [3, 4]] * 2


def test_dask(pool_path: Path) -> None:
    pandas, _, frames = needed("pandas"), needed("pyarrow"), needed("dask.dataframe", "dask[dataframe]")
    parts = frames.from_pandas(pandas.DataFrame({"a": range(100)}), npartitions=3)
    parts.to_parquet(f"aquifer://{pool_path}::/parts.parquet")
    assert frames.read_parquet(f"aquifer://{pool_path}::/parts.parquet")["a"].sum().compute() == 4950
    parts.to_csv(f"aquifer://{pool_path}::/csv/part-*.csv", index=False)
    assert frames.read_csv(f"aquifer://{pool_path}::/csv/part-*.csv")["a"].sum().compute() == 4950


def test_duckdb(pool_path: Path) -> None:
    duckdb = needed("duckdb")
    connection = duckdb.connect()
    connection.register_filesystem(fsspec.filesystem("aquifer", pool=pool_path))
    connection.sql(f"copy (select * from range(10) t(x)) to 'aquifer://{pool_path}::/one.parquet' (format parquet)")
    connection.sql("copy (select * from range(10) t(x)) to 'aquifer:///two.parquet' (format parquet)")
    assert connection.sql(f"select sum(x) from 'aquifer://{pool_path}::/*.parquet'").fetchall() == [(90,)]


class Told(fsspec.callbacks.Callback):  # type: ignore[misc]
    """What a callback of fsspec is told: of all files, and of each."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, Told] = {}

    def branched(self, path_1: str, path_2: str, **options: Any) -> "Told":
        self.files[path_1] = made = Told()
        return made


def test_callbacks_are_told_of_progress(pool_path: Path, tmp_path: Path) -> None:
    fs = fsspec.filesystem("aquifer", pool=pool_path)
    (tmp_path / "in").mkdir()
    for name, size in (("one", 10_000), ("two", 1)):
        (tmp_path / "in" / name).write_bytes(bytes(size))
    put, got = Told(), Told()
    fs.put(f"{tmp_path}/in/*", "/out/", callback=put)
    fs.get("/out/*", f"{tmp_path}/back/", callback=got)
    for told, directory in (put, f"{tmp_path}/in"), (got, "/out"):
        assert (told.size, told.value) == (2, 2)
        done = {name: (one.size, one.value) for name, one in told.files.items()}
        assert done == {f"{directory}/one": (10_000, 10_000), f"{directory}/two": (1, 1)}
    assert (tmp_path / "back" / "one").read_bytes() == bytes(10_000)


def test_what_links_lead_to_is_not_removed(pool_path: Path) -> None:
    fs = fsspec.filesystem("aquifer", pool=pool_path)
    fs.makedirs("/keep")
    fs.makedirs("/junk/deep")
    fs.pipe("/keep/precious", b"text")
    for name, target in [("link", "/keep"), ("file", "/keep/precious"), ("up", ".."), ("gone", "nowhere")]:
        fs.files.symlink(target, f"/junk/deep/{name}")
    assert fs.isdir("/junk/deep/link") and fs.info("/junk/deep/link")["type"] == "directory"
    assert "/junk/deep/link/precious" not in fs.find("/junk")
    fs.rm("/junk", recursive=True)
    assert not fs.exists("/junk")
    assert fs.cat("/keep/precious") == b"text"
