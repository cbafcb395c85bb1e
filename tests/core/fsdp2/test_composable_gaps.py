"""fully_shard where torch's refuses or errs: ties, scalars, mixed types, odd cuts, copies; what it is nested with."""

from __future__ import annotations

import copy
import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from tests.core.fsdp2.test_fully_shard import (
    Block,
    Tower,
    averaged,
    batch,
    full,
    fully_shard,
    line,
    same,
    tower,
    trained,
)
from tests.kit.models.under_test import TORCH, core, torch_is_wrong, wrap
from tests.kit.ranks import harness
from tests.kit.ranks.compiling import compiled, warm_up
from tests.kit.ranks.stepping import whole_dtensors

if not TORCH:
    from shardckpt.core.fsdp2 import fully_shard as composable


class Tied(nn.Module):
    """A language model whose head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = Block()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(tokens)))


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (2, 4), generator=torch.Generator().manual_seed(100 * step + rank))


@torch_is_wrong("it raises at the first forward")
@pytest.mark.parametrize("alone", [("embedding",), ("head",), ("embedding", "head"), ("head", "block", "embedding")])
def test_g10_a_tied_parameter_belongs_to_the_unit_above_all_its_users(alone: tuple[str, ...]) -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        expected = trained(Tied(), rank, data=tokens, after=averaged)
        torch.manual_seed(0)
        model = Tied()
        for name in alone:
            fully_shard(getattr(model, name), mesh=line())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fully_shard(model, mesh=line())
        assert any("also used outside" in str(each.message) for each in caught)
        assert model.head.weight is model.embedding.weight
        assert len(list(model.parameters())) == len(expected[1])
        same(trained(model, rank, data=tokens), expected)
        assert model.head.weight is model.embedding.weight

    harness.run(2, body)


def test_tied_modules_of_one_group_stay_tied() -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        expected = trained(Tied(), rank, data=tokens, after=averaged)
        torch.manual_seed(0)
        model = Tied()
        fully_shard([model.embedding, model.head], mesh=line())
        fully_shard(model, mesh=line())
        assert model.head.weight is model.embedding.weight
        same(trained(model, rank, data=tokens), expected)

    harness.run(2, body)


class Mixed(nn.Module):
    """Parameters without dimensions, of several types, frozen and not, laid out by columns, of no size that divides."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.columns = nn.Parameter(torch.randn(5, 6).t())
        self.exact = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.low = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x @ self.columns) * self.scale + self.frozen + self.low.float()
        return x * self.exact.float() + self.codes.float().sum() + self.empty.sum()


@torch_is_wrong("it refuses them")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_g11_g12_g15_any_parameters_train_in_one_unit(world: int) -> None:
    def body(rank: int, world: int) -> None:
        meshes = [line()]
        if world == 4:
            meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        torch.manual_seed(0)
        before = Mixed()
        expected = trained(copy.deepcopy(before), rank, after=averaged)
        for mesh in meshes:
            model = fully_shard(copy.deepcopy(before), mesh=mesh)
            assert set(model.scale.placements) == {Replicate()}
            for (name, one), other in zip(model.named_parameters(), before.parameters(), strict=True):
                assert torch.equal(full(one), other), name
                assert one.dtype is other.dtype
                assert one.requires_grad is other.requires_grad
            with torch.no_grad():
                model(batch(0, rank))
            assert torch.equal(full(model.codes), before.codes)
            same(trained(model, rank), expected, atol=1e-5, rtol=1e-4)

    harness.run(world, body)


@torch_is_wrong("it refuses uneven cuts along other dimensions")
@pytest.mark.parametrize("world", [2, 3])
def test_g15_parameters_are_cut_along_any_dimension(world: int) -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        expected = trained(Tower(), rank, after=averaged)
        model = tower(shard_placement_fn=lambda p: Shard(-1))
        assert model.blocks[0].up.weight.placements == (Shard(1),)
        same(trained(model, rank), expected)

    harness.run(world, body)


