"""Reduce a bucket's gradients to averages for this rank's shard; set gradients on exposed parameters."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.comm.collectives import CommHook, CustomCollectives, Pending, ShardGroup, allocate
from shardckpt.core.params.buffer_layout import BucketLayout, StoredShard
from shardckpt.core.params.unsharded_params import UnshardedParams
from shardckpt.devices import Event, copy_to_pinned, get_current_stream, has_streams, record_stream
from shardckpt.torch_features import assign_gradient_of_another_type

# Rows in a device's reduce-scatter have a multiple of these bytes: kernels use full cache lines.
_ROW_ALIGNMENT = 128


@dataclass(frozen=True)
class ReduceOptions:
    """Options for one reduction."""

    dtype: torch.dtype  # for the sum
    device: torch.device
    factor: float | None = None  # divides the sum; None for the number of ranks
    split: bool = False  # divide in two steps, before and after the sum, to avoid overflow
    # Sum over replicas too; if not, this rank's shard of the sum waits for the next reduction.
    all_reduce: bool = True

    def divisors(self, world: int) -> tuple[float, float]:
        """Return the divisors for gradients before and after the sum."""
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
    """A reduction's flags that are being copied to the host."""

    values: torch.Tensor  # on the CPU; positive for each parameter for which any rank had a gradient
    event: Event | None  # after the copy; None without streams

    def wait(self) -> tuple[bool, ...]:
        """Wait for the flags and return them."""
        if self.event is not None:
            self.event.synchronize()
        return tuple((self.values > 0).tolist())


@dataclass(frozen=True)
class ReducedGrad:
    """A reduction's result on one rank."""

    gradient: torch.Tensor  # 1-D shard of the mean gradient, including padding
    used: tuple[bool, ...]  # for each parameter, whether any rank had a gradient, as far as this rank knows
    event: Event | None = None  # after the gradient's copy to the CPU; None if the gradient can be read
    # All ranks' pending flags, for parameters without a gradient on this rank; None if `used` is final.
    flags: PendingFlags | None = None


@dataclass(frozen=True)
class _Reduction:
    how: ReduceOptions
    out: torch.Tensor
    source: torch.Tensor | None  # kept while queued work may read it; threads keep their inputs themselves
    has: tuple[bool, ...]  # which parameters had a gradient on this rank
    pending: Pending
    hook_flags: torch.Tensor | None = None  # which parameters have gradients, if a user's hook reduced

    def record_current_stream(self) -> None:
        """Record that the current stream, which has waited for the reduction, uses all tensors."""
        # Their memory belongs to the backward's stream, which may be another one.
        for tensor in (self.source, self.out, self.hook_flags):
            if tensor is not None:
                record_stream(tensor)


@dataclass(frozen=True)
class _QueuedResult:
    """A reduction's queued result; None inside if a later reduction completes it."""

    reduced: ReducedGrad | None
    event: Event | None  # after the complete reduction


