"""What the constructor and its neighbours accept; the rest are errors of builtin types that name unit and names."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.nn.parallel import DistributedDataParallel

from tests.kit.models.models import (
    PLAIN,
    Block,
    FrozenMix,
    Nested,
    Stack,
    blocks_and_root,
    built,
    case,
    deep,
    floats,
    square,
)
from tests.kit.models.under_test import FSDP, TORCH, Strategy, core, shard, torch_is_wrong, wrap
from tests.kit.ranks.harness import count, recorded, run

CPU = torch.device("cpu")


def run_and_catch(world: int, action) -> tuple[tuple[str, ...], str, list[str]]:
    """The exception's classes and message, and the warnings, of `action()` on rank 0; all ranks agree on the class."""

    def body(rank, world):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                action()
                error = ((), "")
            except Exception as raised:  # noqa: BLE001
                error = (tuple(base.__name__ for base in type(raised).__mro__), str(raised))
        return (*error, [f"{each.category.__name__}: {each.message}" for each in caught])

    found = run(world, body)
    assert len({each[0] for each in found}) == 1
    return found[0]


def refused(kind: type[Exception], action, *words: str, world: int = 1, ours: tuple[str, ...] = ()) -> None:
    """Assert that `action()` raises `kind` with `words` in the message, and with `ours` too when the engine is ours."""
    bases, message, _ = run_and_catch(world, action)
    assert kind.__name__ in bases, (bases, message)
    for word in (*words, *(() if TORCH else ours)):
        assert word.lower() in message.lower(), message


def accepted(action, world: int = 1) -> list[str]:
    """The warnings of an `action()` that raises nothing."""
    bases, message, warned = run_and_catch(world, action)
    assert bases == (), (bases, message)
    return warned


def bare(module: nn.Module, **settings):
    """The constructor with its warnings."""
    return FSDP(module, **({"device_id": CPU} if TORCH else {}), **settings)


# ---------------------------------------------------------------------------------------------- signatures


def test_the_constructor_has_torchs_arguments_in_torchs_order_with_its_defaults():
    ours, theirs = (inspect.signature(kind.__init__).parameters for kind in (FSDP, TorchFSDP))
    assert list(ours) == list(theirs)
    plain = {name: p.default for name, p in ours.items() if not hasattr(p.default, "name")}
    assert plain == {name: p.default for name, p in theirs.items() if name in plain}
    assert {n: p.default.name for n, p in ours.items() if hasattr(p.default, "name")} == {
        n: p.default.name for n, p in theirs.items() if hasattr(p.default, "name")
    }


@pytest.mark.parametrize("name", ["ShardingStrategy", "BackwardPrefetch", "StateDictType", "OptimStateKeyType"])
def test_enums_have_torchs_members(name):
    from torch.distributed import fsdp as theirs

    assert [(m.name, m.value) for m in getattr(core, name)] == [(m.name, m.value) for m in getattr(theirs, name)]


RECORDS = [
    "MixedPrecision",
    "CPUOffload",
    "StateDictConfig",
    "FullStateDictConfig",
    "LocalStateDictConfig",
    "ShardedStateDictConfig",
    "OptimStateDictConfig",
    "FullOptimStateDictConfig",
    "LocalOptimStateDictConfig",
    "ShardedOptimStateDictConfig",
]


@pytest.mark.parametrize("name", RECORDS)
def test_records_have_torchs_fields_and_defaults(name):
    from torch.distributed import fsdp as theirs

    assert vars(getattr(core, name)()) == vars(getattr(theirs, name)())
    assert list(inspect.signature(getattr(core, name)).parameters) == list(
        inspect.signature(getattr(theirs, name)).parameters
    )


# ------------------------------------------------------------------------------------------- constructor: 1.3


def test_group_and_mesh_together():
    refused(
        ValueError,
        lambda: bare(Block(), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (1,))),
        "process_group",
        "device_mesh",
    )


