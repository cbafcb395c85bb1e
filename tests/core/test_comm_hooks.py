"""A user's hook may average gradients in the engine's place; it is refused where it could not."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torchs
from torch.distributed.device_mesh import init_device_mesh

from tests.kit.models.models import PLAIN, Block, Stack, built, case, square
from tests.kit.models.reference import exposed, groups, mismatches, product, reduce_gradients
from tests.kit.models.under_test import FSDP, TORCH, Strategy, core, shard, torch_is_wrong
from tests.kit.ranks.harness import raised_everywhere, recorded, run

if TORCH:
    hooks = torchs
else:
    from shardckpt.core import comm_hooks as hooks

STRATEGIES = (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD)
SHARDED = STRATEGIES[:2]


def model_of(which=PLAIN, **settings):
    torch.manual_seed(17)
    return which.cut(built(which), lambda module: shard(module, **settings))


def default_hook(strategy):
    return hooks.allreduce_hook if strategy is Strategy.NO_SHARD else hooks.reduce_scatter_hook


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in exposed(model).items()}


def in_each(body, **axes) -> list[list]:
    """What `body(rank, **row)` gives on each of two forked ranks, under every row of the settings."""

    def every(rank, world):
        found = []
        for row in product(**axes):
            try:
                found.append(body(rank, **row))
            except Exception as error:
                raise AssertionError(f"under {row}") from error
        return found

    return run(2, every)


class Recorder:
    """Averages as the engine does and keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def sharded(self, state: object, grad: torch.Tensor, out: torch.Tensor) -> None:
        self.seen.append((state, tuple(grad.shape), tuple(out.shape), grad.is_contiguous(), grad.dtype))
        total = grad.clone()
        dist.all_reduce(total)
        out.copy_(total.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size())

    def whole(self, state: object, grad: torch.Tensor) -> None:
        self.seen.append((state, tuple(grad.shape), None, grad.is_contiguous(), grad.dtype))
        dist.all_reduce(grad)
        grad.div_(dist.get_world_size())

    def of(self, strategy):
        return self.whole if strategy is Strategy.NO_SHARD else self.sharded


# ------------------------------------------------------------------------------------------------- the hooks


def test_divisors_are_two_steps_to_the_number_of_ranks():
    def body(rank, world):
        state = hooks.DefaultState(dist.group.WORLD)
        return state.world_size, state.gradient_predivide_factor, state.gradient_postdivide_factor

    assert [run(world, body)[0] for world in (1, 2, 3, 4)] == [(1, 1, 1), (2, 2, 1), (3, 2, 1.5), (4, 2, 2)]


def test_a_state_without_a_group_is_refused():
    with pytest.raises(ValueError, match="Expected to pass in an explicit ProcessGroup"):
        hooks.DefaultState(None)


def test_a_low_precision_state_knows_the_type_to_give_back():
    def body(rank, world):
        made = (hooks.LowPrecisionState(dist.group.WORLD), hooks.LowPrecisionState(dist.group.WORLD, torch.float64))
        return [state.parameter_type for state in made]

    assert run(1, body)[0] == [torch.float32, torch.float64]


@torch_is_wrong("its hooks want a stream that a CPU does not have")
@pytest.mark.parametrize(
    ("name", "dtype"), [("fp16_compress_hook", torch.float16), ("bf16_compress_hook", torch.bfloat16)]
)
def test_compressing_hooks_reduce_in_their_type_and_give_back_the_parameters(name, dtype):
    def body(rank, world):
        state, hook = hooks.LowPrecisionState(dist.group.WORLD), getattr(hooks, name)
        grad = torch.tensor([1.0, 1.0 / 3, 100.0, -7.3]) * (rank + 1)
        small = grad.to(dtype) / 2
        dist.all_reduce(small)
        whole, out = grad.clone(), torch.empty(2)
        with recorded() as calls:
            hook(state, grad.clone(), out)
            hook(state, whole)
        assert torch.equal(whole, small.float())
        assert torch.equal(out, small.float().chunk(2)[rank])
        return [(call.op, call.dtype) for call in calls]

    kind = str(dtype).removeprefix("torch.")
    assert run(2, body)[0] == [("reduce_scatter", kind), ("all_reduce", kind)]


# ------------------------------------------------------------------------------------------ training with them


