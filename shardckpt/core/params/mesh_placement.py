"""Places one `fully_shard` parameter on its mesh, as a sharded DTensor.

Buckets contain plain local tensors. A parameter that is a DTensor already (tensor parallel, or on the full mesh) is
sharded further. Its local tensor is sharded, and the sharded DTensor combines the placements on both meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardckpt.core.comm.collectives import ShardGroup
from shardckpt.core.errors import ArgumentError, PlacementError, PlacementMissingError
from shardckpt.core.modules.dtensors import wrap_local
from shardckpt.core.params.buffer_layout import isolate_storage
from shardckpt.ranks.torch_group import current_device
from shardckpt.torch_features import concatenate_meshes


@dataclass
class DataParallelMeshDims:
    """A full mesh's data-parallel dimension names.

    Attributes:
        shard: Dimension name or names to shard over; several dimensions are flattened into one.
        replicate: Dimension name or names to replicate over.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ArgumentError("At least one of shard or replicate must be set in DataParallelMeshDims")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names in `shard`, as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Names in `replicate`, as a tuple."""
        return _names(self.replicate)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


# ------------------------------------------------------------------------------------------------------ meshes


@dataclass(eq=False)
class DataParallelMeshInfo:
    """Data-parallel mesh with a dimension to shard over, to replicate over, or both."""

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None  # index of the dimension to shard over; None without one
    replicate_mesh_dim: int | None = None  # index of the dimension to replicate over; None without one
    dp_mesh_dims: DataParallelMeshDims | None = None  # these dimensions' names in the full mesh
    # The full mesh, on which parameters are DTensors already.
    spmd_mesh: DeviceMesh | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise PlacementError("At least one of shard_mesh_dim and replicate_mesh_dim must not be None")

    @cached_property
    def group(self) -> ShardGroup:
        """Ranks that shard a parameter, and its replicas."""
        shard = None if self.shard_mesh_dim is None else self.mesh.get_group(self.shard_mesh_dim)
        replicate = None if self.replicate_mesh_dim is None else self.mesh.get_group(self.replicate_mesh_dim)
        return ShardGroup(shard, replicate)

    @property
    def is_spmd_mesh(self) -> bool:
        """Return True if parameters are DTensors on the full mesh."""
        return self.dp_mesh_dims is not None

    @property
    def device(self) -> torch.device:
        """This rank's compute device."""
        return current_device(self.mesh.device_type)

    @property
    def ring(self) -> DeviceMesh:
        """1-D mesh with the ranks that shard a parameter."""
        names = self.mesh.mesh_dim_names
        if self.mesh.ndim == 1 or self.shard_mesh_dim is None or names is None:
            return self.mesh
        return self.mesh[names[self.shard_mesh_dim]]

    def over(self, placement: Placement) -> tuple[Placement, ...]:
        """Return placements on `mesh`: one on the shard dimension, `Replicate` on others."""
        return tuple(placement if dim == self.shard_mesh_dim else Replicate() for dim in range(self.mesh.ndim))

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallelMeshInfo:
        """Return itself: copies share meshes."""
        return self


@dataclass(eq=False)
class FSDPMeshInfo(DataParallelMeshInfo):
    """Mesh with a dimension to shard over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_mesh_dim is None:
            raise PlacementError("Expects non-None shard_mesh_dim")

    @property
    def shard_mesh_size(self) -> int:
        """Number of ranks that shard a parameter."""
        return self.mesh.size(self.shard_mesh_dim)

    @property
    def shard_mesh_rank(self) -> int:
        """This rank's index among them."""
        return self.mesh.get_local_rank(self.shard_mesh_dim)


@dataclass(eq=False)
class DDPMeshInfo(DataParallelMeshInfo):
    """Mesh with a dimension to replicate over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicate_mesh_dim is None:
            raise PlacementError("Expects non-None replicate_mesh_dim")


@dataclass(eq=False)
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """Mesh with both dimensions."""


def default_mesh() -> DeviceMesh:
    """Return a mesh with all ranks; initialize the process group if needed. Collective."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return init_device_mesh(accelerator.type if accelerator else "cpu", mesh_shape=(dist.get_world_size(),))


