"""The benches work; they measure only when they are run by themselves."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from aquifer import bench
from aquifer.bench import _benches, _harness


@pytest.mark.parametrize("name", list(_benches.BENCHES))
def test_the_contenders_agree(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert bench.main(["--quick", "--json", "--only", name, "--dir", str(tmp_path)]) == 0
    results = json.loads(capsys.readouterr().out)
    report = results["benches"][name]
    assert report["times"] and min(report["times"].values()) > 0
    assert results["ratios"].keys() == report["ratios"].keys()
    floors = [figures["floor"] for figures in results["ratios"].values()]
    assert name == "tokens" or any(floors)
    assert not list(tmp_path.iterdir()), "what it wrote is removed"


def test_every_floor_has_its_ratio() -> None:
    source = pathlib.Path(_benches.__file__).read_text()
    for name in _benches.FLOORS:
        shown = {"dataloader_vs_memmap_2w": "dataloader_vs_memmap_{workers}w"}.get(name, name)
        if name.startswith("warm_"):
            shown = "warm_{what}_vs_memmap"
        assert f'ratios["{shown}"]' in source or f'ratios[f"{shown}"]' in source


def test_the_list_and_the_text(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(_benches.BENCHES)
    assert bench.main(["--quick", "--only", "warm", "--dir", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "warm_index_vs_memmap" in captured.out and "floor 0.95, aim 1" in captured.out
    assert "warm: " in captured.err, "progress"


def contender(name: str, answer: Any) -> _harness.Contender:
    def open_() -> _harness.Read:
        if isinstance(answer, Exception):
            raise answer
        return lambda batch: np.asarray(answer)

    return _harness.Contender(name, open_, [])


def test_wrong_answers_and_missing_contenders_are_told(tmp_path: pathlib.Path) -> None:
    conditions = _harness.Conditions(256 << 20, True, str(tmp_path))
    right = contender("right", [1])
    absent = contender("absent", _harness.Missing("pip install absent"))
    times, missing = _harness.compare(conditions, [right, absent], [[0, 0], [0]])
    assert len(times["right"]) == 2 and missing == {"absent": "pip install absent"}
    with pytest.raises(AssertionError, match="wrong has read something else"):
        _harness.compare(conditions, [right, contender("wrong", [2])], [[0]])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        _harness.compare(conditions, [contender("failing", ZeroDivisionError())], [[0]])
    with pytest.raises(RuntimeError, match="died"):
        _harness.in_child(lambda: os._exit(3))


def test_the_limit_of_memory_holds(tmp_path: pathlib.Path) -> None:
    conditions = _harness.Conditions(64 << 20, True, str(tmp_path))
    if conditions.unlimited:
        pytest.skip(conditions.unlimited)
    system = subprocess.run(["stat", "--file-system", "--format=%T", tmp_path], capture_output=True, text=True).stdout.strip()
    if system in ("tmpfs", "ramfs"):
        pytest.skip(f"files of a {system} stay in memory")

    def read() -> int:
        path = tmp_path / "much"
        path.write_bytes(bytes(128 << 20))
        kept = np.memmap(path, np.uint8, "r")
        assert kept.sum() == 0
        resident = sum(_cached(str(path)))
        path.unlink()
        return resident

    assert _harness.in_child(read, conditions.group()) < 64 << 20
    assert _harness.in_child(read) >= 64 << 20


def _cached(path: str) -> list[int]:
    """Bytes of a file in the page cache."""
    found = subprocess.run(["fincore", "--bytes", "--noheadings", "--output", "res", path], capture_output=True, text=True)
    if found.returncode:
        pytest.skip("fincore of util-linux is not there")
    return [int(line) for line in found.stdout.split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_an_interrupted_run(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "aquifer.bench", "--quick", "--dir", str(tmp_path)]
    # A shell starts what runs in its background with the signal ignored, which children inherit.
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(number, before)
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            if "round 1" in line:
                break
        assert list(tmp_path.iterdir())
        process.send_signal(number)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and output == "" and "interrupted" in errors
    assert not list(tmp_path.iterdir())
    parent = _groups()
    assert parent is None or not list(parent.glob(f"aquifer-bench-{process.pid}-*"))


def test_a_group_that_was_not_used_is_removed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    parent = _groups()
    if parent is None:
        pytest.skip("no control group for memory")
    monkeypatch.setattr(_harness, "in_child", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _benches.run(["rows_256_zipf"], str(tmp_path), 256 << 20, quick=True)
    assert not list(parent.glob(f"aquifer-bench-{os.getpid()}-*"))


def _groups() -> pathlib.Path | None:
    try:
        return _harness._parent_group()[0]
    except OSError:
        return None
