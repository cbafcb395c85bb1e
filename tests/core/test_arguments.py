"""Effects of arguments and methods that other tests do not check; `covered` lists the tests of each."""

from __future__ import annotations

import ast
import functools
import inspect
import pathlib
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.kit.models.covered import COVERED
from tests.kit.models.models import PLAIN, Block, Stack, square
from tests.kit.models.under_test import FSDP, TORCH, Strategy, core, shard, torch_is_wrong
from tests.kit.ranks.harness import count, raised_everywhere, recorded, run

HERE = pathlib.Path(__file__).parent


def line(world: int) -> Any:
    return init_device_mesh("cpu", (world,))


def ones(module: nn.Module) -> nn.Module:
    """The module with parameters that are 1."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0)
    return module


# ------------------------------------------------------------------------------- FullyShardedDataParallel(...)


def test_the_module_is_wrapped_and_not_copied():
    def body(rank, world):
        module = Block()
        model = shard(module, use_orig_params=True)
        return model.module is module, [name for name, _ in model.named_children()]

    assert run(1, body)[0] == (True, ["_fsdp_wrapped_module"])


def test_process_group_says_who_shares_and_who_is_averaged():
    def body(rank, world):
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = shard(nn.Linear(3, 2, bias=False), process_group=halves[rank // 2])
        model(torch.full((1, 3), float(rank))).sum().backward()
        assert model.process_group is halves[rank // 2]
        return model._flat_param.numel(), model._flat_param.grad.tolist()

    assert run(4, body) == [(3, [0.5] * 3)] * 2 + [(3, [2.5] * 3)] * 2


def test_device_mesh_says_it_too():
    def body(rank, world):
        mesh = line(world)
        model = shard(nn.Linear(3, 2, bias=False), device_mesh=mesh)
        model(torch.full((1, 3), float(rank))).sum().backward()
        assert dist.get_process_group_ranks(model.process_group) == [0, 1]
        return model._flat_param.numel(), model._flat_param.grad.tolist()

    assert run(2, body) == [(3, [0.5] * 3)] * 2


@pytest.mark.parametrize(
    ("strategy", "numel", "kept"),
    [(Strategy.FULL_SHARD, 3, False), (Strategy.SHARD_GRAD_OP, 3, True), (Strategy.NO_SHARD, 6, True)],
)
def test_sharding_strategy_says_what_is_cut_and_how_long_parameters_are_whole(strategy, numel, kept):
    def body(rank, world):
        model = shard(
            nn.Sequential(shard(nn.Linear(3, 2, bias=False), sharding_strategy=strategy)), sharding_strategy=strategy
        )
        inner = model[0]
        with recorded() as forward:
            loss = model(torch.ones(1, 3)).sum()
        with recorded() as backward:
            loss.backward()
        return inner._flat_param.numel(), count(forward, "all_gather"), count(backward, "all_gather")

    gathers = 0 if strategy is Strategy.NO_SHARD else 1
    assert run(2, body) == [(numel, gathers, 0 if kept else 1)] * 2


@torch_is_wrong("it pins memory, which needs an accelerator")
@pytest.mark.parametrize("orig", [False, True])
def test_cpu_offload_keeps_shards_and_gradients_on_the_cpu_and_changes_no_number(orig):
    def body(rank, world):
        torch.manual_seed(0)
        plain = shard(Stack(), use_orig_params=orig)
        torch.manual_seed(0)
        model = shard(Stack(), use_orig_params=orig, cpu_offload=core.CPUOffload(offload_params=True))
        assert model.cpu_offload.offload_params
        for step in range(2):
            for each in (plain, model):
                square(each(PLAIN.batch(rank, step))).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.device.type == "cpu"
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)

    run(2, body)


def test_auto_wrap_policy_says_which_children_are_units():
    def body(rank, world):
        from tests.kit.models.under_test import wrap

        model = shard(Stack(), auto_wrap_policy=wrap.ModuleWrapPolicy({Block}))
        return [type(each.module).__name__ for each in FSDP.fsdp_modules(model)]

    assert run(2, body)[0] == ["Stack", "Block", "Block", "Block"]


def test_mixed_precision_computes_and_reduces_in_other_types_and_stores_in_the_own():
    def body(rank, world):
        seen = {}

        class Looks(nn.Linear):
            def forward(self, x):
                seen.update(weight=self.weight.dtype, input=x.dtype, buffer=self.level.dtype)
                return super().forward(x)

        module = Looks(3, 2, bias=False)
        module.register_buffer("level", torch.ones(1))
        mixed = core.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float64, buffer_dtype=torch.float16)
        model = shard(module, mixed_precision=mixed)
        with recorded() as calls:
            out = model(torch.ones(1, 3))
            out.float().sum().backward()
        reduced = {call.dtype for call in calls if call.op == "reduce_scatter"}
        gathered = {call.dtype for call in calls if call.op == "all_gather"}
        return seen, out.dtype, model._flat_param.dtype, model._flat_param.grad.dtype, gathered, reduced

    seen, out, stored, grad, gathered, reduced = run(2, body)[0]
    assert seen == {"weight": torch.bfloat16, "input": torch.bfloat16, "buffer": torch.float16}
    assert (out, stored, grad) == (torch.bfloat16, torch.float32, torch.float32)
    assert gathered == {"bfloat16"}
    assert reduced == {"float64"}


@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states"])
def test_what_is_ignored_is_neither_sharded_nor_averaged(argument):
    def body(rank, world):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1, bias=False))
        ignored = model[1].weight
        states = [model[1]] if argument == "ignored_modules" else [ignored]
        model = shard(model, use_orig_params=True, **{argument: states})
        model(torch.full((1, 3), float(rank))).sum().backward()
        return tuple(ignored.shape), model[1].weight is ignored, ignored.grad.tolist()

    (shape, same, first), (_, _, second) = run(2, body)
    assert (shape, same) == ((1, 3), True)
    assert first != second


def test_param_init_fn_makes_what_is_on_meta():
    def body(rank, world):
        def made(module):
            module.to_empty(device="cpu", recurse=False)
            ones(module)

        with torch.device("meta"):
            module = nn.Linear(3, 2)
        model = shard(module, param_init_fn=made)
        return model(torch.ones(1, 3)).tolist()

    assert run(2, body) == [[[4.0, 4.0]]] * 2


def test_device_id_is_where_parameters_are_put():
    """On the accelerator where there is one; parameters on meta are made there too."""

    def body(rank, world):
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        with torch.device("meta"):
            module = nn.Linear(3, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = FSDP(module, device_id=device)
            moved = FSDP(nn.Linear(3, 2), device_id=device)
        return made._flat_param.device == moved._flat_param.device == made.compute_device == device

    assert run(1, body)[0]


@torch_is_wrong("it refuses states on the CPU")
def test_sync_module_states_gives_all_ranks_those_of_the_first():
    def body(rank, world):
        module = nn.Linear(3, 2)
        nn.init.constant_(module.weight, float(rank + 1))
        nn.init.constant_(module.bias, float(rank + 1))
        return shard(module, sync_module_states=True)(torch.ones(1, 3)).tolist()

    assert run(2, body) == [[[4.0, 4.0]]] * 2


@pytest.mark.skipif(TORCH, reason="looks at our limiter")
@pytest.mark.parametrize("limit", [True, False])
def test_limit_all_gathers_holds_gathers_back(limit):
    def body(rank, world):
        model = PLAIN.cut(Stack(), lambda module: shard(module, limit_all_gathers=limit))
        square(model(PLAIN.batch(rank, 0))).backward()
        return model._root_state.limiter.waits

    assert [waits > 0 for waits in run(2, body)] == [limit] * 2


@pytest.mark.parametrize("orig", [False, True])
def test_use_orig_params_says_what_an_optimizer_sees(orig):
    def body(rank, world):
        return [name for name, _ in shard(nn.Linear(3, 2), use_orig_params=orig).named_parameters()]

    found = run(2, body)[0]
    assert [name.removeprefix("_fsdp_wrapped_module.") for name in found] == (
        ["weight", "bias"] if orig else ["_flat_param"]
    )


def test_params_are_the_instances_own():
    """Not an argument; public tests of torch's engine read it."""

    def body(rank, world):
        model = nn.Sequential(nn.Linear(3, 2), shard(nn.Linear(2, 2)))
        model = shard(model)
        model(torch.ones(1, 3)).sum().backward()
        return len(model.params), model.params[0] is model._flat_param, model.params[0].grad is not None

    assert run(2, body) == [(1, True, True)] * 2


