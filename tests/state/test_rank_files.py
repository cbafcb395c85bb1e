"""LOCAL states that ranks saved become the unsharded state without a job: each style, number of ranks, part."""

from __future__ import annotations

import json
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardckpt
from shardckpt.core import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from tests.kit.models.models import CASES, Case, built
from tests.kit.ranks.harness import run

STYLES = ("flat", "orig", "in place")


def sharded(which: Case, style: str, strategy: ShardingStrategy) -> nn.Module:
    def cut(module: nn.Module) -> nn.Module:
        if style == "in place":
            return fully_shard(module)
        return FullyShardedDataParallel(module, use_orig_params=style == "orig", sharding_strategy=strategy)

    return which.cut(built(which), cut)


def saved(model: nn.Module, optim, folder: Path, rank: int, *, together: bool) -> None:
    state = {"model": shardckpt.model_state_dict(model, "LOCAL"), "step": 7}
    if optim is not None:
        state["optim"] = shardckpt.optim_state_dict(model, optim, "LOCAL")
    folder.mkdir(exist_ok=True)
    if together:
        torch.save(state, folder / f"of-{rank}.pt")
        return
    torch.save(state["model"], folder / f"model_{rank}.pt")
    if optim is not None:
        torch.save(state["optim"], folder / f"optim_{rank}.pt")


def cases(world: int) -> list[tuple[int, Case]]:
    """All cases on two ranks, some elsewhere."""
    return [(index, which) for index, which in enumerate(CASES) if world == 2 or index % 5 == world]


def differs(found, expected) -> list[str]:
    wrong = [f"names {sorted(found)} instead of {sorted(expected)}"] if set(found) != set(expected) else []
    for name in set(found) & set(expected):
        one, other = found[name], expected[name]
        if one.dtype != other.dtype or one.shape != other.shape or not torch.equal(one, other):
            wrong.append(f"{name} differs")
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("style", STYLES)
def test_models_are_put_together(style: str, world: int, tmp_path: Path) -> None:
    def body(rank, world):
        warnings.simplefilter("ignore")
        for index, which in cases(world):
            strategy = ShardingStrategy.NO_SHARD if index % 4 == 3 else ShardingStrategy.FULL_SHARD
            model = sharded(which, style, strategy)
            saved(model, None, tmp_path / str(index), rank, together=False)

    run(world, body, timeout=120)
    for index, which in cases(world):
        source, target = tmp_path / str(index), tmp_path / f"whole{index}"
        assert shardckpt.verify(str(source)).problems == (), which
        report = shardckpt.consolidate(str(source), str(target))
        expected = built(which).state_dict()
        kept = {name: value for name, value in expected.items() if name not in report.ties}
        assert differs(load_file(target / "model.safetensors"), kept) == [], which
        first: dict[int, str] = {}
        tied = {n: first.setdefault(v.data_ptr(), n) for n, v in expected.items() if v.numel()}
        assert dict(report.ties) == {name: kept for name, kept in tied.items() if name != kept}, which


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.inner = nn.Linear(7, 7, bias=False)
        self.last = nn.Linear(7, 3)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.inner(self.first(x))))


def wrapped(style: str, mesh=None, strategy=ShardingStrategy.FULL_SHARD) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    if style in ("in place", "torch"):
        cut = fully_shard if style == "in place" else torch_fully_shard
        cut(net.inner, mesh=mesh)
        return cut(net, mesh=mesh)
    given = {"use_orig_params": style == "orig", "device_mesh": mesh, "sharding_strategy": strategy}
    net.inner = FullyShardedDataParallel(net.inner, **given)
    return FullyShardedDataParallel(net, **given)


