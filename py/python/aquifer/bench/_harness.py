"""How contenders are measured: each turn in a process of its own, under one limit of memory, on a cold and then refilled cache.

A turn forks a child, which joins a control group, opens the contender, warms it up, and times it. When it ends, its mappings and
its memory are gone, and the parent drops the files from the page cache. So contenders that share a file cannot serve each other,
and each pays for all the memory it uses. Turns of all contenders follow one another in rounds, with the same batches; a ratio is
the median of the rounds' ratios, because other load on the machine comes and goes.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Conditions", "Contender", "Turn", "compare", "drop", "in_child", "progress", "ratio", "remove_groups"]

Result = TypeVar("Result")
Read = Callable[[Any], npt.NDArray[Any]]

_numbers = itertools.count()


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Missing(Exception):
    """A contender that is not there, and why."""


# ---- memory ---------------------------------------------------------------------------------------


def _parent_group() -> tuple[Path, str, str]:
    """Directory, name of the limit's file, name of the processes' file: of version 2 of control groups, or of version 1."""
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return root / "memory" / path.lstrip("/"), "memory.limit_in_bytes", "cgroup.procs"
        if controllers == "" and (root / "cgroup.controllers").exists():
            # A group that has processes cannot divide memory: the limited group goes beside it, below the root.
            return root, "memory.max", "cgroup.procs"
    raise OSError("no control group for memory")


@dataclass
class Conditions:
    """What all contenders have."""

    limit_bytes: int
    quick: bool
    directory: str
    # Why there is no limit.
    unlimited: str | None = None

    def __post_init__(self) -> None:
        try:
            Group(self.limit_bytes).remove()
        except OSError as error:
            self.unlimited = f"no memory limit: control groups cannot be used ({error}); run it as root"

    def group(self) -> Group | None:
        return None if self.unlimited else Group(self.limit_bytes)


class Group:
    """A control group with a limit of memory."""

    def __init__(self, limit_bytes: int) -> None:
        parent, limit, self._processes = _parent_group()
        self.place = parent / f"aquifer-bench-{os.getpid()}-{next(_numbers)}"
        self.place.mkdir()
        try:
            if limit == "memory.max" and not (self.place / limit).exists():
                raise OSError("the controller of memory is not enabled")
            (self.place / limit).write_text(str(limit_bytes))
        except BaseException:
            self.place.rmdir()
            raise

    def join(self) -> None:
        (self.place / self._processes).write_text(str(os.getpid()))

    def remove(self) -> None:
        # The kernel may still be taking the last process down.
        for wait in range(200):
            try:
                return self.place.rmdir()
            except OSError:
                if wait == 199:
                    raise
                time.sleep(0.01)


def remove_groups() -> None:
    """Those of this process that were made and not used, because it was interrupted in between."""
    try:
        parent, _, _ = _parent_group()
    except OSError:
        return
    for place in parent.glob(f"aquifer-bench-{os.getpid()}-*"):
        place.rmdir()


def drop(paths: Iterable[str]) -> None:
    """Has the kernel forget what it has of files."""
    for path in paths:
        files = [path] if os.path.isfile(path) else [os.path.join(at, name) for at, _, names in os.walk(path) for name in names]
        for file in files:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


# ---- processes ------------------------------------------------------------------------------------


def in_child(work: Callable[[], Result], group: Group | None = None) -> Result:
    """What `work` returns in a forked process; also its exception."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    # What they raise would be lost in the functions that modules have called at a fork.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        child = os.fork()
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    if child == 0:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(reader)
            # All that it starts ends with it.
            os.setpgid(0, 0)
            if group is not None:
                group.join()
            try:
                answer: tuple[bool, Any] = (True, work())
            except Exception as error:
                answer = (False, error if isinstance(error, Missing) else RuntimeError(f"{type(error).__name__}: {error}"))
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(answer, pipe)
            os._exit(0)
        finally:
            os._exit(1)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            content = pipe.read()
        os.waitpid(child, 0)
    except BaseException:
        for kill in (os.killpg, os.kill):
            try:
                kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass
        os.waitpid(child, 0)
        raise
    finally:
        if group is not None:
            group.remove()
    if not content:
        raise RuntimeError("the process of a contender died; it may have had too little memory")
    succeeded, value = pickle.loads(content)
    if not succeeded:
        raise value
    result: Result = value
    return result


# ---- turns ----------------------------------------------------------------------------------------


@dataclass
class Contender:
    """A way to read. `open` is called in the turn's process: what it returns reads a batch."""

    name: str
    open: Callable[[], Read]
    # What it reads, which is dropped from memory before a turn.
    files: Sequence[str]
    # Brings what it would have in memory after a long time into memory.
    warm: Callable[[Read], None] = field(default=lambda read: None)


@dataclass
class Turn:
    """Seconds for each batch, and what tells answers apart."""

    seconds: list[float]
    answers: list[int]


def _turn(contender: Contender, batches: Sequence[Any], most_seconds: float) -> Turn:
    read = contender.open()
    contender.warm(read)
    seconds: list[float] = []
    answers: list[int] = []
    for batch in batches:
        started = time.perf_counter()
        found = read(batch)
        seconds.append(time.perf_counter() - started)
        answers.append(zlib.crc32(np.ascontiguousarray(found).view(np.uint8).reshape(-1).data))
        # One that is far slower than the others need not show that with every batch.
        if sum(seconds) > most_seconds:
            break
    return Turn(seconds, answers)


def compare(
    conditions: Conditions,
    contenders: Sequence[Contender],
    rounds: Sequence[Sequence[Any]],
    *,
    most_seconds: float = 3.0,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Median milliseconds of a batch for each contender and round; and contenders that are missing, with the reason."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    missing: dict[str, str] = {}
    for number, batches in enumerate(rounds):
        shift = number % len(contenders)
        expected: list[int] = []
        for contender in [*contenders[shift:], *contenders[:shift]]:
            if contender.name in missing:
                continue
            progress(f"  round {number + 1} of {len(rounds)}: {contender.name}")
            drop(contender.files)
            try:
                turn = in_child(lambda contender=contender: _turn(contender, batches, most_seconds), conditions.group())  # type: ignore[misc]
            except Missing as reason:
                missing[contender.name] = str(reason)
                continue
            common = min(len(expected), len(turn.answers))
            if turn.answers[:common] != expected[:common]:
                raise AssertionError(f"{contender.name} has read something else than the others")
            expected = max(expected, turn.answers, key=len)
            times[contender.name].append(statistics.median(turn.seconds) * 1e3)
    return {name: taken for name, taken in times.items() if name not in missing}, missing


def ratio(others: Sequence[float], own: Sequence[float]) -> float:
    """How many times as long the others took: the median of the rounds."""
    return statistics.median(other / one for other, one in zip(others, own, strict=True))