def names(model: nn.Module) -> list[str]:
    return [name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters()]


@pytest.mark.parametrize("strategy", [Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP])
def test_flat_parameters_may_be_shown_instead_of_original_ones(strategy):
    """Nor is this one public; but what is written to the flat parameters is there afterwards."""

    def body(rank, world):
        inner = shard(nn.Linear(2, 2), use_orig_params=True, sharding_strategy=strategy)
        model = shard(nn.Sequential(nn.Linear(3, 2), inner), use_orig_params=True, sharding_strategy=strategy)
        model(torch.ones(1, 3)).sum().backward()
        before = names(model)
        with model._deregister_orig_params_ctx():
            during = names(model)
            with torch.no_grad():
                for flat in model.parameters():
                    flat.fill_(1.0)
            assert during == ["_flat_param", "1._flat_param"]
        assert names(model) == before == ["0.weight", "0.bias", "1.weight", "1.bias"]
        out = model(torch.ones(1, 3))
        out.sum().backward()
        return out.tolist()

    assert run(2, body) == [[[9.0, 9.0]]] * 2


def test_flat_parameters_are_shown_already_without_original_ones():
    def body(rank, world):
        with shard(nn.Linear(3, 2))._deregister_orig_params_ctx():
            pass

    for each in raised_everywhere(1, body):
        assert each.is_a(AssertionError)
        assert "should only be called when" in each.message