def trained(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    model(torch.randn(4, 5)).square().mean().backward()
    optim.step()
    return optim


def keep_truth(model: nn.Module, optim, folder: Path, rank: int) -> None:
    found = shardckpt.model_state_dict(model), shardckpt.optim_state_dict(model, optim)
    if rank == 0:
        torch.save(found, folder / "truth.pt")


def of_optimizer(state) -> dict[str, torch.Tensor]:
    return {f"{n}/{s}": value for n, slots in state["state"].items() for s, value in slots.items()}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_optimizers_are_put_together_with_their_models(world: int, tmp_path: Path) -> None:
    def body(rank, world):
        warnings.simplefilter("ignore")
        for style in (*STYLES, "torch"):
            model = wrapped(style)
            optim = trained(model, rank)
            folder = tmp_path / style
            folder.mkdir(exist_ok=True)
            for together in (True, False):
                saved(model, optim, folder / str(together), rank, together=together)
            keep_truth(model, optim, folder, rank)

    run(world, body, timeout=120)
    for style, together in product((*STYLES, "torch"), (True, False)):
        folder, whole = tmp_path / style, tmp_path / style / f"whole {together}"
        report = shardckpt.consolidate(str(folder / str(together)), str(whole), part="all")
        weights, moments = torch.load(folder / "truth.pt")
        assert differs(load_file(whole / "model.safetensors"), weights) == [], style
        assert differs(load_file(whole / "optimizer.safetensors"), of_optimizer(moments)) == [], style
        groups = json.loads((whole / "param_groups.json").read_text())["param_groups"]
        assert [g["params"] for g in groups] == [g["params"] for g in moments["param_groups"]], style
        assert list(report.left_out) == (["step"] if together else []), style


def test_of_replicas_one_is_enough(tmp_path: Path) -> None:
    def body(rank, world):
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for style in (*STYLES, "torch"):
            model = wrapped(style, mesh, ShardingStrategy.HYBRID_SHARD)
            optim = trained(model, rank)
            (tmp_path / style).mkdir(exist_ok=True)
            saved(model, optim, tmp_path / style / "ranks", rank, together=True)
            keep_truth(model, optim, tmp_path / style, rank)

    run(4, body, timeout=120)
    for style in (*STYLES, "torch"):
        ranks, whole = tmp_path / style / "ranks", tmp_path / style / "whole"
        weights, moments = torch.load(tmp_path / style / "truth.pt")
        for gone, rest in ((), ""), ((2, 3), "of 4 ranks, rank 2 and 1 more left no file here"):
            for rank in gone:
                (ranks / f"of-{rank}.pt").unlink()
            report = shardckpt.consolidate(str(ranks), str(whole), part="all", overwrite=True)
            assert differs(load_file(whole / "model.safetensors"), weights) == [], style
            assert differs(load_file(whole / "optimizer.safetensors"), of_optimizer(moments)) == [], style
            assert not rest or rest in report.warnings, style
        (ranks / "of-1.pt").unlink()
        with pytest.raises(shardckpt.errors.IncompleteError, match="the file is not there"):
            shardckpt.consolidate(str(ranks), str(tmp_path / style / "again"))


@pytest.mark.parametrize("style", ["in place", "orig"])
def test_what_tensor_parallelism_has_cut_as_well_is_refused_by_name(style: str, tmp_path: Path) -> None:
    def body(rank, world):
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        if style == "in place":
            model = fully_shard(net, mesh=mesh["data"])
        else:
            model = FullyShardedDataParallel(net, device_mesh=mesh["data"], use_orig_params=True)
        saved(model, None, tmp_path / "ranks", rank, together=False)

    run(4, body, timeout=120)
    with pytest.raises(shardckpt.errors.UnsupportedError, match=r"in more than one way.* FULL or SHARDED"):
        shardckpt.consolidate(str(tmp_path / "ranks"), str(tmp_path / "whole"))


def test_an_optimizer_that_keeps_nothing_yet_is_put_together(tmp_path: Path) -> None:
    def body(rank, world):
        warnings.simplefilter("ignore")
        for style in STYLES:
            model = wrapped(style)
            saved(model, torch.optim.AdamW(model.parameters(), lr=0.3), tmp_path / style, rank, together=False)

    run(2, body)
    for style in STYLES:
        whole = tmp_path / f"whole {style}"
        shardckpt.consolidate(str(tmp_path / style), str(whole), part="all")
        [group] = json.loads((whole / "param_groups.json").read_text())["param_groups"]
        assert (group["lr"], sorted(group["params"])) == (0.3, sorted(dict(Net().named_parameters()))), style
        assert load_file(whole / "optimizer.safetensors") == {}, style


def lying(model: nn.Module, optim) -> tuple[dict, dict]:
    """What a script that was written for torch's wrapper takes, and saves."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optim)


@pytest.mark.parametrize("parent", [False, True], ids=["wrapped whole", "in a plain module"])
@pytest.mark.parametrize("style", ["flat", "orig"])
def test_what_the_wrappers_own_state_dicts_save_is_put_together(style: str, parent: bool, tmp_path: Path) -> None:
    def body(rank, world):
        warnings.simplefilter("ignore")
        model = wrapped(style)
        model = nn.Sequential(model, nn.BatchNorm1d(3)) if parent else model
        optim = trained(model, 0 if parent else rank)  # nothing makes what is not wrapped equal on ranks
        weights, moments = lying(model, optim)
        (tmp_path / "ranks").mkdir(exist_ok=True)
        torch.save(weights, tmp_path / f"ranks/model_{rank}.pt")
        torch.save(moments, tmp_path / f"ranks/optim_{rank}.pt")
        keep_truth(model, optim, tmp_path, rank)

    run(2, body, timeout=120)
    shardckpt.consolidate(str(tmp_path / "ranks"), str(tmp_path / "whole"), part="all")
    weights, moments = torch.load(tmp_path / "truth.pt")
    assert differs(load_file(tmp_path / "whole/model.safetensors"), weights) == []
    assert differs(load_file(tmp_path / "whole/optimizer.safetensors"), of_optimizer(moments)) == []


@pytest.mark.parametrize("style", ["flat", "orig"])
def test_files_of_the_wrappers_own_state_dicts_load_where_they_were_saved(style: str, tmp_path: Path) -> None:
    def body(rank, world):
        warnings.simplefilter("ignore")
        model = wrapped(style)
        optim = trained(model, rank)
        torch.save(lying(model, optim), tmp_path / f"{rank}.pt")
        expected = shardckpt.model_state_dict(model), of_optimizer(shardckpt.optim_state_dict(model, optim))
        found = []
        for how in ("function", "method"):
            weights, moments = torch.load(tmp_path / f"{rank}.pt")
            other = wrapped(style)
            again = trained(other, 5)
            if how == "function":
                shardckpt.load_model_state_dict(other, weights)
            else:
                with FullyShardedDataParallel.state_dict_type(other, StateDictType.LOCAL_STATE_DICT):
                    other.load_state_dict(weights)
            shardckpt.load_optim_state_dict(other, again, moments)
            found += differs(shardckpt.model_state_dict(other), expected[0])
            found += differs(of_optimizer(shardckpt.optim_state_dict(other, again)), expected[1])
        return found

    assert run(2, body) == [[], []]


@pytest.mark.parametrize("style", ["flat", "orig"])
def test_a_local_state_of_another_rank_or_of_other_units_is_refused(style: str, tmp_path: Path) -> None:
    def body(rank, world):
        warnings.simplefilter("ignore")
        model = wrapped(style)
        weights, _ = lying(model, trained(model, rank))
        torch.save(weights, tmp_path / f"{rank}.pt")
        torch.distributed.barrier()
        alone = FullyShardedDataParallel(Net(), use_orig_params=style == "orig")
        told = []
        for other, state in (model, torch.load(tmp_path / f"{1 - rank}.pt")), (alone, weights):
            before = shardckpt.model_state_dict(other)
            kept = {name: value.clone() for name, value in before.items()}
            with FullyShardedDataParallel.state_dict_type(other, StateDictType.LOCAL_STATE_DICT):
                try:
                    other.load_state_dict(state)
                except RuntimeError as error:
                    told.append(str(error))
            told += differs(shardckpt.model_state_dict(other), kept)
        return told

    for rank, told in enumerate(run(2, body)):
        assert len(told) == 2
        assert f"taken by rank {1 - rank} of 2, this is rank {rank}" in told[0]
        assert "taken from 2 units" in told[1]
        assert "here are 1" in told[1]
