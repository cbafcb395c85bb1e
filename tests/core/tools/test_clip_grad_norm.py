"""Gradients are clipped by the norm over all ranks: the one of the unsharded model, with the same bits everywhere."""

from __future__ import annotations

import copy
import inspect
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.kit.models.models import PLAIN, Block, Stack, built, case, square
from tests.kit.models.reference import groups, here, mine, mismatches, product, reduce_gradients, roughly
from tests.kit.models.torch_limits import full_tensor
from tests.kit.models.under_test import FSDP, TORCH, Strategy, Style, core, shard, sharder, torch_is_wrong
from tests.kit.ranks.harness import count, raised_everywhere, recorded, run

if not TORCH:
    from shardckpt.core.tools import clip_grad_norm

STRATEGIES = (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD)
ORDERS = (2.0, 1.0, 2.5, math.inf)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-7)


def bits(value: torch.Tensor) -> list[bytes]:
    """The bits of a scalar on every rank."""
    found: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(found, (str(value.dtype) + value.detach().double().numpy().tobytes().hex()).encode())
    return found


def trained(which, **settings):
    """A sharded model and its twin, both after a backward, the twin's gradients averaged."""
    plain = built(which)
    model = which.cut(copy.deepcopy(plain), lambda module: shard(module, **settings))
    batch = which.batch(dist.get_rank(), 0)
    square(model(batch)).backward()
    square(plain(batch)).backward()
    shared = groups(model, plain, settings.get("use_orig_params", False))
    reduce_gradients(plain, shared)
    return model, plain, shared


def differs(which, norm_type: float, fraction: float, **settings) -> list[str]:
    """Clip both to a fraction of the norm and tell what parts them."""
    model, plain, shared = trained(which, **settings)
    before = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None], norm_type)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), fraction * before.item(), norm_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rank may own no part of any trained parameter
        found = model.clip_grad_norm_(fraction * before.item(), norm_type)
    assert type(found) is torch.Tensor
    assert found.shape == ()
    if not TORCH:
        assert len(set(bits(found))) == 1
    low = any(p.dtype == torch.bfloat16 for p in plain.parameters())  # whose gradients are averaged in their own type
    torch.testing.assert_close(found, before.to(found.dtype), rtol=1e-3 if low else 1e-5, atol=0)
    replicated = settings["sharding_strategy"] is Strategy.NO_SHARD or dist.get_world_size() == 1
    return mismatches(model, plain, shared, replicated, roughly if low else close)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_norm_and_clipped_gradients_are_those_of_the_unsharded_model(world):
    def body(rank, world):
        warnings.simplefilter("ignore")
        rows = product(sharding_strategy=STRATEGIES, use_orig_params=(False, True), norm_type=ORDERS)
        return [f"{row}: {each}" for row in rows for each in differs(PLAIN, row.pop("norm_type"), fraction=0.3, **row)]

    assert run(world, body, timeout=60)[0] == []


def test_a_norm_below_the_limit_changes_nothing():
    def body(rank, world):
        return differs(PLAIN, 2.0, fraction=3.0, sharding_strategy=Strategy.FULL_SHARD)

    assert run(2, body)[0] == []


@pytest.mark.parametrize(
    "name", ["unused everywhere", "frozen unit and frozen part", "mixed dtypes", "tied in the root"]
)
def test_gradients_that_are_missing_frozen_or_of_several_types(name):
    which = case(name)
    if TORCH and which.torch not in ("yes", "orig"):
        pytest.skip("torch is wrong")

    def body(rank, world):
        warnings.simplefilter("ignore")
        return differs(which, 2.0, 0.5, sharding_strategy=Strategy.FULL_SHARD, use_orig_params=True)

    assert run(2, body)[0] == []


def clip_both(model: nn.Module, plain: nn.Module, most: float, order: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a backward of both, clip the gradients, and return the norms; the plain model's are averaged before."""
    batch = PLAIN.batch(dist.get_rank(), 0)
    square(model(batch)).backward()
    square(plain(batch)).backward()
    reduce_gradients(plain, groups(model, plain, False))
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), most, order)
    return model.clip_grad_norm_(most, order), wanted