def test_both_kinds_of_ignored():
    def both():
        block = Block()
        bare(block, ignored_modules=[block.up], ignored_states=[block.down])

    refused(ValueError, both, "ignored_modules", "ignored_states")


@pytest.mark.parametrize("states", ["mixed", "numbers"])
def test_ignored_states_of_the_wrong_kind(states):
    def wrong():
        block = Block()
        bare(block, ignored_states=[block.up, block.down.weight] if states == "mixed" else [1, 2])

    refused(ValueError, wrong, "ignored_states")


def test_ignored_modules_that_are_no_list():
    refused(TypeError, lambda: bare(Block(), ignored_modules=3), ours=("ignored_modules",))


@pytest.mark.parametrize("modules", [["up"], [torch.zeros(1)]], ids=["names", "tensors"])
def test_ignored_modules_that_are_no_modules(modules):
    refused(ValueError, lambda: bare(Block(), ignored_modules=modules), "ignored_modules")
    if not TORCH:
        refused(TypeError, lambda: bare(Block(), ignored_modules=modules), "ignored_modules")


def test_ignored_modules_that_are_sharded():
    def inner():
        model = Stack()
        model.blocks[0] = bare(model.blocks[0])
        bare(model, ignored_modules=[model.blocks[0]])

    refused(ValueError, inner, "ignored_modules")


def test_ignoring_the_module_itself_warns():
    def itself():
        block = Block()
        bare(block, ignored_modules=[block])

    assert any("ignore" in warning.lower() for warning in accepted(itself))


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hybrid_without_knowing_the_groups(strategy):
    refused(ValueError, lambda: bare(Block(), sharding_strategy=getattr(Strategy, strategy)), "process group")


def test_hybrid_with_a_flat_mesh():
    refused(
        ValueError,
        lambda: bare(Block(), sharding_strategy=Strategy.HYBRID_SHARD, device_mesh=init_device_mesh("cpu", (1,))),
        "mesh",
    )


def test_hybrid_with_one_group():
    refused(
        ValueError,
        lambda: bare(Block(), sharding_strategy=Strategy.HYBRID_SHARD, process_group=dist.group.WORLD),
        "process_group",
    )


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_pair_of_groups_for_a_strategy_that_is_not_hybrid(strategy):
    def pair():
        bare(Block(), sharding_strategy=Strategy[strategy], process_group=(dist.group.WORLD, dist.group.WORLD))

    bases, message, _ = run_and_catch(1, pair)
    assert "Exception" in bases
    if not TORCH:
        assert {"TypeError", "ValueError"} <= set(bases)
        assert "process_group" in message


@torch_is_wrong("the second dimension is silently left out")
def test_a_mesh_of_two_dimensions_for_a_strategy_that_is_not_hybrid():
    refused(ValueError, lambda: bare(Block(), device_mesh=init_device_mesh("cpu", (1, 1))), "mesh", "2 dimensions")


def test_without_a_default_group():
    def alone():
        dist.destroy_process_group()
        bare(Block())

    refused(ValueError, alone, "Default process group has not been initialized", ours=("init_process_group",))


