"""Different saved values of elements that tensors of a state share are a mismatch before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt.errors import UsageError

VIEWS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "part": lambda w: w[1:3],
    "column": lambda w: w[:, 1],
    "transposed": lambda w: w.t(),
    "another type": lambda w: w.view(torch.int32)[2],
    "one element": lambda w: w[3, 2],
}


def saved(path: Path, view: Callable[[torch.Tensor], torch.Tensor], *, are_equal: bool) -> torch.Tensor:
    whole = torch.arange(1.0, 13.0).reshape(4, 3)
    part = view(whole).clone(memory_format=torch.contiguous_format)
    if not are_equal:
        part.view(-1)[0] += 1
    shardckpt.save({"whole": whole, "part": part}, path)
    return whole


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("is_first", [True, False])
def test_different_values_are_a_mismatch_that_names_both_and_changes_nothing(view, is_first, tmp_path: Path) -> None:
    saved(tmp_path / "x", view, are_equal=False)
    whole = torch.zeros(4, 3)
    state = {"whole": whole, "part": view(whole)}
    with pytest.raises(UsageError, match=r"(whole|part) shares memory with (part|whole) .*saved values of the same"):
        shardckpt.load(state if is_first else dict(reversed(state.items())), tmp_path / "x")
    assert not whole.any()


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_equal_values_load(view, tmp_path: Path) -> None:
    wanted = saved(tmp_path / "x", view, are_equal=True)
    whole = torch.zeros(4, 3)
    shardckpt.load({"whole": whole, "part": view(whole)}, tmp_path / "x")
    assert torch.equal(whole, wanted)


def test_views_without_common_elements_are_not_read_to_compare(tmp_path: Path, monkeypatch) -> None:
    wanted = torch.arange(12.0).reshape(4, 3)
    shardckpt.save({"left": wanted[:, :1].clone(), "right": wanted[:, 1:].clone()}, tmp_path / "x")
    monkeypatch.setattr("shardckpt.checkpoint.load.load_plan.LoadPlanBuilder._read_shard", None)
    whole = torch.zeros(4, 3)
    shardckpt.load({"left": whole[:, :1], "right": whole[:, 1:]}, tmp_path / "x")
    assert torch.equal(whole, wanted)


def test_the_values_are_compared_as_they_are_cast(tmp_path: Path) -> None:
    whole = torch.arange(4.0)
    shardckpt.save({"whole": whole, "part": whole[1:].half()}, tmp_path / "x")
    target = torch.zeros(4)
    shardckpt.load({"whole": target, "part": target[1:]}, tmp_path / "x", cast=True)
    assert torch.equal(target, whole)


def test_a_view_of_another_shape_than_saved_is_that_mismatch_alone(tmp_path: Path) -> None:
    whole = torch.arange(4.0)
    shardckpt.save({"whole": whole, "part": torch.ones(3)}, tmp_path / "x")
    with pytest.raises(UsageError, match="size mismatch for part") as caught:
        shardckpt.load({"whole": whole, "part": whole[2:]}, tmp_path / "x")
    assert "shares memory" not in str(caught.value)