def test_hybrid_strategies_count_replicas_once():
    def body(rank, world):
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        plain = built(PLAIN)
        found = []
        for order in ORDERS:
            settings = {"sharding_strategy": Strategy.HYBRID_SHARD, "device_mesh": mesh}
            model = PLAIN.cut(copy.deepcopy(plain), lambda m, s=settings: shard(m, **s))
            twin = copy.deepcopy(plain)
            norm, wanted = clip_both(model, twin, 0.05, order)
            after = model.clip_grad_norm_(1e9, order)
            assert TORCH or len(set(bits(norm))) == 1
            for ours, theirs in ((norm, wanted), (after, wanted.clamp(max=0.05))):
                if not torch.isclose(ours, theirs, rtol=1e-5):
                    found.append((order, ours.item(), theirs.item()))
        return found

    assert run(4, body)[0] == []


def test_units_of_other_strategies_below_one_root():
    """Copies of NO_SHARD units are counted once, shards all."""

    def body(rank, world):
        warnings.simplefilter("ignore")
        found = []
        for order in ORDERS:
            plain = built(PLAIN)
            model = copy.deepcopy(plain)
            model.blocks[1] = shard(model.blocks[1], sharding_strategy=Strategy.NO_SHARD)
            model.blocks[2] = shard(model.blocks[2], sharding_strategy=Strategy.SHARD_GRAD_OP)
            model = shard(model)
            norm, wanted = clip_both(model, plain, 0.1, order)
            assert TORCH or len(set(bits(norm))) == 1
            after = model.clip_grad_norm_(1e9, order)
            found += [] if torch.isclose(norm, wanted, rtol=1e-5) else [(order, norm.item(), wanted.item())]
            found += [] if torch.isclose(after, wanted.clamp(max=0.1), rtol=1e-5) else [("after", order, after.item())]
        return found

    assert run(2, body)[0] == []


