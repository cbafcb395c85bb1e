"""DTensors around local tensors on any device; the DTensors' full tensors; the memory order of dense tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from shardckpt.boxes import chunk_range
from shardckpt.torch_features import shard_replicated

MeshPlacements = tuple[DeviceMesh, tuple[Placement, ...]]  # for a DTensor


def wrap_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """Return a DTensor that aliases a local tensor on the local tensor's device; `stride` is the full tensor's."""
    if local.device.type == mesh.device_type or local.is_meta:
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(torch.Size(shape), tuple(stride), local.dtype))
    with torch.no_grad():
        # `DTensor.from_local` would copy an offloaded tensor from the CPU to the mesh's device.
        return DTensor(local.view_as(local), spec, requires_grad=local.requires_grad)  # type: ignore[no-untyped-call]


def is_strided(value: DTensor) -> bool:
    """Return True if a DTensor has dimensions that data parallelism split after tensor parallelism did."""
    return any(hasattr(placement, "split_factor") for placement in value.placements)


def sort_by_split_order(placements: Sequence[Placement], sizes: Sequence[int]) -> list[tuple[int, Placement]] | None:
    """Return mesh dimensions and placements in the order in which they split a tensor; None if ranks have no boxes."""
    # Mesh dimensions split from left to right. `fully_shard` uses a strided shard if tensor parallelism shards the same
    # dimension. It splits after mesh dimensions to its right, whose number of parts is its split factor. A strided
    # shard that follows no split of the mesh comes from `view` on a tensor that is sharded by columns, for example.
    ordered: list[tuple[int, Placement]] = []
    for at in reversed(range(len(placements))):
        dim, before = getattr(placements[at], "dim", None), getattr(placements[at], "split_factor", 1)
        parts, place = 1, 0
        while parts < before and place < len(ordered):
            other, placement = ordered[place]
            parts *= sizes[other] if getattr(placement, "dim", None) == dim else 1
            place += 1
        if parts != before:
            return None
        ordered.insert(place, (at, placements[at]))
    return ordered


def split_rows(rows: int, ranks: int) -> tuple[int, ...]:
    """Return each rank's number of rows; the last ranks may have fewer or none."""
    return tuple(chunk_range(rows, ranks, rank)[1] for rank in range(ranks))


def gather_full_tensor(value: DTensor) -> torch.Tensor:
    """Gather a DTensor's full tensor to all ranks in its mesh. Collective."""
    # Some versions of torch misplace strided rows in `full_tensor` if the ranks do not divide them, so we join them
    # here.
    mesh = value.device_mesh
    splits = _find_splits(value) if is_strided(value) and mesh.get_coordinate() is not None else None
    if splits is None or any(p.is_partial() for p in value.placements):
        return value.full_tensor()
    joined = value.to_local()
    for at, dim, rows in reversed(splits):
        counts = split_rows(rows, mesh.size(at))
        own = pad_rows(joined, dim, counts[0])
        parts = [torch.empty_like(own) for _ in counts]
        dist.all_gather([view_as_flat_bytes(part) for part in parts], view_as_flat_bytes(own), group=mesh.get_group(at))
        joined = torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, counts, strict=True)], dim)
    return joined


def shard_full_tensor(value: torch.Tensor, kept: DTensor) -> torch.Tensor:
    """Return this rank's part of a full tensor that every rank in a DTensor's mesh has."""
    mesh = kept.device_mesh
    splits = _find_splits(kept) if is_strided(kept) and mesh.get_coordinate() is not None else None
    if splits is None:
        return shard_replicated(value, mesh, kept.placements).to_local()
    for at, dim, rows in splits:
        value = value.narrow(dim, *chunk_range(rows, mesh.size(at), mesh.get_local_rank(at)))
    return value


def _find_splits(kept: DTensor) -> list[tuple[int, int, int]] | None:
    """Return mesh dimension, tensor dimension and this rank's earlier rows per split, in order; None without boxes."""
    mesh, sizes, found = kept.device_mesh, list(kept.shape), []
    order = sort_by_split_order(kept.placements, tuple(mesh.shape))
    if order is None:
        return None
    for at, placement in order:
        dim = getattr(placement, "dim", None)
        if dim is not None:
            found.append((at, dim, sizes[dim]))
            sizes[dim] = chunk_range(sizes[dim], mesh.size(at), mesh.get_local_rank(at))[1]
    return found


def pad_rows(part: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    """Return a contiguous tensor padded to a number of rows with zeros."""
    if part.shape[dim] == rows:
        return part.contiguous()
    padded = part.new_zeros([rows if d == dim else n for d, n in enumerate(part.shape)])
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    return padded


def view_as_flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as 1-D bytes, which every backend sends."""
    return tensor.view(-1).view(torch.uint8)


def get_mesh_placements(tensor: torch.Tensor) -> MeshPlacements | None:
    """Return a DTensor's mesh and placements; None for a plain tensor."""
    return (tensor.device_mesh, tuple(tensor.placements)) if isinstance(tensor, DTensor) else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local tensor, after the collective that computes it; a plain tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
        own = tensor.to_local()
    return own.wait() if isinstance(own, AsyncCollectiveTensor) else own


def detach(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its history; a wrapper subclass itself, whose `detach` may copy inner tensors."""
    is_own = type(local(tensor)).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return tensor.detach() if is_own else tensor


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a dense tensor's dimensions from slowest to fastest; empty if row-major."""
    if tensor.is_contiguous():
        return ()
    steps = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-steps[d], d)))
    return order if tensor.permute(order).is_contiguous() else ()


def view_in_order(flat: torch.Tensor, shape: Sequence[int], order: tuple[int, ...]) -> torch.Tensor:
    """Return a view of a 1-D tensor, whose elements are in memory order, with a shape and that order."""
    if not order:
        return flat.view(shape)
    return flat.view([shape[d] for d in order]).permute([order.index(d) for d in range(len(order))])
