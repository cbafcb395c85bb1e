"""Placements of parameters of fully_shard: boxes of ranks join to the parameter again, on every kind of mesh."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardckpt.core.errors import ArgumentError
from shardckpt.core.params import mesh_placement
from shardckpt.layout import DimLayout, ParamSpec
from tests.kit.models.torch_limits import full_tensor
from tests.kit.ranks import harness

SHAPES = [(8, 4), (5, 3), (1, 7), (3,), (2, 3, 5), (0, 4)]


def box(placed: mesh_placement.MeshPlacement, local: torch.Tensor) -> torch.Tensor:
    """This rank's box of a local tensor, as a bucket cuts it."""
    if placed.dim is None:
        return local.clone()
    group = placed.info.group
    layout = DimLayout((ParamSpec("p", tuple(local.shape), "float32"),), group.size, (placed.dim,))
    found = layout.box(0, group.rank)
    view = local
    for dim, (start, size) in enumerate(zip(found.offset, found.size, strict=True)):
        view = view.narrow(dim, start, size)
    return view.clone()


def whole(shape: tuple[int, ...]) -> torch.Tensor:
    """The same values on every rank."""
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)


def joined(parameter: nn.Parameter, info: mesh_placement.DataParallelMeshInfo, dim: int | None = None) -> Any:
    """Place, cut, and gather again."""
    choose = None if dim is None else lambda _: Shard(dim)
    placed = mesh_placement.place_param("p", parameter, info, choose)
    made = placed.sharded(box(placed, placed.local(parameter)))
    return made, full_tensor(made)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_boxes_on_a_mesh_of_one_dimension_join_to_the_parameter(world: int) -> None:
    def body(rank: int, world: int) -> None:
        info = mesh_placement.mesh_info(init_device_mesh("cpu", (world,)))
        for shape in SHAPES:
            for dim in [None, *range(len(shape)), -1]:
                made, full = joined(nn.Parameter(whole(shape)), info, dim)
                assert made.placements == (Shard((dim or 0) % len(shape)),)
                assert made.shape == torch.Size(shape)
                assert torch.equal(full, whole(shape)), (shape, dim)

    harness.run(world, body)


def test_a_parameter_without_dimensions_is_whole_on_every_rank() -> None:
    def body(rank: int, world: int) -> None:
        info = mesh_placement.mesh_info(init_device_mesh("cpu", (world,)))
        made, full = joined(nn.Parameter(torch.tensor(3.0)), info)
        assert made.placements == (Replicate(),)
        assert torch.equal(full, torch.tensor(3.0))

    harness.run(2, body)


def test_the_sharded_tensor_aliases_the_box_and_the_full_one_what_was_gathered() -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("tp", "dp"))
        info = mesh_placement.mesh_info(mesh["dp"])
        tp = nn.Parameter(distribute_tensor(whole((4, 4)), mesh["tp"], [Shard(1)]))
        for parameter in (nn.Parameter(whole((4, 4))), tp):
            placed = mesh_placement.place_param("p", parameter, info, None)
            held = box(placed, placed.local(parameter))
            gathered = placed.local(parameter).clone()
            sharded, full = placed.sharded(held), placed.full(gathered)
            held.fill_(7.0)
            gathered.fill_(8.0)
            assert bool((sharded.to_local() == 7).all())
            plain = full.to_local() if isinstance(full, DTensor) else full
            assert bool((plain == 8).all())
            assert isinstance(full, DTensor) is placed.is_dtensor

    harness.run(2, body)


def test_hybrid_meshes_replicate_over_the_first_dimension_and_cut_over_the_second() -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        info = mesh_placement.mesh_info(mesh)
        assert (info.group.size, info.group.replicas) == (2, 2)
        for shape in SHAPES:
            made, full = joined(nn.Parameter(whole(shape)), info)
            assert made.placements == (Replicate(), Shard(0))
            assert torch.equal(full, whole(shape))

    harness.run(4, body)


