"""A policy gives single parameters of a unit their stored dtype: `param_dtype_override_fn`."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.kit.models.under_test import TORCH, core
from tests.kit.ranks import harness

HALF = torch.bfloat16
TORCH_HAS_IT = "param_dtype_override_fn" in inspect.signature(torch_fsdp.MixedPrecisionPolicy).parameters

pytestmark = pytest.mark.skipif(TORCH and not TORCH_HAS_IT, reason="this torch has no dtypes of single parameters")


class Scaled(nn.Module):
    """A product whose gain needs the stored dtype; it notes the dtypes in which it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))
        self.gain = nn.Parameter(torch.rand(5) + 0.5)
        self.bias = nn.Parameter(torch.randn(5))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [self.weight.dtype, self.gain.dtype, self.bias.dtype, x.dtype]
        return (x @ self.weight.t() + self.bias) * self.gain


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = Scaled(), Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.outer(x)


def gains_of(model: nn.Module, called: list[Any] | None = None) -> Any:
    """Return an override that keeps the stored dtype of a model's gains, and records its calls."""
    gains = {id(module.gain) for module in model.modules() if isinstance(module, Scaled)}

    def choose(parameter: nn.Parameter) -> torch.dtype | None:
        if called is not None:
            called.append(parameter)
        return parameter.dtype if id(parameter) in gains else None

    return choose


def shard(model: nn.Module, engine: Any = core, *nested: nn.Module, **policy: Any) -> Any:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in (*nested, model):
        engine.fully_shard(module, mesh=mesh, mp_policy=engine.MixedPrecisionPolicy(HALF, **policy))
    return model


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def test_a_parameter_keeps_its_stored_dtype_while_inputs_and_other_ones_are_cast() -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        model, called = Scaled(), []
        weight, bias = model.weight.detach().to(HALF), model.bias.detach().to(HALF)
        expected = sum((batch(each).to(HALF) @ weight.t() + bias).float().sum(0) for each in range(world)) / world
        shard(model, param_dtype_override_fn=gains_of(model, called))
        model(batch(rank)).sum().backward()
        assert model.seen == [HALF, torch.float32, HALF, HALF]
        assert [p.dtype for p in model.parameters()] == [torch.float32] * 3, "the optimizer's are as stored"
        grad = model.gain.grad.full_tensor()
        torch.testing.assert_close(grad, expected, rtol=1e-6, atol=0)
        assert not torch.equal(grad, grad.to(HALF).float()), "the mean is not rounded"
        model(batch(rank))
        assert len(called) == 3, "asked once for each parameter"
        copied = copy.deepcopy(model)
        copied(batch(rank))
        assert copied.seen == model.seen

    harness.run(2, body)


@pytest.mark.skipif(TORCH, reason="torch does not take parameters over")
def test_the_override_is_asked_once_if_a_unit_above_takes_a_shared_parameter_over() -> None:
    def body(rank: int, world: int) -> None:
        model, called = Pair(), []
        model.outer.weight = model.inner.weight
        shard(model.inner, param_dtype_override_fn=gains_of(model, called))
        assert len(called) == 3
        with pytest.warns(UserWarning, match="takes them over"):
            shard(model)
        assert len(called) == 3
        model(batch(rank))
        assert model.inner.seen[:3] == [HALF, torch.float32, HALF]
        assert model.outer.seen[:3] == [HALF, HALF, HALF]

    harness.run(2, body)


@pytest.mark.parametrize("answer", [torch.float64, "float32"])
def test_another_dtype_or_no_dtype_is_refused_and_the_parameters_stay(answer: Any) -> None:
    def body(rank: int, world: int) -> None:
        model = Scaled()
        with pytest.raises(ValueError, match="param_dtype_override_fn must return"):
            shard(model, param_dtype_override_fn=lambda parameter: answer)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())

    harness.run(1, body)


@pytest.mark.skipif(TORCH or not TORCH_HAS_IT, reason="compares ours with torch's")
@pytest.mark.parametrize("world", [2, 3])
def test_training_with_an_override_has_the_same_bits_as_torchs(world: int) -> None:
    def body(rank: int, world: int) -> None:
        found = []
        for engine in (core, torch_fsdp):
            model = Pair()
            policy = {"reduce_dtype": torch.float32, "param_dtype_override_fn": gains_of(model)}
            shard(model, engine, model.inner, **policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for number in range(2):
                model(batch(10 * number + rank)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([p.full_tensor() for p in model.parameters()])
            found.append([model.inner.seen, model.outer.seen])
        assert found[1] == found[3]
        torch.testing.assert_close(found[0], found[2], atol=0, rtol=0)

    harness.run(world, body)
