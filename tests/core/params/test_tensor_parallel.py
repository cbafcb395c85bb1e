"""The wrapper over modules whose parameters tensor parallelism has cut: on 2x2 ranks as on one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.kit.models.models import square
from tests.kit.models.under_test import FSDP, TORCH, Strategy, shard, torch_is_wrong, wrap
from tests.kit.ranks.harness import run


def two_layers() -> nn.Module:
    """Two layers to be cut by columns and rows, and one that is whole."""
    torch.manual_seed(0)
    pair = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    return nn.Sequential(pair, nn.Linear(6, 3))


def parallel(**settings) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = two_layers()
    parallelize_module(model[0], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return shard(model, device_mesh=mesh["dp"], **settings)


def batch(rank: int, step: int) -> torch.Tensor:
    """Ranks of one tensor-parallel group have the same."""
    generator = torch.Generator().manual_seed(10 * step + rank // 2)
    return torch.randn(4, 6, generator=generator)


def reference(steps: int, lr: float, batches: int = 1) -> list[float]:
    """Losses of the plain model on both halves' batches, at each step."""
    model, losses = two_layers(), []
    optim = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        optim.zero_grad()
        parts = [square(model(batch(rank, step * batches + i))) for rank in (0, 2) for i in range(batches)]
        (sum(parts) / 2).backward()
        optim.step()
        losses.append(sum(part.item() for part in parts) / 2)
    return losses


def both(body) -> list[list]:
    """What `body(rank, orig)` gives on each of four forked ranks, without and with original parameters."""

    def every(rank, world):
        found = []
        for orig in (False, True):
            try:
                found.append(body(rank, orig))
            except Exception as error:
                raise AssertionError(f"use_orig_params={orig}") from error
        return found

    return run(4, every)


STRATEGIES = [Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD]
SETTINGS = [(policy, strategy) for policy in (None, wrap.ModuleWrapPolicy({nn.Sequential})) for strategy in STRATEGIES]


def trained(steps: int, **settings) -> list[float]:
    """Losses of training, averaged over ranks."""
    model = parallel(**settings)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optim.zero_grad()
        loss = square(model(batch(dist.get_rank(), step)))
        loss.backward()
        optim.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / 4)
    return losses


def test_losses_are_those_of_the_plain_model():
    # torch says of NO_SHARD with original parameters that their shape changed
    def body(rank, orig):
        possible = [each for each in SETTINGS if not (TORCH and orig and each[1] is Strategy.NO_SHARD)]
        return {
            f"{s} {p}": trained(3, auto_wrap_policy=p, sharding_strategy=s, use_orig_params=orig) for p, s in possible
        }

    expected = torch.tensor(reference(3, 0.1))
    for found in both(body):
        for orig, every in enumerate(found):
            for setting, losses in every.items():
                prefix = f"original parameters {bool(orig)}, {setting}: "
                found_losses = torch.tensor(losses)
                torch.testing.assert_close(
                    found_losses, expected, rtol=1e-4, atol=1e-6, msg=lambda m, prefix=prefix: prefix + m
                )


@torch_is_wrong("it does not take held gradients of DTensors back")
def test_gradients_may_be_held_back():
    def body(rank, orig):
        model = parallel(use_orig_params=orig)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(2):
            optim.zero_grad()
            with model.no_sync():
                first = square(model(batch(rank, 2 * step)))
                first.backward()
            second = square(model(batch(rank, 2 * step + 1)))
            second.backward()
            optim.step()
            total = (first + second).detach()
            dist.all_reduce(total)
            losses.append(total.item() / 4)
        return losses

    for losses in both(body):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor([reference(2, 0.1, 2)] * 2), rtol=1e-4, atol=1e-6)


def test_what_an_optimizer_sees_is_plain_and_what_computes_is_a_dtensor():
    def body(rank, orig):
        model = parallel(use_orig_params=orig)
        seen = []
        model.module[0][0].register_forward_pre_hook(lambda module, _: seen.append(isinstance(module.weight, DTensor)))
        square(model(batch(rank, 0))).backward()
        exposed = [type(each) for each in model.parameters()]
        held = sum(each.numel() for each in model.parameters())
        return seen, set(exposed) == {nn.Parameter}, held

    total = sum(each.numel() for each in two_layers().parameters())
    for found in both(body):
        assert [(computes, plain) for computes, plain, _ in found] == [([True], True)] * 2
        assert all(held < total * 0.5 for *_, held in found)


def test_units_are_of_the_data_parallel_ranks():
    def body(rank, world):
        return dist.get_process_group_ranks(FSDP.fsdp_modules(parallel())[0].process_group)

    assert run(4, body) == [[0, 2], [1, 3], [0, 2], [1, 3]]


@torch_is_wrong("it takes no ties")
def test_a_tied_parameter_goes_to_the_unit_above_as_it_was():
    def body(rank, orig):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model[1].weight = model[0].weight
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": ColwiseParallel()})
        model[1].weight = model[0].weight
        model[0] = shard(model[0], device_mesh=mesh["dp"], use_orig_params=orig)
        sharded = shard(model, device_mesh=mesh["dp"], use_orig_params=orig)
        weights = {len(each.bucket.members) for unit in (sharded, model[0]) for each in unit._unit.registrations}
        return sorted(weights)

    assert both(body) == [[[1, 2]] * 2] * 4


def test_summoned_parameters_are_dtensors_and_changes_are_kept():
    def body(rank, orig):
        model = parallel(use_orig_params=orig)
        with FSDP.summon_full_params(model):
            layer = model.module[0][0]
            shown = isinstance(layer.weight, DTensor), tuple(layer.weight.shape)
            with torch.no_grad():
                layer.weight.fill_(0.5)
        with FSDP.summon_full_params(model):
            return shown, model.module[0][0].weight.to_local().unique().tolist()

    assert both(body) == [[((True, (8, 6)), [0.5])] * 2] * 4


@torch_is_wrong("it refuses tensors on the CPU")
def test_states_are_made_equal_over_the_data_parallel_ranks_alone():
    def body(rank, orig):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module = nn.Module()
        for kind in (nn.Parameter, nn.Buffer):
            local = torch.full((2, 2), float(rank))
            tensor = DTensor.from_local(local, mesh["tp"], [Replicate()], run_check=False)
            setattr(module, kind.__name__, kind(tensor))
        model = shard(module, device_mesh=mesh["dp"], sync_module_states=True, use_orig_params=orig)
        with FSDP.summon_full_params(model):
            return [each.to_local().mean().item() for each in (model.Parameter, model.Buffer)]

    assert both(body) == [[[rank % 2, rank % 2]] * 2 for rank in range(4)]


@torch_is_wrong("ranks of tensor parallelism scale by different norms")
@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_g3_gradients_are_clipped_by_the_norm_of_the_plain_model(order):
    def body(rank, orig):
        model = parallel(use_orig_params=orig, auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Sequential}))
        square(model(batch(rank, 0))).backward()
        norm = model.clip_grad_norm_(0.01, order)
        again = model.clip_grad_norm_(1e9, order)
        return norm.item(), again.item()

    plain = two_layers()
    (sum(square(plain(batch(rank, 0))) for rank in (0, 2)) / 2).backward()
    expected = nn.utils.get_total_norm([each.grad for each in plain.parameters()], order).item()
    for found in zip(*both(body), strict=True):
        assert len(set(found)) == 1
        assert found[0] == pytest.approx((expected, 0.01), rel=1e-3)
