"""Two tensors whose names differ by a wrapper's segment alone are refused on every rank, and no other names are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardckpt
from shardckpt.core import FullyShardedDataParallel, fully_shard
from shardckpt.errors import NameCollisionError
from shardckpt.state import (
    load_model_state_dict,
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
)
from shardckpt.state.adapters.model_index import has_mixed_wrapper
from tests.kit.models.states import refused
from tests.kit.ranks.harness import run

SEGMENTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Clash(nn.Module):
    """A module with `weight` beside a child that has a wrapper's name and a `weight`."""

    def __init__(self, segment: str = "_orig_mod") -> None:
        super().__init__()
        self.add_module(segment, nn.Linear(4, 4))
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (child,) = self.children()
        return child(x) @ self.weight


class Outer(nn.Module):
    def __init__(self, segment: str = "_orig_mod") -> None:
        super().__init__()
        self.block = Clash(segment)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


@pytest.mark.parametrize("segment", SEGMENTS)
def test_a_save_of_two_tensors_with_one_name_is_refused_before_anything_is_written(tmp_path: Path, segment: str):
    with pytest.raises(NameCollisionError) as caught:
        shardckpt.save({"m": Outer(segment)}, tmp_path / "x")
    assert f"'block.{segment}.weight'" in str(caught.value) and "'block.weight'" in str(caught.value)
    assert str(caught.value).startswith("m: ") and "Rename one of the two" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("segment", SEGMENTS)
def test_a_load_into_two_tensors_with_one_name_is_refused_and_changes_nothing(tmp_path: Path, segment: str):
    shardckpt.save({"m": nn.Linear(4, 4)}, tmp_path / "x")
    model = Clash(segment)
    before = [each.clone() for each in model.parameters()]
    with pytest.raises(NameCollisionError, match=r"'weight'.*would both be named 'weight'"):
        shardckpt.load({"m": model}, tmp_path / "x")
    assert all(map(torch.equal, model.parameters(), before))


def test_buffers_and_extra_states_of_one_name_are_refused(tmp_path: Path):
    buffers = nn.Module()
    buffers.register_buffer("mean", torch.zeros(1))
    buffers._orig_mod = nn.Module()
    buffers._orig_mod.register_buffer("mean", torch.ones(1))
    with pytest.raises(NameCollisionError, match=r"'_orig_mod\.mean'"):
        shardckpt.save(buffers, tmp_path / "x")

    class Counted(nn.Module):
        def get_extra_state(self) -> int:
            return 1

    counted = Counted()
    counted._orig_mod = Counted()
    with pytest.raises(NameCollisionError, match=r"'_extra_state' and '_orig_mod\._extra_state'"):
        shardckpt.save(counted, tmp_path / "x")


def test_one_tensor_under_both_names_is_saved_and_loaded(tmp_path: Path):
    def tied() -> Clash:
        model = Clash()
        model.weight = model._orig_mod.weight
        return model

    first, second = tied(), tied()
    shardckpt.save(first, tmp_path / "x")
    shardckpt.load(second, tmp_path / "x")
    assert torch.equal(first.weight, second.weight)
    third = tied()
    load_model_state_dict(third, first.state_dict())  # another tensor for each name, of one memory
    assert torch.equal(first.weight, third.weight)


def test_a_buffer_outside_of_states_does_not_take_the_place_of_a_saved_one(tmp_path: Path):
    def made(value: float) -> nn.Module:
        model = nn.Module()
        model.register_buffer("scale", torch.full((2,), value))
        model._orig_mod = nn.Module()
        model._orig_mod.register_buffer("scale", torch.zeros(2), persistent=False)
        return model

    first, second = made(1.0), made(2.0)
    shardckpt.save(first, tmp_path / "x")
    shardckpt.load(second, tmp_path / "x")
    assert torch.equal(second.scale, first.scale) and not second._orig_mod.scale.any()


def test_a_state_with_two_spellings_of_one_name_is_refused():
    model = nn.Linear(2, 2)
    state = model.state_dict()
    with pytest.raises(NameCollisionError, match=r"'weight' and '_orig_mod\.weight'"):
        load_model_state_dict(model, {**state, "_orig_mod.weight": torch.ones(2, 2)})
    load_model_state_dict(model, {**state, "_orig_mod.weight": state["weight"]})


def test_wrappers_of_the_library_and_of_torch_are_not_taken_for_a_collision():
    for model in (torch.compile(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))):
        assert not has_mixed_wrapper(model)
    assert has_mixed_wrapper(Outer())


KINDS = {
    "flat": lambda: FullyShardedDataParallel(Outer(), device_id=torch.device("cpu")),
    "orig": lambda: FullyShardedDataParallel(Outer(), use_orig_params=True, device_id=torch.device("cpu")),
    "in place": lambda: fully_shard(Outer()),
    "ddp": lambda: DistributedDataParallel(Outer()),
    "plain": Outer,
}


@pytest.mark.parametrize("kind", [*KINDS, "around ddp", "theirs", "theirs flat"])
def test_every_rank_refuses_two_tensors_with_one_name(tmp_path: Path, kind: str):
    def make(kind: str) -> nn.Module:
        if kind == "around ddp":
            model: nn.Module = DistributedDataParallel(nn.Linear(4, 4))
            model.weight = nn.Parameter(torch.zeros(4, 4))
            return model
        if kind.startswith("theirs"):
            from torch.distributed.fsdp import FullyShardedDataParallel as Theirs

            return Theirs(Outer(), use_orig_params=kind == "theirs", device_id=torch.device("cpu"))
        return KINDS[kind]()

    def body(rank, world, kind, folder):
        torch.manual_seed(0)
        model = make(kind)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(2, 4)).sum().backward()
        optim.step()
        said = {
            "save": refused(shardckpt.save, {"m": model, "o": optim}, folder),
            "state": refused(model_state_dict, model),
            "sharded": refused(model_state_dict, model, "SHARDED"),
            "first": refused(model_state_dict, model, rank0_only=True),
            "load": refused(load_model_state_dict, model, {}, strict=False),
            "optim": refused(optim_state_dict, model, optim),
            "load optim": refused(load_optim_state_dict, model, optim, {"state": {}, "param_groups": []}),
        }
        if kind in ("flat", "orig"):
            said["state_dict"] = refused(model.state_dict)
            said["load_state_dict"] = refused(model.load_state_dict, {}, strict=False)
        return said

    names = ("'weight'", "'module.weight'") if kind == "around ddp" else ("block.weight'", "_orig_mod.weight'")
    for said in run(2, body, kind, tmp_path / "x", timeout=60):
        wrong = {call: text for call, text in said.items() if not all(name in text for name in names)}
        assert not wrong
    assert not list(tmp_path.iterdir())
