"""Who shares a bucket and how its 1-D buffers travel: all-gather, reduce-scatter, all-reduce, broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardckpt.core.errors import DeviceMemoryError
from shardckpt.devices import is_device_error, is_out_of_memory
from shardckpt.errors import RankError

# Names, looked up at each call, so that a function that replaces the one of torch.distributed is called.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

# Types that gloo moves as they are; everything else travels as bytes, which a gather does not mind.
_MOVABLE = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
    }
)


class Pending:
    """A collective that may still be under way.

    Args:
        work: What torch returned for it; None for one that needed nobody.
        what: What it is for, named when it fails.
    """

    def __init__(self, work: Any, what: str) -> None:
        self._work = work
        self._what = what

    @property
    def done(self) -> bool:
        """Return True if `wait` would return at once."""
        return self._work is None or (isinstance(self._work, dist.Work) and self._work.is_completed())

    def wait(self) -> None:
        """Return when the result can be read.

        Raises:
            RankError: Another rank did not take part in time, or is gone.
            DeviceMemoryError: This rank is out of memory.
        """
        work, self._work = self._work, None
        if work is None:
            return
        with _Named(self._what):
            work.wait()


class _Named:
    """A context in which an error of a collective names the unit, and whose fault it is.

    Args:
        what: What the collective is for.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, (RankError, DeviceMemoryError)):
            return
        rank = dist.get_rank()
        if is_out_of_memory(error):
            raise DeviceMemoryError(
                f"rank {rank} ran out of memory to {self._what}: {error}",
                fix="Use smaller units or batches; other ranks may wait for this one until the timeout of the group.",
            ) from error
        if not is_device_error(error):
            raise RankError(
                f"rank {rank} waited in vain to {self._what}: {error}",
                rank=rank,
                fix="Another rank left, or ran other units; its own log says why.",
            ) from error


@dataclass(frozen=True)
class CommHook:
    """A communication hook of a user, which averages gradients instead of the engine.

    Attributes:
        state: Passed to every call.
        call: `(state, gradient)` in place where nothing is sharded, else `(state, full gradient, this rank's part)`;
            gradients are 1-D and padded.
    """

    state: object
    call: Callable[..., None]

    def __deepcopy__(self, memo: dict[int, Any]) -> CommHook:
        """It is the user's, and shared by copies."""
        return self


class CollectiveOp(Protocol):
    """A custom collective, with the buffers it works on."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor to gather into, or to reduce from."""


class AllGatherOp(CollectiveOp, Protocol):
    """A custom all-gather."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Fill the output with everyone's input, in rank order; return what can be waited for, or None."""


class ReduceScatterOp(CollectiveOp, Protocol):
    """A custom reduce-scatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Fill the output with this rank's part of the reduced inputs; return what can be waited for, or None."""