@pytest.mark.skipif(TORCH, reason="with pretended devices, which torch's constructor does not take")
@pytest.mark.parametrize(
    ("devices", "device_id", "kind", "words"),
    [
        (["cuda:0", "cuda:1"], None, RuntimeError, ("single device modules", "p1 on cuda:1")),
        (["cpu", "cuda:0", "cuda:1"], "cuda:0", RuntimeError, ("single device modules",)),
        (["cpu", "cuda:0"], None, RuntimeError, ("both CPU and GPU params", "device_id", "p0 on cpu")),
        (["cuda:0"], "cuda:1", ValueError, ("Inconsistent compute device and `device_id`", "p0 on cuda:0", "cuda:1")),
        (["cuda:0"], "cpu", ValueError, ("Inconsistent compute device and `device_id`",)),
    ],
)
def test_parameters_on_several_devices_or_on_another_than_was_said(devices, device_id, kind, words):
    from torch._subclasses.fake_tensor import FakeTensorMode

    from shardckpt.core import materialize

    module = nn.Module()
    with FakeTensorMode():
        for i, device in enumerate(devices):
            module.register_parameter(f"p{i}", nn.Parameter(torch.empty(2, device=device)))
        with pytest.raises(kind) as error:
            materialize.move(
                materialize.ModuleScope.collect(module, lambda _: False, set()),
                torch.device(device_id) if device_id else None,
            )
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda blocks: nn.ModuleDict({"a": blocks[0]})], ids=["list", "dict"])
def test_a_container_without_forward_is_warned_of(kind):
    assert any("forward" in warning.lower() for warning in accepted(lambda: bare(kind([Block()]))))


def test_frozen_and_trainable_in_a_unit_that_a_policy_made():
    policy = wrap.ModuleWrapPolicy({Block})
    refused(
        ValueError,
        lambda: bare(FrozenMix(), auto_wrap_policy=policy, use_orig_params=False),
        "blocks.1",
        "requires_grad",
        ours=("blocks.1.up.weight", "blocks.1.down.weight"),
    )


def test_frozen_and_trainable_with_original_parameters_is_warned_of():
    policy = wrap.ModuleWrapPolicy({Block})
    warned = accepted(lambda: bare(FrozenMix(), auto_wrap_policy=policy, use_orig_params=True))
    assert any("blocks.1.up.weight" in warning for warning in warned)


@torch_is_wrong("it refuses")
def test_g13_frozen_and_trainable_wrapped_by_hand():
    accepted(lambda: blocks_and_root(FrozenMix(), lambda m: bare(m, use_orig_params=False)))


@torch_is_wrong("it refuses")
@pytest.mark.parametrize("name", ["mixed dtypes", "scalars and strides"])
def test_g11_g12_scalars_and_mixed_dtypes_are_accepted(name):
    accepted(lambda: blocks_and_root(built(case(name)), bare))


@pytest.mark.parametrize("kind", ["module", "callable"])
def test_a_policy_over_what_is_sharded_already(kind):
    policy = wrap.ModuleWrapPolicy({Block})
    if kind == "callable":
        policy = lambda module, recurse, nonwrapped_numel: isinstance(module, Block) or recurse  # noqa: E731

    def twice():
        model = Stack()
        model.blocks[1] = bare(model.blocks[1])
        bare(model, auto_wrap_policy=policy)

    refused(ValueError, twice, "blocks.1")


@torch_is_wrong("it refuses tensors on the CPU")
def test_g6_states_are_synchronised_on_the_cpu():
    def body(rank, world):
        torch.manual_seed(rank)
        model = Stack()
        model.register_buffer("count", torch.tensor([float(rank)]), persistent=False)
        first = [tensor.clone() for tensor in model.state_dict().values()]
        sharded = blocks_and_root(model, lambda m: shard(m, sync_module_states=True, use_orig_params=True))
        mine = [p.detach().sum().item() for p in sharded.parameters()]
        return [tensor.sum().item() for tensor in first], mine, sharded.count.item()

    zero, one = run(2, body)
    wanted, own = torch.tensor(zero[0]), torch.tensor(one[0])
    assert not torch.allclose(wanted, own)
    torch.testing.assert_close(torch.tensor(zero[1]) + torch.tensor(one[1]), wanted, rtol=1e-4, atol=1e-5)
    assert one[2] == 0.0


@torch_is_wrong("it needs an accelerator, or the CPU as an argument")
def test_g17_the_cpu_needs_no_device_id():
    def body(rank, world):
        model = FSDP(Block())
        model(torch.ones(2, 7)).sum().backward()
        return True

    assert run(2, body) == [True, True]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an index is one of the accelerator")
