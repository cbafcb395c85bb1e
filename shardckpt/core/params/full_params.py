"""Full values in a shard's layout: gather, shard, scatter from rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardckpt.core.comm.streams import ResizableStorage
from shardckpt.core.params.param_bucket import Bucket


@dataclass
class FullValues:
    """Full values in their own memory, or views of the shard if nothing is sharded."""

    values: list[torch.Tensor]  # one per parameter in the bucket, on the compute device
    buffer: ResizableStorage | None = None  # counted memory; None if the values do not have their own

    def free(self) -> None:
        """Free the memory; the values must not be read after that."""
        if self.buffer is not None:
            self.buffer.free()


def gather_full(bucket: Bucket, shard: torch.Tensor) -> FullValues:
    """Gather the full values for a tensor with a bucket's shard layout. Collective."""
    shard = shard.to(bucket.compute_device)
    if bucket.keeps_full:
        return FullValues(bucket.packing.views(shard))
    incoming = ResizableStorage(bucket.packing.all_gather_numel, shard.dtype, shard.device)
    bucket.group.all_gather(incoming.tensor, shard, f"gather {bucket.name}").wait()
    return _unpack(bucket, incoming)


class Staging:
    """Buffer that units use one after the other, as large as the largest request."""

    def __init__(self) -> None:
        self._held: ResizableStorage | None = None

    def place(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized 1-D tensor, in the last call's memory if possible."""
        nbytes = numel * dtype.itemsize
        held = self._held
        if held is None or held.tensor.device != device or held.tensor.numel() < nbytes:
            if held is not None:
                held.free()  # before the allocation; a backend thread may hold the tensor a little longer
            held = self._held = ResizableStorage(nbytes, torch.uint8, device)
        return held.tensor[:nbytes].view(dtype)


def gather_copies(
    bucket: Bucket, shard: torch.Tensor, staging: Staging, *, first_only: bool = False
) -> Iterator[torch.Tensor] | None:
    """Gather full values into separate memory for each parameter. Collective."""
    # With `first_only`, only rank 0 in the shard group and among replicas gets values; with tensor parallelism there is
    # one such rank per TP rank. `staging` must not be used until all values are read.
    shard, group, what = shard.to(bucket.compute_device), bucket.group, f"gather {bucket.name}"
    wanted = group.is_first or not first_only
    if group.size == 1 or bucket.keeps_full:
        return bucket.packing.copy_full_params(shard) if wanted else None
    incoming = staging.place(bucket.packing.all_gather_numel, shard.dtype, shard.device) if wanted else None
    if first_only:
        group.gather_to_rank0(incoming, shard, what)
    elif incoming is not None:
        group.all_gather(incoming, shard, what).wait()
    return None if incoming is None else bucket.packing.copy_full_params(incoming)


def _unpack(bucket: Bucket, incoming: ResizableStorage) -> FullValues:
    packing = bucket.packing
    if packing.is_direct:
        return FullValues(packing.views(incoming.tensor), incoming)
    buffer = ResizableStorage(packing.all_gather_numel, incoming.tensor.dtype, incoming.tensor.device)
    packing.unpack(incoming.tensor.view(packing.layout.world, -1), buffer.tensor)
    incoming.free()
    return FullValues(packing.views(buffer.tensor), buffer)


def gather_some(bucket: Bucket, parts: Sequence[torch.Tensor | None], dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Gather full parameters, with zeros for missing parts; None if no rank has a part. Collective."""
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
    values = _unpack(bucket, incoming).values
    return [value if there else None for value, there in zip(values, has, strict=True)]


def concat_shards(
    bucket: Bucket, parts: Sequence[torch.Tensor | None], dtype: torch.dtype, staging: Staging | None = None
) -> torch.Tensor:
    """Concatenate parameter shards, or zeros for None, in the layout of the bucket's shard."""
    size, device = bucket.packing.layout.chunk, bucket.compute_device
    # Memory from `staging` has undefined padding.
    if staging is None:
        joined = torch.zeros(size, dtype=dtype, device=device)
    else:
        joined = staging.place(bucket.packing.all_gather_numel, dtype, device)[bucket.group.rank * size :][:size]
    for place, part in zip(bucket.split_shard(joined), parts, strict=True):
        if part is not None:
            place.copy_(part)
        elif staging is not None:
            place.zero_()
    return joined


def write_shard(bucket: Bucket, values: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Copy this rank's shard of full values to `out`."""
    if not bucket.keeps_full:
        bucket.packing.write_shard(values, bucket.group.rank, out)
        return
    for place, value in zip(bucket.packing.views(out), values, strict=True):
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)


def scatter_full(bucket: Bucket, values: Sequence[torch.Tensor | None] | None, out: torch.Tensor) -> list[bool]:
    """Scatter rank 0's full values to all shards; return which parameters rank 0 has. Collective."""
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