@torch_is_wrong("it refuses to be copied")
def test_g18_a_copy_trains_by_itself() -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        expected = trained(Tower(), rank, after=averaged)
        model = tower()
        core.register_fsdp_forward_method(model, "twice")
        model(batch(0, rank)).sum().backward()
        model.zero_grad()
        before = copy.deepcopy(model)
        same(trained(model, rank), expected)
        assert type(before) is type(model)
        assert before.head.weight is not model.head.weight
        other = copy.deepcopy(before)
        same(trained(before, rank), expected)
        other.twice(batch(0, rank)).sum().backward()
        assert other.head.weight.grad is not None
        average = copy.deepcopy(other)
        with torch.no_grad():
            for mean, one, two in zip(average.parameters(), other.parameters(), model.parameters(), strict=True):
                mean.copy_(0.5 * one + 0.5 * two)
        torch.testing.assert_close(full(average.head.weight), 0.5 * full(other.head.weight) + 0.5 * expected[1][-2])

    harness.run(2, body)


@pytest.mark.parametrize("how", ["around", "inside", "reentrant", "plain"])
def test_checkpointed_blocks_train_as_whole_ones(how: str) -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        expected = trained(Tower(), rank, after=averaged)
        torch.manual_seed(0)
        model = Tower()
        for index, block in enumerate(model.blocks):
            if how == "around":  # the wrapper is the unit
                model.blocks[index] = fully_shard(checkpoint_wrapper(block), mesh=line())
            elif how == "inside":
                model.blocks[index] = checkpoint_wrapper(fully_shard(block, mesh=line()))
            else:
                fully_shard(block, mesh=line())
                forward = block.forward
                block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=how == "reentrant")
        fully_shard(model, mesh=line())
        same(trained(model, rank), expected)

    harness.run(2, body)


@pytest.mark.parametrize("how", ["unit of compiled", "compiled unit", "whole"])
def test_compiled_modules_train_as_they_are(how: str) -> None:
    warm_up()

    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        expected = trained(Tower(1), rank, after=averaged, steps=2)
        torch.manual_seed(0)
        model: Any = Tower(1)
        if how == "unit of compiled":
            model.blocks[0].compile(backend="aot_eager")
        fully_shard(model.blocks[0], mesh=line())
        if how == "compiled unit":
            model.blocks[0] = compiled(model.blocks[0])
        fully_shard(model, mesh=line())
        if how == "whole":
            model = compiled(model)
        same(trained(model, rank, steps=2), expected)

    harness.run(2, body, timeout=100.0, group_timeout=60.0)


@torch_is_wrong("what it gathered for inference cannot be gathered again")
def test_inference_leaves_nothing_behind() -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        plain, model = Tower(), tower()
        with torch.inference_mode():
            torch.testing.assert_close(model(batch(0, rank)), plain(batch(0, rank)))
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(batch(0, rank)), plain(batch(0, rank)))
        model.train()
        same(trained(model, rank), trained(plain, rank, after=averaged))

    harness.run(2, body)


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_optimizers_of_several_tensors_step_dtensors(kind: str) -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        models = [Tower(), tower()]
        for model in models:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **{kind: True})
            for step in range(2):
                model(batch(step, rank)).square().mean().backward()
                if model is models[0]:
                    averaged(model)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                with whole_dtensors():
                    optimizer.step()
                optimizer.zero_grad()
            assert full(norm) > 0
        for one, other in zip(models[1].parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(full(one), other)

    harness.run(2, body)


@torch_is_wrong("it refuses them")
def test_scalars_are_reduced_also_while_replicas_wait() -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        plain = Mixed()
        meshes = [line(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))]
        models = [fully_shard(copy.deepcopy(plain), mesh=mesh) for mesh in meshes]
        for model in (plain, *models):
            for step, last in enumerate((False, True)):
                if model is not plain:
                    model.set_requires_all_reduce(last)
                model(batch(step, rank)).square().mean().backward()
        averaged(plain)
        for model in models:
            torch.testing.assert_close(full(model.scale.grad), plain.scale.grad)
            torch.testing.assert_close(full(model.columns.grad), plain.columns.grad)

    harness.run(4, body)


def test_low_precision_goes_with_tensor_parallelism_and_hybrid_meshes() -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("rep", "dp", "tp"))
        model = Block(8, 10)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        policy = core.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        fully_shard(model, mesh=mesh["rep", "dp"], mp_policy=policy)
        output = model(torch.randn(3, 8))
        assert output.dtype is torch.bfloat16
        output.sum().backward()
        assert all(p.grad.dtype is torch.float32 and p.grad.shape == p.shape for p in model.parameters())
        with torch.no_grad():
            torch.optim.SGD(model.parameters(), lr=0.1).step()

    harness.run(4, body)


