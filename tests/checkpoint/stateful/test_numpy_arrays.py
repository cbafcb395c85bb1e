"""NumPy arrays of all dtypes that torch has come back with their elements and dtype."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import shardckpt

DTYPES = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.float16, np.complex64, np.bool_]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_comes_back_with_its_dtype(tmp_path: Path, dtype: type) -> None:
    saved = {
        "matrix": np.arange(12).reshape(3, 4).astype(dtype).T[::2],
        "scalar": np.ones((), dtype),
        "empty": np.zeros((0, 2), dtype),
    }
    shardckpt.save(saved, tmp_path / "step")
    loaded = shardckpt.load(tmp_path / "step")
    for name, array in saved.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name].astype(np.complex64), array.astype(np.complex64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_is_filled_in_place(tmp_path: Path, dtype: type) -> None:
    shardckpt.save({"array": np.ones(3, dtype)}, tmp_path / "step")
    target = np.zeros(3, dtype)
    shardckpt.load({"array": target}, tmp_path / "step")
    np.testing.assert_array_equal(target, np.ones(3, dtype))


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.float4_e2m1fn, np.dtype("U3"), np.dtype("M8[s]")])
def test_an_array_of_elements_that_torch_lacks_is_refused_by_its_path(tmp_path: Path, dtype: type) -> None:
    with pytest.raises(shardckpt.errors.UnsupportedError, match=r"^arrays\.odd: a numpy array of type .* cannot be"):
        shardckpt.save({"arrays": {"odd": np.zeros(3).astype(dtype)}}, tmp_path / "step")


@pytest.mark.parametrize("form", ["reversed", "field of records"])
def test_an_array_whose_memory_torch_cannot_have_is_replaced(tmp_path: Path, form: str) -> None:
    shardckpt.save({"array": np.arange(4.0)}, tmp_path / "step")
    records = np.zeros(4, [("value", "f8"), ("flag", "u1")])
    state = {"array": np.zeros(4)[::-1] if form == "reversed" else records["value"]}
    shardckpt.load(state, tmp_path / "step")
    np.testing.assert_array_equal(state["array"], np.arange(4.0))
