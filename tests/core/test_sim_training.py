"""Training on a device with memory of its own gives the bits of the CPU, on every front end."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from tests.kit.models.front_ends import FRONT_ENDS
from tests.kit.models.models import Ranked, Stack, rows
from tests.kit.models.under_test import TORCH, core, no_sync
from tests.kit.ranks import harness, sim

if not TORCH:
    from shardckpt.core.comm.collectives import ShardGroup
    from shardckpt.core.errors import BackendError

WORLDS = pytest.mark.parametrize("world", [1, 2])
FRONTS = pytest.mark.parametrize("front_end", FRONT_ENDS)


def build(front_end: str, device: str, kind: type[nn.Module] = Stack, **settings: Any) -> nn.Module:
    """Return the sharded model, the same on every rank and device."""
    torch.default_generator.manual_seed(3)
    model = kind()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if front_end == "in place":
            settings["mesh"] = init_device_mesh(device, (dist.get_world_size(),))
            model = model if "offload_policy" in settings else model.to(device)
            for block in model.blocks:
                core.fully_shard(block, **settings)
            return core.fully_shard(model, **settings)
        settings |= {"use_orig_params": front_end == "orig", "device_id": torch.device(device)}
        for index, block in enumerate(model.blocks):
            model.blocks[index] = core.FullyShardedDataParallel(block, **settings)
        return core.FullyShardedDataParallel(model, **settings)


def batch(step: int, device: str) -> torch.Tensor:
    """Return what a rank trains on in a step."""
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    return torch.randn(4, 5, generator=generator).to(device)


def loss_of(model: nn.Module, step: int, device: str) -> torch.Tensor:
    return model(batch(step, device)).float().square().mean()


def local(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def kept(model: nn.Module) -> list[Any]:
    """Return this rank's shards, as plain numbers."""
    return [local(parameter).cpu().tolist() for parameter in model.parameters()]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # its default depends on the device


def train(rank: int, world: int, front_end: str, device: str, steps: int = 3, **settings: Any) -> Any:
    """Return losses and shards of some steps."""
    model = build(front_end, device, **settings)
    optimizer = optimizer_of(model)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, kept(model)


def on_both(world: int, body: Callable[..., Any], *args: Any) -> tuple[list[Any], list[Any]]:
    """Return what `body(rank, world, *args, device)` gives on the device and on the CPU."""

    def on(device: str) -> Callable[..., Any]:
        return lambda rank, world: body(rank, world, *args, device)

    return sim.ranks(world, on("sim")), harness.run(world, on("cpu"))


@WORLDS
@FRONTS
def test_training_gives_the_bits_of_the_cpu(world, front_end):
    found, expected = on_both(world, train, front_end)
    assert found == expected


def offload_of(front_end: str) -> dict[str, Any]:
    """Return the settings that keep shards on the CPU."""
    return (
        {"offload_policy": core.CPUOffloadPolicy()}
        if front_end == "in place"
        else {"cpu_offload": core.CPUOffload(True)}
    )


def train_offloaded(rank: int, world: int, front_end: str, device: str) -> Any:
    return train(rank, world, front_end, device, **offload_of(front_end))


@FRONTS
def test_offloaded_shards_stay_on_the_cpu_and_train_to_the_same_bits(front_end):
    found, expected = on_both(2, train_offloaded, front_end)
    assert found == expected


def train_offloaded_without_pinning(rank: int, world: int, device: str) -> Any:
    return train(rank, world, "in place", device, offload_policy=core.CPUOffloadPolicy(pin_memory=False))


def test_shards_that_are_offloaded_to_other_memory_train_to_the_same_bits():
    found, expected = on_both(2, train_offloaded_without_pinning)
    assert found == expected


def copies_of_a_step(rank: int, world: int, front_end: str, offloads: bool, device: str) -> sim.Copies:
    """Return the copies between host and device of a step that is like the ones before."""
    model = build(front_end, device, **(offload_of(front_end) if offloads else {}))
    optimizer, batches = optimizer_of(model), [batch(step, device) for step in range(3)]
    for inputs in batches:
        with sim.counted() as counts:
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found = counts()
    return found


@pytest.mark.parametrize("offloads", [False, True], ids=["on the device", "offloaded"])
@FRONTS
def test_the_host_waits_for_no_copy_in_a_step(front_end, offloads):
    found = sim.ranks(2, copies_of_a_step, front_end, offloads, "sim")
    assert [copies.waits for copies in found] == [0, 0]
    assert all((copies.pinned > 0) is offloads for copies in found)