class GradientReducer:
    """Reduce-scatters one bucket's gradients; one reduction at a time."""

    # Message sizes depend only on the layout and the number of ranks: parameters without a gradient count as zeros. A
    # flag per parameter, after each rank's shard, marks whether a rank had a gradient.

    def __init__(self, stored: StoredShard, unsharded: UnshardedParams, layout: BucketLayout) -> None:
        self._stored = stored
        self._unsharded = unsharded
        self._layout = layout
        self._group = layout.group
        self._hook: CommHook | None = None
        self._comms = CustomCollectives()
        self._reduction: _Reduction | None = None
        self._queued: _QueuedResult | None = None  # for that reduction, if the device has streams
        self._partial: torch.Tensor | None = None
        self._unsynced_grads: list[torch.Tensor | None] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReducer:
        """Return a reducer for a copied bucket, without gradients."""
        stored, unsharded, layout = copy.deepcopy((self._stored, self._unsharded, self._layout), memo)
        copied = GradientReducer(stored, unsharded, layout)
        memo[id(self)] = copied
        copied.set_collectives(hook=self._hook, comms=self._comms, group=self._group)
        return copied

    def __del__(self) -> None:
        """Make later work wait for a pending reduction, which still uses its memory."""
        reduction: _Reduction | None = getattr(self, "_reduction", None)
        if reduction is not None and not sys.is_finalizing():
            self._unsharded.streams.wait_for_reductions()
            reduction.record_current_stream()

    @property
    def hook(self) -> CommHook | None:
        """Communication hook that averages instead of the engine; None without one."""
        return self._hook

    @property
    def group(self) -> ShardGroup:
        """Shard group, with the process groups for gradients."""
        return self._group

    @property
    def comms(self) -> CustomCollectives:
        """A user's custom collectives."""
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
        """Set the collectives and hooks that reduce."""
        self._hook = hook or self._hook
        self._comms = comms or self._comms
        self._group = group or self._group

    def stash_grads(self) -> None:
        """Keep the full parameters' gradients for the next reduction (no_sync)."""
        self._unsynced_grads = self._add_unsynced(self._unsharded.take_gradients(), self._stored.dtypes.reduce)

    def _add_unsynced(self, gradients: list[torch.Tensor | None], dtype: torch.dtype) -> list[torch.Tensor | None]:
        """Return gradients plus the kept unreduced gradients, which are dropped."""
        kept, self._unsynced_grads = self._unsynced_grads or [None] * len(gradients), []
        return [_sum(before, new, dtype) for before, new in zip(kept, gradients, strict=True)]

    @property
    def is_done(self) -> bool:
        """Return True if `wait_reduce_scatter` neither waits nor starts a collective."""
        reduction = self._reduction
        if self._queued is not None:
            event = self._queued.event
            return event is None or (not self._unsharded.streams.is_capturing and event.query())
        alone = self._group.replicas == 1 and self._comms.all_reduce_hook is None
        return reduction is None or (alone and reduction.pending.done)

    def start_reduce_scatter(
        self, *, factor: float | None = None, split: bool = False, all_reduce: bool = True, full_precision: bool = False
    ) -> None:
        """Move the gradients off the full parameters, and start their reduce-scatter. Collective."""
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
        if self._unsharded.streams.is_async:
            self._queued = self._queue_rest(self._reduction)

    def _launch_reduce_scatter(self, gradients: list[torch.Tensor | None], how: ReduceOptions) -> _Reduction:
        chunk, size, count = self._layout.packing.layout.chunk, self._group.size, len(gradients)
        row = chunk + count
        device = how.device
        if size > 1 and self._unsharded.streams.is_async:
            row += -row % (_ROW_ALIGNMENT // how.dtype.itemsize)
        custom = self._comms.reduce_scatter
        source = allocate(custom, size * row, how.dtype, device)
        rows = source.view(size, row)
        has = tuple(gradient is not None for gradient in gradients)
        self._layout.packing.pack(_pop_all(gradients), rows)
        _write_flags(rows[:, chunk:], has)
        before, _ = how.divisors(self._group.world)
        if before != 1:
            source.div_(before)
        if size == 1 and custom is None:
            return _Reduction(how, source, source, has, Pending(None, ""))
        out = torch.empty(row, dtype=how.dtype, device=device)
        pending = self._group.reduce_scatter(out, source, f"reduce {self._layout.name}", custom)
        is_kept = custom is not None or self._unsharded.streams.is_async
        return _Reduction(how, out, source if is_kept else None, has, pending)

    def _run_comm_hook(self, gradients: list[torch.Tensor | None], how: ReduceOptions) -> _Reduction:
        """Reduce by a user's hook; reduce the flags separately."""
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
        """Queue the work after the reduce-scatter on the reduce stream."""
        # Computation waits for this work when it reads the result.
        streams = self._unsharded.streams
        with streams.use_reduce_stream():
            return _QueuedResult(self._finish(reduction), streams.record_event())

    def wait_reduce_scatter(self) -> ReducedGrad | None:
        """Return the reduction's result; None without a reduction, or if a later one completes it."""
        reduction, self._reduction = self._reduction, None
        queued, self._queued = self._queued, None
        if reduction is None or queued is None:
            return None if reduction is None else self._finish(reduction)
        if queued.event is not None:
            get_current_stream(reduction.how.device).wait_event(queued.event)
        reduction.record_current_stream()
        if queued.reduced is None:
            return None
        gradient = queued.reduced.gradient
        record_stream(gradient)  # its memory may belong to the reduce stream
        return replace(queued.reduced, gradient=gradient.to(self._stored.data.device))

    def _move_to_shard(self, reduced: ReducedGrad) -> ReducedGrad:
        """Cast a gradient and start its copy to pinned memory."""
        device, gradient = self._stored.data.device, reduced.gradient.to(self._stored.dtypes.gradient)
        # A copy to other memory would block the host.
        if gradient.device == device or not self._stored.offload.pin:
            return replace(reduced, gradient=gradient)
        copied, event = copy_to_pinned(gradient)
        return replace(reduced, gradient=copied, event=event)

    def _finish(self, reduction: _Reduction) -> ReducedGrad | None:
        """Wait, sum over replicas and divide; None if a later reduction completes the sum."""
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
        record_stream(partial)  # its memory belongs to the compute stream
        return out.add_(partial)

    def reset_after_error(self) -> None:
        """Wait for a pending reduction after an error, and drop all gradients."""
        reduction, self._reduction = self._reduction, None
        self._queued, self._partial, self._unsynced_grads = None, None, []
        if reduction is not None:
            self._unsharded.streams.wait_for_reductions()
            reduction.pending.wait()
            reduction.record_current_stream()


def _build_result(gradient: torch.Tensor, has: tuple[bool, ...], flags: torch.Tensor) -> ReducedGrad:
    """Return a reduced gradient; read flags later if the host would have to wait."""
    if all(has):
        return ReducedGrad(gradient, has)
    if not has_streams(flags.device):
        return ReducedGrad(gradient, tuple((flags > 0).tolist()))
    return ReducedGrad(gradient, has, flags=PendingFlags(*copy_to_pinned(flags)))


def _write_flags(flags: torch.Tensor, has: Sequence[bool]) -> None:
    """Write 1 or 0 per parameter, without a synchronizing copy from the host."""
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


class EngineHook:
    """Base class for the engine's own hooks on exposed parameters: called for autograd's gradients only."""


def add_gradient_to(parameter: nn.Parameter, grad: torch.Tensor) -> None:
    """Set or accumulate a gradient with any dtype, and call its hooks."""
    if parameter.grad is None:
        assign_gradient(parameter, grad)
    else:
        _add(parameter.grad, grad)
    for hook in get_gradient_hooks(parameter):
        if not isinstance(hook, EngineHook):
            hook(parameter)
    for optimizer in getattr(parameter, "_in_backward_optimizers", ()):  # from `_apply_optimizer_in_backward`
        optimizer.step()
        parameter.grad = None


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return True if `add_gradient_to` calls hooks, which may run collectives."""
    is_users = any(not isinstance(hook, EngineHook) for hook in get_gradient_hooks(parameter))
    return is_users or bool(getattr(parameter, "_in_backward_optimizers", ()))


def get_gradient_hooks(parameter: nn.Parameter) -> tuple[Callable[[nn.Parameter], None], ...]:
    """Return the hooks that run after a parameter's gradient was accumulated."""
    return tuple((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def is_read_at_once(parameter: nn.Parameter) -> bool:
    """Return True if `add_gradient_to` reads the gradient, or calls hooks that may."""
    return parameter.grad is not None or has_gradient_hooks(parameter)


def _add(held: torch.Tensor, grad: torch.Tensor) -> None:
    """Add in place; add the local tensors if DTensors have equal placements."""
    if isinstance(held, DTensor) and isinstance(grad, DTensor) and _is_placed_like(held, grad):
        # torch does the same, since it takes far less time.
        with torch.no_grad():
            held.to_local().add_(grad.to_local())
    else:
        held.add_(grad)


def _is_placed_like(one: DTensor, other: DTensor) -> bool:
    meshes = one.device_mesh == other.device_mesh
    return meshes and one.placements == other.placements and one.shape == other.shape


def restore_gradient(parameter: nn.Parameter, grad: torch.Tensor) -> None:
    """Set a gradient whose shape differs from the parameter's current shape."""
    data = parameter.data
    parameter.data = grad
    assign_gradient(parameter, grad)
    parameter.data = data


def assign_gradient(parameter: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Set a gradient with any dtype."""
    if grad is not None and grad.dtype != parameter.dtype:
        assign_gradient_of_another_type(parameter, grad)
    else:
        parameter.grad = grad


def copy_gradient(parameter: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Copy values into the existing gradient tensor, or set a new one."""
    if grad is not None and parameter.grad is not None:
        parameter.grad.copy_(grad)
    else:
        assign_gradient(parameter, grad)
