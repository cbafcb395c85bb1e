"""The state of a sharded model is that of the unsharded one, in every form; what was taken can be put back."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardckpt.core import CPUOffloadPolicy, FullyShardedDataParallel, ShardingStrategy, fully_shard
from shardckpt.state.keys.kinds import StateKind
from shardckpt.state.model.load_model_state_dict import load_model_state_dict
from shardckpt.state.model.model_state_dict import iter_full_state_dict, model_state_dict
from tests.kit.models.models import CASES, Case, built
from tests.kit.ranks.harness import run

STYLES = ("flat", "orig", "in place")
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)


def sharded(which: Case, plain: nn.Module, style: str, strategy=ShardingStrategy.FULL_SHARD) -> nn.Module:
    def cut(module: nn.Module) -> nn.Module:
        if style == "in place":
            return fully_shard(module, reshard_after_forward=strategy is ShardingStrategy.FULL_SHARD)
        return FullyShardedDataParallel(module, use_orig_params=style == "orig", sharding_strategy=strategy)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return which.cut(copy.deepcopy(plain), cut)


def strategies(index: int, world: int) -> tuple[ShardingStrategy, ...]:
    """Every third case on two ranks, others on one; now and then nothing is sharded."""
    if (index + world) % 3:
        return ()
    return STRATEGIES if world == 2 and index % 2 == 0 else STRATEGIES[:1]


def same(found, expected) -> list[str]:
    wrong = [f"names: {list(found)} instead of {list(expected)}"] if list(found) != list(expected) else []
    for name, value in expected.items():
        got = found.get(name)
        if got is None:
            wrong.append(f"{name} is missing")
        elif isinstance(value, torch.Tensor) and not (got.dtype == value.dtype and torch.equal(got, value)):
            wrong.append(f"{name} differs")
    return wrong


def whole(state):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


@torch.no_grad()
def zero(model: nn.Module) -> None:
    """Let nothing be left of what a model was or was given."""
    for tensor in [*model.parameters(), *model.buffers()]:
        held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        held.copy_(torch.zeros_like(held))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("style", STYLES)
def test_every_form_holds_the_unsharded_state_and_goes_back(style, world):
    def body(rank, world):
        warnings.simplefilter("ignore")
        wrong = {}
        for index, which in enumerate(CASES):
            plain = built(which)
            for strategy in strategies(index, world):
                model = sharded(which, plain, style, strategy)
                expected = plain.state_dict()
                found = [f"FULL {w}" for w in same(model_state_dict(model, "full"), expected)]
                first = model_state_dict(model, "FULL", rank0_only=True, offload_to_cpu=True)
                found += [f"rank0 {w}" for w in same(first, expected if rank == 0 else {})]
                pieces = model_state_dict(model, StateKind.SHARDED)
                found += [f"SHARDED {w}" for w in same(whole(pieces), expected)]
                lying = model_state_dict(model, "local")
                lying_copy = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in lying.items()}
                noted = type(lying)(lying_copy)
                noted._metadata = lying._metadata
                fresh = sharded(which, plain, style, strategy)
                for kind, state in (("FULL", expected), ("first", first), ("SHARDED", pieces), ("LOCAL", noted)):
                    zero(fresh)
                    load_model_state_dict(fresh, state)
                    found += [f"after {kind} {w}" for w in same(model_state_dict(fresh), expected)]
                if found:
                    wrong[f"{which} {strategy}"] = found[:4]
        return wrong

    assert run(world, body, timeout=120) == [{}] * world


def shard_parallel_parts(model: nn.Module) -> nn.Module:
    """Each rank is the first, and the last, of those that shard its part of a parameter."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return fully_shard(parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()}), mesh=mesh["dp"])


def replicate_as_dtensors(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()])))
    return model


def keep_plain(model: nn.Module) -> nn.Module:
    return model


@pytest.mark.parametrize("spread", [shard_parallel_parts, replicate_as_dtensors, keep_plain])
def test_iteration_for_rank_0_gives_other_ranks_neither_parameters_nor_buffers(spread):
    def body(rank, world):
        warnings.simplefilter("ignore")
        plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        model = spread(copy.deepcopy(plain))
        return same(dict(iter_full_state_dict(model, rank0_only=True)), plain.state_dict() if rank == 0 else {})

    assert run(2, body) == [[]] * 2


def saved_bytes(value: torch.Tensor) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


@pytest.mark.parametrize("style", STYLES)
def test_sharded_states_are_copied_and_saved_each_tensor_by_itself(style):
    def body(rank, world):
        torch.manual_seed(0)
        model = sharded(CASES[0], built(CASES[0]), style)
        state = model_state_dict(model, "SHARDED")
        parts = [value.to_local().detach() for value in state.values() if isinstance(value, DTensor)]
        wrong = [tuple(part.shape) for part in parts if saved_bytes(part) != saved_bytes(part.clone())]
        return len(parts) > 1, wrong + same(whole(copy.deepcopy(state)), whole(state))

    assert run(2, body) == [(True, [])] * 2


def test_offloaded_models_without_memory_take_what_is_assigned_to_them():
    def body(rank, world):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
        with torch.device("meta"):
            empty = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
        fully_shard(empty, offload_policy=CPUOffloadPolicy(pin_memory=False))
        for name, tensor in fully_shard(copy.deepcopy(plain)).state_dict().items():
            empty.load_state_dict({name: tensor}, assign=True, strict=False)
        given = torch.randn(2, 4)
        return torch.equal(empty(given), plain(given)), same(whole(empty.state_dict()), plain.state_dict())

    assert run(2, body) == [(True, [])] * 2