@torch_is_wrong("it cannot tell an index without an accelerator")
def test_an_index_means_the_cpu_where_there_is_nothing_else():
    def body(rank, world):
        return str(FSDP(Block(), device_id=rank).compute_device)

    assert run(2, body) == ["cpu", "cpu"]


@pytest.mark.parametrize("device", [CPU, "cpu"])
def test_the_cpu_may_be_named(device):
    accepted(lambda: FSDP(Block(), device_id=torch.device(device)))


def test_no_shard_on_several_ranks_is_deprecated():
    warned = accepted(lambda: bare(Block(), sharding_strategy=Strategy.NO_SHARD), world=2)
    assert any(warning.startswith("FutureWarning") for warning in warned)


@torch_is_wrong("one rank turns every strategy into NO_SHARD (G19)")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_g19_one_rank_changes_no_strategy(strategy):
    assert run(1, lambda rank, world: shard(Block(), sharding_strategy=Strategy[strategy]).sharding_strategy.name) == [
        strategy
    ]


@pytest.mark.parametrize("states", ["modules", "parameters"])
def test_ignored_states_are_left_whole_and_are_not_reduced(states):
    def body(rank, world):
        block = Block()
        ignored = [block.up] if states == "modules" else list(block.up.parameters())
        model = shard(block, ignored_states=ignored, use_orig_params=True)
        model(torch.full((2, 7), float(rank + 1))).sum().backward()
        return (
            tuple(block.up.weight.shape),
            block.up.weight.grad.abs().sum().item(),
            model._ignored_params == set(block.up.parameters()),
        )

    first, second = run(2, body)
    assert first[0] == second[0] == (9, 7)
    assert first[1] != second[1], "each rank has its own gradient"
    assert first[2]


def test_ignored_children_of_a_policy_are_left_alone():
    def body(rank, world):
        model = Stack()
        sharded = shard(model, auto_wrap_policy=wrap.ModuleWrapPolicy({Block}), ignored_modules=[model.blocks[1]])
        return [isinstance(block, FSDP) for block in sharded.module.blocks]

    assert run(2, body)[0] == [True, False, True]


# ---------------------------------------------------------------------------------------------------- members


def test_attributes_and_items_are_those_of_the_module():
    def body(rank, world):
        model = shard(nn.Sequential(nn.Linear(5, 4), nn.ReLU()))
        model.module.mark = 5
        with pytest.raises(AttributeError):
            _ = model.nothing
        return isinstance(model[1], nn.ReLU), model.mark, type(model.module).__name__

    assert run(1, body) == [(True, 5, "Sequential")]


def test_the_first_to_run_is_the_root():
    def body(rank, world):
        model = blocks_and_root(Stack(), shard)
        return model.check_is_root(), model.blocks[0].check_is_root(), len(FSDP.fsdp_modules(model, root_only=True))

    assert run(1, body) == [(True, False, 1)]


def test_lazy_initialisation_can_be_undone():
    def body(rank, world):
        model = blocks_and_root(Stack(), shard)
        model.blocks[0].check_is_root()
        for each in FSDP.fsdp_modules(model):
            each._reset_lazy_init()
        return model._is_root, model.check_is_root(), model.blocks[0].check_is_root(), model._is_root

    assert run(1, body) == [(None, True, False, True)]


def test_flat_parameters_and_whether_there_are_any():
    def body(rank, world):
        model = shard(nn.Sequential(shard(nn.Linear(2, 2)), nn.ReLU()))
        return (
            model._has_params,
            model._flat_param is None,
            model[0]._has_params,
            model[0]._flat_param is next(iter(model.parameters())),
            model[0]._flat_param._fsdp_flattened,  # the mark by which Lightning knows flat parameters
        )

    assert run(1, body) == [(False, True, True, True, True)]