@torch_is_wrong("it adds up over the root's group alone")
def test_units_cut_over_part_of_the_ranks_are_counted_by_all():
    """As experts are: two halves of the ranks hold other gradients, and every rank scales by the norm of all."""

    def body(rank, world):
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = built(PLAIN)
        model.blocks[0] = shard(model.blocks[0], process_group=halves[rank // 2])
        model = shard(model)
        square(model(PLAIN.batch(rank, 0))).backward()
        parts = {name: p.grad.double().square().sum() for name, p in model.named_parameters()}
        total = sum(parts.values()).view(1)
        dist.all_reduce(total)
        norm = model.clip_grad_norm_(1e9)
        return len(set(bits(norm))), torch.isclose(norm.double(), total.sqrt(), rtol=1e-6).item()

    assert run(4, body)[0] == (1, True)


@torch_is_wrong("every rank scales by a norm of its own")
@pytest.mark.parametrize("orig", [False, True])
def test_g3_gradients_of_ignored_parameters_are_neither_counted_nor_scaled(orig):
    def body(rank, world):
        model = Stack()
        ignored = model.last
        model.blocks[0] = shard(model.blocks[0], use_orig_params=orig)
        model = shard(model, ignored_modules=[ignored], use_orig_params=orig)
        square(model(PLAIN.batch(rank, 0)) * (rank + 1)).backward()
        before = ignored.weight.grad.clone()
        mine = [
            p.grad for p in model.parameters() if p.grad is not None and all(p is not q for q in ignored.parameters())
        ]
        total = sum(grad.double().square().sum() for grad in mine).view(1)
        dist.all_reduce(total)
        norm = model.clip_grad_norm_(1e-3)
        assert torch.equal(before, ignored.weight.grad)
        return len(set(bits(norm))), torch.isclose(norm.double(), total.sqrt(), rtol=1e-6).item()

    assert run(2, body)[0] == (1, True)


class Lone(nn.Module):
    """One parameter of one element, so that all ranks but the first own nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0]))

    def forward(self, x):
        return x * self.weight


def test_a_rank_without_gradients_takes_part_and_says_so():
    def body(rank, world):
        model = shard(Lone(), use_orig_params=True)
        model(torch.ones(1)).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            norm = model.clip_grad_norm_(0.5)
        messages = [str(each.message) for each in caught if "with no gradients" in str(each.message)]
        return norm.item(), str(norm.dtype), messages

    first, second = run(2, body)
    assert first == (1.0, "torch.float32", [])
    assert second[:2] == (1.0, "torch.float32")
    assert second[2][0].startswith(
        "Called FSDP.clip_grad_norm_() on rank 1 with no gradients -- returning the total norm"
    )


def test_no_gradients_at_all_give_zero():
    def body(rank, world):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            norm = shard(Block()).clip_grad_norm_(1.0)
        return norm.item(), str(norm.dtype), any("no gradients" in str(each.message) for each in caught)

    assert run(2, body) == [(0.0, "torch.float32", True)] * 2


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, pytest.param(torch.float64, marks=torch_is_wrong("it cannot clip float64"))],
)
def test_the_norm_has_the_type_that_gradients_promote_to(dtype):
    """It is computed in single precision at least: half precision would overflow at the first square."""

    def body(rank, world):
        model = shard(nn.Linear(64, 64, bias=False, dtype=dtype))
        (model(torch.full((4, 64), 16.0, dtype=dtype)).sum() / 4).backward()
        norm = model.clip_grad_norm_(1.0)
        after = model.clip_grad_norm_(10.0)
        return norm.dtype, norm.item(), after.item()

    kind, norm, after = run(2, body)[0]
    assert kind == dtype
    assert norm == pytest.approx(1024.0)
    assert after == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("orig", [False, True])
def test_gradients_kept_in_low_precision_give_a_norm_of_their_type(orig):
    def body(rank, world):
        half = core.MixedPrecision(torch.float16, torch.float16, keep_low_precision_grads=True)
        model = PLAIN.cut(built(PLAIN), lambda module: shard(module, mixed_precision=half, use_orig_params=orig))
        (square(model(PLAIN.batch(rank, 0))) * 64).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(grad.dtype == torch.float16 for grad in grads)
        norm = model.clip_grad_norm_(1.0)
        assert all(torch.linalg.vector_norm(grad) <= 1.0 for grad in grads)
        return norm.dtype, norm.item() > 1.0

    assert run(2, body) == [(torch.float16, True)] * 2


@torch_is_wrong("its method has no such argument")
def test_a_norm_that_is_not_finite_is_refused_on_every_rank_and_changes_nothing():
    def body(rank, world):
        model = shard(Stack(), use_orig_params=True)
        square(model(PLAIN.batch(rank, 0))).backward()
        mine = [p for p in model.parameters() if p.grad is not None]
        if rank == 1:
            mine[0].grad.view(-1)[0] = math.nan
        before = [p.grad.clone() for p in mine]
        with pytest.raises(RuntimeError, match=r"total norm of order 2.0 .* is non-finite"):
            model.clip_grad_norm_(1.0, error_if_nonfinite=True)
        same = all(
            torch.equal(p.grad.nan_to_num(7.0), old.nan_to_num(7.0)) for p, old in zip(mine, before, strict=True)
        )
        return same, model.clip_grad_norm_(1.0).isnan().item()

    assert run(2, body) == [(True, True)] * 2


def test_an_infinite_gradient_gives_an_infinite_norm_on_every_rank():
    def body(rank, world):
        model = shard(Stack())
        square(model(PLAIN.batch(rank, 0))).backward()
        if rank == 1:
            model._flat_param.grad[0] = math.inf
        return model.clip_grad_norm_(1.0, math.inf).item(), model._flat_param.grad[1].item()

    found = run(2, body)
    assert [norm for norm, _ in found] == [math.inf, math.inf]
    assert [grad for _, grad in found] == [0.0, 0.0]


@torch_is_wrong("it clips what is not reduced by a norm of its own")
@pytest.mark.parametrize("orig", [False, True])
def test_gradients_that_no_sync_holds_back_have_no_norm(orig):
    def body(rank, world):
        model = shard(Stack(), use_orig_params=orig)
        with model.no_sync():
            square(model(PLAIN.batch(rank, 0))).backward()
        with pytest.raises(RuntimeError, match="unreduced gradients"):
            model.clip_grad_norm_(1.0)
        square(model(PLAIN.batch(rank, 1))).backward()
        return model.clip_grad_norm_(1.0).item() > 0

    assert run(2, body) == [True, True]


def test_only_the_root_clips():
    def body(rank, world):
        model = Stack()
        model.blocks[0] = shard(model.blocks[0])
        model = shard(model)
        model(PLAIN.batch(rank, 0))
        model.blocks[0].clip_grad_norm_(1.0)

    for each in raised_everywhere(2, body):
        assert each.is_a(RuntimeError)
        assert "should only be called on the root FSDP instance" in each.message


@torch_is_wrong("it divides by zero, or counts padding")
@pytest.mark.parametrize("order", [0.0, -1.0, math.nan])
def test_an_order_that_is_not_positive_is_refused(order):
    def body(rank, world):
        shard(Block()).clip_grad_norm_(1.0, order)

    for each in raised_everywhere(1, body):
        assert each.is_a(ValueError)


@torch_is_wrong("it makes two when units are sharded and not")
def test_one_small_collective_however_many_units():
    def body(rank, world):
        model = PLAIN.cut(built(PLAIN), shard)
        square(model(PLAIN.batch(rank, 0))).backward()
        with recorded() as calls:
            model.clip_grad_norm_(1.0)
        return len(calls), count(calls, "all_gather"), sum(call.received for call in calls)

    assert run(2, body)[0] == (1, 1, 2)


class Operations(TorchDispatchMode):
    """Counts operations that compute, and notes the types of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if not function.is_view and function.namespace == "aten":
            dtypes = {each.dtype for each in tree_leaves((found, args)) if isinstance(each, torch.Tensor)}
            self.count += bool(dtypes)
            self.dtypes |= dtypes
        return found


def operations_of_clipping(layers: int, **settings) -> Operations:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    model = shard(model, use_orig_params=True, **settings)
    model(torch.ones(1, 8)).sum().backward()
    with Operations() as found:
        model.clip_grad_norm_(0.1)
    return found


@pytest.mark.skipif(TORCH, reason="how our own function computes")
def test_as_many_operations_clip_many_parameters_as_few():
    few, many = run(2, lambda rank, world: [operations_of_clipping(layers).count for layers in (1, 20)])[0]
    assert few == many


@pytest.mark.skipif(TORCH, reason="how our own function computes")
def test_a_device_without_float64_clips_in_float32(monkeypatch):
    def body(rank, world):
        expected = trained(PLAIN)[0].clip_grad_norm_(0.1)
        monkeypatch.setattr(clip_grad_norm, "has_float64", lambda device: False)
        found = trained(PLAIN)[0].clip_grad_norm_(0.1)
        torch.testing.assert_close(found, expected)
        return operations_of_clipping(3).dtypes, len(set(bits(found)))

    for dtypes, different in run(2, body):
        assert torch.float64 not in dtypes
        assert different == 1


def test_torchs_own_function_clips_what_fully_shard_made():
    def body(rank, world):
        return [clipped(rank, world, order) for order in ORDERS]

    def clipped(rank, world, order):
        plain = built(PLAIN)
        model = copy.deepcopy(plain)
        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            core.fully_shard(block, mesh=mesh)
        core.fully_shard(model, mesh=mesh)
        batch = PLAIN.batch(rank, 0)
        square(model(batch)).backward()
        square(plain(batch)).backward()
        averaged(plain)
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, order)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, order).full_tensor()
        torch.testing.assert_close(norm, wanted, msg=lambda m: f"order {order}: {m}")
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(here(ours.grad), mine(theirs.grad, ours), msg=lambda m: f"order {order}: {m}")
        return len(set(bits(norm)))

    assert run(2, body)[0] == [1] * len(ORDERS)


