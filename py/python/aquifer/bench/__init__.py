"""`python -m aquifer.bench [--json] [--quick]`: random rows of a file, against what else Python has for them.

The contenders read the same batches, interleaved, and their answers are compared. Before each batch the file is dropped from
memory, so that each reads from the device; `warm` has everything in memory. A ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

import aquifer

__all__ = ["main"]

Rows = npt.NDArray[np.uint8]
Contender = Callable[[npt.NDArray[np.int64]], Rows]


class Scene:
    """A file of rows, and the ways to read them."""

    def __init__(self, directory: str, rows: int, row_bytes: int, budget: int) -> None:
        self.rows, self.row_bytes = rows, row_bytes
        self.path = os.path.join(directory, "rows")
        random = np.random.default_rng(1)
        with open(self.path, "wb") as file:
            for start in range(0, rows, 4096):
                random.integers(0, 256, (min(4096, rows - start), row_bytes), np.uint8).tofile(file)
            file.flush()
            os.fsync(file.fileno())
        shape = (rows, row_bytes)
        self.array = aquifer.memmap(self.path, np.uint8, "r", shape=shape, budget=budget)
        self.plain = np.memmap(self.path, np.uint8, "r", shape=shape)
        self.map: mmap.mmap = self.plain._mmap  # type: ignore[attr-defined]
        self.map.madvise(mmap.MADV_RANDOM)
        self.file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self.threads = ThreadPoolExecutor(16)

    def close(self) -> None:
        self.threads.shutdown()
        os.close(self.file)

    def drop(self) -> None:
        """Has no page of the file in memory."""
        self.array.advise("dontneed")
        self.map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)

    def take(self, wanted: npt.NDArray[np.int64]) -> Rows:
        found: Rows = self.array.take(wanted)
        return found

    def memmap_random(self, wanted: npt.NDArray[np.int64]) -> Rows:
        return np.asarray(self.plain[wanted])

    def willneed_loop(self, wanted: npt.NDArray[np.int64]) -> Rows:
        for row in wanted.tolist():
            start = row * self.row_bytes
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            self.map.madvise(mmap.MADV_WILLNEED, page, start + self.row_bytes - page)
        return np.asarray(self.plain[wanted])

    def preadv_loop(self, wanted: npt.NDArray[np.int64]) -> Rows:
        out = np.empty((len(wanted), self.row_bytes), np.uint8)
        for place, row in enumerate(wanted.tolist()):
            os.preadv(self.file, [out[place].data], row * self.row_bytes)
        return out

    def preadv_threads(self, wanted: npt.NDArray[np.int64]) -> Rows:
        out = np.empty((len(wanted), self.row_bytes), np.uint8)

        def read(part: range) -> None:
            for place in part:
                os.preadv(self.file, [out[place].data], int(wanted[place]) * self.row_bytes)

        each = -(-len(wanted) // 16)
        list(self.threads.map(read, [range(at, min(at + each, len(wanted))) for at in range(0, len(wanted), each)]))
        return out


def cold(scene: Scene, batch: int, rounds: int) -> dict[str, float]:
    """Median milliseconds for a batch."""
    contenders: dict[str, Contender] = {
        "take": scene.take,
        "memmap_random": scene.memmap_random,
        "willneed_loop": scene.willneed_loop,
        "preadv_loop": scene.preadv_loop,
        "preadv_threads": scene.preadv_threads,
    }
    random = np.random.default_rng(2)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        wanted = random.integers(0, scene.rows, batch)
        names = list(contenders)
        names = names[turn % len(names) :] + names[: turn % len(names)]
        answers = []
        for name in names:
            scene.drop()
            started = time.perf_counter()
            answers.append(contenders[name](wanted))
            times[name].append((time.perf_counter() - started) * 1e3)
        assert all((answer == answers[0]).all() for answer in answers), "the contenders disagree"
    return {name: statistics.median(taken) for name, taken in times.items()}


def warm(scene: Scene, rounds: int) -> dict[str, float]:
    """Least nanoseconds for an index and a slice of what is in memory, and for np.memmap's."""
    subjects: dict[str, Any] = {"aquifer": scene.array[:64, 0], "memmap": scene.plain[:64, 0]}
    accesses: dict[str, Callable[[Any], None]] = {"index": _indices, "slice": _slices}
    best = {f"{what}_{name}": float("inf") for what in accesses for name in subjects}
    for array in subjects.values():
        array.sum()
    for _ in range(rounds * 20):
        for what, access in accesses.items():
            for name, array in subjects.items():
                started = time.perf_counter_ns()
                access(array)
                best[f"{what}_{name}"] = min(best[f"{what}_{name}"], (time.perf_counter_ns() - started) / 640)
    return best


def _indices(array: Any) -> None:
    for _ in range(10):
        for at in range(64):
            array[at]


def _slices(array: Any) -> None:
    for _ in range(10):
        for at in range(64):
            array[at:]


def measure(directory: str, *, quick: bool) -> dict[str, Any]:
    size = (32 if quick else 2048) << 20
    rounds = 3 if quick else 31
    results: dict[str, Any] = {"size_bytes": size, "batch": 256}
    for row_bytes in (3072, 256):
        with tempfile.TemporaryDirectory(dir=directory) as place:
            scene = Scene(place, size // row_bytes, row_bytes, (16 if quick else 256) << 20)
            times = cold(scene, 256, rounds)
            results[f"rows_{row_bytes}_ms"] = times
            others = {name: taken for name, taken in times.items() if name != "take"}
            results[f"take_vs_memmap_random_{row_bytes}"] = times["memmap_random"] / times["take"]
            results[f"take_vs_willneed_loop_{row_bytes}"] = times["willneed_loop"] / times["take"]
            results[f"take_vs_best_other_{row_bytes}"] = min(others.values()) / times["take"]
            if row_bytes == 3072:
                best = warm(scene, rounds)
                results["warm_ns"] = best
                for what in ("index", "slice"):
                    results[f"warm_{what}_vs_memmap"] = best[f"{what}_memmap"] / best[f"{what}_aquifer"]
            scene.close()
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m aquifer.bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="test that it works, on 32 MiB; without it, it measures, on 2 GiB")
    parser.add_argument("--dir", default=".", help="where the data is put, and removed again")
    chosen = parser.parse_args(arguments)
    results = measure(chosen.dir, quick=chosen.quick)
    if chosen.json:
        print(json.dumps(results))
        return 0
    for name, value in results.items():
        if isinstance(value, dict):
            print(f"{name}: " + ", ".join(f"{which} {taken:.3g}" for which, taken in value.items()))
        else:
            print(f"{name}: {value:.3g}" if isinstance(value, float) else f"{name}: {value}")
    return 0