def test_what_buffers_and_hooks_do_to_precision_can_be_asked():
    def body(rank, world):
        plain, mixed = shard(Block()), shard(Block(), mixed_precision=core.MixedPrecision(buffer_dtype=torch.bfloat16))
        return (
            plain._mixed_precision_enabled_for_buffers(),
            mixed._mixed_precision_enabled_for_buffers(),
            plain._low_precision_hook_enabled(),
        )

    assert run(1, body) == [(False, True, False)]


@pytest.mark.parametrize("async_op", [False, True])
def test_parameters_can_be_gathered_ahead_of_forward(async_op):
    def body(rank, world):
        model = shard(Block())
        x = torch.ones(2, 7)
        model(x).sum().backward()
        with recorded() as first:
            handle = model._unshard(async_op)
            if handle is not None:
                handle.wait()
            model._wait_unshard_streams_on_current_stream()
        with recorded() as second:
            out = model(x)
        return count(first, "all_gather"), count(second, "all_gather"), (handle is None) != async_op, out.shape

    if TORCH:
        pytest.skip("it wants streams")
    assert run(2, body) == [(1, 0, True, (2, 7))] * 2


@pytest.mark.parametrize("call", ["no_sync", "apply"])
def test_calls_that_wait_for_the_end_of_a_forward(call):
    def middle():
        model = shard(Block())

        def hook(*_):
            if call == "apply":
                model.apply(lambda module: None)
            with model.no_sync():
                pass

        model.module.register_forward_pre_hook(hook)
        model(torch.ones(2, 7))

    bases, message, _ = run_and_catch(1, middle)
    assert "Exception" in bases
    if not TORCH:
        assert {"ValueError", "AssertionError"} & set(bases)
        assert "FORWARD" in message
        assert "Block" in message


def test_a_unit_that_ran_before_its_root_is_an_error():
    def early():
        model = blocks_and_root(Stack(), shard)
        model.blocks[0](torch.ones(2, 7))
        model(floats(0, 0))

    bases, message, _ = run_and_catch(1, early)
    assert "Exception" in bases
    if not TORCH:
        assert "blocks.0" in message


def test_no_sync_below_the_root():
    def below():
        model = blocks_and_root(Stack(), shard)
        square(model(floats(0, 0))).backward()
        with model.blocks[0].no_sync():
            pass

    refused(RuntimeError, below, "no_sync", "root")


@pytest.mark.parametrize("setting", ["use_orig_params", "limit_all_gathers"])
def test_units_of_one_tree_agree(setting):
    def apart():
        model = Stack()
        model.blocks[0] = shard(model.blocks[0], **{setting: True})
        shard(model, **{setting: False})(floats(0, 0))

    refused(ValueError, apart, setting)


def test_modules_in_depth_first_order():
    def body(rank, world):
        model = deep(Nested(), shard)
        every = [module for module in model.modules() if isinstance(module, FSDP)]
        return FSDP.fsdp_modules(model) == every, FSDP.fsdp_modules(nn.Sequential(model, nn.ReLU())) == every

    assert run(1, body) == [(True, True)]


def test_module_looks_through_a_checkpoint_wrapper():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def body(rank, world):
        block = Block()
        return shard(checkpoint_wrapper(block)).module is block

    assert run(1, body) == [True]


def test_apply_sees_whole_parameters_and_keeps_what_it_writes():
    def body(rank, world):
        model, shapes = shard(Block(), use_orig_params=True), []

        def fill(module):
            if isinstance(module, nn.Linear):
                shapes.append(tuple(module.weight.shape))
                nn.init.constant_(module.weight, 2.0)
                nn.init.zeros_(module.bias)

        model.apply(fill)
        return shapes, sorted({value for p in model.parameters() for value in p.detach().tolist()})

    for shapes, values in run(2, body):
        assert shapes == [(9, 7), (7, 9)]
        assert set(values) <= {0.0, 2.0}


