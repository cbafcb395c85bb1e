"""States before they are sharded: made on the meta device and initialised, moved, made equal on all ranks."""

from __future__ import annotations

import sys
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.kit.models.models import square
from tests.kit.models.under_test import FSDP, TORCH, Strategy, core, shard, torch_is_wrong, wrap
from tests.kit.ranks.harness import count, recorded, run

if not TORCH:
    from shardckpt.core import materialize
    from shardckpt.core.comm.collectives import ShardGroup
    from shardckpt.core.params.mesh_placement import FSDPMeshInfo
    from shardckpt.ranks.torch_group import get_group_device

CPU = torch.device("cpu")


class Filled(nn.Linear):
    """A layer whose initial values tell who made them, and how often; with a buffer of each kind."""

    fill = 1.0

    def __init__(self, size: int, device: str | None = None) -> None:
        self.made = 0
        super().__init__(size, size, device=device)
        self.register_buffer("scale", torch.ones(size, device=device))
        self.register_buffer("table", torch.ones(size, device=device), persistent=False)
        if device != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        self.made += 1
        nn.init.constant_(self.weight, self.fill)
        nn.init.constant_(self.bias, 0.5)
        if "table" in self._buffers:
            self.scale.fill_(2.0)
            self.table.fill_(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + self.table


class Pile(nn.Module):
    """Two filled layers in a module of their own, and one beside it."""

    def __init__(self, device: str | None = None, size: int = 3) -> None:
        super().__init__()
        self.inner = nn.Sequential(Filled(size, device), nn.ReLU(), Filled(size, device))
        self.outer = Filled(size, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x))


def fingerprint(model: nn.Module) -> list[float]:
    """Sums over all ranks of what each rank holds of parameters, and this rank's buffers."""
    found = []
    for parameter in model.parameters():
        total = parameter.detach().double().sum()
        dist.all_reduce(total)
        found.append(total.item())
    return [*found, *(buffer.double().sum().item() for buffer in model.buffers())]


POLICY = wrap.ModuleWrapPolicy({Filled})


# ------------------------------------------------------------------------------------------------------ meta device


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("policy", [None, POLICY], ids=["one unit", "nested"])
def test_a_module_on_meta_is_reset(policy, orig):
    def body(rank, world):
        settings = {"auto_wrap_policy": policy, "use_orig_params": orig}
        meta = shard(Pile("meta"), **settings)
        real = shard(Pile(), **settings)
        x = torch.ones(2, 3)
        return fingerprint(meta) == fingerprint(real), torch.equal(meta(x), real(x))

    assert run(2, body) == [(True, True)] * 2


def test_each_module_is_reset_once_and_only_with_states_of_its_own():
    def body(rank, world):
        pile = Pile("meta")
        for layer in (pile.inner[0], pile.inner[2], pile.outer):
            layer.made = 0
        shard(pile, auto_wrap_policy=POLICY)
        return [layer.made for layer in (pile.inner[0].module, pile.inner[2].module, pile.outer.module)]

    assert run(1, body) == [[1, 1, 1]]


def test_param_init_fn_is_called_with_each_module():
    def body(rank, world):
        seen = []

        def init(module):
            seen.append(type(module).__name__)
            module.to_empty(device=CPU, recurse=False)
            if isinstance(module, Filled):
                module.reset_parameters()

        model = shard(Pile("meta"), param_init_fn=init)
        return seen, fingerprint(model) == fingerprint(shard(Pile()))

    assert run(2, body)[0] == (["Pile", "Sequential", "Filled", "Filled", "ReLU", "Filled"], True)


def test_param_init_fn_of_nested_units_is_called_once_for_each_module():
    def body(rank, world):
        seen = []

        def init(module):
            seen.append(module)
            module.to_empty(device=CPU, recurse=False)
            if isinstance(module, Filled):
                module.reset_parameters()

        shard(Pile("meta"), param_init_fn=init, auto_wrap_policy=POLICY)
        return len(seen), len(set(seen))

    assert run(2, body) == [(3, 3)] * 2