def accumulate(rank: int, world: int, front_end: str, device: str) -> Any:
    """Return offloaded gradients of two backwards, which a hook reads as they come."""
    model = build(front_end, device, **offload_of(front_end))
    seen: list[Any] = []
    for step in range(2):
        if step == 1:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda each: seen.append(local(each.grad).tolist()))
        loss_of(model, step, device).backward()
    return seen, [None if each.grad is None else local(each.grad).tolist() for each in model.parameters()]


@FRONTS
def test_offloaded_gradients_are_there_when_they_are_read(front_end):
    found, expected = on_both(2, accumulate, front_end)
    assert found == expected


LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def low_of(front_end: str) -> dict[str, Any]:
    """Return the settings that compute in bfloat16."""
    if front_end == "in place":
        return {"mp_policy": core.MixedPrecisionPolicy(**LOW)}
    return {"mixed_precision": core.MixedPrecision(**LOW)}


def train_scaled_and_clipped(rank: int, world: int, front_end: str, device: str) -> Any:
    """Train in bfloat16 with loss scaling and clipping; one step overflows and is left out."""
    model = build(front_end, device, **low_of(front_end))
    optimizer = optimizer_of(model)
    scaler = core.ShardedGradScaler(device, init_scale=8.0)
    norms = []
    for step in range(4):
        loss = loss_of(model, step, device) * (float("inf") if step == 1 and rank == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(full_number(core.clip_grad_norm_(model, 0.5)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return str(norms), scaler.get_scale(), kept(model)


def full_number(value: torch.Tensor) -> float:
    return (value.full_tensor() if isinstance(value, DTensor) else value).item()


@FRONTS
def test_scaling_and_clipping_in_low_precision_give_the_bits_of_the_cpu(front_end):
    found, expected = on_both(2, train_scaled_and_clipped, front_end)
    assert found == expected


def train_compiled(rank: int, world: int, front_end: str, device: str) -> Any:
    """Train a model of which a unit is compiled."""
    model = build(front_end, device)
    model.blocks[0].compile(backend="eager")
    return steps(model, device)


@pytest.mark.parametrize(
    "front_end", ["in place", *(pytest.param(each, marks=pytest.mark.slow) for each in ("flat", "orig"))]
)
def test_compiled_units_give_the_bits_of_the_cpu(front_end):
    found, expected = on_both(1, train_compiled, front_end)
    assert found == expected


class Passing(nn.Module):
    """Returns its input: nothing is computed that would wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return inputs["x"]


def refill_inputs(rank: int, world: int, front_end: str, device: str) -> tuple[list[float], list[float], int]:
    """Return what a model has got from memory, pinned and other, that was refilled behind its forward."""
    if front_end == "in place":
        model = core.fully_shard(Passing().to(device), mesh=init_device_mesh(device, (world,)))
    else:
        settings = {"device_id": torch.device(device), "sharding_strategy": core.ShardingStrategy.NO_SHARD}
        model = core.FullyShardedDataParallel(Passing(), use_orig_params=front_end == "orig", **settings)
    found = []
    with torch.no_grad(), sim.counted() as counts:
        for buffer in (torch.ones(4).pin_memory(), torch.ones(4)):
            passed = model({"x": buffer})
            buffer.fill_(2.0)
            found.append(passed)
        blocking = counts().blocking
    return *(passed.tolist() for passed in found), blocking


@FRONTS
def test_pinned_inputs_may_be_refilled_behind_a_forward(front_end):
    assert sim.ranks(1, refill_inputs, front_end, "sim") == [([1.0] * 4, [1.0] * 4, 0)]


class Reader(nn.Module):
    """Reads sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.RNN(3, 4)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        return self.read(packed)[0]


def read_packed(rank: int, world: int, front_end: str, device: str) -> Any:
    """Read sequences that are packed on the CPU; their sizes have to stay there."""
    torch.default_generator.manual_seed(3)
    model = Reader()
    packed = pack_sequence([torch.ones(length, 3) for length in (1, 4, 2)], enforce_sorted=False)
    if front_end == "in place":
        core.fully_shard(model.to(device), mesh=init_device_mesh(device, (world,)))
    else:
        device_id = torch.device(device)
        model = core.FullyShardedDataParallel(model, use_orig_params=front_end == "orig", device_id=device_id)
    found = model(packed)
    found.data.sum().backward()
    return found.data.device.type == device, found.batch_sizes.device.type, kept(model)


@FRONTS
def test_sizes_of_packed_sequences_stay_on_the_cpu(front_end):
    found, expected = on_both(1, read_packed, front_end)
    assert found == expected
    assert found[0][:2] == (True, "cpu")


def strategies(rank: int, world: int, strategy: str, device: str) -> Any:
    """Train with another strategy than FULL_SHARD."""
    return train(rank, world, "orig", device, 2, sharding_strategy=core.ShardingStrategy[strategy])


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_GRAD_OP"])
def test_other_strategies_give_the_bits_of_the_cpu(strategy):
    found, expected = on_both(2, strategies, strategy)
    assert found == expected


def use_some(rank: int, world: int, front_end: str, offloads: bool, device: str) -> Any:
    """Train parts that only one rank uses, or none; return copies of a step, gradients and shards."""
    model = build(front_end, device, Ranked, **(offload_of(front_end) if offloads else {}))
    optimizer = optimizer_of(model)
    inputs = rows(rank, 0).to(device)
    gradients = []
    for _ in range(3):
        optimizer.zero_grad()
        with sim.counted() if device == "sim" else contextlib.nullcontext(sim.Copies) as counts:
            model((inputs, {rank, 1})).square().mean().backward()
            optimizer.step()
            waits = counts().waits
        gradients.append([None if each.grad is None else local(each.grad).tolist() for each in model.parameters()])
    return waits, gradients, kept(model)


@pytest.mark.parametrize("offloads", [False, True], ids=["on the device", "offloaded"])
@FRONTS
def test_who_used_a_parameter_is_read_without_waiting_in_backward(front_end, offloads):
    found, expected = on_both(2, use_some, front_end, offloads)
    assert found == expected
    assert any(None in gradients for gradients in found[0][1]) is (front_end != "flat")


def note_hooks(rank: int, world: int, front_end: str, device: str) -> list[int]:
    """Return the order of hooks of parameters, of which one rank uses some that the other does not."""
    model = build(front_end, device, Ranked)
    order: list[int] = []
    for index, parameter in enumerate(model.parameters()):
        if local(parameter).numel():
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))
    model((rows(rank, 0).to(device), {2 + rank})).square().mean().backward()
    return order


def test_hooks_come_in_the_same_order_on_all_ranks_whoever_used_a_parameter():
    """They may run collectives of their own."""
    first, second = sim.ranks(2, note_hooks, "in place", "sim")
    assert first == second
    assert len(first) == 20


def step_in_many_ways(rank: int, world: int, front_end: str, device: str) -> list[int]:
    """Return how often the host waits in a step: in low precision, with clipping, with gradients that accumulate."""
    model = build(front_end, device, **low_of(front_end))
    optimizer, inputs = optimizer_of(model), batch(0, device)
    waits = []
    for _ in range(2):
        with sim.counted() as counts:
            with no_sync(model):
                model(inputs).square().mean().backward()
            model(inputs).square().mean().backward()
            core.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            waits.append(counts().waits)
    return waits


@FRONTS
def test_the_host_waits_for_no_copy_with_clipping_accumulation_and_low_precision(front_end):
    assert sim.ranks(2, step_in_many_ways, front_end, "sim") == [[0, 0]] * 2


def note_rows(rank: int, world: int, front_end: str, is_low: bool, device: str) -> tuple[set[int], list[int]]:
    """Return how far the rows of reduce-scatters are from a multiple of 128 bytes, and the sizes of the shards."""
    types = {"param_dtype": torch.bfloat16}
    low = {"mp_policy": core.MixedPrecisionPolicy(**types)} if front_end == "in place" else {}
    low = low or {"mixed_precision": core.MixedPrecision(**types)}
    model = build(front_end, device, **(low if is_low else {}))
    rows: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        reduce_scatter = ShardGroup.reduce_scatter

        def noted(group: ShardGroup, out: torch.Tensor, full: torch.Tensor, *more: Any, **settings: Any) -> Any:
            rows.add(full.nbytes // group.size % 128)
            return reduce_scatter(group, out, full, *more, **settings)

        patch.setattr(ShardGroup, "reduce_scatter", noted)
        loss_of(model, 0, device).backward()
    return rows, [local(parameter).numel() for parameter in model.parameters()]


@pytest.mark.parametrize("is_low", [False, True], ids=["fp32", "bf16"])
@FRONTS
def test_reduce_scatters_have_aligned_rows_on_a_device_and_shards_as_on_the_cpu(front_end, is_low):
    on_device, on_cpu = on_both(2, note_rows, front_end, is_low)
    assert [rows for rows, _ in on_device] == [{0}] * 2
    assert [sizes for _, sizes in on_device] == [sizes for _, sizes in on_cpu]
    assert all(rows != {0} for rows, _ in on_cpu)


def are_pinned(model: nn.Module) -> set[bool]:
    return {local(parameter).is_pinned() for parameter in model.parameters() if local(parameter).numel()}


def step(model: nn.Module, device: str) -> None:
    """Compute once, after which nothing stays unsharded."""
    with torch.no_grad():
        loss_of(model, 0, device)


def copy_and_replace(rank: int, world: int, front_end: str, device: str) -> list[set[bool]]:
    """Return whether offloaded shards are pinned: at first, in a copy, after a user has put others in their place."""
    model = build(front_end, device, **offload_of(front_end))
    step(model, device)
    found = [are_pinned(model), are_pinned(copy.deepcopy(model))]
    for parameter in model.parameters():
        new = torch.nn.Parameter(parameter.detach().clone())
        torch.utils.swap_tensors(parameter, new) if front_end == "in place" else setattr(parameter, "data", new.data)
    step(model, device)
    return [*found, are_pinned(model)]


@FRONTS
def test_offloaded_shards_stay_pinned(front_end):
    assert sim.ranks(2, copy_and_replace, front_end, "sim") == [[{True}] * 3] * 2


def train_on_a_grid(rank: int, world: int, front_end: str, device: str) -> Any:
    """Train two groups of ranks that each hold the whole model."""
    grid = init_device_mesh(device, (2, world // 2), mesh_dim_names=("replicate", "shard"))
    torch.default_generator.manual_seed(3)
    model = Stack().to(device)
    if front_end == "in place":
        core.fully_shard(model, mesh=grid)
    else:
        settings = {"device_mesh": grid, "sharding_strategy": core.ShardingStrategy.HYBRID_SHARD}
        settings |= {"use_orig_params": front_end == "orig", "device_id": torch.device(device)}
        model = core.FullyShardedDataParallel(model, **settings)
    return steps(model, device)


def train_resharded_to_two(rank: int, world: int, device: str) -> Any:
    """Train units whose parameters stay on groups of two ranks between forward and backward."""
    return steps(build("in place", device, reshard_after_forward=2), device)


def steps(model: nn.Module, device: str) -> Any:
    optimizer = optimizer_of(model)
    for at in range(2):
        loss_of(model, at, device).backward()
        optimizer.step()
        optimizer.zero_grad()
    return kept(model)


@pytest.mark.slow
@FRONTS
def test_replicated_groups_give_the_bits_of_the_cpu(front_end):
    found, expected = on_both(4, train_on_a_grid, front_end)
    assert found == expected


@pytest.mark.slow
def test_a_number_of_ranks_to_reshard_to_gives_the_bits_of_the_cpu():
    found, expected = on_both(4, train_resharded_to_two)
    assert found == expected


def summon(rank: int, world: int, front_end: str, device: str) -> Any:
    """Summon full parameters in every way, change them, and return what there was."""
    found: list[Any] = []
    for settings in ({}, offload_of(front_end)):
        model = build(front_end, device, **settings)
        loss_of(model, 0, device).backward()
        for ways in ({}, {"offload_to_cpu": True}, {"rank0_only": True, "writeback": False}, {"rank0_only": True}):
            with core.FullyShardedDataParallel.summon_full_params(model, **ways):
                seen = next(model.parameters())
                found.append(seen.detach().cpu().tolist())
                if "writeback" not in ways and not (ways and rank):
                    seen.data.mul_(2.0)
        found.append(kept(model))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("front_end", ["flat", "orig"])
def test_summoned_parameters_are_those_of_the_cpu(front_end):
    found, expected = on_both(2, summon, front_end)
    assert found == expected


def differing_linear(rank: int) -> nn.Module:
    module = nn.Linear(4, 4)
    nn.init.constant_(module.weight, rank + 1)
    return module


def test_states_of_the_cpu_are_made_equal_over_a_backend_without_it():
    def body(rank: int, world: int) -> list[float]:
        module = differing_linear(rank)
        core.sync_module_states(module)
        wrapped = core.FullyShardedDataParallel(differing_linear(rank), sync_module_states=True)
        kept = {str(each.device) for each in (*module.parameters(), *wrapped.parameters())}
        assert kept == {"cpu"}
        return [float(module.weight.sum()), *wrapped.to("sim").state_dict()["weight"].flatten().tolist()]

    assert sim.ranks(2, body) == [[16.0] + [1.0] * 16] * 2


def test_a_module_that_stays_on_the_cpu_is_refused_by_a_backend_without_it():
    def body(rank: int, world: int) -> None:
        model = core.FullyShardedDataParallel(nn.Linear(4, 4))
        with pytest.raises(BackendError, match=r"gather Linear.*device type cpu.*device_id"):
            model(torch.ones(1, 4))

    sim.ranks(2, body)
