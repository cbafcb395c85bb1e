"""A tensor's shards on this rank: boxes in the full tensor as views, without copies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardckpt.boxes import Box, Shape, chunk_range, full_box
from shardckpt.core.modules.dtensors import (
    detach,
    get_mesh_placements,
    local,
    memory_order,
    sort_by_split_order,
    view_in_order,
)
from shardckpt.errors import UnsupportedError
from shardckpt.state.keys.slots import is_wrapper_subclass


class LocalShard(NamedTuple):
    """A tensor's box on this rank."""

    box: Box  # offsets and lengths in the full tensor
    tensor: torch.Tensor  # a view into the rank's memory: a write changes the model


class TensorShards(NamedTuple):
    """A tensor's full shape, with its shards on this rank."""

    shape: Shape
    dtype: torch.dtype
    shards: tuple[LocalShard, ...]  # disjoint; may be empty

    @property
    def order(self) -> tuple[int, ...]:
        """Dimensions from slowest to fastest in the shards' memory; empty if row-major, or elements overlap."""
        others = [shard.tensor for shard in self.shards if not shard.tensor.is_contiguous()]
        return next(filter(None, map(find_order, others)), ())


def find_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions from slowest to fastest, also with gaps in its memory; empty if row-major."""
    if tensor.is_contiguous():
        return ()
    steps = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-steps[d], d)))
    has_gaps_only = all(steps[a] >= steps[b] * tensor.shape[b] > 0 for a, b in itertools.pairwise(order))
    if has_gaps_only and order != tuple(range(tensor.dim())):
        return order
    return memory_order(tensor)


def repeats_elements(tensor: torch.Tensor) -> bool:
    """Return True if elements share memory, as in an expanded tensor."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def find_wrapper(array: TensorShards) -> torch.Tensor | None:
    """Return this rank's shard of an array if it is a wrapper subclass."""
    if len(array.shards) != 1 or not is_wrapper_subclass(array.shards[0].tensor):
        return None
    return array.shards[0].tensor


def empty_in_order(
    shape: Sequence[int], order: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Return an uninitialized tensor with this memory order."""
    return view_in_order(torch.empty(prod(shape), dtype=dtype, device=device), shape, order)


def get_tensor_shards(tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> TensorShards:
    """Return this rank's shards for a plain tensor or DTensor."""
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return TensorShards(shape, tensor.dtype, (LocalShard(full_box(shape), detach(tensor)),))
    own = detach(local(tensor))
    box = get_box(_choose_placed(tensor, parameter), own)
    shards = () if box is None or 0 in box.size else (LocalShard(box, own),)
    return TensorShards(tuple(tensor.shape), own.dtype, shards)


def _choose_placed(tensor: DTensor, parameter: torch.Tensor | None) -> DTensor:
    """Return the parameter if torch calls its layout and the DTensor's equal; otherwise the DTensor."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    return parameter if get_mesh_placements(tensor) == get_mesh_placements(parameter) else tensor


def get_box(tensor: DTensor, own: torch.Tensor | None = None) -> Box | None:
    """Return a DTensor's box on this rank; None if the rank is not in the mesh."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    box = _compute_box(tuple(tensor.shape), tuple(tensor.placements), _get_mesh_shape(mesh), tuple(coordinate))
    shape = tuple((local(tensor) if own is None else own).shape)
    if shape != box.size:
        raise UnsupportedError(
            "a DTensor's local tensor must fit its placements",
            found=shape,
            expected=box.size,
            fix="Redistribute it to plain Shard placements first.",
        )
    return box


_SHAPES: WeakKeyDictionary[DeviceMesh, Shape] = WeakKeyDictionary()


def _get_mesh_shape(mesh: DeviceMesh) -> Shape:
    """Return a mesh's cached shape; torch computes it on every access."""
    shape = _SHAPES.get(mesh)
    if shape is None:
        shape = _SHAPES[mesh] = tuple(mesh.shape)
    return shape


@lru_cache(maxsize=4096)  # a hundred thousand tensors have a few dozen shapes
def _compute_box(shape: Shape, placements: tuple[Placement, ...], mesh: Shape, coordinate: Shape) -> Box:
    """Return one rank's box for given placements."""
    if any(placement.is_partial() for placement in placements):
        raise UnsupportedError("a DTensor with partial sums cannot be saved", fix="Redistribute it first.")
    order = sort_by_split_order(placements, mesh)
    if order is None:
        raise UnsupportedError(
            "a DTensor with a strided shard must have rows that follow its mesh",
            found=placements,
            expected="boxes, as `fully_shard` over tensor parallelism makes them",
            fix="Redistribute it to plain Shard placements first.",
        )
    offset, size = [0] * len(shape), list(shape)
    for at, placement in order:
        dim = getattr(placement, "dim", None)
        if dim is not None:
            start, size[dim] = chunk_range(size[dim], mesh[at], coordinate[at])
            offset[dim] += start
    return Box(tuple(offset), tuple(size))


def end_address(tensor: torch.Tensor) -> int:
    """Return the address after a tensor's last byte; it must have elements."""
    if tensor.is_contiguous():
        return tensor.data_ptr() + tensor.nbytes
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
