"""A bucket's shard group, and collectives on its 1-D buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardckpt.core.errors import BackendError, DeviceMemoryError
from shardckpt.devices import has_streams, is_device_error, is_out_of_memory
from shardckpt.errors import RankError
from shardckpt.ranks.torch_group import get_group_device

# Names, looked up at each call, so that a patched torch.distributed is used.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

# Dtypes that gloo supports; other dtypes are gathered as bytes.
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

_SUMMING = frozenset({"gloo", "mpi"})  # backends that compute no mean, or return a sum instead in old versions of torch


@dataclass(eq=False)
class Pending:
    """Collective that may not have completed."""

    work: Any  # torch's result; None if no communication was necessary, or after `wait`
    what: str  # its purpose, for errors

    @property
    def done(self) -> bool:
        """Return True if `wait` would return at once."""
        return self.work is None or (isinstance(self.work, dist.Work) and self.work.is_completed())

    def wait(self) -> None:
        """Wait until the result can be read; raise RankError if another rank did not join in time or is lost."""
        work, self.work = self.work, None
        if work is None:
            return
        with _Named(self.what):
            work.wait()


class _Named:
    """Adds purpose and responsible rank to a collective's errors."""

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
                fix="Use smaller units or batches; other ranks may wait for this one until the group's timeout.",
            ) from error
        if "No backend type associated with device type" in str(error):
            raise BackendError(
                f"the process group cannot {self._what}: {error}",
                fix="Move the module to the group's device by device_id or to(), or add a backend for its device.",
            ) from error
        if not is_device_error(error):
            raise RankError(
                f"rank {rank} could not {self._what}: {error}",
                rank=rank,
                fix="Another rank left, or ran other units; its own log says why.",
            ) from error


@dataclass(frozen=True)
class CommHook:
    """A user's communication hook, which averages gradients instead of the engine."""

    state: object  # passed as the first argument
    # Called as `(state, gradient)` to change the gradient in place if nothing is sharded, otherwise as `(state, full
    # gradient, this rank's shard)`. Gradients are 1-D and padded.
    call: Callable[..., None]

    def __deepcopy__(self, memo: dict[int, Any]) -> CommHook:
        """Return itself: copies share the user's hook."""
        return self


class CollectiveOp(Protocol):
    """Custom collective that allocates its own buffers."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an all-gather's output buffer, or a reduce-scatter's input."""


class AllGatherOp(CollectiveOp, Protocol):
    """Custom all-gather."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Fill the output with all ranks' inputs in rank order; return work or None."""


class ReduceScatterOp(CollectiveOp, Protocol):
    """Custom reduce-scatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Fill the output with this rank's shard of the reduction; return work or None."""


def allocate(custom: CollectiveOp | None, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a 1-D buffer for a collective; custom collectives allocate their own."""
    if custom is not None:
        return custom.allocate((numel,), dtype=dtype, device=device)
    return torch.empty(numel, dtype=dtype, device=device)


@dataclass(frozen=True)
class CustomCollectives:
    """A user's custom collectives; None for torch's."""

    all_gather: AllGatherOp | None = None  # gathers shards
    reduce_scatter: ReduceScatterOp | None = None  # reduces gradients
    # Changes this rank's shard of the averaged gradient, a 1-D tensor, in place.
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomCollectives:
        """Return itself: copies share a user's collectives."""
        return self


@dataclass(frozen=True)
class ShardGroup:
    """Ranks that shard a bucket, and the replicas of this rank."""

    shard: dist.ProcessGroup | None  # process group that shards the bucket; None if nothing is sharded
    # Process group with the same shard on all ranks; None without replicas.
    replicate: dist.ProcessGroup | None = None
    # Separate process group for gradients, with the ranks in `shard`; None to use `shard`.
    scatter: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None  # the user's mesh, (replicate, shard); None if the user passed groups

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardGroup:
        """Return itself: copies share process groups."""
        return self

    @cached_property
    def size(self) -> int:
        """Number of ranks that shard the bucket."""
        return self.shard.size() if self.shard is not None else 1

    @cached_property
    def rank(self) -> int:
        """Index of this rank in the shard group."""
        return self.shard.rank() if self.shard is not None else 0

    @cached_property
    def replicas(self) -> int:
        """Number of ranks with the same shard."""
        return self.replicate.size() if self.replicate is not None else 1

    @cached_property
    def world(self) -> int:
        """Number of ranks whose gradients are averaged."""
        return self.size * self.replicas

    @cached_property
    def _has_direct_messages(self) -> bool:
        return self.shard is not None and has_direct_messages(self.shard)

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, what: str, custom: AllGatherOp | None = None
    ) -> Pending:
        """Fill `full` with all ranks' shards, in rank order."""
        # `shard` may be a view of `full`.
        if self.size == 1 and custom is None:
            if shard.data_ptr() != full.data_ptr():
                full.copy_(shard)
            return Pending(None, what)
        assert self.shard is not None or custom is not None
        is_async = _runs_on_threads(full)
        if custom is not None:
            with _Named(what):
                return Pending(custom(full, shard, self.shard, async_op=is_async), what)  # type: ignore[arg-type]
        if shard.dtype not in _MOVABLE:
            full, shard = full.view(torch.uint8), shard.view(torch.uint8)
        if self._has_direct_messages and is_sent_directly(shard):
            assert self.shard is not None
            with _Named(what):
                return Pending(start_all_gather(self.shard, full, shard), what)
        with _Named(what):
            return Pending(getattr(dist, _ALL_GATHER)(full, shard, group=self.shard, async_op=is_async), what)

    def can_average(self, device: torch.device) -> bool:
        """Return True if a reduce-scatter can return the mean over all ranks and replicas."""
        group = self.scatter or self.shard
        if self.replicas > 1 or group is None:
            return False
        try:
            return str(group._get_backend(device).name()) not in _SUMMING
        except RuntimeError:  # no backend: the collective itself raises
            return False

    def reduce_scatter(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        what: str,
        custom: ReduceScatterOp | None = None,
        *,
        is_mean: bool = False,
    ) -> Pending:
        """Fill `out` with this rank's shard of the sum or mean over ranks; `out` and `full` are 1-D."""
        group, is_async = self.scatter or self.shard, _runs_on_threads(full)
        if custom is not None and group is not None:
            with _Named(what):
                return Pending(custom(out, full, group, dist.ReduceOp.SUM, async_op=is_async), what)
        if self.size == 1:
            out.copy_(full)
            return Pending(None, what)
        with _Named(what):
            op = dist.ReduceOp.AVG if is_mean else dist.ReduceOp.SUM
            return Pending(getattr(dist, _REDUCE_SCATTER)(out, full, op=op, group=group, async_op=is_async), what)

    def all_reduce_flags(self, flags: torch.Tensor, what: str) -> None:
        """All-reduce a few flags over all ranks and replicas, in place."""
        for group in (self.shard, self.replicate):
            if group is not None and dist.get_world_size(group) > 1:
                with _Named(what):
                    dist.all_reduce(flags, group=group)

    def all_reduce(self, shard: torch.Tensor, what: str) -> Pending:
        """Replace `shard` by its sum over replicas."""
        if self.replicas == 1:
            return Pending(None, what)
        with _Named(what):
            return Pending(dist.all_reduce(shard, group=self.replicate, async_op=_runs_on_threads(shard)), what)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast rank 0's `tensor` to its replicas, then to the shard group; it may be on any device."""
        data = _bytes(tensor)
        for group in (self.replicate, self.shard):
            if group is not None and dist.get_world_size(group) > 1:
                sent = data.to(get_group_device(group, data.device))
                dist.broadcast(sent, group=group, group_src=0)
                if sent is not data:
                    data.copy_(sent)

    @property
    def is_first(self) -> bool:
        """Return True if this rank is rank 0 in its shard group and among its replicas."""
        return self.rank == 0 and (self.replicate is None or self.replicate.rank() == 0)

    def gather_to_rank0(self, full: torch.Tensor | None, shard: torch.Tensor, what: str) -> None:
        """Gather the shards in rank 0's shard group to rank 0, in rank order; `full` is None elsewhere."""
        if self.replicate is not None and self.replicate.rank() != 0:
            return
        parts = None if full is None else [_bytes(part) for part in full.chunk(self.size)]
        with _Named(what):
            dist.gather(_bytes(shard), parts, group=self.shard, group_dst=0)

    def scatter_from_rank0(self, out: torch.Tensor, rows: torch.Tensor | None, what: str) -> None:
        """Scatter rank 0's table, `(size, elements)`, to the ranks and their replicas; None elsewhere."""
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


