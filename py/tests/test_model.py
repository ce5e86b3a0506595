"""Arrays of files against arrays in memory."""

from __future__ import annotations

import pathlib
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import aquifer

DTYPES = st.sampled_from(["u1", "<i2", ">i4", "<f8", "c16", "S5", "M8[s]", [("a", "<u2"), ("b", "<f4", (2,))]])


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype: np.dtype[Any] = np.dtype(cast(Any, draw(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=12))
    count = int(np.prod(shape)) * dtype.itemsize
    content = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, count, np.uint8)
    return cast(np.ndarray[Any, Any], content.view(dtype).reshape(shape))


def same(first: Any, second: Any) -> bool:
    # Bytes: NaN is not equal to itself.
    first, second = np.asarray(first), np.asarray(second)
    return bool(first.shape == second.shape and first.dtype == second.dtype and first.tobytes() == second.tobytes())


def outcome(array: np.ndarray[Any, Any], index: Any) -> Any:
    try:
        return array[index]
    except IndexError:
        return IndexError


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_indexing_is_numpys(mode: str, tmp_path: pathlib.Path, data: st.DataObject) -> None:
    model = data.draw(arrays())
    offset = data.draw(st.integers(0, 5000))
    path = tmp_path / "data"
    path.write_bytes(b"\xaa" * offset + model.tobytes() + b"tail")
    array: np.ndarray[Any, Any] = aquifer.memmap(path, model.dtype, mode, offset, model.shape)
    for _ in range(data.draw(st.integers(1, 4))):
        how = data.draw(st.sampled_from(["basic", "rows", "mask", "take", "slice", "store"]))
        if how == "basic":
            index: Any = data.draw(hnp.basic_indices(model.shape, allow_newaxis=True))
        elif how == "rows":
            index = data.draw(hnp.arrays(np.int64, st.integers(0, 9), elements=st.integers(-14, 14)))
        elif how == "mask":
            index = data.draw(hnp.arrays(np.bool_, model.shape[: data.draw(st.integers(1, model.ndim))]))
        elif how == "take":
            rows = data.draw(st.lists(st.integers(-len(model), len(model) - 1))) if len(model) else []
            assert same(array.take(rows, axis=0), model.take(rows, axis=0))
            continue
        elif how == "slice":
            index = data.draw(st.slices(len(model)))
            if model[index].size:
                array, model = array[index], model[index]
            continue
        else:
            if mode != "r":
                index = data.draw(hnp.basic_indices(model.shape))
                value = np.zeros_like(model[index])
                model = model.copy() if not model.flags.writeable else model
                array[index] = value
                model[index] = value
            continue
        found, expected = outcome(array, index), outcome(model, index)
        if expected is IndexError or found is IndexError:
            assert found is expected
        else:
            assert same(found, expected)
    assert same(array, model)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stores=st.lists(st.tuples(st.integers(0, 40_000), st.binary(min_size=1, max_size=9000), st.booleans()), max_size=8))
def test_flushes_write_what_was_stored(tmp_path: pathlib.Path, stores: list[tuple[int, bytes, bool]]) -> None:
    path = tmp_path / "data"
    model = np.random.default_rng(1).integers(0, 256, 50_000, np.uint8)
    model.tofile(path)
    with aquifer.memmap(path, np.uint8, "r+") as array:
        for start, content, flushes in stores:
            array[start : start + len(content)] = model[start : start + len(content)] = np.frombuffer(content, np.uint8)
            if flushes:
                array.flush()
                assert (np.fromfile(path, np.uint8) == model).all()
    assert (np.fromfile(path, np.uint8) == model).all()