def test_tensor_parallel_parameters_are_cut_further() -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for tp_dim, dim, shape in itertools.product((0, 1), (0, 1), [(8, 8), (8, 6), (4, 12)]):
            case = (tp_dim, dim, shape)
            tp = distribute_tensor(whole(shape), mesh["tp"], [Shard(tp_dim)])
            made, full = joined(nn.Parameter(tp), mesh_placement.mesh_info(mesh["dp"]), dim)
            assert made.device_mesh == mesh, case
            assert made.shape == torch.Size(shape), case
            assert made.placements[1] == Shard(tp_dim), case
            assert (type(made.placements[0]) is Shard) is (tp_dim != dim), case
            assert torch.equal(full, whole(shape)), case

    harness.run(4, body)


def test_tensor_parallel_parameters_lie_over_hybrid_meshes() -> None:
    def body(rank: int, world: int) -> None:
        for sizes in [(1, 2, 2), (2, 1, 2), (2, 2, 1)]:
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("rep", "dp", "tp"))
            for tp_dim in (0, 1):
                case = (sizes, tp_dim)
                tp = distribute_tensor(whole((8, 6)), mesh["tp"], [Shard(tp_dim)])
                made, full = joined(nn.Parameter(tp), mesh_placement.mesh_info(mesh["rep", "dp"]))
                assert made.device_mesh == mesh, case
                assert made.placements[0] == Replicate(), case
                assert torch.equal(full, whole((8, 6))), case

    harness.run(4, body)


def test_a_replicated_dtensor_is_cut_like_a_plain_tensor() -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tp = distribute_tensor(whole((5, 3)), mesh["tp"], [Replicate()])
        made, full = joined(nn.Parameter(tp), mesh_placement.mesh_info(mesh["dp"]))
        assert made.placements == (Shard(0), Replicate())
        assert torch.equal(full, whole((5, 3)))

    harness.run(4, body)


def test_dtensors_on_the_mesh_of_everything_are_cut_over_the_named_dimensions() -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        info = mesh_placement.mesh_info(mesh, mesh_placement.DataParallelMeshDims(shard="dp"))
        for tp_dim in (0, 1):
            parameter = nn.Parameter(distribute_tensor(whole((8, 4)), mesh, [Replicate(), Shard(tp_dim)]))
            made, full = joined(parameter, info)
            assert made.device_mesh == mesh
            assert torch.equal(full, whole((8, 4)))

    harness.run(4, body)


def test_several_dimensions_that_cut_are_flattened_into_one() -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "cp", "tp"))
        info = mesh_placement.mesh_info(mesh, mesh_placement.DataParallelMeshDims(shard=("dp", "cp")))
        assert info.group.size == 4
        parameter = nn.Parameter(distribute_tensor(whole((5, 2)), mesh, [Replicate(), Replicate(), Shard(1)]))
        made, full = joined(parameter, info)
        assert made.device_mesh.mesh_dim_names == ("dp_cp", "tp")
        assert torch.equal(full, whole((5, 2)))

    harness.run(4, body)


def test_named_dimensions_may_replicate_and_cut() -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))
        info = mesh_placement.mesh_info(mesh, mesh_placement.DataParallelMeshDims(shard="dp", replicate="rep"))
        assert (info.group.size, info.group.replicas) == (2, 2)
        parameter = nn.Parameter(distribute_tensor(whole((5, 2)), mesh, [Replicate(), Replicate()]))
        made, full = joined(parameter, info)
        assert made.placements == (Replicate(), Shard(0))
        assert torch.equal(full, whole((5, 2)))
        only = mesh_placement.mesh_info(mesh, mesh_placement.DataParallelMeshDims(replicate=("rep", "dp")))
        assert (only.group.size, only.group.replicas) == (1, 4)
        made, full = joined(parameter, only)
        assert made.placements == (Replicate(), Replicate())
        assert torch.equal(full, whole((5, 2)))

    harness.run(4, body)


