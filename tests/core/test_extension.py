"""Tensor subclasses that say themselves what is gathered of them: low-precision payloads with and without scales."""

from __future__ import annotations

import copy
from typing import Any

import harness
import pytest
import torch
from test_composable import averaged, batch, full, line
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing
from under_test import TORCH, core, torch_is_wrong

KEPT = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.copy_.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
}


class Halved(torch.Tensor):
    """Stored in float32, gathered in bfloat16 by itself."""

    asked: int = 0

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self.data_ = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Halved, lambda t: t.data_, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, out) if func in KEPT else out

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        assert mesh.ndim == 1
        type(self).asked += 1
        return (self.data_.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        assert metadata is None
        (gathered,) = outputs
        if out is not None:
            with torch.no_grad():
                out.copy_(gathered[: out.shape[0]].to(param_dtype))
            return None
        made = gathered.to(param_dtype)
        return made, (made,)


class Scaled(Halved):
    """Gathered as eight bits with a scale for each row."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:  # type: ignore[override]
        assert outer_size == (8, 6)
        assert outer_stride == (6, 1)
        assert isinstance(module, nn.Linear)
        assert mp_policy.param_dtype is None
        scale = self.data_.abs().amax(1, keepdim=True) / 127 + 1e-12
        return ((self.data_ / scale).round().to(torch.int8), scale), self.shape

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        payload, scale = outputs
        made = (payload.to(param_dtype) * scale)[:8]
        if out is not None:
            with torch.no_grad():
                out.copy_(made)
            return None
        return made, (made,)


def extended(kind: type[Halved], rows: int = 8) -> nn.Linear:
    torch.manual_seed(0)
    module = nn.Linear(6, rows)
    module.weight = nn.Parameter(kind(module.weight.detach()))
    return module


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", [Halved, Scaled])
def test_what_a_subclass_gives_is_gathered_and_its_shard_is_trained(kind: type[Halved], world: int) -> None:
    def body(rank: int, world: int) -> None:
        plain = nn.Linear(6, 8)
        torch.manual_seed(0)
        plain.reset_parameters()
        model = core.fully_shard(extended(kind), mesh=line())
        assert isinstance(model.weight, DTensor)
        assert type(model.weight.to_local()) is kind
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
        for step in range(3):
            before = plain(batch(step, rank))
            with harness.recorded() as calls:
                found = model(batch(step, rank))
            torch.testing.assert_close(found, before, atol=0.1, rtol=0.1)
            types = {call.dtype for call in calls if call.op == "all_gather"}
            assert TORCH or world == 1 or types == ({"bfloat16", "float32"} if kind is Halved else {"int8", "float32"})
            for output in (before, found):
                output.sum().backward()
            averaged(plain)
            torch.testing.assert_close(full(model.weight.grad), plain.weight.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            rows = model.weight.to_local()
            torch.testing.assert_close(rows.data_, plain.weight.detach()[-(-8 // world) * rank :][: rows.shape[0]])

    harness.run(world, body)


@torch_is_wrong("what is gathered again for backward counts as a change, unless the subclass prevents it")
@pytest.mark.parametrize("kind", [Halved, Scaled])
def test_what_is_freed_after_forward_is_gathered_again_for_backward(kind: type[Halved]) -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        head = nn.Linear(8, 3)
        model = nn.Sequential(nn.Linear(6, 6), extended(kind), copy.deepcopy(head))
        torch.manual_seed(0)
        first = copy.deepcopy(model[0])
        plain = nn.Sequential(first, nn.Linear(6, 8), head)
        plain[1].weight.data.copy_(model[1].weight.data_)
        plain[1].bias.data.copy_(model[1].bias)
        for module in model:
            core.fully_shard(module, mesh=line())
        core.fully_shard(model, mesh=line())
        for step in range(2):
            with harness.recorded() as calls:
                found = model(batch(step, rank))
                found.sum().backward()
            assert harness.count(calls, "all_gather") >= 8
            expected = plain(batch(step, rank))
            torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)
            expected.sum().backward()
            averaged(plain)
            torch.testing.assert_close(full(model[1].weight.grad), plain[1].weight.grad)
            torch.testing.assert_close(full(model[0].weight.grad), plain[0].weight.grad, atol=0.1, rtol=0.1)
            model.zero_grad()
            plain.zero_grad()

    harness.run(2, body)


@torch_is_wrong("rows that are missing have to be added by the subclass")
def test_rows_that_a_rank_lacks_are_added() -> None:
    def body(rank: int, world: int) -> None:
        model = core.fully_shard(extended(Halved, 7), mesh=line())
        expected = extended(Halved, 7)
        x = batch(0, rank)
        wanted = x @ expected.weight.data_.to(torch.bfloat16).float().t() + expected.bias
        for _ in range(2):
            torch.testing.assert_close(model(x), wanted)
            model.reshard()
        assert Halved.asked == 2
        model(x).sum().backward()
        other = copy.deepcopy(model)
        torch.testing.assert_close(other(x), wanted)

    harness.run(3, body)


def test_half_a_pair_is_refused() -> None:
    class Half(Halved):
        fsdp_post_all_gather = property()  # type: ignore[assignment]

    def body(rank: int, world: int) -> None:
        with pytest.raises(AssertionError, match="Both fsdp_pre_all_gather and fsdp_post_all_gather"):
            core.fully_shard(extended(Half), mesh=line())

    harness.run(1, body)


class Paired(torch.Tensor):
    """Two tensors that go through every operation side by side, in what is stored and in what computes."""

    @staticmethod
    def __new__(cls, one: torch.Tensor, other: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, one.size(), strides=one.stride(), dtype=one.dtype, device=one.device
        )

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.one, self.other = one, other

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sides = []
        for side in ("one", "other"):
            mine = pytree.tree_map_only(Paired, lambda t, side=side: getattr(t, side), (args, kwargs or {}))
            sides.append(func(*mine[0], **mine[1]))
        out = pytree.tree_map(lambda a, b: cls(a, b) if isinstance(a, torch.Tensor) else a, *sides)
        return return_and_correct_aliasing(func, args, kwargs or {}, out)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.one, self.other), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        if out is None:
            return Paired(*outputs), outputs
        for gathered, shown in zip(outputs, (out.one, out.other), strict=True):
            assert gathered.data_ptr() == shown.data_ptr()
        return None


def test_what_a_subclass_computes_with_is_what_was_gathered_each_time():
    def body(rank: int, world: int) -> bool:
        layer = nn.Linear(4, 4, bias=False)
        layer.weight = nn.Parameter(Paired(layer.weight.detach(), layer.weight.detach() * 2))
        core.fully_shard(layer)
        for _ in range(3):
            layer(torch.ones(2, 4)).sum().backward()
        return True

    assert harness.run(2, body) == [True, True]


def test_parts_of_a_subclass_on_meta_are_of_the_subclass_once_they_have_memory():
    def body(rank: int, world: int) -> bool:
        with torch.device("meta"):
            layer = nn.Linear(4, 4, bias=False)
            layer.weight = nn.Parameter(Paired(layer.weight.detach(), layer.weight.detach().clone()))
        core.fully_shard(layer)
        layer.to_empty(device="cpu")
        nn.init.ones_(layer.weight)
        out = layer(torch.ones(2, 4))
        out.sum().backward()
        return bool((out.one == 4).all() and (out.other == 4).all())

    assert harness.run(2, body) == [True, True]
