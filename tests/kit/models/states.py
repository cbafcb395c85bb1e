"""A small model, the ways in which it can be sharded and wrapped, and what tells two states apart."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shardckpt import core as ours
from shardckpt.errors import ShardckptError
from shardckpt.state import model_state_dict, optim_state_dict
from tests.kit.ranks.harness import run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(6, 3)
        self.gain = nn.Parameter(torch.full(shape, 1.5))
        self.register_buffer("scale", torch.arange(1.0, 7.0).view(2, 3).t())

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.gain * self.scale[:, 0]


def quiet(action, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return action(*args, **kwargs)


def wrapper(engine, **settings):
    def shard(net: nn.Module, mesh=None) -> nn.Module:
        kwargs = dict(settings)
        if engine is theirs:
            kwargs["device_id"] = torch.device("cpu")
        if mesh is not None:
            kwargs["device_mesh"] = mesh
        if mesh is not None and mesh.ndim == 2:
            kwargs["sharding_strategy"] = engine.ShardingStrategy.HYBRID_SHARD
        for index, block in enumerate(net.blocks):
            net.blocks[index] = quiet(engine.FullyShardedDataParallel, block, **kwargs)
        return quiet(engine.FullyShardedDataParallel, net, **kwargs)

    return shard


def in_place(engine, **settings):
    def shard(net: nn.Module, mesh=None) -> nn.Module:
        for block in net.blocks:
            engine.fully_shard(block, mesh=mesh, **settings)
        return engine.fully_shard(net, mesh=mesh, **settings)

    return shard


def compiled(module: nn.Module) -> nn.Module:
    """A compiler's module around one, which computes as it did: to compile takes a second, and changes no state."""
    torch.compiler.set_stance("force_eager")
    made: nn.Module = torch.compile(module, backend=as_it_is)
    return made


def as_it_is(graph, inputs):
    """Compile nothing."""
    return graph.forward


torch.compile(nn.Identity(), backend=as_it_is)  # imports what compiles: once here, not in every rank


def wrapped_inside(net: nn.Module, mesh=None) -> nn.Module:
    """Our units around recomputing, compiled blocks."""
    for index, block in enumerate(net.blocks):
        inside = compiled(checkpoint_wrapper(block))
        net.blocks[index] = quiet(ours.FullyShardedDataParallel, inside, use_orig_params=True)
    return quiet(ours.FullyShardedDataParallel, checkpoint_wrapper(net), use_orig_params=True)


def parallel(engine_shard):
    def shard(net: nn.Module, mesh) -> nn.Module:
        for block in net.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return engine_shard(net, mesh["dp"])

    return shard


def plain_of(net: nn.Module, mesh=None) -> nn.Module:
    return net


FRONT_ENDS = {
    "plain": plain_of,
    "flat": wrapper(ours),
    "orig": wrapper(ours, use_orig_params=True),
    "whole": wrapper(ours, sharding_strategy=ours.ShardingStrategy.NO_SHARD),
    "kept": wrapper(ours, sharding_strategy=ours.ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True),
    "offloaded": wrapper(ours, cpu_offload=ours.CPUOffload(offload_params=True)),
    "in place": in_place(ours),
    "wrapped inside": wrapped_inside,
    "compiled": lambda net, mesh=None: compiled(in_place(ours)(net)),
    "ddp": lambda net, mesh=None: DistributedDataParallel(net),
    "torch in place": in_place(theirs),
}
PARALLEL = {
    "in place": parallel(in_place(ours)),
    "orig": parallel(wrapper(ours, use_orig_params=True)),
    "torch in place": parallel(in_place(theirs)),
}


def over(front_ends, body, world: int = 2, timeout: float = 60.0) -> None:
    """Run `body(rank, world, front_end)` for each front_end on the same forked ranks: it gives what is wrong."""

    def each(rank, world):
        warnings.simplefilter("ignore")
        found = {front_end: body(rank, world, front_end) for front_end in front_ends}
        return {front_end: wrong for front_end, wrong in found.items() if wrong}

    found = run(world, each, timeout=timeout)
    assert found == [{}] * world, found


def refused(action, *args, **kwargs) -> str:
    """The error that an action ends with, as text."""
    try:
        action(*args, **kwargs)
    except ShardckptError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def built(face: str, seed: int = 0, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a trained model of a face and its optimizer; the data is the same on every rank."""
    torch.manual_seed(seed)
    model = FRONT_ENDS[face](Net((1,)))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(steps):
        step(model, optim, number)
    return model, optim


def step(model: nn.Module, optim, seed: int = 0) -> None:
    torch.manual_seed(seed)
    optim.zero_grad()
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    model(torch.randn(4, 5).to(dtype)).square().mean().backward()
    optim.step()


def kept_differs(model: nn.Module, optim, other: nn.Module, again) -> list[str]:
    """Tell in which bits two models of one sharding and what their optimizers keep differ, on this rank."""
    wrong = []
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        mine, theirs = dict(optim.state.get(p, {}), itself=p.detach()), dict(again.state.get(q, {}), itself=q.detach())
        wrong += [f"{name}/{slot} is kept by one alone" for slot in set(mine) ^ set(theirs)]
        for slot in set(mine) & set(theirs):
            a, b = local(mine[slot]), local(theirs[slot])
            told = (type(mine[slot]), a.dtype, a.device) == (type(theirs[slot]), b.dtype, b.device)
            wrong += [] if told and torch.equal(a, b) else [f"{name}/{slot} differs: {a.dtype}, {b.dtype}"]
    rates = [[group["lr"] for group in each.param_groups] for each in (optim, again)]
    return wrong + ([] if rates[0] == rates[1] else [f"rates {rates}"])


def whole(value):
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.clone() if isinstance(value, torch.Tensor) else value


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def flat(state) -> dict:
    made = {(name, slot): whole(value) for name, slots in state["state"].items() for slot, value in slots.items()}
    groups = [{**group, "params": sorted(group["params"])} for group in state["param_groups"]]
    return made | {("group", index): str(group) for index, group in enumerate(groups)}


def looked_at(model: nn.Module, optim) -> tuple[dict, dict]:
    """Return the full model state and optimizer state by names, as tensors that survive a pipe."""
    weights = {name: whole(value) for name, value in model_state_dict(model, "FULL").items()}
    return weights, flat(optim_state_dict(model, optim, "FULL"))


def differing(found: dict, expected: dict, exact: bool = True) -> list[str]:
    wrong = [str(name) for name in set(found) ^ set(expected)]
    for name in set(found) & set(expected):
        a, b = found[name], expected[name]
        if isinstance(b, torch.Tensor):
            equal = torch.equal(a, b) if exact else torch.allclose(a, b, atol=1e-5)
            if a.shape != b.shape or a.dtype != b.dtype or not equal:
                wrong.append(f"{name} differs: {a.dtype} {tuple(a.shape)}")
        elif a != b:
            wrong.append(f"{name}: {a} instead of {b}")
    return wrong
