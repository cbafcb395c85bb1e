"""A model on some of the ranks, as a pipeline's stage: those have its state, and nobody waits for others."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardckpt import core as ours
from shardckpt.errors import ShardckptError
from shardckpt.state import load_model_state_dict, load_optim_state_dict, model_state_dict, optim_state_dict
from tests.kit.models.states import FRONT_ENDS, Block, differing, flat, in_place, local, quiet, step, whole, wrapper
from tests.kit.ranks.harness import run

HYBRID = ours.ShardingStrategy.HYBRID_SHARD


class Stage(nn.Module):
    """Stages have different numbers of blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def optimizer_of(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """DTensors are slow with all but momentum."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=lr)


def goes_round(shard, mesh: DeviceMesh, stage: int, first: bool) -> list[str]:
    """Take the state of a stage in each form and put it into another, from every rank and from its first."""
    torch.manual_seed(stage)
    plain = Stage(stage + 1)
    model = shard(copy.deepcopy(plain), mesh)
    optim = optimizer_of(model, lr=0.001)
    step(model, optim, stage)
    weights = {name: whole(value) for name, value in model_state_dict(model, "SHARDED").items()}
    moments = flat(optim_state_dict(model, optim, "SHARDED"))
    wrong = [] if list(weights) == list(plain.state_dict()) else [f"names {list(weights)}"]
    other = shard(Stage(stage + 1), mesh)
    for kind in ("FULL", "first", "SHARDED", "LOCAL"):
        how = {"rank0_only": True} if kind == "first" else {}
        told = "FULL" if kind == "first" else kind
        taken, kept = model_state_dict(model, told, **how), optim_state_dict(model, optim, told, **how)
        if kind == "first":
            wrong += [] if first == bool(taken) == bool(kept["state"]) else ["not the stage's first rank alone"]
        for parameter in other.parameters():
            local(parameter.detach()).zero_()
        again = optimizer_of(other, lr=7.0)
        load_model_state_dict(other, taken)
        load_optim_state_dict(other, again, kept)
        wrong += [f"{kind} {each}" for each in differing(model_state_dict(other), weights)]
        wrong += [f"{kind} {each}" for each in differing(flat(optim_state_dict(other, again)), moments)]
    return wrong


def refused_alone(shard, mesh: DeviceMesh, stage: int, rank: int) -> str:
    """Give one rank of the last stage a state that does not fit."""
    model = shard(Stage(stage + 1), mesh)
    state = Stage(stage + 1).state_dict()
    if rank == 3:
        state.pop("first.bias")
    try:
        load_model_state_dict(model, state)
    except ShardckptError as error:
        return str(error)
    return "nothing was raised"


def test_each_stage_of_a_pipeline_takes_and_puts_its_own_state():
    def body(rank, world):
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        stage = rank // 2
        front_ends = {
            **{name: FRONT_ENDS[name] for name in ("flat", "orig", "in place", "whole")},
            "torch": in_place(theirs),
        }
        wrong = [
            (n, w) for n, shard in front_ends.items() for w in goes_round(shard, meshes[stage], stage, rank % 2 == 0)
        ]
        told = refused_alone(FRONT_ENDS["flat"], meshes[stage], stage, rank)
        dist.barrier()
        return wrong, told

    found = run(4, body, timeout=60)
    assert [wrong for wrong, _ in found] == [[]] * 4
    told = [text for _, text in found]
    assert told[0] == told[1] == "nothing was raised"
    assert "failed on rank 3" in told[2]
    assert "first.bias" in told[2]
    assert "Missing key: first.bias" in told[3]


def test_a_stage_on_a_mesh_of_two_dimensions_is_a_grid_of_ranks():
    def body(rank, world):
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("copies", "cut"))
        if rank == 4:
            dist.barrier()
            return [], ""
        front_ends = {"flat": wrapper(ours, sharding_strategy=HYBRID), "in place": in_place(ours)}
        wrong = [(n, w) for n, shard in front_ends.items() for w in goes_round(shard, mesh, 0, rank == 0)]
        told = refused_alone(front_ends["flat"], mesh, 0, rank)
        dist.barrier()
        return wrong, told

    found = run(5, body, timeout=60, group_timeout=30)
    assert [wrong for wrong, _ in found] == [[]] * 5
    assert ["failed on rank 3" in text or "Missing key" in text for _, text in found] == [True] * 4 + [False]


def test_models_that_nobody_shares_may_differ():
    def body(rank, world):
        model = quiet(Stage, rank + 1)
        state = Stage(rank + 1).state_dict()
        load_model_state_dict(model, state)
        return differing(model_state_dict(model), dict(state))

    assert run(2, body) == [[], []]


def test_a_model_that_one_rank_shards_over_itself_has_its_state_there():
    def body(rank, world):
        alone = dist.new_group([1])
        if rank != 1:
            return []
        torch.manual_seed(0)
        net = Stage(1)
        model = quiet(ours.FullyShardedDataParallel, copy.deepcopy(net), alone)
        optim = torch.optim.AdamW(model.parameters())
        step(model, optim)
        kept = optim_state_dict(model, optim, rank0_only=True)
        load_model_state_dict(model, net.state_dict())
        load_optim_state_dict(model, optim, kept)
        found = model_state_dict(model, rank0_only=True)
        return differing(found, dict(net.state_dict())) + differing(flat(optim_state_dict(model, optim)), flat(kept))

    assert run(2, body) == [[], []]


def test_experts_that_some_ranks_share_have_states_on_those():
    def body(rank, world):
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        torch.manual_seed(0)
        model = Stage(2)
        model.blocks[1 - rank % 2] = nn.Identity()
        model.blocks[rank % 2] = quiet(ours.FullyShardedDataParallel, model.blocks[rank % 2], pairs[rank % 2])
        model = quiet(ours.FullyShardedDataParallel, model)
        optim = torch.optim.AdamW(model.parameters())
        step(model, optim)
        return set(optim_state_dict(model, optim, "SHARDED")["state"]) == set(model_state_dict(model, "SHARDED"))

    assert run(4, body) == [True] * 4
