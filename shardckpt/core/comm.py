"""Who shares a bucket and how its 1-D buffers travel: all-gather, reduce-scatter, all-reduce, broadcast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardckpt.errors import RankError

_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

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

    def wait(self) -> None:
        """Return when the result can be read.

        Raises:
            RankError: Another rank did not take part in time, or is gone.
        """
        work, self._work = self._work, None
        if work is None:
            return
        with _Named(self._what):
            work.wait()


class _Named:
    """Names the unit that waited where a collective fails."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, RankError):
            raise RankError(
                f"rank {dist.get_rank()} waited in vain to {self._what}: {error}",
                rank=dist.get_rank(),
                fix="Another rank left, or ran other units; its own log says why.",
            ) from error


@dataclass(frozen=True)
class ShardGroup:
    """The ranks among which a bucket is cut, and those that hold copies of the same shard.

    Attributes:
        shard: Ranks that share the bucket; None where nothing is cut.
        replicate: Ranks that hold this rank's shard; None where there is no other.
    """

    shard: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Ranks that share the bucket."""
        return dist.get_world_size(self.shard) if self.shard is not None else 1

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return dist.get_rank(self.shard) if self.shard is not None else 0

    @property
    def replicas(self) -> int:
        """Ranks that hold this rank's shard."""
        return dist.get_world_size(self.replicate) if self.replicate is not None else 1

    @property
    def world(self) -> int:
        """Ranks whose gradients are averaged."""
        return self.size * self.replicas

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, what: str) -> Pending:
        """Fill `whole` with everyone's shard, in rank order.

        Args:
            whole: 1-D, `size` times as long as `shard`.
            shard: This rank's part, 1-D.
            what: What it is for, named when it fails.
        """
        if self.size == 1:
            whole.copy_(shard)
            return Pending(None, what)
        if shard.dtype not in _MOVABLE:
            whole, shard = whole.view(torch.uint8), shard.view(torch.uint8)
        with _Named(what):
            return Pending(_ALL_GATHER(whole, shard, group=self.shard, async_op=True), what)

    def reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor, what: str) -> Pending:
        """Fill `out` with the sum over ranks of this rank's part of `whole`. Both 1-D."""
        if self.size == 1:
            out.copy_(whole)
            return Pending(None, what)
        with _Named(what):
            return Pending(_REDUCE_SCATTER(out, whole, group=self.shard, async_op=True), what)

    def all_reduce(self, shard: torch.Tensor, what: str) -> Pending:
        """Replace `shard` by its sum over replicas."""
        if self.replicas == 1:
            return Pending(None, what)
        with _Named(what):
            return Pending(dist.all_reduce(shard, group=self.replicate, async_op=True), what)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` on every rank by that of the first rank: across replicas, then among those that share."""
        for group in (self.replicate, self.shard):
            if group is not None and dist.get_world_size(group) > 1:
                data = tensor if tensor.dtype in _MOVABLE else tensor.view(torch.uint8)
                dist.broadcast(data, group=group, group_src=0)