def test_the_default_hooks_give_the_gradients_of_the_engine():
    def body(rank, strategy, orig):
        model, plain = (model_of(sharding_strategy=strategy, use_orig_params=orig) for _ in range(2))
        model.register_comm_hook(hooks.DefaultState(dist.group.WORLD), default_hook(strategy))
        for step in range(3):
            for each in (model, plain):
                each.zero_grad()
                square(each(PLAIN.batch(rank, step))).backward()
            expected = gradients(plain)
            for name, found in gradients(model).items():
                torch.testing.assert_close(found, expected[name], msg=name)

    in_each(body, strategy=STRATEGIES, orig=(False, True))


def test_torchs_own_default_hooks_are_welcome():
    def body(rank, strategy):
        model, plain = model_of(sharding_strategy=strategy), model_of(sharding_strategy=strategy)
        hook = torchs.allreduce_hook if strategy is Strategy.NO_SHARD else torchs.reduce_scatter_hook
        model.register_comm_hook(torchs.DefaultState(dist.group.WORLD), hook)
        for each in (model, plain):
            square(each(PLAIN.batch(rank, 0))).backward()
        expected = gradients(plain)
        for name, found in gradients(model).items():
            torch.testing.assert_close(found, expected[name], msg=name)

    in_each(body, strategy=STRATEGIES)


@torch_is_wrong("its hooks want a stream that a CPU does not have")
def test_compressed_gradients_are_near_and_have_the_parameters_type():
    def body(rank, name, strategy):
        model, plain = model_of(sharding_strategy=strategy), model_of(sharding_strategy=strategy)
        model.register_comm_hook(hooks.LowPrecisionState(dist.group.WORLD), getattr(hooks, name))
        assert model._low_precision_hook_enabled()
        for each in (model, plain):
            square(each(PLAIN.batch(rank, 0))).backward()
        expected, differs = gradients(plain), False
        for key, found in gradients(model).items():
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, expected[key], rtol=3e-2, atol=3e-3, msg=key)
            differs |= not torch.equal(found, expected[key])
        return differs

    found = in_each(body, name=["fp16_compress_hook", "bf16_compress_hook"], strategy=STRATEGIES)
    assert all(any(differ) for differ in zip(*found, strict=True)), found


def test_a_hook_sees_one_padded_gradient_a_unit_and_its_state():
    def body(rank, strategy, orig):
        recorder, model = Recorder(), model_of(sharding_strategy=strategy, use_orig_params=orig)
        plain = built(PLAIN)
        model.register_comm_hook("the state", recorder.of(strategy))
        batch = PLAIN.batch(rank, 0)
        square(model(batch)).backward()
        square(plain(batch)).backward()
        shared = groups(model, plain, orig)
        reduce_gradients(plain, shared)
        close = lambda a, b: torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)  # noqa: E731
        return recorder.seen, mismatches(model, plain, shared, strategy is Strategy.NO_SHARD, close)

    axes = {"strategy": STRATEGIES, "orig": (False, True)}
    for row, (seen, wrong) in zip(product(**axes), in_each(body, **axes)[0], strict=True):
        assert wrong == [], row
        assert len(seen) == 4, row
        for state, size, out, contiguous, dtype in seen:
            assert state == "the state", row
            assert contiguous, row
            assert dtype == torch.float32, row
            assert len(size) == 1, row
            assert out is None or (2 * out[0],) == size, row


def test_under_mixed_precision_a_hook_sees_the_type_that_gradients_are_reduced_in():
    def body(rank, strategy, orig, reduce_dtype):
        mixed = core.MixedPrecision(torch.bfloat16, reduce_dtype)
        settings = {"sharding_strategy": strategy, "use_orig_params": orig, "mixed_precision": mixed}
        recorder, model, plain = Recorder(), model_of(**settings), model_of(**settings)
        model.register_comm_hook(None, recorder.of(strategy))
        for each in (model, plain):
            square(each(PLAIN.batch(rank, 0))).backward()
        expected = gradients(plain)
        for name, found in gradients(model).items():
            assert (found is None) == (expected[name] is None)
            if found is not None:
                assert found.dtype == torch.float32
                torch.testing.assert_close(found, expected[name], rtol=2e-2, atol=2e-3, msg=name)
        return {dtype for *_, dtype in recorder.seen}, {reduce_dtype or torch.bfloat16}

    found = in_each(body, strategy=STRATEGIES, orig=(False, True), reduce_dtype=(None, torch.float32))
    assert all(seen == expected for seen, expected in found[0]), found[0]


