"""Full values of tensors with the layout of a shard: gathered, sharded again, scattered from rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardckpt.core.comm.streams import ResizableStorage
from shardckpt.core.params.param_bucket import Bucket


@dataclass
class FullValues:
    """Full values in separate memory, or views of the shard if nothing is sharded.

    Attributes:
        values: For each parameter of a bucket its value, where the unit computes.
        buffer: The memory, which is counted; None where it is not their own.
    """

    values: list[torch.Tensor]
    buffer: ResizableStorage | None = None

    def free(self) -> None:
        """Free the memory; the values cannot be read after that."""
        if self.buffer is not None:
            self.buffer.free()


def gather_full(bucket: Bucket, shard: torch.Tensor) -> FullValues:
    """Gather the full values of a tensor with the layout of a bucket's shard. Collective.

    Args:
        bucket: The bucket.
        shard: This rank's part, 1-D: the stored parameters, a gradient.
    """
    own = shard.to(bucket.compute_device)
    if bucket.keeps_full:
        return FullValues(bucket.packing.views(own))
    incoming = ResizableStorage(bucket.packing.all_gather_numel, own.dtype, own.device)
    bucket.group.all_gather(incoming.tensor, own, f"gather {bucket.name}").wait()
    return _unpacked(bucket, incoming)


class Staging:
    """Memory that units use one after the other: allocated once for the largest, freed with this object."""

    def __init__(self) -> None:
        self._held: ResizableStorage | None = None

    def place(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory, 1-D: that of the last call again where it is as large, any other with any content.

        Args:
            numel: Elements.
            dtype: Their type.
            device: Where it is.
        """
        nbytes = numel * dtype.itemsize
        held = self._held
        if held is None or held.tensor.device != device or held.tensor.numel() < nbytes:
            if held is not None:
                held.free()  # before there is more; a thread of the backend may hold the tensor for a moment yet
            held = self._held = ResizableStorage(nbytes, torch.uint8, device)
        return held.tensor[:nbytes].view(dtype)


def gather_copies(
    bucket: Bucket, shard: torch.Tensor, staging: Staging, *, first_only: bool = False
) -> Iterator[torch.Tensor] | None:
    """Gather as `gather_full` does, into separate memory for each parameter. Collective.

    Args:
        bucket: The bucket.
        shard: This rank's part, 1-D.
        staging: Memory of the all-gather output; it must stay unchanged until all values are read.
        first_only: Gather to rank 0 of all that share the bucket or have replicas.

    Returns:
        The full value of each parameter; with `first_only` None on other ranks than rank 0 of the bucket's group and
        replicas. With tensor parallelism each TP rank has such a rank 0.
    """
    own, group, what = shard.to(bucket.compute_device), bucket.group, f"gather {bucket.name}"
    wanted = group.is_first or not first_only
    if group.size == 1 or bucket.keeps_full:
        return bucket.packing.copy_full_params(own) if wanted else None
    incoming = staging.place(bucket.packing.all_gather_numel, own.dtype, own.device) if wanted else None
    if first_only:
        group.gather_to_rank0(incoming, own, what)
    elif incoming is not None:
        group.all_gather(incoming, own, what).wait()
    return None if incoming is None else bucket.packing.copy_full_params(incoming)


def _unpacked(bucket: Bucket, incoming: ResizableStorage) -> FullValues:
    packing = bucket.packing
    if packing.is_direct:
        return FullValues(packing.views(incoming.tensor), incoming)
    buffer = ResizableStorage(packing.unsharded_numel, incoming.tensor.dtype, incoming.tensor.device)
    packing.unpack(incoming.tensor, buffer.tensor)
    incoming.free()
    return FullValues(packing.views(buffer.tensor), buffer)


