"""What all tests share."""

from __future__ import annotations

import pathlib

import numpy as np
import numpy.typing as npt
import pytest

ROWS, COLUMNS = 4096, 64


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "data")


@pytest.fixture
def table(path: str) -> npt.NDArray[np.int64]:
    """What the file at `path` holds: 2 MiB, each element its own number."""
    table = np.arange(ROWS * COLUMNS, dtype=np.int64).reshape(ROWS, COLUMNS)
    table.tofile(path)
    return table