def test_clipping_takes_torchs_arguments():
    assert [*inspect.signature(FSDP.clip_grad_norm_).parameters][:3] == ["self", "max_norm", "norm_type"]
    assert inspect.signature(FSDP.clip_grad_norm_).parameters["norm_type"].default == 2.0


# -------------------------------------------------------------------------------------- core.clip_grad_norm_


class Scaled(nn.Module):
    """Linears of uneven sizes and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.scale


def averaged(model: nn.Module, group: dist.ProcessGroup | None = None) -> list[nn.Parameter]:
    gradients = [parameter.grad for parameter in model.parameters()]
    total = torch.cat([each.reshape(-1) for each in gradients])
    dist.all_reduce(total, group=group)
    total /= dist.get_world_size(group)
    for each, mean in zip(gradients, total.split([each.numel() for each in gradients]), strict=True):
        each.copy_(mean.view(each.shape))
    return list(model.parameters())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return full_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def clips_alike(model: nn.Module, plain: nn.Module, wanted: list[nn.Parameter], order: float) -> None:
    """Clip both and compare norm and gradients of those parameters, which the sharded model has in the same order."""
    norm, expected = core.clip_grad_norm_(model, 0.05, order), torch.nn.utils.clip_grad_norm_(wanted, 0.05, order)
    torch.testing.assert_close(norm, expected, msg=lambda m: f"order {order}: {m}")
    assert type(norm) is torch.Tensor
    assert len(set(bits(norm))) == 1
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if any(theirs is each for each in wanted):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, msg=lambda m: f"order {order}: {m}")


@pytest.mark.skipif(TORCH, reason="ours alone")
@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_what_fully_shard_made_is_clipped_as_a_whole_model(shape):
    def body(rank, world):
        for order in ORDERS:
            clips(rank, order)

    def clips(rank, order):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        plain = Scaled()
        model = copy.deepcopy(plain)
        core.fully_shard(model.up, mesh=mesh)
        core.fully_shard(model, mesh=mesh)
        for each in (plain, model):
            square(each(PLAIN.batch(rank, 0))).backward()
        clips_alike(model, plain, averaged(plain), order)

    run(math.prod(shape), body)


FORWARDS = {
    "a forward": lambda model, x: model(x),
    "a forward of a unit": lambda model, x: model[1](x),
    "a forward without gradients": torch.no_grad()(lambda model, x: model(x)),
    "an unshard": lambda model, x: [unit.unshard() for unit in (*model, model)],
}


@torch_is_wrong("the parameters that it shows then have no gradients, so it counts and clips none")
def test_full_parameters_that_a_forward_kept_hide_no_gradients():
    def clipped(style: Style, between) -> list[torch.Tensor]:
        torch.manual_seed(0)
        apply = sharder(style, Strategy.SHARD_GRAD_OP)
        model = apply(nn.Sequential(*(apply(nn.Linear(6, 6)) for _ in range(3))))
        optim = torch.optim.SGD(model.parameters(), lr=1.0)
        x = torch.arange(12.0).view(2, 6)
        model(x).square().mean().backward()
        between(model.module if style.wraps else model, x)
        norm = core.clip_grad_norm_(model, 0.01)
        optim.step()
        return [norm, *(full_tensor(v) if isinstance(v, DTensor) else v for v in model.state_dict().values())]

    def body(rank, world):
        wrong = []
        for style in Style:
            wanted = clipped(style, lambda model, x: None)
            for name, between in FORWARDS.items():
                if name == "an unshard" and style.wraps:
                    continue
                if not all(map(torch.equal, clipped(style, between), wanted)):
                    wrong.append(f"{style}: {name}")
        return wrong

    assert run(2, body) == [[], []]


@pytest.mark.skipif(TORCH, reason="ours alone")
def test_g3_plain_parameters_beside_sharded_ones_are_left_alone():
    """torch's function refuses a mixture of plain tensors and DTensors."""

    def body(rank, world):
        plain = Scaled()
        model = copy.deepcopy(plain)
        core.fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params=set(model.down.parameters()))
        for each in (plain, model):
            square(each(PLAIN.batch(rank, 0)) * (rank + 1)).backward()
        before = model.down.weight.grad.clone()
        mine = [p for p in averaged(plain) if all(p is not q for q in plain.down.parameters())]
        clips_alike(model, plain, mine, 2.0)
        assert torch.equal(model.down.weight.grad, before)

    run(2, body)