def test_slices_are_kept_under_hybrid_meshes() -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        expected = trained(Tower(), rank, after=averaged)
        mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
        same(trained(tower(mesh=mesh, reshard_after_forward=2), rank), expected)

    harness.run(4, body)


def test_torchs_checkpoints_know_what_is_sharded() -> None:
    def body(rank: int, world: int) -> None:
        model = tower()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(batch(0, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        options = dcp.StateDictOptions(full_state_dict=True)
        state = dcp.get_model_state_dict(model, options=options)
        moments = copy.deepcopy(optimizer.state_dict())
        assert list(state) == list(Tower().state_dict())
        assert not isinstance(state["head.weight"], DTensor)
        other = tower()
        again = torch.optim.AdamW(other.parameters(), lr=1e-2)
        dcp.set_model_state_dict(other, state, options=options)
        again.load_state_dict(moments)
        for each, steps in ((model, optimizer), (other, again)):
            each(batch(1, rank)).square().mean().backward()
            steps.step()
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(full(one), full(two))

    harness.run(2, body)


def test_modules_may_be_converted_by_swapping() -> None:
    def body(rank: int, world: int) -> None:
        model = tower()
        torch.__future__.set_swap_module_params_on_conversion(True)
        model.double()
        parameters = list(model.parameters())
        model(batch(0, rank).double()).sum().backward()
        assert all(p.grad is not None and p.dtype is torch.float64 for p in parameters)
        assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))

    harness.run(2, body)


# ------------------------------------------------------------------------------------------- wrapping and meshes


@pytest.mark.skipif(TORCH, reason="torch's driver is private")
def test_policies_shard_in_place_with_fully_shard() -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        model = Tower()
        policy = wrap.ModuleWrapPolicy({Block})
        wrap.auto_wrap(model, policy, fully_shard, {"mesh": line()})
        assert all(isinstance(block, core.FSDPModule) for block in model.blocks)
        assert not isinstance(model, core.FSDPModule)
        torch.manual_seed(0)
        same(trained(fully_shard(model, mesh=line()), rank), trained(Tower(), rank, after=averaged))

    harness.run(2, body)


def test_annotated_modules_are_sharded_in_place() -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        model = Tower()
        with wrap.enable_wrap(wrapper_cls=fully_shard, mesh=line()):
            for block in model.blocks:
                assert wrap.wrap(block, reshard_after_forward=False) is block
            wrap.wrap(model)
        assert isinstance(model.blocks[2], core.FSDPModule)
        torch.manual_seed(0)
        same(trained(model, rank), trained(Tower(), rank, after=averaged))

    harness.run(2, body)


def test_all_ranks_are_the_default_mesh_and_a_process_group_is_made_for_it() -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        model = fully_shard(Tower())
        assert model.head.weight.device_mesh.size() == world
        same(trained(model, rank), trained(copy.deepcopy(Tower()), rank, after=averaged), atol=10, rtol=10)
        dist.destroy_process_group()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        fully_shard(nn.Linear(2, 2))
        assert dist.is_initialized()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        harness.run(2, body)


@pytest.mark.skipif(TORCH, reason="ours only")
def test_parameters_of_one_module_may_lie_over_several_meshes() -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("out", "in"))
        everyone = line()
        inner = core.FSDPMeshInfo(mesh["in"], shard_mesh_dim=0)

        def choose(parameter: nn.Parameter) -> Any:
            return core.ShardPlacementResult(None, inner) if parameter.ndim == 1 else None

        model = fully_shard(nn.Linear(6, 8), mesh=everyone, shard_placement_fn=choose)
        assert model.weight.device_mesh == everyone
        assert model.bias.device_mesh == mesh["in"]
        model(batch(0, rank)).sum().backward()
        assert model.bias.grad.device_mesh == mesh["in"]
        with pytest.raises(ValueError, match="multiple param groups"):
            model.set_all_reduce_hook(lambda _: None)

        theirs = SimpleNamespace(**{**vars(inner), "replicate_mesh_dim": None})  # torch's class has these attributes

        def choose_theirs(parameter: nn.Parameter) -> Any:
            return SimpleNamespace(placement=None, mesh_info=theirs) if parameter.ndim == 1 else None

        twice = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8))
        fully_shard(twice, mesh=everyone, shard_placement_fn=choose_theirs)
        assert [each.bias.device_mesh for each in twice] == [mesh["in"]] * 2
        assert twice[0].weight.device_mesh == everyone
        with pytest.raises(ValueError, match="Invalid shard_placement_fn result"):
            fully_shard(nn.Linear(6, 8), mesh=everyone, shard_placement_fn=lambda _: SimpleNamespace(placement=None))

        def confused(parameter: nn.Parameter) -> Any:
            return core.ShardPlacementResult(None, core.FSDPMeshInfo(mesh["in"], shard_mesh_dim=0))

        with pytest.raises(ValueError, match="same FSDPMeshInfo object"):
            fully_shard(nn.Linear(6, 8), mesh=everyone, shard_placement_fn=confused)

    harness.run(4, body)


