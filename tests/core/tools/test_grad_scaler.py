"""Ranks of a scaled training step together or skip together, whoever met the overflow."""

from __future__ import annotations

import dataclasses
import importlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.kit.models.models import PLAIN, Block, Stack, square
from tests.kit.models.under_test import TORCH, core, shard, torch_is_wrong
from tests.kit.ranks.harness import count, recorded, run

Scaler = importlib.import_module(f"{core.__name__}.sharded_grad_scaler").ShardedGradScaler


def scaler(**settings):
    return Scaler("cpu", **{"init_scale": 8.0, **settings})


def with_gradients(*values: float, dtype: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    """An optimizer of one parameter a gradient."""
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for _ in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.full_like(parameter, value)
    return torch.optim.SGD(parameters or [nn.Parameter(torch.ones(2))], lr=1.0)


def moved(optimizer: torch.optim.Optimizer) -> list[float]:
    return [p.detach()[0].item() for group in optimizer.param_groups for p in group["params"]]


# ---------------------------------------------------------------------------------------------- one process


@dataclasses.dataclass
class Losses:
    main: torch.Tensor
    name: str = "x"


def test_scaled_losses_keep_their_type_and_their_containers():
    def body(rank, world):
        half, single = torch.tensor(2.0, dtype=torch.float16), torch.tensor([3.0])
        made = scaler()
        nested = made.scale([half, (single, [single])])
        assert isinstance(nested, list)
        assert isinstance(nested[1], tuple)
        return made.scale(half), nested[0].dtype, nested[1][1][0].item(), [t.item() for t in made.scale(iter([single]))]

    half, kind, single, streamed = run(1, body)[0]
    assert (half.item(), half.dtype, kind, single, streamed) == (16.0, torch.float16, torch.float16, 24.0, [24.0])


@torch_is_wrong("it maps over the keys of a dict")
def test_losses_may_lie_in_dicts_and_dataclasses():
    def body(rank, world):
        scaled = scaler().scale({"a": Losses(torch.tensor(1.0)), "b": torch.tensor(2.0, dtype=torch.bfloat16)})
        return scaled["a"].main.item(), scaled["a"].name, scaled["b"]

    main, name, other = run(1, body)[0]
    assert (main, name, other.item(), other.dtype) == (8.0, "x", 16.0, torch.bfloat16)


@pytest.mark.parametrize("outputs", [3.0, [1, 2]])
def test_what_holds_no_tensor_is_refused(outputs):
    def body(rank, world):
        with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
            scaler().scale(outputs)

    run(1, body)


def test_a_scaler_that_is_switched_off_passes_everything_through():
    def body(rank, world):
        made, optimizer = scaler(enabled=False), with_gradients(1.0)
        with recorded() as calls:
            assert made.scale(outputs := torch.tensor(2.0)) is outputs
            made.unscale_(optimizer)
            made.step(optimizer)
            made.update()
        return calls, moved(optimizer), made.get_scale()

    assert run(1, body)[0] == ([], [0.0], 1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without an accelerator")
def test_without_an_accelerator_the_default_device_switches_it_off():
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not Scaler().is_enabled()


def test_unscaling_twice_or_after_the_step_is_an_error():
    def body(rank, world):
        made, optimizer = scaler(), with_gradients(8.0)
        made.scale(torch.ones(1))
        made.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer"):
            made.unscale_(optimizer)
        made.step(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
            made.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
            made.step(optimizer)
        made.update()
        made.unscale_(optimizer)

    run(1, body)


def test_unscaling_before_scaling_is_an_error():
    def body(rank, world):
        with pytest.raises(AssertionError, match="_scale"):
            scaler().unscale_(with_gradients(1.0))

    run(1, body)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_of_any_precision_are_unscaled(dtype):
    def body(rank, world):
        made, optimizer = scaler(), with_gradients(8.0, dtype=dtype)
        made.scale(torch.ones(1))
        made.step(optimizer)
        return moved(optimizer)

    assert run(1, body)[0] == [0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sparse_gradients_are_unscaled_and_checked(dtype):
    def body(rank, world):
        found = []
        for value in (16.0, math.inf, 4e4):
            made = scaler()  # one for each optimizer: a scaler knows optimizers by `id`, which may be used again
            made.scale(torch.ones(1))
            weight = nn.Parameter(torch.zeros(3, dtype=dtype))
            where = torch.tensor([[1, 1]])  # two for one place: their sum is what counts
            weight.grad = torch.sparse_coo_tensor(where, torch.tensor([value, value], dtype=dtype), (3,))
            optimizer = torch.optim.SGD([weight], lr=1.0)
            made.unscale_(optimizer)
            before = weight.detach().clone()
            made.step(optimizer)
            found.append((weight.grad.to_dense()[1].item(), not torch.equal(before, weight)))
        return found

    fine, infinite, large = run(1, body)[0]
    assert fine == (4.0, True)
    assert infinite == (math.inf, False)
    assert large == ((math.inf, False) if dtype == torch.float16 else (1e4, True))


def test_the_scale_grows_and_backs_off():
    def body(rank, world):
        made, found = scaler(growth_factor=4.0, backoff_factor=0.25, growth_interval=2), []
        for value in (1.0, 1.0, math.nan, 1.0):
            made.scale(torch.ones(1))
            optimizer = with_gradients(value)
            made.step(optimizer)
            made.update()
            found.append(made.get_scale())
        return found

    assert run(1, body)[0] == [8.0, 32.0, 8.0, 8.0]


def test_the_state_goes_through_a_state_dict():
    def body(rank, world):
        made, again = scaler(growth_interval=1), scaler()
        made.scale(torch.ones(1))
        made.step(with_gradients(1.0))
        made.update()
        again.load_state_dict(made.state_dict())
        return again.scale(torch.ones(1)).item()

    assert run(1, body)[0] == 16.0


# ----------------------------------------------------------------------------------------------- several ranks


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_all_ranks_skip_when_one_meets_an_overflow(value):
    def body(rank, world):
        made, optimizer = scaler(), with_gradients(8.0, value if rank == 1 else 8.0)
        made.scale(torch.ones(1))
        made.step(optimizer)
        made.update()
        skipped = moved(optimizer), made.get_scale()
        calm = with_gradients(4.0)
        made.step(calm)
        made.update()
        return skipped, moved(calm), made.get_scale()

    assert run(3, body) == [(([1.0, 1.0], 4.0), [0.0], 4.0)] * 3


def test_a_rank_without_gradients_takes_part():
    def body(rank, world):
        made = scaler()
        made.scale(torch.ones(1))
        optimizer = with_gradients(*([] if rank == 0 else [math.inf]))
        made.step(optimizer)
        made.update()
        return made.get_scale()

    assert run(2, body) == [4.0, 4.0]


def test_only_ranks_of_the_group_agree():
    def body(rank, world):
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        made, optimizer = scaler(process_group=halves[rank // 2]), with_gradients(math.inf if rank == 3 else 8.0)
        made.scale(torch.ones(1))
        made.step(optimizer)
        made.update()
        return moved(optimizer)[0], made.get_scale()

    assert run(4, body) == [(0.0, 8.0), (0.0, 8.0), (1.0, 4.0), (1.0, 4.0)]


def test_one_collective_of_one_element():
    def body(rank, world):
        made, optimizer = scaler(), with_gradients(*[1.0] * (rank + 3))
        made.scale(torch.ones(1))
        with recorded() as calls:
            made.unscale_(optimizer)
        return count(calls, "all_reduce"), len(calls), calls[0].sent

    assert run(2, body) == [(1, 1, 1)] * 2


@torch_is_wrong("ranks look at their own shards alone")
def test_optimizers_that_unscale_themselves_skip_together():
    def body(rank, world):
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.full((2,), math.inf if rank == 1 else 8.0)
        optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
        made = scaler()
        made.scale(torch.ones(1))
        made.step(optimizer)
        made.update()
        return moved(optimizer), made.get_scale()

    assert run(2, body) == [([1.0], 4.0)] * 2


def test_gradients_that_are_dtensors():
    def body(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        found = []
        for value in (8.0, math.inf):
            whole = torch.full((3, 2), 8.0)
            whole[2, 0] = value  # the last rank's
            weight = nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)]))
            weight.grad = distribute_tensor(whole, mesh, [Shard(0)])
            optimizer, made = torch.optim.SGD([weight], lr=1.0), scaler()
            made.scale(torch.ones(1))
            made.step(optimizer)
            made.update()
            found.append((weight.full_tensor()[0, 0].item(), made.get_scale()))
        return found

    assert run(2, body) == [[(0.0, 8.0), (1.0, 4.0)]] * 2


@pytest.mark.parametrize("orig", [False, True])
def test_scaled_training_of_the_wrapper_is_unscaled_training(orig):
    """A scale that is a power of two changes no bit; clipping after `unscale_` sees true gradients."""

    def body(rank, world):
        plain = shard(Stack(), use_orig_params=orig)
        model = shard(Stack(), use_orig_params=orig)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            ours.data.copy_(theirs.data)
        made, losses = scaler(init_scale=2.0**10), []
        first, second = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(3):
            first.zero_grad()
            second.zero_grad()
            batch = PLAIN.batch(rank, step)
            loss = square(model(batch))
            made.scale(loss).backward()
            made.unscale_(first)
            norm = model.clip_grad_norm_(0.5)
            made.step(first)
            made.update()
            expected = square(plain(batch))
            expected.backward()
            assert torch.equal(norm, plain.clip_grad_norm_(0.5))
            second.step()
            losses.append(torch.equal(loss, expected))
        return losses

    assert run(2, body)[0] == [True] * 3


def test_scaled_training_of_fully_shard_skips_an_overflow_together():
    def body(rank, world):
        model = core.fully_shard(Block(), mesh=init_device_mesh("cpu", (world,)))
        optimizer, made = torch.optim.AdamW(model.parameters(), lr=0.1), scaler()
        before = [p.full_tensor().clone() for p in model.parameters()]
        loss = square(model(torch.randn(4, 7)))
        made.scale(loss * (math.inf if rank == 0 else 1.0)).backward()
        made.step(optimizer)
        made.update()
        kept = all(torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True))
        optimizer.zero_grad()
        made.scale(square(model(torch.randn(4, 7)))).backward()
        made.step(optimizer)
        made.update()
        changed = any(not torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True))
        return kept, changed, made.get_scale()

    assert run(2, body) == [(True, True, 4.0)] * 2


@pytest.mark.parametrize("kind", ["torch's scaler", "sharded scaler"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@pytest.mark.parametrize("value", [1.0, math.inf])
def test_gradients_of_fully_shard_are_unscaled_by_either_scaler(kind, shape, value):
    """Also under tensor parallelism, where the overflow is met by one rank of all."""

    def body(rank, world):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
        model = Block(8, 10)
        if len(shape) == 2:
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        core.fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        made = torch.amp.GradScaler("cpu", init_scale=2.0) if kind == "torch's scaler" else scaler(init_scale=2.0)
        made.scale(square(model(torch.ones(4, 8)))).backward()
        local = model.up.weight.grad.to_local()
        if rank == world - 1:
            local[0, 0] *= value
        before = local.clone()
        made.unscale_(optimizer)
        assert torch.equal(model.up.weight.grad.to_local(), before / 2)
        made.step(optimizer)
        made.update()
        return bool(optimizer.state), made.get_scale()

    wanted = (True, 2.0) if value == 1.0 else (False, 1.0)
    assert run(math.prod(shape), body) == [wanted] * math.prod(shape)


@pytest.mark.skipif(TORCH, reason="ours only")
def test_the_scaler_is_one_class_under_all_its_names():
    from shardckpt.core.tools import grad_scaler as module

    assert module.ShardedGradScaler is Scaler
