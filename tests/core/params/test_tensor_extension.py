"""Tensor subclasses that say themselves what is gathered of them: low-precision payloads with and without scales."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from tests.core.fsdp2.test_fully_shard import averaged, batch, full, line
from tests.kit.models.extensions import Halved, Scaled
from tests.kit.models.under_test import LOW, TORCH, core, no_sync, torch_is_wrong
from tests.kit.ranks import harness

if not TORCH:
    import shardckpt
    from shardckpt.core.params import tensor_extension as core_errors


def extended(kind: type[Halved], rows: int = 8) -> nn.Linear:
    torch.manual_seed(0)
    module = nn.Linear(6, rows)
    module.weight = nn.Parameter(kind(module.weight.detach()))
    return module


def finish_step(layers: tuple[Any, Any], outputs: tuple[Any, Any], optimizers: list[torch.optim.Optimizer]) -> None:
    """Run the backwards of a plain layer and a sharded one, compare their gradients, and step."""
    plain, model = layers
    for output in outputs:
        output.sum().backward()
    averaged(plain)
    torch.testing.assert_close(full(model.weight.grad), plain.weight.grad)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


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
            assert world == 1 or [call.dtype for call in calls if call.op == "all_gather"] == ["uint8"]
            finish_step((plain, model), (before, found), optimizers)
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
            assert harness.count(calls, "all_gather") == 6, "one for each of three units and pass"
            assert harness.count(calls, "reduce_scatter") == 3
            expected = plain(batch(step, rank))
            torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)
            expected.sum().backward()
            averaged(plain)
            torch.testing.assert_close(full(model[1].weight.grad), plain[1].weight.grad)
            torch.testing.assert_close(full(model[0].weight.grad), plain[0].weight.grad, atol=0.1, rtol=0.1)
            model.zero_grad()
            plain.zero_grad()

    harness.run(2, body)


def cast_to_low(self: torch.Tensor, mesh: Any) -> Any:
    return (self.detach().as_subclass(torch.Tensor).to(LOW),), None


def show_gathered(
    self: torch.Tensor, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> Any:
    return None if out is not None else (outputs[0], outputs)


@pytest.mark.parametrize("world", [1, 2])
def test_extensions_that_show_what_was_gathered_train_on_any_number_of_ranks(world: int) -> None:
    """Gathering again for backward is no change of the memory that they show, also where one rank copies."""

    def body(rank: int, world: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(2)))
        policy = core.MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
        for block in model:
            core.fully_shard(block, mesh=line(), mp_policy=policy)
        core.fully_shard(model, mesh=line(), mp_policy=policy)
        for parameter in model.parameters():
            local = parameter._local_tensor
            local.fsdp_pre_all_gather = cast_to_low.__get__(local)
            local.fsdp_post_all_gather = show_gathered.__get__(local)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for _ in range(3):
            loss = model(torch.ones(2, 8)).float().square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    for losses in harness.run(world, body):
        assert losses[0] > losses[1] > losses[2]


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


class Twofold(torch.Tensor):
    """Two tensors that go through every operation side by side, and say nothing about gathers."""

    @staticmethod
    def __new__(cls, one: torch.Tensor, other: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, one.size(), strides=one.stride(), dtype=one.dtype, device=one.device
        )

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.one, self.other = one, other

    def __tensor_flatten__(self) -> Any:
        return ["one", "other"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return Twofold(inner["one"], inner["other"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sides = []
        for side in ("one", "other"):
            mine = pytree.tree_map_only(Twofold, lambda t, side=side: getattr(t, side), (args, kwargs or {}))
            sides.append(func(*mine[0], **mine[1]))
        out = pytree.tree_map(lambda a, b: cls(a, b) if isinstance(a, torch.Tensor) else a, *sides)
        return return_and_correct_aliasing(func, args, kwargs or {}, out)


class Paired(Twofold):
    """Two tensors that are stored and gathered, and compute, side by side."""

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


def before_gather(self: torch.Tensor, mesh: Any) -> Any:
    Halved.asked += 1
    return (self.to(torch.bfloat16),), None


def after_gather(
    self: torch.Tensor, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> Any:
    return Halved.fsdp_post_all_gather(self, outputs, metadata, param_dtype, out=out)  # type: ignore[arg-type]


def put_functions(layer: nn.Linear) -> None:
    """Put functions of its own on the dense local tensor."""
    local = layer.weight._local_tensor
    local.fsdp_pre_all_gather = functools.partial(before_gather, local)
    local.fsdp_post_all_gather = after_gather.__get__(local)


class Dense(torch.Tensor):
    """A subclass that has memory itself."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return before_gather(self.as_subclass(torch.Tensor), mesh)

    fsdp_post_all_gather = after_gather


def put_dense(layer: nn.Linear) -> None:
    """Put a subclass with memory in the place of the local tensor."""
    layer.weight._local_tensor = layer.weight._local_tensor.as_subclass(Dense)


def put_subclass(layer: nn.Linear) -> None:
    """Put a subclass in the place of the local tensor."""
    layer.weight._local_tensor = Halved(layer.weight._local_tensor)


