"""The wrapper's tensor-parallel parameters, as plain tensors with their TP shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardckpt.core.errors import ArgumentError
from shardckpt.core.modules.dtensors import wrap_local
from shardckpt.core.modules.fqn_and_params import ParamInfo
from shardckpt.core.params.param_bucket import Bucket


class LocalParam:
    """Parameter that tensor parallelism does not shard."""

    dim = None

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter itself."""
        return parameter

    def sharded(self, local: torch.Tensor, *, keeps_storage: bool = False) -> torch.Tensor:
        """Return `local` itself."""
        del keeps_storage
        return local

    def full(self, local: torch.Tensor) -> torch.Tensor:
        """Return `local` itself."""
        return local

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient itself."""
        return grad

    def count_replicas(self, mesh: DeviceMesh) -> int:
        """Return the number of ranks in a mesh that have the same values."""
        return mesh.size()


@dataclass(frozen=True, eq=False)
class TPShardedParam(LocalParam):
    """Tensor-parallel parameter: a DTensor over a mesh that is not data-parallel."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size  # the full parameter's
    stride: tuple[int, ...]  # the full parameter's

    def __deepcopy__(self, memo: dict[int, object]) -> TPShardedParam:
        """Return itself: copies share meshes."""
        return self

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's TP shard of the parameter."""
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def full(self, local: torch.Tensor) -> torch.Tensor:
        """Return the DTensor to compute with, which aliases the TP shard."""
        with torch.no_grad():
            return wrap_local(local, self.mesh, self.placements, self.shape, self.stride)

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return a gradient's TP shard. Collective if placements are not equal."""
        if not isinstance(grad, DTensor):
            return grad
        with torch.no_grad():
            return grad.redistribute(placements=self.placements).to_local()

    def count_replicas(self, mesh: DeviceMesh) -> int:
        """Return the number of ranks in a mesh that have the same TP shard."""
        return math.prod(mesh.size(dim) for dim, placement in enumerate(self.placements) if placement.is_replicate())


def get_tp_mesh(buckets: Iterable[Bucket]) -> DeviceMesh | None:
    """Return the buckets' tensor-parallel mesh, or None."""
    meshes = [place.mesh for bucket in buckets for place in bucket.placements if isinstance(place, TPShardedParam)]
    if any(mesh != meshes[0] for mesh in meshes):
        raise ArgumentError("units below one root must have their DTensors on one mesh", found=set(map(str, meshes)))
    return meshes[0] if meshes else None


def count_tp_replicas(bucket: Bucket, mesh: DeviceMesh) -> list[int]:
    """Return the number of ranks with the same values for each parameter in a bucket."""
    plain: tuple[LocalParam, ...] = (LocalParam(),) * len(bucket.members)
    params = [param for param in bucket.placements if isinstance(param, LocalParam)] or plain
    return [param.count_replicas(mesh) for param in params]


def build_tp_params(members: Sequence[ParamInfo]) -> tuple[LocalParam, ...]:
    """Return the parameters' tensor-parallel sharding; empty if none is sharded."""
    parameters = [member.parameter for member in members]
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return ()
    return tuple(map(_build_tp_param, parameters))


def _build_tp_param(parameter: nn.Parameter) -> LocalParam:
    if not isinstance(parameter, DTensor):
        return LocalParam()
    return TPShardedParam(parameter.device_mesh, tuple(parameter.placements), parameter.shape, parameter.stride())


def register_local_tensors(members: Sequence[ParamInfo]) -> None:
    """Replace DTensor parameters by plain parameters, registered while sharded, with their local tensors."""
    for member in members:
        parameter = member.parameter
        if isinstance(parameter, DTensor):
            plain = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
            plain.__dict__.update(parameter.__dict__)
            member.replace(plain)