@torch_is_wrong("its hooks want a stream that a CPU does not have")
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_compressing_hooks_give_back_the_stored_type_under_mixed_precision(reduce_dtype):
    def body(rank, world):
        model = model_of(mixed_precision=core.MixedPrecision(torch.bfloat16, reduce_dtype))
        model.register_comm_hook(hooks.LowPrecisionState(dist.group.WORLD), hooks.fp16_compress_hook)
        with recorded() as calls:
            square(model(PLAIN.batch(rank, 0))).backward()
        assert all(found.dtype == torch.float32 and found.any() for found in gradients(model).values())
        return {call.dtype for call in calls if call.op == "reduce_scatter"}

    assert run(2, body)[0] == {"float16"}


@torch_is_wrong("it pins memory, which needs an accelerator")
def test_hooks_go_with_shards_on_the_cpu():
    def body(rank, world):
        recorder, model = Recorder(), model_of(cpu_offload=core.CPUOffload(offload_params=True))
        plain = model_of()
        model.register_comm_hook(None, recorder.sharded)
        for _ in range(2):
            for each in (model, plain):
                square(each(PLAIN.batch(rank, 0))).backward()
        expected = gradients(plain)
        for name, found in gradients(model).items():
            torch.testing.assert_close(found, expected[name], msg=name)

    run(2, body)


@pytest.mark.parametrize("strategy", SHARDED)
def test_what_a_hook_writes_is_the_gradient(strategy):
    """A hook that talks to nobody decides alone."""

    def body(rank, world):
        model = model_of(sharding_strategy=strategy)
        model.register_comm_hook(10.0, lambda state, grad, out: out.fill_(state + rank))
        square(model(PLAIN.batch(rank, 0))).backward()
        return {value for grad in gradients(model).values() for value in grad.tolist()}

    assert run(2, body) == [{10.0}, {11.0}]


@pytest.mark.parametrize("orig", [False, True])
def test_accumulation_in_and_out_of_no_sync_calls_the_hook_once_a_reduction(orig):
    def body(rank, world):
        recorder, settings = Recorder(), {"use_orig_params": orig}
        model, plain = model_of(**settings), model_of(**settings)
        model.register_comm_hook(None, recorder.sharded)
        for each in (model, plain):
            with each.no_sync():
                square(each(PLAIN.batch(rank, 0))).backward()
            for step in (1, 2):
                square(each(PLAIN.batch(rank, step))).backward()
        expected = gradients(plain)
        for name, found in gradients(model).items():
            torch.testing.assert_close(found, expected[name], msg=name)
        return len(recorder.seen)

    assert run(2, body) == [8, 8]


@torch_is_wrong("ranks that used nothing of a unit reduce nothing")
@pytest.mark.parametrize("name", ["used on some ranks", "unused everywhere", "part of the outputs by rank"])
def test_parameters_that_some_or_all_ranks_did_not_use(name):
    which = case(name)

    def body(rank, world):
        found = []
        for strategy, orig in ((Strategy.FULL_SHARD, True), (Strategy.FULL_SHARD, False), (Strategy.NO_SHARD, True)):
            plain = built(which)
            model = which.cut(
                copy.deepcopy(plain), lambda m, s=strategy, o=orig: shard(m, sharding_strategy=s, use_orig_params=o)
            )
            model.register_comm_hook(None, Recorder().of(strategy))
            shared = groups(model, plain, orig)
            for step in range(2):
                square(model(which.batch(rank, step))).backward()
                square(plain(which.batch(rank, step))).backward()
                reduce_gradients(plain, shared)
                close = lambda a, b: torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)  # noqa: E731
                found += mismatches(model, plain, shared, strategy is Strategy.NO_SHARD, close)
                model.zero_grad()
                plain.zero_grad()
        return found

    assert run(2, body)[0] == []


@torch_is_wrong("it refuses mixed types")
def test_a_unit_of_several_types_calls_the_hook_once_for_each():
    which = case("mixed dtypes")

    def body(rank, world):
        recorder, model = Recorder(), shard(which.build().blocks[0])
        model.register_comm_hook(None, recorder.sharded)
        square(model(torch.randn(4, 7))).backward()
        return sorted(str(dtype) for *_, dtype in recorder.seen)

    found = run(2, body)[0]
    assert len(found) == len(set(found)) > 1


@torch_is_wrong("it cannot be copied")
def test_g18_a_copy_has_the_hook_and_shares_its_state():
    """A state holds a process group, which nobody can copy."""

    def body(rank, world):
        state, model = hooks.DefaultState(dist.group.WORLD), model_of()
        model.register_comm_hook(state, hooks.reduce_scatter_hook)
        other = copy.deepcopy(model)
        for each in (model, other):
            square(each(PLAIN.batch(rank, 0))).backward()
        wanted = gradients(model)
        assert all(torch.equal(grad, wanted[name]) for name, grad in gradients(other).items())
        return [each._comm_hook_state is state for each in FSDP.fsdp_modules(other)]

    assert run(2, body)[0] == [True] * 4