# -------------------------------------------------------------------------------------------- fully_shard(...)


def sharded(rank: int, world: int, **settings: Any) -> Any:
    """A model of two units of ones."""
    settings = {"mesh": line(world), **settings}
    model = ones(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
    core.fully_shard(model[0], **settings)
    return core.fully_shard(model, **settings)


def test_fully_shard_returns_its_module_or_its_modules():
    def body(rank, world):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        assert core.fully_shard(first, mesh=line(world)) is first
        both = [nn.Linear(4, 4), nn.Linear(4, 4)]
        assert core.fully_shard(both, mesh=line(world)) is both
        return isinstance(first, core.FSDPModule), isinstance(both[1], core.FSDPModule), type(second).__name__

    assert run(1, body)[0] == (True, True, "Linear")


def test_mesh_of_two_dimensions_replicates_over_the_first():
    def body(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded(rank, world, mesh=mesh)
        model(torch.full((1, 4), float(rank))).sum().backward()
        weight = model[1].weight
        return weight.placements == (Replicate(), Shard(0)), weight.grad.full_tensor()[0, 0].item()

    assert run(4, body) == [(True, 6.0)] * 4  # the mean of 4 * rank


@pytest.mark.parametrize(("answer", "gathers"), [(True, 2), (False, 0), (None, 1)])
def test_reshard_after_forward_says_what_backward_gathers_again(answer, gathers):
    """None keeps the root's."""

    def body(rank, world):
        model = sharded(rank, world, reshard_after_forward=answer)
        loss = model(torch.ones(1, 4)).sum()
        with recorded() as calls:
            loss.backward()
        return count(calls, "all_gather")

    assert run(2, body) == [gathers] * 2


def test_shard_placement_fn_says_which_dimension_is_cut():
    def body(rank, world):
        model = sharded(rank, world, shard_placement_fn=lambda parameter: Shard(1))
        model(torch.ones(1, 4)).sum().backward()
        weight = model[0].weight
        return weight.placements, tuple(weight.to_local().shape), weight.grad.full_tensor().eq(4.0).all().item()

    assert run(2, body)[0] == ((Shard(1),), (4, 2), True)


def test_mp_policy_says_what_types_compute_and_come_out():
    def body(rank, world):
        policy = core.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float16)
        model, seen = core.fully_shard(nn.Linear(4, 4, bias=False), mesh=line(world), mp_policy=policy), []
        model.register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
        with recorded() as calls:
            out = model(torch.ones(1, 4))
            out.sum().backward()
        kinds = {call.dtype for call in calls if call.op == "reduce_scatter"}
        return seen, out.dtype, model.weight.dtype, model.weight.grad.dtype, kinds

    wanted = ([torch.bfloat16], torch.float16, torch.float32, torch.float32, {"float32"})
    assert run(2, body)[0] == wanted


def test_offload_policy_keeps_shards_and_gradients_on_the_cpu():
    def body(rank, world):
        model = sharded(rank, world, offload_policy=core.CPUOffloadPolicy(pin_memory=False))
        for _ in range(2):  # accumulated on the CPU
            model(torch.full((1, 4), float(rank))).sum().backward()
        weight = model[1].weight
        assert weight.to_local().device.type == weight.grad.to_local().device.type == "cpu"
        return weight.grad.full_tensor()[0, 0].item(), weight.to_local().shape[0]

    assert run(2, body) == [(4.0, 2)] * 2


def test_ignored_params_stay_plain_and_are_not_averaged():
    def body(rank, world):
        model = ones(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
        ignored = model[1].weight
        core.fully_shard(model, mesh=line(world), ignored_params={ignored})
        model(torch.full((1, 4), float(rank))).sum().backward()
        assert isinstance(model[0].weight, DTensor)
        return model[1].weight is ignored, type(ignored.data), ignored.grad[0, 0].item()

    assert run(2, body) == [(True, torch.Tensor, 0.0), (True, torch.Tensor, 4.0)]


# ------------------------------------------------------------------------------------------------- FSDPModule


def test_moving_to_another_type_moves_the_shards():
    """By `_apply`, which `to`, `double`, `cuda` go through."""

    def body(rank, world):
        model = sharded(rank, world)
        model.double()
        out = model(torch.ones(1, 4, dtype=torch.float64))
        out.sum().backward()
        weight = model[0].weight
        return out.dtype, weight.to_local().dtype, weight.grad.dtype, out[0, 0].item()

    assert run(2, body)[0] == (torch.float64, torch.float64, torch.float64, 16.0)


@torch_is_wrong("they are the gathered ones until the next iteration, or until reset_iter_state")
def test_after_a_failed_backward_named_parameters_are_the_sharded_ones():
    def body(rank, world):
        model = sharded(rank, world)

        def fails(_):
            raise KeyError("in backward")

        model[0].register_forward_hook(lambda module, args, out: out.register_hook(fails) and None)
        with pytest.raises(KeyError):
            model(torch.ones(1, 4)).sum().backward()
        return [(name, isinstance(each, DTensor), each.grad is None) for name, each in model.named_parameters()]

    assert run(2, body) == [[("0.weight", True, True), ("1.weight", True, True)]] * 2


@torch_is_wrong("gloo cannot do what it asks of it")
def test_the_old_name_of_the_divisor_is_deprecated_and_works():
    def body(rank, world):
        model = sharded(rank, world)
        for each in (model, model[0]):
            with pytest.warns(Warning, match="set_gradient_divide_factor"):
                each.set_reduce_scatter_divide_factor(1.0)
        model(torch.ones(1, 4)).sum().backward()
        return model[1].weight.grad.full_tensor()[0, 0].item()

    assert run(2, body) == [8.0] * 2


def test_an_event_behind_the_optimizer_may_be_set_and_changes_no_number():
    def body(rank, world):
        model = sharded(rank, world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = []
        for _ in range(2):
            loss = model(torch.ones(1, 4)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.set_post_optim_event(torch.Event("cpu"))
            found.append(loss.item())
        return found

    # each weight loses half its gradient of 4
    assert run(2, body) == [[64.0, 64.0]] * 2


@pytest.mark.parametrize("on", [True, False])
def test_gathers_by_themselves_or_not_change_no_number(on):
    def body(rank, world):
        model = sharded(rank, world)
        for each in (model, model[0]):
            each._set_unshard_async_op(on)
        out = model(torch.ones(1, 4))
        out.sum().backward()
        return out[0, 0].item(), model[0].weight.grad.full_tensor()[0, 0].item()

    assert run(2, body) == [(16.0, 4.0)] * 2


def test_sums_only_give_the_same_mean():
    def body(rank, world):
        model = sharded(rank, world)
        for each in (model, model[0]):
            each.set_force_sum_reduction_for_comms(True)
        model(torch.full((1, 4), float(rank))).sum().backward()
        return model[1].weight.grad.full_tensor()[0, 0].item()

    assert run(2, body) == [2.0] * 2


@pytest.mark.parametrize("call", ["set_symm_mem_for_comm", "set_allocate_memory_from_process_group_for_comm"])
@torch_is_wrong("it fails later, in the allocator")
def test_options_of_nccl_are_refused_by_name(call):
    def body(rank, world):
        model = sharded(rank, world)
        getattr(model, call)(*([True] if call.startswith("set_allocate") else []))

    for each in raised_everywhere(1, body):
        assert each.is_a(RuntimeError)
        assert "nccl" in each.message


# ------------------------------------------------------------------------------------- everything has a test


ELSEWHERE = ("module", "forward")  # a constructor's argument too, and what all tests call
PRIVATE = ("_unshard", "_wait_unshard_streams_on_current_stream", "_reset_lazy_init", "_deregister_orig_params_ctx")


def wanted() -> list[str]:
    """Every argument of the two constructors, and every method of what they make; statics of optimizers are states."""
    methods = [name for name, each in vars(core.FSDPModule).items() if inspect.isfunction(each)]
    private = ("_set_unshard_async_op", "_apply")
    members = [name for name in vars(TorchFSDP) if not name.startswith("_") and "optim_state_dict" not in name]
    return [
        *(f"FullyShardedDataParallel.{name}()" for name in [*members, *PRIVATE] if name not in ELSEWHERE),
        *(f"FullyShardedDataParallel.{name}" for name in inspect.signature(core.FullyShardedDataParallel).parameters),
        *(f"fully_shard.{name}" for name in inspect.signature(core.fully_shard).parameters),
        *(f"FSDPModule.{name}" for name in methods if not name.startswith("_") or name in private),
    ]


@pytest.mark.skipif(TORCH, reason="looks at ours")
def test_every_argument_and_method_has_a_test_and_no_other_is_listed():
    assert sorted(set(wanted()) - set(COVERED)) == []
    assert sorted(set(COVERED) - set(wanted())) == []


@pytest.mark.parametrize("name", sorted(COVERED))
def test_the_test_of_an_argument_exists_and_uses_it(name):
    file, _, test = COVERED[name].partition("::")
    source, functions = parsed(HERE / file)
    assert test in functions, f"{COVERED[name]} is gone"
    assert mentions(name.rpartition(".")[2].removesuffix("()"), test, functions, source), (
        f"{COVERED[name]} does not use {name}"
    )


@functools.cache
def parsed(path: pathlib.Path) -> tuple[str, dict[str, ast.FunctionDef]]:
    """The text of a file and its functions by name."""
    source = path.read_text()
    return source, {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}


def mentions(word: str, start: str, functions: dict[str, ast.FunctionDef], source: str) -> bool:
    """Return True if a function, or one of the same file that it calls, has a word."""
    lines, seen, left = source.splitlines(), set(), [start]
    while left:
        node = functions[left.pop()]
        seen.add(node.name)
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
        text = "\n".join(lines[first : node.end_lineno])
        if re.search(rf"\b{word}\b", text):
            return True
        left += [each for each in functions if each not in seen and re.search(rf"\b{each}\(", text)]
    return False