def mesh_info(mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> DataParallelMeshInfo:
    """Return the roles of a mesh's dimensions: 1-D to shard, 2-D (replicate, shard), or any mesh with `dims`."""
    if dims is not None:
        _check_names(mesh, dims)
        return _named(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ArgumentError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    if mesh.mesh_dim_names is None:
        raise PlacementError("Please init the 2D mesh for HSDP with mesh_dim_names specified", found=mesh)
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def _check_names(mesh: DeviceMesh, dims: DataParallelMeshDims) -> None:
    if mesh.mesh_dim_names is None:
        raise ArgumentError("mesh must have mesh_dim_names when dp_mesh_dims is provided", found=mesh)
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in mesh.mesh_dim_names:
            raise ArgumentError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}")


def _named(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelMeshInfo:
    if not dims.shard_names:
        return DDPMeshInfo(_flat(mesh, dims.replicate_names), None, 0, dims, mesh)
    shard = _flat(mesh, dims.shard_names)
    if not dims.replicate_names:
        return FSDPMeshInfo(shard, 0, None, dims, mesh)
    return HSDPMeshInfo(_join_meshes([_flat(mesh, dims.replicate_names), shard]), 1, 0, dims, mesh)


# DeviceMesh does not have a public API for these; other meshes would not equal any user mesh.


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return a submesh flattened to one dimension. Collective on the first call."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def _join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return a mesh with the dimensions of several submeshes in one mesh."""
    if len(meshes) == 1:
        return meshes[0]
    if any(mesh.mesh_dim_names is None for mesh in meshes):
        raise PlacementError(
            "joining a parameter's mesh with the data-parallel mesh needs dimension names",
            found=[mesh.mesh_dim_names for mesh in meshes],
            fix="Give mesh_dim_names to init_device_mesh, and take both meshes from one.",
        )
    return concatenate_meshes(meshes)


def join_placements(
    mesh: DeviceMesh, dim: int, inner: DeviceMesh, placements: Sequence[Placement]
) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """Join tensor-parallel and data-parallel placements; None if the meshes are not parts of one named mesh."""
    try:
        both = _join_meshes([mesh, inner])
    except (PlacementError, RuntimeError, ValueError):
        return None
    data_parallel = _build_shard_placement(
        dim, [(placement, inner.size(at)) for at, placement in enumerate(placements)]
    )
    return both, (*[Replicate()] * (mesh.ndim - 1), data_parallel, *placements)


# -------------------------------------------------------------------------------------------------- parameters


@dataclass
class ShardPlacementResult:
    """Result from `shard_placement_fn`: a parameter's sharded dimension and mesh.

    Attributes:
        placement: Placement with the dimension; None for dimension 0.
        mesh_info: Mesh to shard over.
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo


ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


@dataclass(frozen=True)
class _Inner:
    """Mesh, placements and shape for a parameter that is already a DTensor."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    data_parallel: frozenset[int] = frozenset()

    def around(self, local: torch.Tensor) -> DTensor:
        return wrap_local(local, self.mesh, self.placements, self.shape, self.stride)

    def local(self, grad: DTensor) -> torch.Tensor:
        """Return a gradient's local tensor, redistributed like the parameter."""
        # Data-parallel dimensions are not redistributed.
        wanted = [
            actual if dim in self.data_parallel else expected
            for dim, (expected, actual) in enumerate(zip(self.placements, grad.placements, strict=True))
        ]
        if list(grad.placements) != wanted:
            grad = grad.redistribute(placements=wanted)
        return grad.to_local()


@dataclass(frozen=True, eq=False)
class MeshPlacement:
    """One parameter's placement on its mesh."""

    info: DataParallelMeshInfo  # ranks that shard the parameter, and its replicas
    dim: int | None  # sharded dimension in the local tensor; None if every rank has all elements
    mesh: DeviceMesh  # for the sharded DTensor
    placements: tuple[Placement, ...]
    shape: torch.Size  # the full parameter's
    stride: tuple[int, ...]  # the full parameter's
    _inner: _Inner | None = None

    @property
    def is_dtensor(self) -> bool:
        """Return True if the module computes with a DTensor."""
        return self._inner is not None

    @property
    def ring(self) -> DeviceMesh:
        """1-D mesh with the ranks that shard the parameter."""
        return self.info.ring

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the plain tensor to shard."""
        plain = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return plain.detach()

    def sharded(self, local: torch.Tensor, *, keeps_storage: bool = False) -> DTensor:
        """Return the sharded DTensor that aliases `local`, this rank's shard."""
        with torch.no_grad():
            made = wrap_local(isolate_storage(local), self.mesh, self.placements, self.shape, self.stride)
        # CUDA's `record_stream` ignores storages that do not own their memory.
        if keeps_storage and local.numel():
            made._local_tensor = local
        return made

    def full(self, local: torch.Tensor) -> torch.Tensor:
        """Return the parameter to compute with, which aliases the full local tensor."""
        if self._inner is None:
            return local
        with torch.no_grad():
            return self._inner.around(local)

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the plain gradient. Collective if its placements are not the parameter's."""
        if self._inner is None or not isinstance(grad, DTensor):
            return grad
        with torch.no_grad():
            return self._inner.local(grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshPlacement:
        """Return itself: copies share meshes."""
        return self


def accept_torch_results(choose: ShardPlacementFn | None) -> ShardPlacementFn | None:
    """Wrap a placement function so that it returns this module's class instead of torch's."""
    # torchtitan returns torch's class for experts, which have their own mesh. Parameters that share a torch mesh share
    # one of this module's.
    if choose is None:
        return None
    meshes: dict[int, tuple[Any, FSDPMeshInfo]] = {}  # torch's has no hash; it is kept, so that its id stays

    def call(parameter: nn.Parameter) -> Any:
        answer: Any = choose(parameter)
        info: Any = getattr(answer, "mesh_info", None)
        if isinstance(answer, ShardPlacementResult) or not hasattr(info, "shard_mesh_dim"):
            return answer
        if id(info) not in meshes:
            kind = FSDPMeshInfo if info.replicate_mesh_dim is None else HSDPMeshInfo
            later: dict[str, Any] = {
                name: getattr(info, name, None) for name in ("dp_mesh_dims", "spmd_mesh")
            }  # since torch 2.12
            meshes[id(info)] = info, kind(info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim, **later)
        return ShardPlacementResult(answer.placement, meshes[id(info)][1])

    return call


def place_param(
    name: str, parameter: nn.Parameter, info: DataParallelMeshInfo, choose: ShardPlacementFn | None
) -> MeshPlacement:
    """Decide a parameter's placement; `choose` may return another mesh than `info`."""
    wanted, info = _chosen(name, parameter, info, choose)
    local_dims = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).dim()
    dim = _dimension(name, parameter, wanted, local_dims) if info.shard_mesh_dim is not None else None
    if isinstance(parameter, DTensor):
        return _place_dtensor(name, parameter, info, dim)
    if info.is_spmd_mesh:
        raise ArgumentError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh "
            f"(e.g. via distribute_module). Got plain tensor for parameter '{name}'.",
        )
    placement = Replicate() if dim is None else Shard(dim)
    return MeshPlacement(
        info, dim, info.mesh, info.over(placement), parameter.size(), _row_major_strides(parameter.size())
    )


def _chosen(
    name: str, parameter: nn.Parameter, info: DataParallelMeshInfo, choose: ShardPlacementFn | None
) -> tuple[Shard | None, DataParallelMeshInfo]:
    answer: Any = choose(parameter) if choose is not None else None
    if answer is None or isinstance(answer, Shard):
        return answer, info
    if not isinstance(answer, ShardPlacementResult):
        raise ArgumentError(
            f"Invalid shard_placement_fn result: {answer}",
            where=name,
            expected="None, Shard or ShardPlacementResult",
        )
    if not isinstance(info, FSDPMeshInfo):
        raise ArgumentError(
            f"Per-param mesh via shard_placement_fn is not supported with {type(info).__name__}; "
            "it requires FSDPMeshInfo (or subclass)",
            where=name,
        )
    return answer.placement, answer.mesh_info


def _dimension(name: str, parameter: nn.Parameter, wanted: Shard | None, dims: int) -> int | None:
    """Return the dimension to shard; None to replicate a 0-dim tensor."""
    if not dims:
        return None
    if wanted is None:
        return 0
    dim = wanted.dim + dims if wanted.dim < 0 else wanted.dim
    if not 0 <= dim < dims:
        raise PlacementError(
            f"Shard dim {wanted.dim} is invalid for {dims}D tensor: {parameter.shape}",
            where=name,
            fix="Return a dimension that the parameter has from shard_placement_fn.",
        )
    return dim


def _row_major_strides(shape: torch.Size) -> tuple[int, ...]:
    """Return a row-major tensor's strides."""
    return tuple(prod(max(n, 1) for n in shape[at + 1 :]) for at in range(len(shape)))


def _build_shard_placement(dim: int | None, inner: Sequence[tuple[Placement, int]]) -> Placement:
    """Return a dimension's placement over data-parallel ranks."""
    if dim is None:
        return Replicate()
    pieces = prod(
        ranks for placement, ranks in inner if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim
    )
    return _StridedShard(dim, split_factor=pieces) if pieces > 1 else Shard(dim)


def _place_dtensor(name: str, parameter: DTensor, info: DataParallelMeshInfo, dim: int | None) -> MeshPlacement:
    mesh = parameter.device_mesh
    if mesh.device_type != info.mesh.device_type:
        raise ArgumentError(
            "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
            f"{mesh.device_type} for DTensor and {info.mesh.device_type} for FSDP",
            where=name,
        )
    if info.is_spmd_mesh:
        return _place_on_everything(name, parameter, info, dim)
    if len(parameter.placements) > 2:
        raise PlacementMissingError(
            f"FSDP only supports 1D TP/EP or 2D EP+TP, not {parameter.placements}",
            where=name,
            fix="Pass the full mesh with dp_mesh_dims.",
        )
    inner = _Inner(mesh, tuple(parameter.placements), parameter.size(), parameter.stride())
    data_parallel = _build_shard_placement(
        dim, [(placement, mesh.size(at)) for at, placement in enumerate(parameter.placements)]
    )
    placements = (*info.over(data_parallel), *parameter.placements)
    return MeshPlacement(
        info, dim, _join_meshes([info.mesh, mesh]), placements, parameter.size(), parameter.stride(), inner
    )


def _place_on_everything(name: str, parameter: DTensor, info: DataParallelMeshInfo, dim: int | None) -> MeshPlacement:
    mesh, dims = parameter.device_mesh, info.dp_mesh_dims
    assert dims is not None and mesh.mesh_dim_names is not None
    if mesh is not info.spmd_mesh:
        raise ArgumentError(
            "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different mesh objects",
            where=name,
            found=mesh,
            expected=info.spmd_mesh,
        )
    shard = [mesh.mesh_dim_names.index(dim_name) for dim_name in dims.shard_names]
    copies = [mesh.mesh_dim_names.index(dim_name) for dim_name in dims.replicate_names]
    for at, role in [*((at, "shard") for at in shard), *((at, "replicate") for at in copies)]:
        if not isinstance(parameter.placements[at], Replicate):
            raise ArgumentError(
                f"Expected Replicate() on DP {role} dim '{mesh.mesh_dim_names[at]}' (index {at}) "
                f"but got {parameter.placements[at]}",
                where=name,
            )
    inner = _Inner(
        mesh, tuple(parameter.placements), parameter.size(), parameter.stride(), frozenset((*shard, *copies))
    )
    placed_on, placements = _sharded_on_everything(parameter, info, dim, shard, copies)
    return MeshPlacement(info, dim, placed_on, placements, parameter.size(), parameter.stride(), inner)


def _sharded_on_everything(
    parameter: DTensor, info: DataParallelMeshInfo, dim: int | None, shard: list[int], copies: list[int]
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the sharded DTensor's mesh and placements, with joined shard dimensions."""
    mesh, inner = parameter.device_mesh, list(parameter.placements)
    assert mesh.mesh_dim_names is not None
    if not shard:
        return mesh, tuple(inner)
    data_parallel = _build_shard_placement(dim, [(inner[at], mesh.size(at)) for at in range(shard[0] + 1, mesh.ndim)])
    if len(shard) == 1:
        inner[shard[0]] = data_parallel
        return mesh, tuple(inner)
    meshes: list[DeviceMesh] = []
    placements: list[Placement] = []
    for at, name in enumerate(mesh.mesh_dim_names):
        if at == shard[0]:
            meshes.append(info.mesh)
            placements.extend(info.over(data_parallel))
        elif at not in shard and at not in copies:
            meshes.append(mesh[name])
            placements.append(inner[at])
    return _join_meshes(meshes), tuple(placements)
