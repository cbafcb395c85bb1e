"""One bucket: places and strides of full parameters, storage given and taken, flags of who used what."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from shardckpt.core import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from shardckpt.core.comm.collectives import ShardGroup
from shardckpt.core.comm.streams import FULL_BYTES
from shardckpt.core.config import Offload, Precision
from shardckpt.core.modules.dtensors import memory_order
from shardckpt.core.modules.fqn_and_params import Name, managed_parameters
from shardckpt.core.params.gradient_reduction import ReductionSettings, start_reduce_scatters
from shardckpt.core.params.param_bucket import Bucket, ShardSpec
from shardckpt.state import model_state_dict
from shardckpt.state.keys.kinds import KEY
from tests.kit.ranks.harness import run
from tests.kit.writers.share_writers import as_rank


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.matrix = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.line = nn.Parameter(torch.arange(5.0))


def made(group, **settings) -> tuple[Bucket, list[torch.Tensor]]:
    module = Uneven()
    values = [p.detach().clone() for p in module.parameters()]
    managed = managed_parameters(module, set())
    return Bucket(managed, group, Name("unit"), ShardSpec(**settings), Precision(), Offload()), values


def gathered(bucket: Bucket) -> None:
    bucket.unsharded.start_all_gather()
    bucket.unsharded.wait_all_gather()


def test_full_parameters_come_back_with_values_and_strides():
    bucket, values = made(ShardGroup(None))
    assert not bucket.unsharded.is_unsharded
    assert bucket.unsharded.params[1].untyped_storage().nbytes() == 0
    gathered(bucket)
    for leaf, value in zip(bucket.unsharded.params, values, strict=True):
        assert torch.equal(leaf, value)
    assert bucket.unsharded.params[1].stride() == (1, 4)
    assert all(leaf.is_leaf and leaf._version == 0 for leaf in bucket.unsharded.params)


def test_full_bytes_are_counted_and_freed():
    before = FULL_BYTES.held
    bucket, _ = made(ShardGroup(None), aligned=True)
    assert FULL_BYTES.held == before
    gathered(bucket)
    assert FULL_BYTES.held == before + 4 * bucket.layout.chunk
    bucket.unsharded.reshard()
    assert FULL_BYTES.held == before


def test_what_keeps_everything_is_never_freed():
    bucket, values = made(ShardGroup(None), keeps_full=True)
    bucket.unsharded.reshard()
    assert bucket.unsharded.is_unsharded
    assert torch.equal(bucket.unsharded.params[3], values[3])
    assert bucket.shard.data_ptr() == bucket.unsharded.params[0].data_ptr()


def test_gathering_again_sees_the_shard_and_not_the_edit_of_the_full_parameter():
    bucket, values = made(ShardGroup(None))
    gathered(bucket)
    bucket.unsharded.params[3].data.fill_(9)
    bucket.unsharded.reshard()
    gathered(bucket)
    assert torch.equal(bucket.unsharded.params[3], values[3])
    bucket.unsharded.params[3].data.fill_(9)
    bucket.write_back()
    bucket.unsharded.reshard()
    gathered(bucket)
    assert bucket.unsharded.params[3].tolist() == [9.0] * 5


def test_a_reduction_averages_and_tells_who_used_what():
    def body(rank, world):
        bucket, _ = made(ShardGroup(torch.distributed.group.WORLD))
        bucket.unsharded.params[1].grad = torch.full((4, 3), float(rank))
        if rank == 1:
            bucket.unsharded.params[0].grad = torch.tensor(6.0)
        start_reduce_scatters([bucket.reducer], ReductionSettings())
        reduced = bucket.reducer.wait_reduce_scatter()
        return reduced.used, reduced.gradient.tolist(), all(leaf.grad is None for leaf in bucket.unsharded.params)

    results = run(3, body)
    assert [used for used, _, _ in results] == [(True, True, False, False)] * 3
    assert [x for _, grad, _ in results for x in grad] == [2.0] + [1.0] * 12 + [0.0] * 5
    assert all(taken for _, _, taken in results)


def test_integers_of_sixteen_bits_are_gathered():
    def body(rank, world):
        module = nn.Module()
        module.table = nn.Parameter(torch.arange(7, dtype=torch.int16), requires_grad=False)
        managed = managed_parameters(module, set())
        group = ShardGroup(torch.distributed.group.WORLD)
        bucket = Bucket(managed, group, Name("u"), ShardSpec(aligned=True), Precision(), Offload())
        gathered(bucket)
        return bucket.unsharded.params[0].tolist(), bucket.unsharded.requires_grad

    assert run(2, body) == [(list(range(7)), False)] * 2


def test_memory_order_of_dense_and_other_tensors():
    assert memory_order(torch.empty(2, 3)) == ()
    assert memory_order(torch.empty(2, 3).t()) == (1, 0)
    assert memory_order(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)) == (0, 2, 3, 1)
    assert memory_order(torch.empty(1, 3).expand(2, 3)) == ()


class Odd(nn.Module):
    """A unit whose first parameters have odd sizes, one frozen among them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.other = nn.Linear(64, 7)
        self.other.weight.requires_grad_(False)
        self.q, self.k = (nn.Linear(64, 64, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.q(x) + self.k(x))
        return self.head(x).sum() + self.other(x).sum()


ODD_POLICIES = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16 gradients": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("policy", ODD_POLICIES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_kernels_find_every_parameter_and_gradient_at_16_bytes(world, policy):
    def body(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        model = Odd()
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**ODD_POLICIES[policy]))
        found = {}

        def look(module, args):
            found.update({f"full {name}": p.data_ptr() for name, p in model.named_parameters()})

        model.norm.register_forward_pre_hook(look)
        model(torch.ones(2, 64)).backward()
        for name, parameter in model.named_parameters():
            found[f"shard {name}"] = parameter.to_local().data_ptr()
            if parameter.grad is not None:
                found[f"grad {name}"] = parameter.grad.to_local().data_ptr()
        return {name: at % 16 for name, at in found.items() if at % 16}

    assert run(world, body) == [{}] * world


def test_the_alignment_of_replicated_parameters_is_not_in_a_state():
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicas",))
        model = nn.Linear(5, 3)
        for name, parameter in list(model.named_parameters()):
            placed = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
            model.register_parameter(name, nn.Parameter(placed))
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="replicas"))
        assert [p.to_local().data_ptr() % 16 for p in model.parameters()] == [0, 0]
        (unit,) = model_state_dict(model, "LOCAL")._metadata[KEY]["units"]
        assert unit["layout"]["alignment"] == 1