def test_param_init_fn_is_not_called_where_nothing_is_on_meta():
    def body(rank, world):
        seen = []
        shard(Pile(), param_init_fn=seen.append)
        return seen

    assert run(1, body) == [[]]


def test_param_init_fn_that_cannot_be_called():
    def body(rank, world):
        with pytest.raises(ValueError, match="to be callable"):
            shard(Pile("meta"), param_init_fn=42)
        return True

    assert run(1, body) == [True]


def test_a_module_without_reset_parameters_is_warned_of_and_its_own_error_comes_out():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

    def body(rank, world):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(AttributeError, match="reset_parameters"):
                FSDP(nn.Sequential(Plain()), device_id=CPU)
        return [str(each.message) for each in caught if "reset_parameters()" in str(each.message)]

    (message,) = run(1, body)[0]
    assert "Unable to call `reset_parameters()`" in message
    assert "Plain" in message


@torch_is_wrong("modules with values are emptied too")
def test_values_that_are_there_stay():
    def body(rank, world):
        pile = Pile("meta")
        pile.outer = Filled(3)
        with torch.no_grad():
            pile.outer.weight.fill_(7.0)
        model = shard(pile, use_orig_params=True)
        return fingerprint(model.module.outer)[0]

    assert run(2, body) == [63.0, 63.0]


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.first, self.second = Filled(3, device), Filled(3, device)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@torch_is_wrong("ties are lost on the meta device")
@pytest.mark.parametrize("init", [False, True], ids=["reset", "param_init_fn"])
@pytest.mark.parametrize("policy", [None, POLICY], ids=["one unit", "nested"])
def test_ties_survive_the_meta_device(policy, init):
    def fill(module):
        module.to_empty(device=CPU, recurse=False)
        if isinstance(module, Filled):
            module.reset_parameters()

    def body(rank, world):
        model = shard(
            Tied("meta"), auto_wrap_policy=policy, use_orig_params=True, **({"param_init_fn": fill} if init else {})
        )
        same = shard(Tied(), auto_wrap_policy=policy, use_orig_params=True)
        x = torch.ones(2, 3)
        return len(list(model.parameters())), torch.equal(model(x), same(x))

    assert run(2, body) == [(3, True)] * 2


def test_a_trained_step_after_meta_equals_one_after_real_values():
    def body(rank, world):
        losses = []
        for device in ("meta", None):
            model = shard(Pile(device), auto_wrap_policy=POLICY)
            optim = torch.optim.SGD(model.parameters(), lr=0.01)
            for step in range(2):
                optim.zero_grad()
                loss = square(model(torch.full((2, 3), rank + step + 1.0)))
                loss.backward()
                optim.step()
                losses.append(loss.item())
        return losses[:2] == losses[2:]

    assert run(2, body) == [True, True]


# -------------------------------------------------------------------------------------------------- G27: buffers


class Forgetful(Filled):
    """Its reset leaves the buffer alone that no checkpoint holds."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0)
        nn.init.constant_(self.bias, 0.5)


class Replacing(Filled):
    """Its reset registers another buffer instead of filling the one there is."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0)
        nn.init.constant_(self.bias, 0.5)
        if "table" in self._buffers:
            self.register_buffer("table", torch.full_like(self.bias, 3.0), persistent=False)


@torch_is_wrong("it trains with whatever memory held")
def test_g27_a_buffer_that_no_checkpoint_holds_and_no_reset_sets():
    def body(rank, world):
        with pytest.raises(RuntimeError, match=r"non-persistent.*0\.table"):
            shard(nn.Sequential(Forgetful(3, "meta")))
        shard(nn.Sequential(Replacing(3, "meta")))
        return True

    assert run(1, body) == [True]


@torch_is_wrong("nothing is said until a kernel fails")
def test_g27_what_param_init_fn_left_on_meta():
    def init(module):
        if isinstance(module, Filled):
            module.weight = nn.Parameter(torch.ones(3, 3))
            module.bias = nn.Parameter(torch.ones(3))
            module.scale = torch.ones(3)

    def body(rank, world):
        with pytest.raises(RuntimeError, match=r"outer\.table") as error:
            shard(Pile("meta"), param_init_fn=init)
        assert "inner.0.table" in str(error.value)
        return True

    assert run(1, body) == [True]


