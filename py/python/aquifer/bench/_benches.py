"""What is compared: one function for each bench."""

from __future__ import annotations

import importlib.util
import mmap
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import aquifer
from aquifer.torch import MemmapDataset

from . import _contenders as contenders
from ._contenders import File, Numbers
from ._harness import Conditions, Contender, Read, compare, drop, in_child, progress, ratio, remove_groups

__all__ = ["BENCHES", "FLOORS", "Report"]

# A ratio's floor, below which something is wrong, and what it aims at.
FLOORS: dict[str, tuple[float, float]] = {
    "take_vs_memmap_random": (2.5, 5.0),
    "take_vs_willneed_loop_3k_uniform": (1.2, 1.5),
    "take_vs_willneed_loop_256b_zipf": (1.4, 2.2),
    "take_vs_best_other": (1.0, 1.2),
    "dataloader_vs_memmap_2w": (2.0, 3.5),
    "epochs_vs_memmap": (1.5, 3.0),
    "array_psync_vs_np_save": (20.0, 100.0),
    "warm_index_vs_memmap": (0.95, 1.0),
    "warm_slice_vs_memmap": (0.95, 1.0),
}


@dataclass
class Report:
    """Of one bench: times by contender, ratios, contenders that are missing, and what else a reader has to know."""

    unit: str
    times: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def of(self, times: dict[str, list[float]]) -> None:
        self.times.update({name: statistics.median(taken) for name, taken in times.items()})


def _batches(conditions: Conditions, rounds: int, each: int, draw: Callable[[np.random.Generator], Any]) -> list[list[Any]]:
    random = np.random.default_rng(2)
    if conditions.quick:
        rounds, each = 2, 2
    return [[draw(random) for _ in range(each)] for _ in range(rounds)]


def _size(conditions: Conditions) -> int:
    return (32 if conditions.quick else 2048) << 20


def _raw(file: File, conditions: Conditions, warm: Callable[[Read], None]) -> list[Contender]:
    """Those that read a file of rows as it is through the page cache."""
    opened = {
        "memmap_default": contenders.plain_memmap(file),
        "memmap_random": contenders.plain_memmap(file, mmap.MADV_RANDOM),
        "willneed_loop": contenders.willneed_loop(file),
        "preadv_loop": contenders.preadv_loop(file),
        "preadv_threads": contenders.preadv_threads(file),
    }
    return [Contender(name, open_, [file.path], warm) for name, open_ in opened.items()]