def _runs_on_threads(tensor: torch.Tensor) -> bool:
    """Return True if a collective needs to be asynchronous to leave the host free."""
    # On a device with streams it is queued on the current stream, with this stream's priority.
    return not has_streams(tensor.device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in _MOVABLE else tensor.view(torch.uint8)


MIN_SHARD_BYTES = 1 << 18  # smallest shard to send directly; for smaller ones the number of messages counts

_TAG = 0x5A4D  # differs from users' tags


def has_direct_messages(group: dist.ProcessGroup) -> bool:
    """Return True if gloo itself sends a group's CPU tensors, not a wrapper that compares collectives."""
    try:
        return isinstance(_get_backend(group), getattr(dist, "ProcessGroupGloo", ()))
    except RuntimeError:  # the group has no backend for the CPU
        return False


def _get_backend(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cpu"))


def is_sent_directly(shard: torch.Tensor) -> bool:
    """Return True if shards like this one are sent directly; equal on all ranks with equal shard sizes."""
    return shard.device.type == "cpu" and shard.nbytes >= MIN_SHARD_BYTES and not has_streams(shard.device)


class DirectMessages:
    """One all-gather's messages, from and to all other ranks."""

    def __init__(self, works: list[dist.Work], timeout: timedelta) -> None:
        # Messages do not follow a changed group timeout by themselves.
        self._works = works
        self._timeout = timeout

    def wait(self) -> None:
        """Wait for all messages."""
        works, self._works = self._works, []
        # After an error the connections are closed, and the messages are dropped: the memory may be freed. An interrupt
        # is raised only when the messages are complete: gloo cannot use the connections again before.
        try:
            self._wait_for(works)
        except RuntimeError:
            works.clear()
            raise
        finally:
            with suppress(RuntimeError):
                self._wait_for(works)
            works.clear()

    def _wait_for(self, works: list[dist.Work]) -> None:
        while works:
            works.pop(0).wait(self._timeout)


def start_all_gather(group: dist.ProcessGroup, full: torch.Tensor, shard: torch.Tensor) -> DirectMessages:
    """Start to fill `full` with all ranks' shards in a group, in rank order. Collective."""
    rank, size = group.rank(), group.size()
    rows = full.view(size, -1)
    works = [dist.irecv(rows[rank - i], group=group, group_src=(rank - i) % size, tag=_TAG) for i in range(1, size)]
    works += [dist.isend(shard, group=group, group_dst=(rank + i) % size, tag=_TAG) for i in range(1, size)]
    if rows[rank].data_ptr() != shard.data_ptr():
        rows[rank].copy_(shard)
    options = getattr(_get_backend(group), "options", None)
    # Torch has no public name for it; 0: the group's initial timeout.
    timeout = getattr(options, "_timeout", timedelta())
    return DirectMessages([work for work in works if work is not None], timeout)