@pytest.mark.parametrize("orig", [False, True])
def test_to_another_dtype_before_training(orig):
    def body(rank, world):
        model = blocks_and_root(Stack(), lambda m: shard(m, use_orig_params=orig)).to(torch.float64)
        loss = square(model(floats(rank, 0).double()))
        loss.backward()
        return {str(p.dtype) for p in model.parameters()} | {
            str(p.grad.dtype) for p in model.parameters() if p.grad is not None
        }

    assert run(2, body) == [{"torch.float64"}] * 2


# --------------------------------------------------------------------------------------------- settings: 1.2, 1.3


def test_a_config_of_another_type():
    refused(
        RuntimeError,
        lambda: FSDP.set_state_dict_type(
            shard(Block()), core.StateDictType.FULL_STATE_DICT, core.LocalStateDictConfig()
        ),
        "LocalStateDictConfig",
    )


def test_settings_are_given_back_and_asked_for():
    def body(rank, world):
        warnings.simplefilter("ignore")
        model = blocks_and_root(Stack(), shard)
        before = FSDP.set_state_dict_type(model, core.StateDictType.SHARDED_STATE_DICT)
        inside = FSDP.get_state_dict_type(model)
        with FSDP.state_dict_type(model, core.StateDictType.LOCAL_STATE_DICT):
            deepest = FSDP.get_state_dict_type(model.blocks[0]).state_dict_type.name
        after = FSDP.get_state_dict_type(model).state_dict_type.name
        return (
            before.state_dict_type.name,
            inside.state_dict_type.name,
            deepest,
            after,
            FSDP.get_state_dict_type(nn.Linear(1, 1)),
        )

    assert run(1, body) == [("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", None)]


@pytest.mark.parametrize("parent", ["plain", "ddp"])
def test_settings_of_what_lies_in_a_parent_that_is_not_sharded(parent):
    def body(rank, world):
        warnings.simplefilter("ignore")
        inner = blocks_and_root(Stack(), shard)
        outer = nn.Sequential(inner, nn.Linear(2, 2)) if parent == "plain" else DistributedDataParallel(inner)
        before = FSDP.set_state_dict_type(outer, core.StateDictType.SHARDED_STATE_DICT)
        with FSDP.state_dict_type(outer, core.StateDictType.FULL_STATE_DICT, core.FullStateDictConfig(rank0_only=True)):
            inside = FSDP.get_state_dict_type(outer).state_dict_config.rank0_only
        kinds = {FSDP.get_state_dict_type(each).state_dict_type.name for each in FSDP.fsdp_modules(outer)}
        return before.state_dict_type.name, inside, kinds

    assert run(1, body) == [("FULL_STATE_DICT", True, {"SHARDED_STATE_DICT"})]


@torch_is_wrong("the context leaks (G2)")
def test_g2_settings_come_back_after_an_exception():
    def body(rank, world):
        warnings.simplefilter("ignore")
        model = shard(Block())
        with pytest.raises(ZeroDivisionError), FSDP.state_dict_type(model, core.StateDictType.LOCAL_STATE_DICT):
            raise ZeroDivisionError
        return FSDP.get_state_dict_type(model).state_dict_type.name

    assert run(1, body) == ["FULL_STATE_DICT"]


def test_instances_that_differ():
    def differ():
        model = blocks_and_root(Stack(), shard)
        FSDP.set_state_dict_type(model.blocks[0], core.StateDictType.LOCAL_STATE_DICT)
        FSDP.get_state_dict_type(model)

    refused(AssertionError, differ, "state")


# ------------------------------------------------------------------------------------------------- policies: 1.4


def wrapped(policy, model: nn.Module | None = None) -> list[str]:
    """Names of what a policy makes units of, on one rank."""

    def body(rank, world):
        sharded = shard(model or Stack(), auto_wrap_policy=policy, use_orig_params=True)
        names = [
            name.replace("_fsdp_wrapped_module", "").replace("..", ".").strip(".")
            for name, m in sharded.named_modules()
            if isinstance(m, FSDP)
        ]
        return sorted(names), FSDP.fsdp_modules(sharded)[1].sharding_strategy.name if len(names) > 1 else ""

    return run(2, body)[0][0]


