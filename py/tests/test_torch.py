"""The data set, as a loader of torch uses it; torch itself only where it is there."""

from __future__ import annotations

import multiprocessing
import pathlib
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aquifer
from aquifer.torch import MemmapDataset
from object_server import ObjectServer
from test_processes import in_child

Table = npt.NDArray[np.int64]


def batches(dataset: Any, indices: list[list[int]]) -> list[Any]:
    """What the fetcher of a worker does."""
    return [dataset.__getitems__(batch) for batch in indices]


def test_samples_of_one_length(path: str, table: Table) -> None:
    dataset: MemmapDataset[Any] = MemmapDataset(path, np.int64, (8, 8), budget="64MiB")
    assert len(dataset) == 4096 and (dataset[5] == table[5].reshape(8, 8)).all() and (dataset[-1] == table[-1].reshape(8, 8)).all()
    read = dataset.__getitems__([7, 3, -2])
    assert all((sample == table[row].reshape(8, 8)).all() for sample, row in zip(read, [7, 3, 4094]))
    assert sum(int(sample.sum()) for sample in dataset) == table.sum()
    with pytest.raises(IndexError, match="sample 4096 of 4096"):
        dataset[4096]
    single: MemmapDataset[int] = MemmapDataset(path, np.int64, (), transform=int)
    assert single.__getitems__([9, 1]) == [9, 1]


def test_samples_of_several_lengths(path: str, table: Table) -> None:
    flat, offsets = table.reshape(-1), np.array([0, 5, 5, 1000, 1001, 200_000])
    offsets.tofile(path + ".offsets")
    in_file = aquifer.memmap(path + ".offsets", np.int64, "r")
    again = pickle.loads(pickle.dumps(MemmapDataset(path, np.int64, offsets=in_file)))
    assert isinstance(again.offsets, aquifer.memmap) and (again[2] == flat[5:1000]).all()
    # Forked workers do not have the memory of a cache.
    cached = aquifer.memmap(path + ".offsets", np.int64, "r", backend="cache", budget="16MiB")
    assert not isinstance(MemmapDataset(path, np.int64, offsets=cached).offsets, aquifer.memmap)
    dataset: MemmapDataset[Any] = MemmapDataset(path, np.int64, offsets=offsets)
    assert len(dataset) == 5
    for row, sample in zip([4, 1, 0, 2, -2], dataset.__getitems__([4, 1, 0, 2, -2])):
        assert (sample == flat[offsets[row % 5] : offsets[row % 5 + 1]]).all()
    assert sum(len(sample) for sample in dataset) == 200_000


def test_wrong_arguments_are_errors(path: str, table: Table) -> None:
    wrong: list[dict[str, Any]] = [
        {},
        {"shape": (1,), "offsets": [0, 1]},
        {"shape": (0,)},
        {"shape": (table.size + 1,)},
        {"offsets": [0, table.size + 1]},
        {"offsets": [5, 3]},
        {"offsets": [-1, 3]},
    ]
    for options in wrong:
        with pytest.raises(ValueError):
            MemmapDataset(path, np.int64, **options)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_open_the_file_themselves(path: str, table: Table, method: str) -> None:
    dataset: MemmapDataset[Any] = MemmapDataset(path, np.int64, (64,), budget="64MiB")
    assert (dataset[1] == table[1]).all(), "open before the fork"
    assert len(pickle.dumps(dataset)) < 2000
    with multiprocessing.get_context(method).Pool(2) as pool:
        for read in pool.starmap(batches, [(dataset, [[1, 2], [4000]])] * 4):
            assert (read[0][1] == table[2]).all() and (read[1][0] == table[4000]).all()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.delenv("AQUIFER_TIER", raising=False)
    with ObjectServer() as server:
        yield server


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_read_an_object(
    server: ObjectServer, tmp_path: pathlib.Path, table: Table, method: str, rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, tier = server.put("bucket/table.bin", table.tobytes()), tmp_path / "tier"
    options: dict[str, Any] = {"storage_options": {"timeout": 60}, "tier": tier, "rows": rows}
    dataset: MemmapDataset[Any] = MemmapDataset(url, np.int64, (64,), budget="64MiB", **options)
    assert len(dataset) == 4096 and dataset.path == url
    assert (dataset[1] == table[1]).all(), "open before the fork"
    # Of a tier's directory it is only said that there is one; that of the workers' node is in their environment.
    monkeypatch.setenv("AQUIFER_TIER", str(tier))
    with multiprocessing.get_context(method).Pool(2) as pool:
        for read in pool.starmap(batches, [(dataset, [[1, 2], [4000]])] * 4):
            assert (read[0][1] == table[2]).all() and (read[1][0] == table[4000]).all()
        server.put("bucket/table.bin", table[::-1].tobytes())
        for call in (lambda: pool.apply(batches, (dataset, [[500]])), lambda: dataset[500]):
            with pytest.raises(aquifer.ChangedError):
                call()


def test_samples_of_several_lengths_of_an_object(server: ObjectServer, table: Table) -> None:
    url, offsets = server.put("bucket/table.bin", table.tobytes()), [0, 5, 5, 1000, 200_000]
    dataset: MemmapDataset[Any] = MemmapDataset(url, np.int64, offsets=offsets, budget="16MiB")
    flat = table.reshape(-1)
    for again in (dataset, pickle.loads(pickle.dumps(dataset)), pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(dataset))))):
        assert all((sample == flat[offsets[row] : offsets[row + 1]]).all() for row, sample in enumerate(again))
    with pytest.raises(aquifer.NotFoundError):
        MemmapDataset(url + "2", np.int64, ())
    with pytest.raises(ValueError, match="are for URLs"):
        MemmapDataset(__file__, np.uint8, (), tier=True)


def test_secrets_go_to_forked_workers_only(server: ObjectServer, table: Table) -> None:
    url = server.put("bucket/table.bin", table.tobytes()) + "?signature=hunter2"
    dataset: MemmapDataset[Any] = MemmapDataset(url, np.int64, (64,), budget="16MiB")
    assert "hunter2" not in dataset.path
    with pytest.raises(aquifer.NotPicklableError) as raised:
        pickle.dumps(dataset)
    assert "hunter2" not in str(raised.value)
    in_child(lambda: check_equal(dataset[7], table[7]))


def check_equal(sample: Any, expected: Any) -> None:
    assert (sample == expected).all()


def test_a_loader_of_torch(path: str, table: Table) -> None:
    torch: Any = pytest.importorskip("torch", reason="pip install torch")
    for workers in (0, 2):
        dataset: MemmapDataset[Any] = MemmapDataset(path, np.int64, (64,), budget="64MiB")
        loader = torch.utils.data.DataLoader(dataset, batch_size=100, num_workers=workers)
        assert (torch.cat(list(loader)).numpy() == table).all()
