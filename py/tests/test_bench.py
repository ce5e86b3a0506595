"""The bench works; it measures only when it is run by itself."""

from __future__ import annotations

import json
import pathlib

import pytest

from aquifer import bench


def test_the_contenders_agree(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--quick", "--json", "--dir", str(tmp_path)]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["take_vs_memmap_random_3072"] > 0 and results["warm_index_vs_memmap"] > 0
    assert not list(tmp_path.iterdir())