def allocate(custom: CollectiveOp | None, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a 1-D buffer for a collective, from a user's own collective if there is one.

    Args:
        custom: The user's; None for torch's.
        numel: Number of elements.
        dtype: Element type.
        device: Device of the buffer.
    """
    if custom is not None:
        return custom.allocate((numel,), dtype=dtype, device=device)
    return torch.empty(numel, dtype=dtype, device=device)


@dataclass(frozen=True)
class CustomCollectives:
    """Custom collectives of a user; None for torch's.

    Attributes:
        all_gather: Gathers shards.
        reduce_scatter: Sums gradients.
        all_reduce_hook: Given this rank's part of the averaged gradient, changes it in place.
    """

    all_gather: AllGatherOp | None = None
    reduce_scatter: ReduceScatterOp | None = None
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomCollectives:
        """Return itself: copies share a user's collectives."""
        return self


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that a bucket is sharded over, and those that hold replicas of the same shard.

    Attributes:
        shard: Ranks that share the bucket; None if nothing is sharded.
        replicate: Ranks that store the same shard as this rank; None without replicas.
        scatter: The ranks of `shard` again, with channels of their own for gradients; None for the same ones.
        mesh: The mesh that the user passed, (replicate, shard); None if the user passed groups.
    """

    shard: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None = None
    scatter: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardGroup:
        """Ranks are shared, not copied."""
        return self

    @cached_property
    def size(self) -> int:
        """Ranks that share the bucket."""
        return self.shard.size() if self.shard is not None else 1

    @cached_property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.shard.rank() if self.shard is not None else 0

    @cached_property
    def replicas(self) -> int:
        """Ranks that hold this rank's shard."""
        return self.replicate.size() if self.replicate is not None else 1

    @cached_property
    def world(self) -> int:
        """Ranks whose gradients are averaged."""
        return self.size * self.replicas

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, what: str, custom: AllGatherOp | None = None
    ) -> Pending:
        """Fill `full` with the shards of all ranks, in rank order.

        Args:
            full: 1-D, `size` times as long as `shard`.
            shard: This rank's part, 1-D; it may be a view of `full`.
            what: What it is for, named when it fails.
            custom: Custom all-gather; None for torch's.
        """
        if self.size == 1 and custom is None:
            if shard.data_ptr() != full.data_ptr():
                full.copy_(shard)
            return Pending(None, what)
        assert self.shard is not None or custom is not None
        if custom is not None:
            with _Named(what):
                return Pending(custom(full, shard, self.shard, async_op=True), what)  # type: ignore[arg-type]
        if shard.dtype not in _MOVABLE:
            full, shard = full.view(torch.uint8), shard.view(torch.uint8)
        with _Named(what):
            return Pending(getattr(dist, _ALL_GATHER)(full, shard, group=self.shard, async_op=True), what)

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, what: str, custom: ReduceScatterOp | None = None
    ) -> Pending:
        """Fill `out` with the sum over ranks of this rank's part of `full`. Both are 1-D."""
        group = self.scatter or self.shard
        if custom is not None and group is not None:
            with _Named(what):
                return Pending(custom(out, full, group, dist.ReduceOp.SUM, async_op=True), what)
        if self.size == 1:
            out.copy_(full)
            return Pending(None, what)
        with _Named(what):
            return Pending(getattr(dist, _REDUCE_SCATTER)(out, full, group=group, async_op=True), what)

    def all_reduce_flags(self, flags: torch.Tensor, what: str) -> None:
        """All-reduce a few numbers over all ranks, in place."""
        for group in (self.shard, self.replicate):
            if group is not None and dist.get_world_size(group) > 1:
                with _Named(what):
                    dist.all_reduce(flags, group=group)

    def all_reduce(self, shard: torch.Tensor, what: str) -> Pending:
        """Replace `shard` by its sum over replicas."""
        if self.replicas == 1:
            return Pending(None, what)
        with _Named(what):
            return Pending(dist.all_reduce(shard, group=self.replicate, async_op=True), what)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast `tensor` of rank 0: over the replicas, then over the shard group."""
        for group in (self.replicate, self.shard):
            if group is not None and dist.get_world_size(group) > 1:
                data = tensor if tensor.dtype in _MOVABLE else tensor.view(torch.uint8)
                dist.broadcast(data, group=group, group_src=0)

    @property
    def is_first(self) -> bool:
        """Return True if this rank is rank 0 of its shard group and of its replicas."""
        return self.rank == 0 and (self.replicate is None or self.replicate.rank() == 0)

    def gather_to_rank0(self, full: torch.Tensor | None, shard: torch.Tensor, what: str) -> None:
        """Gather the shards of rank 0's shard group to rank 0, in rank order.

        Args:
            full: 1-D, `size` times as long as `shard`, on rank 0; None elsewhere.
            shard: This rank's part, 1-D.
            what: What it is for, named when it fails.
        """
        if self.replicate is not None and self.replicate.rank() != 0:
            return
        parts = None if full is None else [_bytes(part) for part in full.chunk(self.size)]
        with _Named(what):
            dist.gather(_bytes(shard), parts, group=self.shard, group_dst=0)

    def scatter_from_rank0(self, out: torch.Tensor, rows: torch.Tensor | None, what: str) -> None:
        """Scatter the rows of rank 0's table to the ranks, and broadcast them to replicas.

        Args:
            out: 1-D, as long as a row; the result.
            rows: `(size, elements)` on rank 0; None elsewhere.
            what: What it is for, named when it fails.
        """
        replica = dist.get_rank(self.replicate) if self.replicate is not None else 0
        if self.size == 1 and rows is not None:
            out.copy_(rows[0])
        with _Named(what):
            if self.size > 1 and replica == 0:
                row = _bytes(out)
                table = [_bytes(each) for each in rows.unbind()] if rows is not None else None
                dist.scatter(row, table, group=self.shard, group_src=0)
            if self.replicas > 1:
                dist.broadcast(_bytes(out), group=self.replicate, group_src=0)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in _MOVABLE else tensor.view(torch.uint8)
