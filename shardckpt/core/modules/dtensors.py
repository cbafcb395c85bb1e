"""DTensors around local tensors on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement


def wrap_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """Return a DTensor that aliases a local tensor on the local tensor's device.

    `DTensor.from_local` would copy an offloaded tensor from the CPU to the device of the mesh.

    Args:
        local: This rank's shard.
        mesh: Mesh of the ranks.
        placements: Placements, one per mesh dimension; tensor dimensions count from 0.
        shape: Shape of the full tensor.
        stride: Strides of the full tensor, in elements.
    """
    if local.device.type == mesh.device_type or local.is_meta:
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(torch.Size(shape), tuple(stride), local.dtype))
    with torch.no_grad():
        return DTensor(local.view_as(local), spec, requires_grad=local.requires_grad)  # type: ignore[no-untyped-call]


def is_strided(value: DTensor) -> bool:
    """Return True if a DTensor has dimensions that data parallelism split after tensor parallelism did."""
    return any(hasattr(placement, "split_factor") for placement in value.placements)


def sort_by_split_order(placements: Sequence[Placement]) -> list[tuple[int, Placement]]:
    """Return mesh dimensions and placements in the order in which they split a tensor.

    A strided shard, which `fully_shard` uses if tensor parallelism shards the same dimension, splits last.
    """
    return sorted(enumerate(placements), key=lambda pair: hasattr(pair[1], "split_factor"))