def rows_3k(conditions: Conditions) -> Report:
    """Batches of 256 rows of 3 KiB, all asked for alike, from 2 GiB."""
    report = Report("ms a batch")
    file = File.create(os.path.join(conditions.directory, "rows"), _size(conditions) // 3072, 3072)

    def fill(read: Read) -> None:
        contenders.fill_uniformly([file.path], conditions.limit_bytes, 3)

    def fill_by_taking(read: Read) -> None:
        random = np.random.default_rng(3)
        each = min(341, file.rows)
        for start in random.integers(0, file.rows - each + 1, conditions.limit_bytes >> 20):
            read(np.arange(start, start + each))

    others, report.missing = contenders.libraries(file, conditions, 3)
    taking = Contender("take", contenders.take(file, conditions), [file.path], fill_by_taking)
    rounds = _batches(conditions, 5, 16, lambda random: random.integers(0, file.rows, 256))
    times, missing = compare(conditions, [taking, *_raw(file, conditions, fill), *others], rounds)
    report.of(times)
    report.missing |= missing
    report.ratios["take_vs_memmap_random"] = ratio(times["memmap_random"], times["take"])
    report.ratios["take_vs_willneed_loop_3k_uniform"] = ratio(times["willneed_loop"], times["take"])
    best = [min(taken) for taken in zip(*(taken for name, taken in times.items() if name != "take"))]
    report.ratios["take_vs_best_other"] = ratio(best, times["take"])
    return report


def rows_256_zipf(conditions: Conditions) -> Report:
    """Batches of 256 rows of 256 bytes, with Zipf's distribution, from 2 GiB: through Rows."""
    report = Report("ms a batch")
    count = _size(conditions) // 256
    file = File.create(os.path.join(conditions.directory, "rows"), count, 256)

    def draw(random: np.random.Generator, size: int = 256) -> Numbers:
        ranks = np.exp(random.random(size) * np.log(count)).astype(np.int64)
        # Popular rows lie anywhere. The number of rows is a power of two: each rank has a row of its own.
        rows: Numbers = ranks * 2_654_435_761 % count
        return rows

    before = draw(np.random.default_rng(4), 5_000 if conditions.quick else 500_000)

    def fill(read: Read) -> None:
        # By its own reads: pages that are only asked for do not count as used, and the kernel keeps others.
        for part in np.array_split(before, max(len(before) // 8192, 1)):
            read(part)

    takes = [
        Contender("rows_take", contenders.rows_take(file, conditions), [file.path], fill),
        Contender("take", contenders.take(file, conditions), [file.path], fill),
    ]
    raw = [one for one in _raw(file, conditions, fill) if one.name != "memmap_default"]
    rounds = _batches(conditions, 5, 100, draw)
    times, report.missing = compare(conditions, [*takes, *raw], rounds)
    report.of(times)
    report.ratios["take_vs_willneed_loop_256b_zipf"] = ratio(times["willneed_loop"], times["rows_take"])
    report.notes.append(f"before a turn, {len(before)} rows of the same distribution")
    return report


def tokens(conditions: Conditions) -> Report:
    """64 windows of 1024 tokens and the tokens behind them, as nanoGPT takes them, from 2 GiB."""
    report = Report("ms a batch")
    file = File.create(os.path.join(conditions.directory, "rows"), _size(conditions) // 2048, 2048)
    count, length = file.rows * 1024, 1024

    def fill(read: Read) -> None:
        contenders.fill_uniformly([file.path], conditions.limit_bytes, 5)

    def fill_by_taking(read: Read) -> None:
        each = (1 << 19) // length
        for start in np.random.default_rng(5).integers(0, count - (1 << 19) - 1, conditions.limit_bytes >> 20):
            read(start + np.arange(each) * length)

    def windows(data: Any, starts: Numbers) -> npt.NDArray[np.int64]:
        x = np.stack([data[start : start + length].astype(np.int64) for start in starts.tolist()])
        y = np.stack([data[start + 1 : start + 1 + length].astype(np.int64) for start in starts.tolist()])
        return np.concatenate([x, y])

    def nanogpt() -> Read:
        # It maps the file anew for each batch.
        return lambda starts: windows(np.memmap(file.path, np.uint16, "r"), starts)

    def advised() -> Read:
        data = np.memmap(file.path, np.uint16, "r")
        data._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
        return lambda starts: windows(data, starts)

    def willneed() -> Read:
        data = np.memmap(file.path, np.uint16, "r")
        map_: mmap.mmap = data._mmap  # type: ignore[attr-defined]
        map_.madvise(mmap.MADV_RANDOM)

        def read(starts: Numbers) -> npt.NDArray[np.int64]:
            for start in (starts * 2).tolist():
                page = start // mmap.PAGESIZE * mmap.PAGESIZE
                map_.madvise(mmap.MADV_WILLNEED, page, start + 2 * length + 2 - page)
            return windows(data, starts)

        return read

    def ranges() -> Read:
        data = aquifer.memmap(file.path, np.uint16, "r", budget=contenders.budget(conditions))

        def read(starts: Numbers) -> npt.NDArray[np.int64]:
            both = data.read_ranges(starts, length + 1).reshape(-1, length + 1).astype(np.int64)
            return np.concatenate([both[:, :-1], both[:, 1:]])

        return read

    rounds = _batches(conditions, 5, 16, lambda random: random.integers(0, count - length - 1, 64))
    others = [("memmap_nanogpt", nanogpt), ("memmap_random", advised), ("willneed_loop", willneed)]
    times, report.missing = compare(
        conditions,
        [
            Contender("read_ranges", ranges, [file.path], fill_by_taking),
            *(Contender(name, open_, [file.path], fill) for name, open_ in others),
        ],
        rounds,
    )
    report.of(times)
    for name, _ in others:
        report.ratios[f"tokens_vs_{name}"] = ratio(times[name], times["read_ranges"])
    return report


def epochs(conditions: Conditions) -> Report:
    """Two epochs in shuffled order and two in sequential order, in batches of 256 rows of 3 KiB, over 1.3 times the memory."""
    report = Report("s for two epochs")
    rows = int(conditions.limit_bytes * (0.1 if conditions.quick else 1.3)) // 3072
    file = File.create(os.path.join(conditions.directory, "rows"), rows, 3072)

    def epoch(open_: Callable[[], Read], shuffled: bool) -> Callable[[], Read]:
        def opened() -> Read:
            read = open_()

            def all_(seed: int) -> npt.NDArray[Any]:
                digest = np.zeros(3072, np.uint64)
                for number in range(2):
                    order = np.random.default_rng([seed, number]).permutation(rows) if shuffled else np.arange(rows)
                    for start in range(0, rows, 256):
                        digest += read(order[start : start + 256]).sum(axis=0, dtype=np.uint64) * np.uint64(start + 1)
                return digest

            return all_

        return opened

    def in_order(open_: Callable[[], Read]) -> Callable[[], Read]:
        """Batches in sequential order are slices."""

        def opened() -> Read:
            read = open_()
            return lambda wanted: read(slice(wanted[0], wanted[-1] + 1))

        return opened

    ways = {
        "take": contenders.take(file, conditions),
        "slices": contenders.slices(file, conditions),
        "memmap_default": contenders.plain_memmap(file),
        "memmap_random": contenders.plain_memmap(file, mmap.MADV_RANDOM),
        "willneed_loop": contenders.willneed_loop(file),
        "preadv_threads": contenders.preadv_threads(file),
    }
    sums: dict[str, list[float]] = {}
    for shuffled in (True, False):
        order = "shuffled" if shuffled else "sequential"
        members = [
            Contender(
                name,
                epoch(in_order(open_) if name == "slices" or name.startswith("memmap") and not shuffled else open_, shuffled),
                [file.path],
            )
            for name, open_ in ways.items()
            if not (shuffled and (name == "slices" or name == "memmap_default" and not conditions.quick))
            and not (not shuffled and name in ("memmap_random", "willneed_loop"))
        ]
        if shuffled and not conditions.quick:
            report.missing["memmap_default_shuffled"] = "it reads ahead of every row, which takes many minutes an epoch"
        rounds = _batches(conditions, 3, 1, lambda random: int(random.integers(1 << 30)))
        times, missing = compare(conditions, members, rounds, most_seconds=600.0)
        report.missing |= missing
        for name, taken in times.items():
            report.times[f"{name}_{order}"] = statistics.median(taken) / 1e3
        memmaps = [taken for name, taken in times.items() if name.startswith("memmap")]
        best = [min(taken) for taken in zip(*memmaps)]
        report.ratios[f"epochs_vs_memmap_{order}"] = ratio(best, times["take"])
        for whose, taken in (("memmap", best), ("take", times["take"])):
            sums[whose] = [one + more for one, more in zip(sums.get(whose, [0.0] * len(taken)), taken)]
    report.ratios["epochs_vs_memmap"] = ratio(sums["memmap"], sums["take"])
    report.notes.append("np.memmap with the better advice for each order: random when shuffled, none and slices in sequence")
    return report


# ---- loaders --------------------------------------------------------------------------------------


class PlainDataset:
    """What a program without Aquifer has: one row an index."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._plain: npt.NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return self._file.rows

    def __getitem__(self, index: int) -> npt.NDArray[np.uint8]:
        if self._plain is None:
            self._plain = np.memmap(self._file.path, np.uint8, "r", shape=self._file.shape)
            self._plain._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
        return np.array(self._plain[index])


class WillneedDataset(PlainDataset):
    """As an expert writes it: asks for all rows of the batch before the first is copied."""

    def __init__(self, file: File) -> None:
        super().__init__(file)
        self._read: Read | None = None

    def __getitems__(self, batch: list[int]) -> list[npt.NDArray[np.uint8]]:
        if self._read is None:
            self._read = contenders.willneed_loop(self._file)()
        return list(self._read(np.asarray(batch)))


def _collated(dataset: Any, batch: list[int]) -> npt.NDArray[Any]:
    samples = dataset.__getitems__(batch) if hasattr(dataset, "__getitems__") else [dataset[index] for index in batch]
    return np.stack(samples)


def _worker(dataset: Any, asked: Any, done: Any) -> None:
    for number, batch in iter(asked.get, None):
        done.put((number, _collated(dataset, batch)))


def _load(dataset: Any, batches: list[list[int]], workers: int) -> npt.NDArray[np.uint64]:
    """All batches, as torch's loader has its workers make them: two batches ahead for each of them, in order."""
    total = np.zeros(1, np.uint64)
    if workers == 0:
        for batch in batches:
            total += _collated(dataset, batch).sum(dtype=np.uint64)
        return total
    fork = multiprocessing.get_context("fork")
    queues = [fork.SimpleQueue() for _ in range(workers)]
    done = fork.SimpleQueue()
    processes = [fork.Process(target=_worker, args=(dataset, queue, done), daemon=True) for queue in queues]
    for process in processes:
        process.start()
    asked = 0
    ready: dict[int, npt.NDArray[Any]] = {}
    for number in range(len(batches)):
        while asked < min(number + 2 * workers, len(batches)):
            queues[asked % workers].put((asked, batches[asked]))
            asked += 1
        while number not in ready:
            place, found = done.get()
            ready[place] = found
        total += ready.pop(number).sum(dtype=np.uint64)
    for queue in queues:
        queue.put(None)
    for process in processes:
        process.join()
    return total


def _load_with_torch(dataset: Any, batches: list[list[int]], workers: int) -> npt.NDArray[np.uint64]:
    from torch.utils.data import DataLoader  # type: ignore[import-not-found, unused-ignore]

    total = np.zeros(1, np.uint64)
    loader: Any = DataLoader(dataset, batch_sampler=batches, num_workers=workers)  # type: ignore[arg-type, unused-ignore]
    for found in loader:
        total += found.numpy().sum(dtype=np.uint64)
    return total


def dataloader(conditions: Conditions) -> Report:
    """A loader without workers and with two of them: MemmapDataset against a data set over np.memmap, rows of 3 KiB from 2 GiB."""
    report = Report("ms a batch")
    file = File.create(os.path.join(conditions.directory, "rows"), _size(conditions) // 3072, 3072)
    has_torch = importlib.util.find_spec("torch") is not None
    load = _load_with_torch if has_torch else _load
    if not has_torch:
        report.notes.append("torch is not installed: forked workers with the protocol of its loader; pip install torch for its own")
    report.notes.append("the data sets over np.memmap have MADV_RANDOM; `willneed` asks for a batch at once")
    each = 4 if conditions.quick else 48

    def own() -> Any:
        return MemmapDataset(file.path, np.uint8, (file.row_bytes,), budget=contenders.budget(conditions))

    def fill(read: Read) -> None:
        contenders.fill_uniformly([file.path], conditions.limit_bytes, 6)

    for workers in (2, 0):

        def opened(make: Callable[[], Any], workers: int = workers) -> Callable[[], Read]:
            def open_() -> Read:
                dataset = make()
                return lambda batches: load(dataset, batches, workers)

            return open_

        rounds = _batches(conditions, 5, 1, lambda random: random.integers(0, file.rows, (each, 256)).tolist())
        times, missing = compare(
            conditions,
            [
                Contender("dataset", opened(own), [file.path], fill),
                Contender("memmap", opened(lambda: PlainDataset(file)), [file.path], fill),
                Contender("willneed", opened(lambda: WillneedDataset(file)), [file.path], fill),
            ],
            rounds,
            most_seconds=60.0,
        )
        report.missing |= missing
        for name, taken in times.items():
            report.times[f"{name}_{workers}w"] = statistics.median(taken) / each
        report.ratios[f"dataloader_vs_memmap_{workers}w"] = ratio(times["memmap"], times["dataset"])
        report.ratios[f"dataloader_vs_willneed_{workers}w"] = ratio(times["willneed"], times["dataset"])
    return report


# ---- pools, and what is in memory -----------------------------------------------------------------


def psync(conditions: Conditions) -> Report:
    """100 rows of an array of 64 MiB change and are made durable: psync of a pool's array, and np.save with fsync."""
    report = Report("ms")
    rows = (4 if conditions.quick else 64) << 8
    shape = (rows, 1024)
    state = np.random.default_rng(7).random(shape, np.float32)

    def work() -> dict[str, list[float]]:
        times: dict[str, list[float]] = {"psync": [], "np_save": [], "memmap_flush": []}
        random = np.random.default_rng(8)
        plain = np.memmap(os.path.join(conditions.directory, "state.f32"), np.float32, "w+", shape=shape)
        plain[:] = state
        plain.flush()
        path = os.path.join(conditions.directory, "state.pool")
        with aquifer.Pool.create(path, size=4 * state.nbytes + (64 << 20)) as pool:
            array = pool.array("state", shape, np.float32)
            array[:] = state
            array.psync()

            def psync() -> None:
                array[changed] += 1
                array.psync()

            def save() -> None:
                state[changed] += 1
                with open(os.path.join(conditions.directory, "state.npy.new"), "wb") as target:
                    np.save(target, state)
                    target.flush()
                    os.fsync(target.fileno())
                os.replace(target.name, target.name.removesuffix(".new"))

            def flush() -> None:
                plain[changed] += 1
                plain.flush()

            for _ in range(2 if conditions.quick else 7):
                changed = random.integers(0, rows, 100)
                for name, change in (("psync", psync), ("np_save", save), ("memmap_flush", flush)):
                    started = time.perf_counter()
                    change()
                    times[name].append((time.perf_counter() - started) * 1e3)
            assert (array[:] == state).all() and (plain == state).all(), "the contenders disagree"
            del array
        return times

    progress("  changes 100 rows and makes them durable")
    times = in_child(work)
    report.of(times)
    report.ratios["array_psync_vs_np_save"] = ratio(times["np_save"], times["psync"])
    report.ratios["array_psync_vs_memmap_flush"] = ratio(times["memmap_flush"], times["psync"])
    report.notes.append("without a limit of memory: all of it is in memory")
    report.notes.append("a psync is atomic, as the renamed file of np.save is; np.memmap's flush is not")
    return report


def warm(conditions: Conditions) -> Report:
    """a[i] and a[i:j] of what is in memory, against np.memmap's."""
    report = Report("ns", notes=["without a limit of memory: all of it is in memory"])
    path = os.path.join(conditions.directory, "small")
    np.arange(1 << 16).tofile(path)
    subjects: dict[str, Any] = {
        "aquifer": aquifer.memmap(path, np.int64, "r", budget="64MiB"),
        "memmap": np.memmap(path, np.int64, "r"),
    }

    def indices(array: Any) -> None:
        for at in range(640):
            array[at]

    def slices(array: Any) -> None:
        for at in range(640):
            array[at : at + 9]

    for array in subjects.values():
        array.sum()
    for what, access in (("index", indices), ("slice", slices)):
        times: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(10 if conditions.quick else 2000):
            for name, array in subjects.items():
                started = time.perf_counter_ns()
                access(array)
                times[name].append((time.perf_counter_ns() - started) / 640)
        # The least: nothing but interruptions makes a round longer.
        least = {name: min(taken) for name, taken in times.items()}
        report.times |= {f"{what}_{name}": taken for name, taken in least.items()}
        report.ratios[f"warm_{what}_vs_memmap"] = least["memmap"] / least["aquifer"]
    return report


BENCHES: dict[str, Callable[[Conditions], Report]] = {
    bench.__name__: bench for bench in (rows_3k, rows_256_zipf, tokens, epochs, dataloader, psync, warm)
}


def run(names: Sequence[str], directory: str, limit_bytes: int, *, quick: bool) -> tuple[Conditions, dict[str, Report]]:
    """Runs benches, each in a directory of its own, which is removed."""
    reports: dict[str, Report] = {}
    conditions = Conditions(limit_bytes, quick, directory)
    try:
        for name in names:
            progress(f"{name}: {BENCHES[name].__doc__}")
            with tempfile.TemporaryDirectory(prefix="aquifer-bench-", dir=directory) as place:
                conditions.directory = place
                reports[name] = BENCHES[name](conditions)
    finally:
        remove_groups()
    return conditions, reports