@torch_is_wrong("it looks at parameters only")
@pytest.mark.parametrize("left", ["inner.0.table", "outer.weight"])
def test_g27_fully_shard_refuses_to_train_with_what_is_on_meta(left):
    def body(rank, world):
        pile = Pile("meta")
        core.fully_shard(pile.inner)
        core.fully_shard(pile)
        place, _, name = left.rpartition(".")
        pile.to_empty(device=CPU)
        for layer in (pile.inner[0], pile.inner[2], pile.outer):
            layer.reset_parameters()
        state = pile.get_submodule(place)
        if name in state._buffers:
            state._buffers[name] = state._buffers[name].to("meta")
        else:
            pile.outer.weight = nn.Parameter(pile.outer.weight.to("meta"))
        with pytest.raises(RuntimeError, match="still on meta device") as error:
            pile(torch.ones(2, 3))
        for word in (left.removeprefix("inner."), "to_empty"):
            assert word in str(error.value)
        return True

    assert run(2, body) == [True, True]


@pytest.mark.skipif(TORCH, reason="one function of ours")
def test_g27_states_without_memory_are_refused_by_name_before_training():
    scope = materialize.ModuleScope.collect(Pile("meta"), lambda _: False, set())
    with pytest.raises(RuntimeError, match="still on meta device") as error:
        materialize.refuse_meta(scope, "the unit")
    for word in ("the unit", "inner.0.weight", "outer.table", "to_empty"):
        assert word in str(error.value)
    materialize.refuse_meta(materialize.ModuleScope.collect(Pile(), lambda _: False, set()), "the unit")


# ------------------------------------------------------------------------------------------- deferred construction


@pytest.mark.parametrize("function", [False, True], ids=["by the library", "by param_init_fn"])
@pytest.mark.skipif(TORCH, reason="it looks for the library when it is imported")
def test_deferred_construction_of_torchdistx_is_found(function, monkeypatch):
    done = []

    def materialize_module(module, check_fn):
        done.extend(type(each).__name__ for each in module.modules() if check_fn(each))
        for parameter in module.parameters():
            parameter.held_back = False

    fake = types.ModuleType("torchdistx.fake")
    fake.is_fake = lambda tensor: getattr(tensor, "held_back", False)
    deferred = types.ModuleType("torchdistx.deferred_init")
    deferred.materialize_module = materialize_module
    for name, module in {"torchdistx": types.ModuleType("torchdistx"), fake.__name__: fake}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, deferred.__name__, deferred)

    def body(rank, world):
        pile, called = Pile(), []
        for parameter in pile.parameters():
            parameter.held_back = True
        shard(pile, auto_wrap_policy=POLICY, **({"param_init_fn": called.append} if function else {}))
        return len(called), done

    assert run(1, body) == [(3, []) if function else (0, ["Filled", "Filled", "Filled"])]


# --------------------------------------------------------------------------------------------------------- device