def test_a_gradient_is_laid_as_its_parameter_is() -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
        parameter = nn.Parameter(distribute_tensor(whole((4, 4)), mesh["tp"], [Shard(0)]))
        placed = mesh_placement.place_param("p", parameter, mesh_placement.mesh_info(mesh["dp"]), None)
        partial = DTensor.from_local(whole((4, 4)), mesh["tp"], [Partial()], run_check=False)
        expected = 2 * whole((4, 4))[2 * rank : 2 * rank + 2]
        assert torch.equal(placed.gradient(partial) + 0, expected)
        plain = whole((2, 4))
        assert placed.gradient(plain) is plain

    harness.run(2, body)


def test_data_parallel_dimensions_of_a_gradient_are_left_to_the_reduction() -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        info = mesh_placement.mesh_info(mesh, mesh_placement.DataParallelMeshDims(shard="dp"))
        parameter = nn.Parameter(distribute_tensor(whole((4, 4)), mesh, [Replicate()]))
        placed = mesh_placement.place_param("p", parameter, info, None)
        partial = DTensor.from_local(torch.full((4, 4), float(rank)), mesh, [Partial()], run_check=False)
        with harness.recorded() as calls:
            assert torch.equal(placed.gradient(partial), torch.full((4, 4), float(rank)))
        assert not calls

    harness.run(2, body)


def refused(kind: type[BaseException], words: str, of: Any) -> None:
    with pytest.raises(kind, match=words):
        of()


def test_what_cannot_be_placed_is_refused_with_the_listed_types() -> None:
    def body(rank: int, world: int) -> None:
        line = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        info = mesh_placement.mesh_info(line)
        dims = mesh_placement.DataParallelMeshDims
        matrix = nn.Parameter(whole((4, 4)))
        everything = mesh_placement.mesh_info(line, dims(shard="dp"))
        cut = nn.Parameter(distribute_tensor(whole((4, 4)), line, [Shard(0)]))
        refused(ValueError, "1D or 2D", lambda: mesh_placement.mesh_info(init_device_mesh("cpu", (1, 1, world))))
        refused(AssertionError, "mesh_dim_names", lambda: mesh_placement.mesh_info(init_device_mesh("cpu", (1, world))))
        refused(ValueError, "At least one", dims)
        refused(
            ValueError, "mesh_dim_names", lambda: mesh_placement.mesh_info(init_device_mesh("cpu", (world,)), dims("a"))
        )
        refused(ValueError, "'a' not found", lambda: mesh_placement.mesh_info(line, dims("a")))
        refused(ValueError, "plain tensor", lambda: mesh_placement.place_param("p", matrix, everything, None))
        refused(ValueError, "Expected Replicate", lambda: mesh_placement.place_param("p", cut, everything, None))
        refused(
            AssertionError, "invalid for 2D", lambda: mesh_placement.place_param("p", matrix, info, lambda _: Shard(2))
        )
        other = mesh_placement.mesh_info(init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)), dims(shard="dp"))
        copied = nn.Parameter(distribute_tensor(whole((4, 4)), line, [Replicate()]))
        refused(ValueError, "same mesh", lambda: mesh_placement.place_param("p", copied, other, None))
        refused(
            ValueError, "Invalid shard_placement_fn", lambda: mesh_placement.place_param("p", matrix, info, lambda _: 1)
        )
        assert issubclass(ArgumentError, ValueError)

    harness.run(2, body)


def test_a_copied_placement_shares_its_mesh() -> None:
    def body(rank: int, world: int) -> None:
        placed = mesh_placement.place_param(
            "p", nn.Parameter(whole((4,))), mesh_placement.mesh_info(init_device_mesh("cpu", (world,))), None
        )
        assert copy.deepcopy(placed) is placed
        assert isinstance(copy.deepcopy(placed).mesh, DeviceMesh)
        assert dist.get_world_size(placed.info.group.shard) == world

    harness.run(2, body)