def put_parameter(layer: nn.Linear) -> None:
    """Register another parameter around a subclass."""
    layer.weight = nn.Parameter(around(layer.weight))


def assign_state(layer: nn.Linear) -> None:
    """Load a state dict by assignment whose tensor is around a subclass."""
    layer.load_state_dict({"weight": around(layer.weight), "bias": layer.bias.detach()}, assign=True)


def around(weight: Any) -> DTensor:
    local = Halved(weight._local_tensor.detach())
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def materialised(rows: int = 8, **settings: Any) -> Any:
    """A sharded layer that was on the meta device, with the values of `extended`."""
    with torch.device("meta"):
        model = nn.Linear(6, rows)
    core.fully_shard(model, mesh=line(), **settings)
    model.to_empty(device="cpu")
    values = extended(Halved, rows)
    with torch.no_grad():
        for mine, value in ((model.weight, values.weight.data_), (model.bias, values.bias)):
            mine.copy_(distribute_tensor(value.detach(), line(), [Shard(0)]))
    return model


def train(model: Any, rank: int, rows: int = 8) -> None:
    """Three steps beside a plain layer; what is gathered of the weight is in bfloat16, what is trained is not."""
    plain = nn.Linear(6, rows)
    torch.manual_seed(0)
    plain.reset_parameters()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        asked = Halved.asked
        rounded = plain.weight + (plain.weight.bfloat16().float() - plain.weight).detach()
        expected = nn.functional.linear(batch(step, rank), rounded, plain.bias)
        found = model(batch(step, rank))
        torch.testing.assert_close(found, expected)
        assert Halved.asked > asked
        finish_step((plain, model), (expected, found), optimizers)


def put_and_train(rank: int, world: int, put: Callable[[nn.Linear], None]) -> None:
    model = materialised()
    put(model)
    train(model, rank)


@pytest.mark.parametrize("put", [put_functions, put_dense])
def test_functions_put_on_local_tensors_say_what_is_gathered(put: Callable[[nn.Linear], None]) -> None:
    harness.run(2, put_and_train, put)


@torch_is_wrong("a tensor that is made of others cannot take the place of a dense one")
@pytest.mark.parametrize("put", [put_subclass, put_parameter, assign_state])
def test_subclasses_put_in_place_of_local_tensors_say_what_is_gathered(put: Callable[[nn.Linear], None]) -> None:
    harness.run(2, put_and_train, put)


@pytest.mark.parametrize("is_given_functions", [True, False])
def test_a_tensor_made_of_others_is_gathered_by_functions_that_it_is_given_later(is_given_functions: bool) -> None:
    def before(self: Any, mesh: Any) -> Any:
        return (self.one, self.other), None

    def behind(self: Any, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (Twofold(*outputs), outputs)

    def body(rank: int, world: int) -> bool:
        layer = nn.Linear(4, 4, bias=False)
        layer.weight = nn.Parameter(Twofold(torch.ones(4, 4), torch.full((4, 4), 2.0)))
        core.fully_shard(layer)
        local = layer.weight._local_tensor
        if not is_given_functions:
            refused = (
                contextlib.nullcontext() if TORCH else pytest.raises(core_errors.ExtensionError, match="has no fsdp")
            )
            with refused:
                layer(torch.ones(2, 4))  # torch computes with one of the two and says nothing
            return True
        local.fsdp_pre_all_gather = before.__get__(local)
        local.fsdp_post_all_gather = behind.__get__(local)
        for _ in range(2):
            out = layer(torch.ones(2, 4))
            out.sum().backward()
        return bool((out.one == 4).all() and (out.other == 8).all())

    assert harness.run(2, body) == [True, True]


@torch_is_wrong("rows that are missing have to be added by the subclass")
@pytest.mark.parametrize("put", [put_functions, put_dense, put_subclass])
def test_late_extensions_of_ranks_with_fewer_rows_are_kept(put: Callable[[nn.Linear], None]) -> None:
    def body(rank: int, world: int) -> None:
        model = materialised(7)
        put(model)
        train(model, rank, 7)

    harness.run(3, body)


@torch_is_wrong("AttributeError: it looks for extensions before the first forward, and not again")
def test_an_optimizer_and_a_unit_that_ran_before_know_late_extensions() -> None:
    def body(rank: int, world: int) -> None:
        model = materialised()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch(0, rank)).sum().backward()
        optimizer.zero_grad()
        put_functions(model)
        before = Halved.asked
        model(batch(0, rank)).sum().backward()
        weight, gradient = full(model.weight), full(model.weight.grad)
        optimizer.step()
        torch.testing.assert_close(full(model.weight), weight - 0.1 * gradient)
        with torch.no_grad():
            found = model(batch(0, rank))
        rounded = full(model.weight).bfloat16().float()
        torch.testing.assert_close(found, nn.functional.linear(batch(0, rank), rounded, full(model.bias)))
        assert Halved.asked > before

    harness.run(2, body)