class Wrapped(torch.Tensor):
    """A tensor subclass that holds another tensor, as quantised weights do."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = torch.utils._pytree.tree_map_only(Wrapped, lambda t: t.inner, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return Wrapped(out) if isinstance(out, torch.Tensor) else out


@pytest.mark.skipif(TORCH, reason="one function of ours")
def test_what_is_there_and_what_is_on_meta_does_not_move():
    meta, there = nn.Parameter(torch.ones(3, device="meta")), nn.Parameter(torch.ones(2))
    data = there.data_ptr()
    materialize.move_states([meta, there], CPU)
    assert (meta.device.type, there.data_ptr()) == ("meta", data)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(TORCH, reason="one function of ours")
def test_states_move_in_their_own_objects_with_their_gradients():
    plain, buffer = nn.Parameter(torch.ones(3)), torch.ones(2)
    plain.grad = torch.ones(3)
    materialize.move_states([plain, buffer], torch.device("cuda", 0))
    assert [t.device.type for t in (plain, plain.grad, buffer)] == ["cuda"] * 3


@pytest.mark.skipif(TORCH, reason="one function of ours")
def test_wrapper_subclasses_move_by_swapping():
    parameter = nn.Parameter(Wrapped(torch.ones(3)), requires_grad=False)
    assert parameter.device.type == "cpu"
    before = id(parameter)
    materialize.move_states([parameter], torch.device("meta"))
    assert (id(parameter), parameter.inner.device.type) == (before, "meta")
    assert isinstance(parameter, nn.Parameter)


@pytest.mark.skipif(TORCH, reason="one function of ours")
def test_a_dtensor_on_a_mesh_of_another_device():
    def body(rank, world):
        weight = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(ValueError, match="mesh of the same type"):
            materialize.move_states([nn.Parameter(weight)], torch.device("cuda", 0))
        return True

    assert run(1, body) == [True]


@pytest.mark.skipif(TORCH, reason="our decision where there is no accelerator")
def test_without_an_accelerator_parameters_are_made_on_the_cpu():
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    assert run(1, lambda rank, world: str(materialize.default_device(dist.group.WORLD))) == ["cpu"]


@pytest.mark.skipif(TORCH, reason="torch takes the current device")
def test_the_device_is_the_one_that_the_group_was_made_for(monkeypatch):
    """`init_process_group(device_id=...)` does not choose a current device: that is the first one."""

    def body(rank, world):
        group, second = dist.group.WORLD, torch.device("cuda", 1)
        group.bound_device_id = second
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        mesh = FSDPMeshInfo(types.SimpleNamespace(device_type="cuda"), 0)
        found = [materialize.default_device(group), mesh.device, get_group_device(), get_group_device(group)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(materialize.resolve_device(torch.device("cuda"), 0))
        return [each == second for each in found]

    assert run(1, body) == [[True] * 5]


# -------------------------------------------------------------------------------------------- one value on all ranks


def different(rank: int) -> Pile:
    """A pile whose every state tells its rank."""
    pile = Pile()
    with torch.no_grad():
        for state in (*pile.parameters(), *pile.buffers()):
            state.fill_(rank + 1.0)
    return pile


@torch_is_wrong("it refuses tensors on the CPU")
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("policy", [None, POLICY], ids=["one unit", "nested"])
def test_g6_all_ranks_begin_as_the_first(policy, orig):
    def body(rank, world):
        settings = {"auto_wrap_policy": policy, "use_orig_params": orig}
        synced = shard(different(rank), sync_module_states=True, **settings)
        return fingerprint(synced) == fingerprint(shard(different(0), **settings))

    assert run(2, body) == [True, True]


@torch_is_wrong("it refuses tensors on the CPU")
def test_g6_each_state_is_sent_once_under_nesting():
    def body(rank, world):
        pile = different(rank)
        expected = sum(t.numel() for t in (*pile.parameters(), *pile.buffers()))
        with recorded() as calls:
            shard(pile, sync_module_states=True, auto_wrap_policy=POLICY)
        return sum(call.sent for call in calls if call.op == "broadcast") == expected, count(calls, "broadcast")

    assert run(2, body) == [(True, 3)] * 2


@torch_is_wrong("it refuses tensors on the CPU")
def test_g6_buffers_of_units_that_were_not_synchronised_are_sent_by_the_root():
    def body(rank, world):
        pile = different(rank)
        pile.outer = shard(pile.outer)
        shard(pile, sync_module_states=True)
        return pile.outer.table.sum().item()

    assert run(2, body) == [3.0, 3.0]


@torch_is_wrong("it refuses tensors on the CPU")
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_g6_hybrid_replicas_come_first(strategy):
    def body(rank, world):
        mesh = init_device_mesh("cpu", (2, 2))
        settings = {"sharding_strategy": Strategy[strategy], "device_mesh": mesh, "use_orig_params": True}
        with recorded() as calls:
            model = shard(different(rank), sync_module_states=True, **settings)
        groups = [call.ranks for call in calls if call.op == "broadcast"]
        return fingerprint(model) == fingerprint(shard(different(0), **settings)), groups

    assert run(4, body) == [(True, [2, 2])] * 4


@torch_is_wrong("it refuses tensors on the CPU")
def test_other_ranks_may_begin_without_memory():
    def init(module):
        module.to_empty(device=CPU, recurse=False)

    def body(rank, world):
        pile = different(0) if rank == 0 else Pile("meta")
        model = shard(pile, sync_module_states=True, param_init_fn=init, auto_wrap_policy=POLICY)
        return fingerprint(model) == fingerprint(shard(different(0), auto_wrap_policy=POLICY))

    assert run(2, body) == [True, True]


@pytest.mark.skipif(TORCH, reason="torch has no such function")
def test_g6_a_plain_module_is_made_equal_before_fully_shard():
    def body(rank, world):
        pile = different(rank)
        with recorded() as calls:
            materialize.sync_module_states(pile)
        return [state.sum().item() for state in pile.buffers()], pile.outer.weight.sum().item(), len(calls)

    assert run(3, body) == [([3.0] * 6, 9.0, 1)] * 3


@pytest.mark.skipif(TORCH, reason="torch has no such function")
def test_a_group_is_made_equal_to_its_own_first_rank():
    def body(rank, world):
        low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
        pile = different(rank)
        materialize.sync_module_states(pile, low if rank < 2 else high)
        return pile.outer.weight.mean().item()

    assert run(4, body) == [1.0, 1.0, 3.0, 3.0]


@pytest.mark.skipif(TORCH, reason="torch has no such function")
def test_states_of_every_type_travel_and_buckets_hold_so_many_bytes(monkeypatch):
    monkeypatch.setattr(materialize, "BUCKET_BYTES", 100)

    def body(rank, world):
        states = [
            torch.full((30,), rank + 1.0),
            torch.full((5,), rank + 1, dtype=torch.int16),
            torch.full((), rank + 1.0),
            torch.full((10, 2), rank + 1.0)[:, 0],
            torch.full((4,), complex(rank, 1)),
            torch.full((10,), rank + 1.0),
            torch.full((3,), rank + 1.0, dtype=torch.float8_e4m3fn),
            torch.empty(0),
            torch.empty(2, device="meta"),
        ]
        with recorded() as calls:
            materialize.broadcast(states, ShardGroup(dist.group.WORLD))
        sums = [state.to(torch.complex64).sum().item().real for state in states if not state.is_meta]
        return sums, [call.sent for call in calls]

    assert run(2, body) == [([30.0, 5.0, 1.0, 10.0, 0.0, 10.0, 3.0, 0.0], [30, 21, 10, 32, 3])] * 2


@pytest.mark.skipif(TORCH, reason="torch has no such function")
@pytest.mark.parametrize("orig", [False, True])
def test_what_the_wrapper_has_sharded_is_not_overwritten(orig):
    def body(rank, world):
        pile = Pile()
        pile.inner = shard(pile.inner, use_orig_params=orig)
        with pytest.raises(ValueError, match=r"different shards.*before"):
            materialize.sync_module_states(pile)
        return True

    assert run(2, body) == [True, True]


@pytest.mark.skipif(TORCH, reason="torch has no such function")
def test_what_fully_shard_has_cut_stays_and_its_buffers_are_made_equal():
    def body(rank, world):
        pile = core.fully_shard(different(rank))
        materialize.sync_module_states(pile)
        return pile.outer.weight.to_local().mean().item(), pile.outer.table.mean().item()

    assert run(2, body) == [(1.0, 1.0), (2.0, 1.0)]


@pytest.mark.skipif(TORCH, reason="torch has no such function")
def test_dtensors_are_made_equal_over_replicas_and_never_over_their_parts():
    def body(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        module = nn.Module()
        local = torch.full((2,), float(rank))
        module.weight = nn.Parameter(DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False))
        materialize.sync_module_states(module)
        with pytest.raises(ValueError, match=r"weight.*different shards"):
            materialize.sync_module_states(module, mesh.get_group("shard"))
        return module.weight.to_local().tolist()

    assert run(4, body) == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