@pytest.mark.skipif(TORCH, reason="ours alone")
def test_tensor_parallel_parameters_are_counted_once():
    def body(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for order in ORDERS:
            clips(mesh, order)

    def clips(mesh, order):
        plain = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
        model = copy.deepcopy(plain)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        core.fully_shard(model, mesh=mesh["dp"])
        for each in (plain, model):
            square(each(PLAIN.batch(mesh.get_local_rank("dp"), 0))).backward()
        clips_alike(model, plain, averaged(plain, mesh.get_group("dp")), order)

    run(4, body)


@pytest.mark.skipif(TORCH, reason="ours alone")
def test_dtensors_over_a_part_of_the_ranks_of_others_are_refused():
    def body(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6))
        parallelize_module(model[0], mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
        core.fully_shard(model, mesh=mesh["dp"])
        square(model(PLAIN.batch(mesh.get_local_rank("dp"), 0))).backward()
        core.clip_grad_norm_(model, 1.0)

    for each in raised_everywhere(4, body):
        assert each.is_a(ValueError)
        assert "over 2 ranks; expected 4 ranks" in each.message


@pytest.mark.skipif(TORCH, reason="ours alone")
def test_wrapped_modules_inside_a_plain_one_are_clipped_together():
    def body(rank, world):
        model = nn.Sequential(shard(nn.Linear(5, 6)), shard(nn.Linear(6, 3)))
        square(model(PLAIN.batch(rank, 0))).backward()
        total = sum(p.grad.double().square().sum() for p in model.parameters()).view(1)
        dist.all_reduce(total)
        norm = core.clip_grad_norm_(model, 1e9)
        assert torch.isclose(norm.double(), total.sqrt(), rtol=1e-6)
        return len(set(bits(norm)))

    assert run(2, body) == [1, 1]


@pytest.mark.skipif(TORCH, reason="ours alone")
def test_a_module_in_which_nothing_is_sharded_is_refused():
    with pytest.raises(ValueError, match="no sharded parameters"):
        core.clip_grad_norm_(nn.Linear(2, 2), 1.0)
