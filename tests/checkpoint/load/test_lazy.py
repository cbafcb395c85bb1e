"""A checkpoint that is opened lets go of its files when it is closed, and at the interpreter's end without a word."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardckpt
from shardckpt.errors import UnknownNameError, UsageError
from shardckpt.storage.local import LocalStore
from shardckpt.storage.store import read_bytes
from tests.kit.ranks.interpreters import RunScript


def files_open_below(folder: Path) -> list[str]:
    places = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return [to for place in places if (to := os.path.realpath(place)).startswith(str(folder.resolve()))]


@pytest.fixture
def step(tmp_path: Path) -> Path:
    shardckpt.save({"w": torch.arange(10.0), "n": 3}, tmp_path / "step")
    return tmp_path / "step"


def test_a_block_closes_what_it_opened(step: Path) -> None:
    with shardckpt.open(step) as opened:
        kept = opened["w"]
        assert kept[2:4].tolist() == [2.0, 3.0]
        assert files_open_below(step)
    assert not files_open_below(step)
    for read in (lambda: kept[0], lambda: opened["w"], lambda: opened["n"]):
        with pytest.raises(UsageError, match=r"is closed.*Open it again"):
            read()
    assert list(opened) == ["w", "n"]
    assert kept.shape == (10,)
    opened.close()


def test_an_error_in_the_block_closes_it_too(step: Path) -> None:
    with pytest.raises(ZeroDivisionError), shardckpt.open(step) as opened:
        assert opened["w"][0] == 0
        raise ZeroDivisionError
    assert not files_open_below(step)


def test_without_a_block_it_closes_when_nothing_refers_to_it(step: Path) -> None:
    tensor = shardckpt.open(step)["w"]
    assert tensor[...].sum() == 45
    assert files_open_below(step)
    del tensor
    assert not files_open_below(step)


@pytest.mark.parametrize("reproduce", [copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("part", [lambda opened: opened, lambda opened: opened["w"]])
def test_copies_are_refused_and_leave_its_files_open(
    reproduce: Callable[[object], object], part: Callable[[Any], object], tmp_path: Path
) -> None:
    torch.save({"w": torch.arange(10.0)}, tmp_path / "saved")
    torch.save({"w": torch.zeros(10)}, tmp_path / "other")
    opened = shardckpt.open(tmp_path / "saved")
    assert opened["w"][9] == 9
    with pytest.raises(UsageError, match=r"saved: an open checkpoint cannot be copied or pickled.*Open it where"):
        reproduce(part(opened))
    gc.collect()
    with (tmp_path / "other").open("rb"):  # has the number of a descriptor that was closed
        assert opened["w"][...].tolist() == list(range(10))
    assert copy.copy(opened)["w"][9] == 9


def test_a_store_is_not_copied_with_its_open_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    store = LocalStore(str(tmp_path))
    assert read_bytes(store, "file", 0, 5) == b"bytes"
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(store)
    gc.collect()
    assert read_bytes(store, "file", 0, 5) == b"bytes"


@pytest.mark.parametrize("name", [3, None, 1.5, ("w", 3)])
def test_a_name_of_another_type_is_unknown(name: object, step: Path) -> None:
    with shardckpt.open(step) as opened:
        assert name not in opened
        assert opened.get(name, 7) == 7
        with pytest.raises(UnknownNameError):
            opened[name]


def test_a_truth_value_is_no_index(step: Path) -> None:
    with shardckpt.open(step) as opened, pytest.raises(IndexError, match="not by"):
        opened["w"][True]


@pytest.mark.parametrize("source", ["step", "torch"])
def test_one_that_is_open_at_the_end_prints_nothing(
    run_script: RunScript, source: str, step: Path, tmp_path: Path
) -> None:
    torch.save({"w": torch.arange(10.0)}, tmp_path / "torch")
    code = f"import shardckpt, builtins; builtins.kept = c = shardckpt.open({str(tmp_path / source)!r}); c['w'][1:2]"
    done = run_script(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_relative_path_stays_the_folder_that_it_was(
    framework: Any, step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    opened = shardckpt.open("step", framework=framework)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert opened["w"][2:4].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_numpy_makes_an_array_of_a_saved_tensor(framework: Any, step: Path) -> None:
    saved = shardckpt.open(step, framework=framework)["w"]
    assert np.asarray(saved).tolist() == list(range(10))
    assert np.asarray(saved).dtype == np.float32
    assert np.array(saved, dtype=np.int64).dtype == np.int64
    assert (np.ones(10) + saved)[9] == 10
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        with pytest.raises(ValueError, match=r"SavedTensor|SavedArray"):
            np.asarray(saved, copy=False)


def test_a_bfloat16_becomes_an_array_where_numpy_opens_it(tmp_path: Path) -> None:
    shardckpt.save({"w": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "half")
    assert np.asarray(shardckpt.open(tmp_path / "half", framework="numpy")["w"]).dtype.name == "bfloat16"
    with pytest.raises(TypeError, match=r"w: numpy has no bfloat16.*framework='numpy'"):
        np.asarray(shardckpt.open(tmp_path / "half")["w"])