BLOCKS = ["", "blocks.0", "blocks.1", "blocks.2"]


def partial(policy, **given):
    return lambda module, recurse, nonwrapped_numel: policy(
        module, recurse=recurse, nonwrapped_numel=nonwrapped_numel, **given
    )


def test_policies_choose_units():
    assert wrapped(wrap.ModuleWrapPolicy({Block})) == BLOCKS
    assert wrapped(wrap.CustomPolicy(lambda module: isinstance(module, Block))) == BLOCKS
    assert wrapped(partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block))) == BLOCKS
    assert wrapped(partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})) == BLOCKS
    assert wrapped(partial(wrap.size_based_auto_wrap_policy, min_num_params=142)) == BLOCKS
    assert wrapped(partial(wrap.size_based_auto_wrap_policy, min_num_params=10**6)) == [""]
    assert wrapped(wrap.ModuleWrapPolicy({nn.Linear}))[:3] == ["", "blocks.0.down", "blocks.0.up"]


def test_a_custom_policy_may_change_settings():
    def body(rank, world):
        policy = wrap.CustomPolicy(
            lambda m: {"sharding_strategy": Strategy.SHARD_GRAD_OP} if isinstance(m, Block) else False
        )
        model = shard(Stack(), auto_wrap_policy=policy)
        return [each.sharding_strategy.name for each in FSDP.fsdp_modules(model)]

    assert run(2, body)[0] == ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRAD_OP", "SHARD_GRAD_OP"]


def test_a_custom_policy_that_answers_something_else():
    refused(ValueError, lambda: bare(Stack(), auto_wrap_policy=wrap.CustomPolicy(lambda module: 3)))


def test_wrap_by_annotation():
    def body(rank, world):
        settings = {"wrapper_cls": FSDP, "use_orig_params": True, **({"device_id": CPU} if TORCH else {})}
        with wrap.enable_wrap(**settings):
            inside = wrap.wrap(nn.Linear(2, 2), sharding_strategy=Strategy.SHARD_GRAD_OP)
        outside = wrap.wrap(nn.Linear(2, 2))
        return isinstance(inside, FSDP), inside.sharding_strategy.name, isinstance(outside, FSDP)

    assert run(2, body)[0] == (True, "SHARD_GRAD_OP", False)


def test_annotations_do_not_nest():
    def nested():
        with wrap.enable_wrap(wrapper_cls=FSDP), wrap.enable_wrap(wrapper_cls=FSDP):
            pass

    refused(NotImplementedError, nested)


# ----------------------------------------------------------------------------------------- G28, and what waits


@torch_is_wrong("'weight must be 2-D' says neither unit nor fix")
@pytest.mark.parametrize("orig", [False, True])
def test_g28_a_submodule_called_outside_its_unit(orig):
    def outside():
        model = blocks_and_root(Stack(), lambda m: shard(m, use_orig_params=orig))
        square(model(floats(0, 0))).backward()
        model.blocks[1].module.up(torch.ones(2, 7))

    bases, message, _ = run_and_catch(2, outside)
    assert "RuntimeError" in bases
    assert "blocks.1" in message
    assert any(way in message for way in ("register_fsdp_forward_method", "summon_full_params", "unshard"))


@torch_is_wrong("the timeout names no unit")
def test_a_rank_that_does_not_come_is_told_with_the_unit_that_waited():
    from tests.kit.ranks.harness import outcomes

    def body(rank, world):
        model = blocks_and_root(built(PLAIN), shard)
        model(floats(rank, 0))
        if rank == 0:
            model.blocks[1](torch.ones(2, 7))

    found = outcomes(2, body, group_timeout=3.0)
    assert found[0].raised is not None
    assert "blocks.1" in found[0].raised.message