@pytest.mark.skipif(TORCH, reason="ours only")
def test_either_face_may_be_inside_the_other() -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        expected = trained(Tower(), rank, after=averaged)
        torch.manual_seed(0)
        model = Tower()
        fully_shard(model.blocks[0], mesh=line())
        wrapped = core.FullyShardedDataParallel(model, use_orig_params=True)
        assert isinstance(model.blocks[0].up.weight, DTensor)
        assert not isinstance(model.head.weight, DTensor)
        losses, _ = trained(wrapped, rank)
        torch.testing.assert_close(losses, expected[0])
        torch.manual_seed(0)
        model = Tower()
        model.blocks[1] = core.FullyShardedDataParallel(model.blocks[1], use_orig_params=True)
        fully_shard(model, mesh=line())
        losses, _ = trained(model, rank)
        torch.testing.assert_close(losses, expected[0])
        with pytest.raises(ValueError, match="FullyShardedDataParallel"):
            fully_shard(wrapped, mesh=line())

    harness.run(2, body)


@pytest.mark.skipif(TORCH, reason="ours only")
def test_a_parameter_that_is_sharded_elsewhere_is_not_quietly_another() -> None:
    def body(rank: int, world: int) -> None:
        model = Tied()
        fully_shard(model.embedding, mesh=line())
        fully_shard(model.head, mesh=line())
        with pytest.raises(RuntimeError, match="above"):
            model.head(torch.randn(2, 8))

    harness.run(2, body)


@pytest.mark.skipif(TORCH, reason="ours only")
def test_buffers_of_collectives_come_from_the_groups_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        made = 0

        def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            Backend.made += 1
            return torch.empty(size, dtype=dtype, device=device)

    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        expected = trained(Tower(), rank, after=averaged)
        model = tower()
        monkeypatch.setattr(composable, "allocator", lambda *_: Backend())
        monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
        for each in (model, *model.blocks):
            each.set_allocate_memory_from_process_group_for_comm(True)
        same(trained(model, rank), expected)
        assert Backend.made == 14 + 8
        for each in (model, *model.blocks):
            each.set_allocate_memory_from_process_group_for_comm(False)
        model(batch(0, rank)).sum().backward()
        assert Backend.made == 14 + 8

    harness.run(2, body)


@pytest.mark.skipif(TORCH, reason="torch says nothing")
def test_nccl_that_cannot_allocate_is_warned_of_once_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, world: int) -> list[str]:
        torch.manual_seed(0)
        expected = trained(Tower(), rank, after=averaged)
        model = tower()
        monkeypatch.setattr(dist, "get_backend", lambda *_: "cpu:gloo,cuda:nccl")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            for each in (model, *model.blocks):
                each.set_allocate_memory_from_process_group_for_comm(True)
        same(trained(model, rank), expected)
        return [str(each.message) for each in told]

    assert harness.run(2, body) == [["NCCL cannot allocate buffers on this device: torch allocates them"]] * 2


def test_settings_of_the_root_may_be_made_before_there_is_one() -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        expected = trained(Tower(), rank, after=averaged)
        model = tower()
        model.blocks[0].set_is_last_backward(True)
        model.set_is_last_backward(False)
        model.set_is_last_backward(True)
        model.blocks[1].set_post_optim_event(torch.Event("cpu"))
        same(trained(model, rank), expected)

    harness.run(2, body)
