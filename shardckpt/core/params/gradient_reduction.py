"""Reduction of a bucket's gradients to the averaged gradient of this rank's shard."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardckpt.core.comm.collectives import CommHook, CustomCollectives, Pending, ShardGroup, allocate
from shardckpt.core.comm.streams import use_reduce_stream, wait_for_reductions
from shardckpt.core.params.stored_shard import BucketLayout, StoredShard
from shardckpt.core.params.unsharded_params import UnshardedParams
from shardckpt.devices import Event, copy_to_pinned, get_current_stream, has_streams, record_event, record_stream

_ROW_ALIGNMENT = 128
"""Bytes that the length of a row of a reduce-scatter is a multiple of on a device: kernels use full cache lines."""


@dataclass(frozen=True)
class ReduceOptions:
    """Options of one reduction.

    Attributes:
        dtype: Type to sum in.
        device: Where.
        factor: What the sum is divided by; the number of ranks where None.
        split: Divide in two steps, before and after the sum, so that neither overflows.
        all_reduce: Sum over replicas too; otherwise this rank's part of the sum waits for the next reduction.
    """

    dtype: torch.dtype
    device: torch.device
    factor: float | None = None
    split: bool = False
    all_reduce: bool = True

    def divisors(self, world: int) -> tuple[float, float]:
        """Return what gradients are divided by before and after they are summed.

        Args:
            world: Ranks whose gradients are summed.
        """
        if self.factor is not None:
            return 1.0, self.factor
        if not (self.split or self.dtype is torch.float16):
            return 1.0, float(world)
        before = 1
        while world % before == 0 and world / before > before:
            before *= 2
        return float(before), world / before


@dataclass(frozen=True)
class PendingFlags:
    """Flags of a reduction on their way to the host.

    Attributes:
        values: For each parameter a positive number if any rank had a gradient for it, on the CPU.
        event: Behind their copy.
    """

    values: torch.Tensor
    event: Event | None

    def wait(self) -> tuple[bool, ...]:
        """Wait for the flags and return them."""
        if self.event is not None:
            self.event.synchronize()
        return tuple((self.values > 0).tolist())


@dataclass(frozen=True)
class ReducedGrad:
    """The result of a reduction on one rank.

    Attributes:
        gradient: The mean over ranks of this rank's shard of the gradient, 1-D, padding included.
        used: For each parameter, whether any rank had a gradient for it, as far as this rank knows.
        event: What to wait for before the gradient is read: the end of its copy to the CPU; None if it can be read.
        flags: The same for ranks that had one where this rank had none; None if `used` is final.
    """

    gradient: torch.Tensor
    used: tuple[bool, ...]
    event: Event | None = None
    flags: PendingFlags | None = None


@dataclass(frozen=True)
class _Reduction:
    how: ReduceOptions
    out: torch.Tensor
    source: torch.Tensor | None  # kept while something that is queued may read it; threads keep their inputs themselves
    has: tuple[bool, ...]  # for each parameter whether this rank had a gradient
    pending: Pending
    hook_flags: torch.Tensor | None = None  # who had gradients, where a user's hook reduced


@dataclass(frozen=True)
class _QueuedResult:
    """Result of a reduction on a device that runs it later; None if it waits for a later reduction."""

    reduced: ReducedGrad | None
    event: Event | None  # behind all of the reduction


class GradientReducer:
    """Reduce-scatter of the gradients of one bucket; one reduction at a time.

    The sizes that travel depend on the layout and the number of ranks alone: parameters without a gradient count as
    zeros, and a flag for each, behind every rank's part, marks the ranks that had one.

    Args:
        stored: The shard that the gradient is of.
        unsharded: The full parameters, which have the gradients to reduce.
        layout: The bucket's layout over ranks.
    """

    def __init__(self, stored: StoredShard, unsharded: UnshardedParams, layout: BucketLayout) -> None:
        self._stored = stored
        self._unsharded = unsharded
        self._layout = layout
        self._group = layout.group
        self._hook: CommHook | None = None
        self._comms = CustomCollectives()
        self._reduction: _Reduction | None = None
        self._queued: _QueuedResult | None = None  # of that reduction, where the device has streams
        self._partial: torch.Tensor | None = None
        self._unsynced_grads: list[torch.Tensor | None] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReducer:
        """Return one for a copy of the bucket, without the gradients of this one."""
        stored, unsharded, layout = copy.deepcopy((self._stored, self._unsharded, self._layout), memo)
        copied = GradientReducer(stored, unsharded, layout)
        memo[id(self)] = copied
        copied.set_collectives(hook=self._hook, comms=self._comms, group=self._group)
        return copied

    def __del__(self) -> None:
        """Keep memory that a reduction still uses from being reused: nothing has waited for it."""
        if getattr(self, "_reduction", None) is not None and not sys.is_finalizing():
            wait_for_reductions(self._unsharded.device)

    @property
    def hook(self) -> CommHook | None:
        """What averages in the engine's place."""
        return self._hook

    @property
    def group(self) -> ShardGroup:
        """The ranks, with the channels that gradients travel on."""
        return self._group

    @property
    def comms(self) -> CustomCollectives:
        """Custom collectives of a user."""
        return self._comms

    @property
    def has_unreduced_grads(self) -> bool:
        """Return True if a reduction is pending, or gradients wait for the next one."""
        if self._reduction is not None or self._partial is not None or self._unsynced_grads:
            return True
        return any(grad is not None for grad in self._unsharded.gradients)

    def set_collectives(
        self, *, hook: CommHook | None = None, comms: CustomCollectives | None = None, group: ShardGroup | None = None
    ) -> None:
        """Set the collectives and hooks that reduce.

        Args:
            hook: Does all of it.
            comms: Custom collectives.
            group: The same ranks on other channels.
        """
        self._hook = hook or self._hook
        self._comms = comms or self._comms
        self._group = group or self._group

    def stash_grads(self) -> None:
        """Move the gradients of the full parameters here, to add them to the next reduction (no_sync)."""
        self._unsynced_grads = self._add_unsynced(self._unsharded.take_gradients(), self._stored.dtypes.reduce)

    def _add_unsynced(self, gradients: list[torch.Tensor | None], dtype: torch.dtype) -> list[torch.Tensor | None]:
        """Return gradients added to those that were kept, which are given up."""
        kept, self._unsynced_grads = self._unsynced_grads or [None] * len(gradients), []
        return [_sum(before, new, dtype) for before, new in zip(kept, gradients, strict=True)]

    @property
    def is_done(self) -> bool:
        """Return True if `wait_reduce_scatter` would neither wait nor start another collective."""
        reduction = self._reduction
        if self._queued is not None:
            return self._queued.event is None or self._queued.event.query()
        alone = self._group.replicas == 1 and self._comms.all_reduce_hook is None
        return reduction is None or (alone and reduction.pending.done)

    def start_reduce_scatter(
        self, *, factor: float | None = None, split: bool = False, all_reduce: bool = True, full_precision: bool = False
    ) -> None:
        """Start the reduce-scatter of the gradients, and drop them at the full parameters. Collective.

        Args:
            factor: What sums are divided by; the number of ranks where None.
            split: Divide in two steps, before and after the sum.
            all_reduce: Sum over replicas as well.
            full_precision: In the stored type, whatever the type to reduce in.
        """
        dtypes = self._stored.dtypes
        dtype = dtypes.stored if full_precision else dtypes.reduce
        how = ReduceOptions(dtype, self._unsharded.device, factor, split, all_reduce)
        gradients = self._unsharded.take_gradients()
        if self._unsynced_grads:
            gradients = self._add_unsynced(gradients, dtype)
        self._reduction = (
            self._run_comm_hook(gradients, how)
            if self._hook is not None
            else self._launch_reduce_scatter(gradients, how)
        )
        if has_streams(how.device):
            self._queued = self._queue_rest(self._reduction)

    def _launch_reduce_scatter(self, gradients: list[torch.Tensor | None], how: ReduceOptions) -> _Reduction:
        chunk, size, count = self._layout.packing.layout.chunk, self._group.size, len(gradients)
        row = chunk + count
        device = how.device
        if size > 1 and has_streams(device):
            row += -row % (_ROW_ALIGNMENT // how.dtype.itemsize)
        own = self._comms.reduce_scatter
        source = allocate(own, size * row, how.dtype, device)
        rows = source.view(size, row)
        has = tuple(gradient is not None for gradient in gradients)
        self._layout.packing.pack(_pop_all(gradients), rows)
        _write_flags(rows[:, chunk:], has)
        before, _ = how.divisors(self._group.world)
        if before != 1:
            source.div_(before)
        if size == 1 and own is None:
            return _Reduction(how, source, source, has, Pending(None, ""))
        out = torch.empty(row, dtype=how.dtype, device=device)
        pending = self._group.reduce_scatter(out, source, f"reduce {self._layout.name}", own)
        is_kept = own is not None or has_streams(device)
        return _Reduction(how, out, source if is_kept else None, has, pending)

    def _run_comm_hook(self, gradients: list[torch.Tensor | None], how: ReduceOptions) -> _Reduction:
        """Reduce by a user's hook; flags of who had a gradient are reduced separately."""
        assert self._hook is not None
        chunk, size = self._layout.packing.layout.chunk, self._group.size
        source = torch.empty(size * chunk, dtype=how.dtype, device=how.device)
        has = tuple(gradient is not None for gradient in gradients)
        flags = torch.empty(len(has), device=source.device)
        _write_flags(flags.view(1, -1), has)
        self._layout.packing.pack(_pop_all(gradients), source.view(size, chunk))
        self._group.all_reduce_flags(flags, f"count the gradients of {self._layout.name}")
        if self._layout.keeps_full:
            out = source
            self._hook.call(self._hook.state, source)
        else:
            out = torch.zeros(chunk, dtype=how.dtype, device=source.device)
            self._hook.call(self._hook.state, source, out)
        return _Reduction(how, out, source, has, Pending(None, ""), flags)

    def _queue_rest(self, reduction: _Reduction) -> _QueuedResult:
        """Queue what follows the reduce-scatter beside the computation, which waits for it when it reads the result."""
        device = reduction.how.device
        with use_reduce_stream(device):
            return _QueuedResult(self._finish(reduction), record_event(device))

    def wait_reduce_scatter(self) -> ReducedGrad | None:
        """Wait for the reduction and return its gradient; None if there is none or it waits for a later one."""
        reduction, self._reduction = self._reduction, None
        queued, self._queued = self._queued, None
        if reduction is None or queued is None:
            return None if reduction is None else self._finish(reduction)
        if queued.event is not None:
            get_current_stream(reduction.how.device).wait_event(queued.event)
        if queued.reduced is not None:
            record_stream(queued.reduced.gradient)  # it may be memory of the stream that reduces
        return queued.reduced

    def _move_to_shard(self, reduced: ReducedGrad) -> ReducedGrad:
        """Cast a gradient, and move it to the device of the shard; a copy to pinned memory may be under way."""
        device, gradient = self._stored.data.device, reduced.gradient.to(self._stored.dtypes.gradient)
        if gradient.device == device or not self._stored.offload.pin:
            return replace(reduced, gradient=gradient.to(device))
        copied, event = copy_to_pinned(gradient)
        return replace(reduced, gradient=copied, event=event)

    def _finish(self, reduction: _Reduction) -> ReducedGrad | None:
        """Wait, sum over replicas, divide; None if the sum over this rank's group waits for a later reduction."""
        reduction.pending.wait()
        chunk = self._layout.packing.layout.chunk
        if reduction.hook_flags is not None:
            return self._move_to_shard(_build_result(reduction.out[:chunk], reduction.has, reduction.hook_flags))
        if not (reduction.how.all_reduce or self._layout.keeps_full) and self._group.replicas > 1:
            self._keep_partial(reduction.out)
            return None
        out = self._add_partial(reduction.out)
        if self._group.replicas > 1:
            self._group.all_reduce(out, f"reduce {self._layout.name} over replicas").wait()
        gradient = out[:chunk]
        _, after = reduction.how.divisors(self._group.world)
        if after != 1:
            gradient.div_(after)
        if self._comms.all_reduce_hook is not None:
            self._comms.all_reduce_hook(gradient)
        return self._move_to_shard(_build_result(gradient, reduction.has, out[chunk : chunk + len(reduction.has)]))

    def _keep_partial(self, out: torch.Tensor) -> None:
        self._partial = self._add_partial(out)

    def _add_partial(self, out: torch.Tensor) -> torch.Tensor:
        partial, self._partial = self._partial, None
        if partial is None:
            return out
        record_stream(partial)  # memory of the stream that computes
        return out.add_(partial)

    def reset_after_error(self) -> None:
        """Wait for a pending reduction after an error, and drop all gradients."""
        reduction, self._reduction = self._reduction, None
        self._queued, self._partial, self._unsynced_grads = None, None, []
        if reduction is not None:
            wait_for_reductions(reduction.how.device)
            reduction.pending.wait()


def _build_result(gradient: torch.Tensor, has: tuple[bool, ...], flags: torch.Tensor) -> ReducedGrad:
    """Return a reduced gradient; flags that only other ranks know are read later where the host would have to wait."""
    if all(has):
        return ReducedGrad(gradient, has)
    if not has_streams(flags.device):
        return ReducedGrad(gradient, tuple((flags > 0).tolist()))
    return ReducedGrad(gradient, has, flags=PendingFlags(*copy_to_pinned(flags)))


def _write_flags(flags: torch.Tensor, has: Sequence[bool]) -> None:
    """Write for each column 1 or 0, without a copy from the host, which would wait for all that is queued."""
    flags.fill_(1)
    at = 0
    for is_there, columns in itertools.groupby(has):
        end = at + len(list(columns))
        if not is_there:
            flags[:, at:end].zero_()
        at = end


def _pop_all(values: list[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    values.reverse()
    while values:
        yield values.pop()


def _sum(kept: torch.Tensor | None, new: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if new is None or kept is None:
        return new.to(dtype) if new is not None else kept
    return kept.add_(new)