def test_a_hook_that_raises_is_told():
    def body(rank, world):
        def fails(state, grad, out):
            raise KeyError("from the hook")

        model = model_of()
        model.register_comm_hook(None, fails)
        square(model(PLAIN.batch(rank, 0))).backward()

    for each in raised_everywhere(2, body):
        assert "from the hook" in each.message


# ---------------------------------------------------------------------------------------------- registration


def dummy(*args):
    """A hook that is never called."""


def test_without_one_there_is_none():
    def body(rank, world):
        return [each._comm_hook for each in FSDP.fsdp_modules(model_of())]

    assert run(1, body)[0] == [None] * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_unit_knows_the_hook_of_the_root(strategy):
    def body(rank, world):
        model, state = model_of(sharding_strategy=strategy), object()
        model.register_comm_hook(state, dummy)
        found = FSDP.fsdp_modules(model)
        return len(found), all(each._comm_hook is dummy and each._comm_hook_state is state for each in found)

    assert run(2, body) == [(4, True)] * 2


def refused(kind: type[Exception], message: str, action, world: int = 1) -> None:
    """The action raises on every rank, with a message that begins so."""

    def body(rank, world):
        warnings.simplefilter("ignore")
        action()

    for each in raised_everywhere(world, body):
        assert each.is_a(kind), each
        assert each.message.startswith(message)


def test_only_the_root_takes_one():
    def action():
        root, _, inner, _ = FSDP.fsdp_modules(model_of())
        assert root.check_is_root()
        inner.register_comm_hook(None, dummy)

    refused(AssertionError, "register_comm_hook can only be called on a root instance.", action)


def test_only_once():
    def action():
        model = model_of()
        model.register_comm_hook(None, dummy)
        model.register_comm_hook(None, dummy)

    refused(AssertionError, "A communication hook is already registered", action)


def test_not_when_a_unit_has_one_already():
    def action():
        model = model_of()
        FSDP.fsdp_modules(model)[2]._comm_hook = dummy
        model.register_comm_hook(None, dummy)

    refused(AssertionError, "A communication hook is already registered", action)


@pytest.mark.parametrize("hook", [None, 3, "allreduce_hook"])
def test_what_cannot_be_called_is_refused(hook):
    refused(
        ValueError,
        "The communication hook must be callable but got",
        lambda: shard(Block()).register_comm_hook(None, hook),
    )


@pytest.mark.parametrize("strategy", [Strategy.HYBRID_SHARD, Strategy._HYBRID_SHARD_ZERO2])
def test_hybrid_strategies_take_none(strategy):
    def action():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        shard(Block(), sharding_strategy=strategy, device_mesh=mesh).register_comm_hook(None, dummy)

    refused(AssertionError, "Communication hook is not supported for hybrid strategies", action, world=2)


@torch_is_wrong("it takes one at any time, and gradients of one step come about in two ways")
def test_none_between_forward_and_backward():
    def action():
        model = shard(Stack())
        model(torch.randn(2, 5))
        model.register_comm_hook(None, dummy)

    refused(AssertionError, "A communication hook is registered before the first forward", action)


@torch_is_wrong("it leaves those registered that came before the one it cannot serve")
def test_a_refused_hook_is_nowhere():
    def body(rank, world):
        model = model_of()
        FSDP.fsdp_modules(model)[2]._comm_hook = dummy
        with pytest.raises(AssertionError):
            model.register_comm_hook(1, dummy)
        return [each._comm_hook is None for each in FSDP.fsdp_modules(model)]

    assert run(1, body)[0] == [True, True, False, True]


def test_every_row_of_the_product_trains():
    """Strategy, original parameters, kind of hook: losses of two steps are those without a hook."""

    def body(rank, world):
        found = []
        for row in product(sharding_strategy=STRATEGIES, use_orig_params=(False, True)):
            model, plain = model_of(**row), model_of(**row)
            model.register_comm_hook(None, Recorder().of(row["sharding_strategy"]))
            losses = []
            for each in (model, plain):
                optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
                for step in range(3):
                    optimizer.zero_grad()
                    loss = square(each(PLAIN.batch(rank, step)))
                    loss.backward()
                    optimizer.step()
                losses.append(loss.item())
            if losses[0] != pytest.approx(losses[1], rel=1e-5):
                found.append((str(row), losses))
        return found

    assert run(2, body)[0] == []
