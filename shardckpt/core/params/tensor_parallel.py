"""Parameters that tensor parallelism has cut already, as the wrapper sees them: plain tensors of this rank's part."""

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
from shardckpt.core.modules.fqn_and_params import ParamInfo
from shardckpt.core.params.param_bucket import Bucket


class Whole:
    """A parameter that nothing has cut yet."""

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

    def copies(self, mesh: DeviceMesh) -> int:
        """Return how many ranks of a mesh hold the same."""
        return mesh.size()


@dataclass(frozen=True, eq=False)
class Part(Whole):
    """A parameter that is a DTensor, over ranks that are not those of data parallelism.

    Attributes:
        mesh: Its mesh.
        placements: How it lies there.
        shape: Its shape as the user knows it.
        stride: And its strides.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __deepcopy__(self, memo: dict[int, object]) -> Part:
        """Meshes are shared, not copied."""
        return self

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the parameter."""
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def full(self, local: torch.Tensor) -> torch.Tensor:
        """Return the DTensor that the module computes with, around a part; it is aliased."""
        with torch.no_grad():
            return DTensor.from_local(
                local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
            )

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a gradient. Collective where the gradient lies otherwise than the parameter."""
        if not isinstance(grad, DTensor):
            return grad
        with torch.no_grad():
            return grad.redistribute(placements=self.placements).to_local()

    def copies(self, mesh: DeviceMesh) -> int:
        """Return how many ranks of its mesh hold the same part."""
        return math.prod(mesh.size(dim) for dim, each in enumerate(self.placements) if each.is_replicate())


def mesh_beneath(buckets: Iterable[Bucket]) -> DeviceMesh | None:
    """Return the mesh of the tensor parallelism below the wrapper's units; None where there is none.

    Args:
        buckets: The units' buckets.

    Raises:
        ArgumentError: There is more than one.
    """
    meshes = [each.mesh for bucket in buckets for each in bucket.placed if isinstance(each, Part)]
    if any(mesh != meshes[0] for mesh in meshes):
        raise ArgumentError("DTensors of several meshes lie below the units of one tree", found=set(map(str, meshes)))
    return meshes[0] if meshes else None


def copies_beneath(bucket: Bucket, mesh: DeviceMesh) -> list[int]:
    """Return for each parameter of a flat bucket how many ranks of a mesh hold the same of it.

    Args:
        bucket: The bucket.
        mesh: The mesh of the tensor parallelism below it.
    """
    whole: tuple[Whole, ...] = (Whole(),) * len(bucket.members)
    found = [each for each in bucket.placed if isinstance(each, Whole)] or whole
    return [each.copies(mesh) for each in found]


def placed(members: Sequence[ParamInfo]) -> tuple[Whole, ...]:
    """Tell how parameters were cut before data parallelism came to them; nothing where none was."""
    parameters = [member.parameter for member in members]
    if not any(isinstance(each, DTensor) for each in parameters):
        return ()
    return tuple(_placed(each) for each in parameters)


def _placed(parameter: nn.Parameter) -> Whole:
    if not isinstance(parameter, DTensor):
        return Whole()
    return Part(parameter.device_mesh, tuple(parameter.placements), parameter.shape, parameter.stride())


def expose_plain(members: Sequence[ParamInfo]) -> None:
    """Let plain parameters stand for DTensors, as those that a user sees while a unit is sharded.

    Args:
        members: The unit's parameters.
    """
    for member in members:
        parameter = member.parameter
        if isinstance(parameter, DTensor):
            plain = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
            plain.__dict__.update(parameter.__dict__)
            member.replace(plain)