@pytest.mark.skipif(TORCH, reason="these are our own functions")
@pytest.mark.parametrize("put", [put_functions, put_dense, put_subclass])
def test_states_are_taken_of_late_extensions_and_loaded_beneath_them(put: Callable[[nn.Linear], None]) -> None:
    def body(rank: int, world: int) -> None:
        model, other = materialised(), materialised()
        with torch.no_grad():
            other.weight.zero_()
        put(model)
        put(other)
        state = shardckpt.model_state_dict(model)
        torch.testing.assert_close(torch.as_tensor(state["weight"]), extended(Halved).weight.data_)
        shardckpt.load_model_state_dict(other, state)
        train(other, rank)

    harness.run(2, body)


@torch_is_wrong("it gathers without them and says nothing")
@pytest.mark.parametrize("lose", [lambda model: model.double(), copy.deepcopy], ids=["to", "deepcopy"])
def test_functions_that_are_lost_with_their_tensor_are_missed(lose: Callable[[Any], Any]) -> None:
    def body(rank: int, world: int) -> None:
        model = materialised()
        put_functions(model)
        model(batch(0, rank)).sum().backward()
        other = lose(model)
        with pytest.raises(core_errors.ExtensionError, match=r"weight.*has no fsdp_pre_all_gather"):
            other(batch(0, rank).to(other.bias.dtype))

    harness.run(2, body)


@torch_is_wrong("it gathers by them for the backward, whose forward did not know them")
def test_extensions_put_between_forward_and_backward_are_refused() -> None:
    def body(rank: int, world: int) -> None:
        model = materialised()
        loss = model(batch(0, rank)).sum()
        model.reshard()
        put_functions(model)
        with pytest.raises(core_errors.ExtensionError, match="while gradients are pending"):
            model(batch(0, rank))
        del loss

    harness.run(2, body)


@torch_is_wrong("it computes with what was put there")
def test_extensions_put_on_a_tensor_with_unreduced_gradients_are_refused() -> None:
    """After the backward no forward waits for its gradients, but those of `no_sync` wait for their reduction."""

    def body(rank: int, world: int) -> None:
        model = materialised()
        with no_sync(model):
            model(batch(0, rank)).sum().backward()
        put_functions(model)
        with pytest.raises(core_errors.ExtensionError, match="while gradients are pending"):
            model(batch(0, rank))

    harness.run(2, body)


@torch_is_wrong("it looks for the other half when that is needed")
def test_half_a_pair_that_comes_late_is_refused_by_the_next_forward() -> None:
    def body(rank: int, world: int) -> None:
        model = materialised()
        with torch.no_grad():
            model(batch(0, rank))
        model.reshard()
        model.weight._local_tensor.fsdp_pre_all_gather = before_gather
        with pytest.raises(AssertionError, match="Both fsdp_pre_all_gather and fsdp_post_all_gather"), torch.no_grad():
            model(batch(0, rank))

    harness.run(2, body)


@pytest.mark.parametrize("kind", [Halved, Scaled])
def test_a_model_that_is_first_evaluated_in_inference_mode_can_be_trained(kind: type[Halved]) -> None:
    """As Lightning does before the first step."""

    def body(rank: int, world: int) -> bool:
        models = [core.fully_shard(extended(kind), mesh=line()) for _ in range(2)]
        with torch.inference_mode():
            models[0](batch(0, rank))
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                model(batch(step, rank)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        pairs = zip(*(model.parameters() for model in models), strict=True)
        return all(torch.equal(full(one), full(two)) for one, two in pairs)

    assert harness.run(2, body) == [True, True]


class FourBits(nn.Module):
    """A frozen base in NF4 of torchao with a trained LoRA adapter."""

    def __init__(self) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        super().__init__()
        self.weight = nn.Parameter(to_nf4(torch.randn(64, 64), 64, 16), requires_grad=False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return linear_nf4(x, self.weight).tanh() + self.up(self.down(x))


def losses_of_four_bits(shard: Callable[..., Any], rank: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(FourBits(), FourBits())
    for block in model:
        shard(block)
    shard(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(2, 64, generator=torch.Generator().manual_seed(rank))).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("world", [1, 2])
def test_a_frozen_base_in_nf4_trains_as_with_torch(world: int) -> None:
    """On one rank as the plain model: torch fails there."""
    pytest.importorskip("torchao")

    def body(rank: int, world: int) -> bool:
        expected = losses_of_four_bits(torch_fsdp.fully_shard if world > 1 else lambda _: None, rank)
        return losses_of_four_bits(core.fully_shard, rank) == expected

    assert harness.run(world, body) == [True] * world


@pytest.mark.skipif(TORCH, reason="asks for our error")
def test_a_base_in_nf4_that_the_ranks_do_not_divide_is_refused_by_name() -> None:
    pytest.importorskip("torchao")

    def body(rank: int, world: int) -> None:
        with pytest.raises(core_errors.ExtensionError, match=r"weight.*NF4Tensor.*ignored_params"):
            core.fully_shard(FourBits())

    harness.run(3, body)
