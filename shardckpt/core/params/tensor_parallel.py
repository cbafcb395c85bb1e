"""Tensor-parallel parameters as the wrapper sees them: plain tensors of this rank's TP shard."""

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
    """A parameter that is not sharded by tensor parallelism."""

    dim = None

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter."""
        return parameter

    def sharded(self, local: torch.Tensor) -> torch.Tensor:
        """Return what it is given."""
        return local

    def full(self, local: torch.Tensor) -> torch.Tensor:
        """Return what it is given."""
        return local

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient."""
        return grad

    def count_replicas(self, mesh: DeviceMesh) -> int:
        """Count the ranks of a mesh that hold the same values."""
        return mesh.size()


@dataclass(frozen=True, eq=False)
class TPShardedParam(LocalParam):
    """A tensor-parallel parameter: a DTensor over other ranks than those of data parallelism.

    Attributes:
        mesh: Its mesh.
        placements: Its placements there.
        shape: Its shape as the user knows it.
        stride: And its strides.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __deepcopy__(self, memo: dict[int, object]) -> TPShardedParam:
        """Meshes are shared, not copied."""
        return self

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's TP shard of the parameter."""
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def full(self, local: torch.Tensor) -> torch.Tensor:
        """Return the DTensor that the module computes with, around a part; it is aliased."""
        with torch.no_grad():
            return wrap_local(local, self.mesh, self.placements, self.shape, self.stride)

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a gradient. Collective if its placements differ from the parameter's."""
        if not isinstance(grad, DTensor):
            return grad
        with torch.no_grad():
            return grad.redistribute(placements=self.placements).to_local()

    def count_replicas(self, mesh: DeviceMesh) -> int:
        """Count the ranks of its mesh that hold the same TP shard."""
        return math.prod(mesh.size(dim) for dim, each in enumerate(self.placements) if each.is_replicate())


def get_tp_mesh(buckets: Iterable[Bucket]) -> DeviceMesh | None:
    """Return the tensor-parallel mesh of buckets, or None.

    Args:
        buckets: The units' buckets.

    Raises:
        ArgumentError: There is more than one.
    """
    meshes = [each.mesh for bucket in buckets for each in bucket.placements if isinstance(each, TPShardedParam)]
    if any(mesh != meshes[0] for mesh in meshes):
        raise ArgumentError("the units of one tree have DTensors on several meshes", found=set(map(str, meshes)))
    return meshes[0] if meshes else None


def count_tp_replicas(bucket: Bucket, mesh: DeviceMesh) -> list[int]:
    """Count for each parameter of a flat bucket the ranks of a mesh that hold the same values.

    Args:
        bucket: The bucket.
        mesh: The tensor-parallel mesh.
    """
    plain: tuple[LocalParam, ...] = (LocalParam(),) * len(bucket.members)
    params = [param for param in bucket.placements if isinstance(param, LocalParam)] or plain
    return [param.count_replicas(mesh) for param in params]


def build_tp_params(members: Sequence[ParamInfo]) -> tuple[LocalParam, ...]:
    """Describe how tensor parallelism shards parameters; return nothing if it shards none."""
    parameters = [member.parameter for member in members]
    if not any(isinstance(each, DTensor) for each in parameters):
        return ()
    return tuple(_build_tp_param(each) for each in parameters)


def _build_tp_param(parameter: nn.Parameter) -> LocalParam:
    if not isinstance(parameter, DTensor):
        return LocalParam()
    return TPShardedParam(parameter.device_mesh, tuple(parameter.placements), parameter.shape, parameter.stride())


def register_local_tensors(members: Sequence[ParamInfo]) -> None:
    """Replace DTensor parameters by plain ones of their local tensors, which are registered while sharded.

    Args:
        members: The unit's parameters.
    """
    for member in members:
        parameter = member.parameter
        if isinstance(parameter, DTensor):
            plain = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
            plain.__dict__.update(parameter.__dict__)
            member.replace(plain)