def gather_some(bucket: Bucket, parts: Sequence[torch.Tensor | None], dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Gather the full values of parameters' parts, of which some are missing. Collective.

    Args:
        bucket: The bucket.
        parts: For each parameter this rank's part, None if missing.
        dtype: Their type, the same on all ranks.

    Returns:
        For each parameter the full value, missing parts as zeros; None where no rank has a part.
    """
    chunk, world = bucket.packing.layout.chunk, bucket.packing.layout.world
    flags = torch.tensor([float(part is not None) for part in parts]).to(dtype)
    if bucket.keeps_full:
        return list(parts)
    row = torch.cat([concat_shards(bucket, parts, dtype), flags.to(bucket.compute_device)])
    rows = row.new_empty(world * row.numel())
    bucket.group.all_gather(rows, row, f"gather gradients of {bucket.name}").wait()
    table = rows.view(world, -1)
    incoming = ResizableStorage(world * chunk, dtype, row.device)
    incoming.tensor.view(world, chunk).copy_(table[:, :chunk])
    has = (table[:, chunk:] != 0).any(0).tolist()
    values = _unpacked(bucket, incoming).values
    return [value if there else None for value, there in zip(values, has, strict=True)]


def concat_shards(
    bucket: Bucket, parts: Sequence[torch.Tensor | None], dtype: torch.dtype, staging: Staging | None = None
) -> torch.Tensor:
    """Concatenate parameters' shards in the layout of the bucket's shard, zeros for missing ones.

    Args:
        bucket: The bucket.
        parts: For each parameter this rank's part, None if missing.
        dtype: Their type.
        staging: Write to where `gather_copies` gathers through the same staging, with any content in the padding; None
            for new memory with zeros there.
    """
    size, device = bucket.packing.layout.chunk, bucket.compute_device
    if staging is None:
        joined = torch.zeros(size, dtype=dtype, device=device)
    else:
        joined = staging.place(bucket.packing.all_gather_numel, dtype, device)[bucket.rank * size :][:size]
    for place, part in zip(bucket.split_shard(joined), parts, strict=True):
        if part is not None:
            place.copy_(part)
        elif staging is not None:
            place.zero_()
    return joined


def write_shard(bucket: Bucket, values: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Copy this rank's shard of full values to `out`; values may be views of `out` if nothing is sharded.

    Args:
        bucket: The bucket.
        values: For each parameter its full value.
        out: 1-D, as long as the shard.
    """
    if not bucket.keeps_full:
        bucket.packing.write_shard(values, bucket.rank, out)
        return
    for place, value in zip(bucket.packing.views(out), values, strict=True):
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)


def scatter_full(bucket: Bucket, values: Sequence[torch.Tensor | None] | None, out: torch.Tensor) -> list[bool]:
    """Scatter rank 0's full values to the shards of all ranks. Collective.

    Args:
        bucket: The bucket.
        values: For each parameter its full value on rank 0, None for one that is missing; None elsewhere.
        out: 1-D, as long as the shard: what is filled, missing values with zeros.

    Returns:
        For each parameter whether rank 0 had a value.
    """
    chunk, count = bucket.packing.layout.chunk, len(bucket.members)
    row = torch.zeros(chunk + count, dtype=out.dtype, device=bucket.compute_device)
    rows: torch.Tensor | None = None
    if values is not None:
        rows = row.new_zeros(bucket.packing.layout.world, chunk + count)
        rows[:, chunk:] = torch.tensor([float(value is not None) for value in values]).to(rows)
        _pack(bucket, values, rows)
    bucket.group.scatter_from_rank0(row, rows, f"write back {bucket.name}")
    out.copy_(row[:chunk])
    return (row[chunk:] != 0).tolist()


def _pack(bucket: Bucket, values: Sequence[torch.Tensor | None], rows: torch.Tensor) -> None:
    chunk = bucket.packing.layout.chunk
    if not bucket.keeps_full:
        bucket.packing.pack(values, rows[:, :chunk])
        return
    for place, value in zip(bucket.packing.views(rows[0, :chunk]), values, strict=True):
        if value is not None:
            place.copy_(value)
