"""Reduce a bucket's gradients to averages for this rank's shard; set gradients on exposed parameters."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.comm.collectives import CommHook, CustomCollectives, Pending, ShardGroup, allocate
from shardckpt.core.params.buffer_layout import Packing, StoredShard
from shardckpt.core.params.unsharded_params import UnshardedParams
from shardckpt.devices import Event, copy_to_pinned, get_current_stream, has_streams, record_stream
from shardckpt.layout import ALIGNMENT
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
class ReductionSettings:
    """How a unit reduces in one backward."""

    factor: float | None = None  # divides the sum; None for the number of ranks
    split: bool = False  # divide in two steps
    all_reduce: bool = True  # sum over replicas too
    full_precision: bool = False  # sum in the stored dtypes


@dataclass(frozen=True)
class PendingFlags:
    """A reduction's flags that are being copied to the host."""

    values: torch.Tensor  # on the CPU; 0 for each parameter for which no rank had a gradient
    event: Event | None  # after the copy; None without streams

    def wait(self) -> tuple[bool, ...]:
        """Wait for the flags and return them."""
        if self.event is not None:
            self.event.synchronize()
        return tuple((self.values != 0).tolist())


@dataclass(frozen=True)
class ReducedGrad:
    """A reduction's result on one rank."""

    gradient: torch.Tensor  # 1-D shard of the mean gradient, including padding
    used: tuple[bool, ...]  # for each parameter, whether any rank had a gradient, as far as this rank knows
    event: Event | None = None  # after the gradient's copy to the CPU; None if the gradient can be read
    # All ranks' pending flags, for parameters without a gradient on this rank; None if `used` is final.
    flags: PendingFlags | None = None


@dataclass(frozen=True)
class _GradientPart:
    """One bucket's gradients in a reduction."""

    reducer: GradientReducer
    has: tuple[bool, ...]  # which parameters had a gradient on this rank
    place: slice  # in a row: a rank's shard, then a flag per parameter


class _Reduction:
    """A reduce-scatter of one or several buckets' gradients, and the work after it."""

    def __init__(
        self,
        how: ReduceOptions,
        parts: Sequence[_GradientPart],
        out: torch.Tensor,
        source: torch.Tensor | None,
        pending: Pending,
        *,
        hook_flags: torch.Tensor | None = None,
        is_mean: bool = False,
    ) -> None:
        self.parts = tuple(parts)
        self.out = out
        self.source = source  # kept while queued work may read it; threads keep their inputs themselves
        self.pending = pending
        self.hook_flags = hook_flags  # which parameters have gradients, if a user's hook reduced
        self.is_mean = is_mean  # the collective divides
        self._how = how
        self._results: tuple[ReducedGrad | None, ...] | None = None

    def finish(self) -> tuple[ReducedGrad | None, ...]:
        """Wait, sum over replicas and divide; return None for buckets whose sum a later reduction completes."""
        if self._results is None:
            self.pending.wait()
            self._results = self._finish()
        return self._results

    def _finish(self) -> tuple[ReducedGrad | None, ...]:
        outs = [(part.reducer, self.out[part.place], part.has) for part in self.parts]
        if self.hook_flags is not None:
            return tuple(reducer.build_result(out, has, self.hook_flags) for reducer, out, has in outs)
        is_complete = [reducer.add_partial(out, self._how) for reducer, out, _ in outs]
        if not all(is_complete):
            return (None,) * len(outs)
        group = outs[0][0].group
        if group.replicas > 1:
            group.all_reduce(self.out, f"{self.pending.what} over replicas").wait()
        _, after = self._how.divisors(group.world)
        if after != 1 and not self.is_mean:
            self.out.div_(after)  # flags too: only 0 counts
        return tuple(reducer.complete(out, has) for reducer, out, has in outs)


@dataclass(frozen=True)
class _QueuedResult:
    """A reduction that is queued on the reduce stream; the result is None if a later reduction completes it."""

    reduced: ReducedGrad | None
    event: Event | None  # after the complete reduction


@dataclass(frozen=True)
class _ReduceInput:
    """Tensors that belong to the backward's stream, and the event after which the reduce stream does not use them."""

    tensors: tuple[torch.Tensor, ...]
    event: Event | None
    is_scattered: bool  # the output is separate, and belongs to the reduce stream


class GradientReducer:
    """Reduce-scatters one bucket's gradients; one reduction at a time."""

    # Message sizes depend only on the layout and the number of ranks: parameters without a gradient count as zeros. A
    # flag per parameter, after each rank's shard, marks whether a rank had a gradient.

    def __init__(self, stored: StoredShard, unsharded: UnshardedParams) -> None:
        self._stored = stored
        self._unsharded = unsharded
        self.group = stored.group  # with the process groups for gradients
        self.hook: CommHook | None = None  # averages instead of the engine
        self.comms = CustomCollectives()  # a user's
        self._reduction: _Reduction | None = None  # without streams
        self._queued: _QueuedResult | None = None  # with streams
        self._input: _ReduceInput | None = None  # of the queued reduction
        self._partial: torch.Tensor | None = None
        self._unsynced_grads: list[torch.Tensor | None] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReducer:
        """Return a reducer for a copied bucket, without gradients."""
        copied = GradientReducer(*copy.deepcopy((self._stored, self._unsharded), memo))
        memo[id(self)] = copied
        copied.set_collectives(hook=self.hook, comms=self.comms, group=self.group)
        return copied

    def __del__(self) -> None:
        """Make later work wait for a queued reduction, which still uses its input."""
        if getattr(self, "_input", None) is not None and not sys.is_finalizing():
            self.release_input()

    @property
    def has_unreduced_grads(self) -> bool:
        """Return True if a reduction is pending, or gradients wait for the next one."""
        if self._reduction is not None or self._queued is not None:
            return True
        if self._partial is not None or self._unsynced_grads:
            return True
        return any(grad is not None for grad in self._unsharded.gradients)

    def set_collectives(
        self, *, hook: CommHook | None = None, comms: CustomCollectives | None = None, group: ShardGroup | None = None
    ) -> None:
        """Set the collectives and hooks that reduce."""
        self.hook = hook or self.hook
        self.comms = comms or self.comms
        self.group = group or self.group

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
        alone = self.group.replicas == 1 and self.comms.all_reduce_hook is None
        return reduction is None or (alone and reduction.pending.done)

    def get_message_key(self, *, full_precision: bool) -> object:
        """Return a key; gradients of buckets with equal keys can be reduced by one message."""
        if self.hook is not None or self.group.size == 1:
            return id(self)
        comms = id(self.comms.reduce_scatter), id(self.comms.all_reduce_hook)
        return self.group, comms, self._get_dtype(full_precision=full_precision), self._unsharded.device

    def _get_dtype(self, *, full_precision: bool) -> torch.dtype:
        return self._stored.dtypes.stored if full_precision else self._stored.dtypes.reduce

    @staticmethod
    def _start_reduce_scatter(reducers: Sequence[GradientReducer], settings: ReductionSettings) -> None:
        """Start the reduce-scatter of the gradients of one or several buckets with equal message keys."""
        first, streams = reducers[0], reducers[0]._unsharded.streams
        dtype = first._get_dtype(full_precision=settings.full_precision)
        how = ReduceOptions(dtype, first._unsharded.device, settings.factor, settings.split, settings.all_reduce)
        gradients = [reducer._take_gradients(dtype) for reducer in reducers]
        if first.hook is not None:
            reduction = first._run_comm_hook(gradients[0], how)
        else:
            source, parts = first._pack_gradients(reducers, gradients, how)
            with streams.use_reduce_stream() if streams.is_async else nullcontext():
                reduction = first._launch_reduce_scatter(source, parts, how)
        if streams.is_async:
            first._queue_rest(reduction)
        else:
            for reducer in reducers:
                reducer._reduction = reduction

    def _take_gradients(self, dtype: torch.dtype) -> list[torch.Tensor | None]:
        gradients = self._unsharded.take_gradients()
        return self._add_unsynced(gradients, dtype) if self._unsynced_grads else gradients

    def _pack_gradients(
        self, reducers: Sequence[GradientReducer], gradients: Sequence[list[torch.Tensor | None]], how: ReduceOptions
    ) -> tuple[torch.Tensor, list[_GradientPart]]:
        """Return the reduce-scatter's input: a row with gradients and flags for each rank; and their places."""
        size, parts, row = self.group.size, [], 0
        for reducer, values in zip(reducers, gradients, strict=True):
            row += -row % (ALIGNMENT // how.dtype.itemsize)
            end = row + reducer._stored.packing.layout.chunk + len(values)
            parts.append(_GradientPart(reducer, tuple(value is not None for value in values), slice(row, end)))
            row = end
        if size > 1 and self._unsharded.streams.is_async:
            row += -row % (_ROW_ALIGNMENT // how.dtype.itemsize)
        source = allocate(self.comms.reduce_scatter, size * row, how.dtype, how.device)
        rows = source.view(size, row)
        ends = [part.place.start for part in parts[1:]] + [row]
        columns = [(part.place.start, end) for part, end in zip(parts, ends, strict=True)]
        packings = [part.reducer._stored.packing for part in parts]
        if not self._cat_gradients(packings, gradients, [end - start for start, end in columns], rows):
            for part, packing, values, (start, end) in zip(parts, packings, gradients, columns, strict=True):
                packing.pack(_pop_all(values), rows[:, start:end])
                _write_flags(rows[:, start + packing.layout.chunk : end], part.has)
        before, _ = how.divisors(self.group.world)
        if before != 1:
            source.div_(before)
        return source, parts

    def _cat_gradients(
        self,
        packings: Sequence[Packing],
        gradients: Sequence[list[torch.Tensor | None]],
        widths: Sequence[int],
        rows: torch.Tensor,
    ) -> bool:
        """Move all gradients to the rows by one operation, with their flags; return False if that is impossible."""
        chunk_cat = getattr(torch, "_chunk_cat", None)  # what torch's FSDP2 uses; not public
        found = [packing.list_chunks(values) for packing, values in zip(packings, gradients, strict=True)]
        chunks = [each for each in found if each is not None]
        kinds = {(tensor.dtype, tensor.device) for each in chunks for tensor in each}
        if chunk_cat is None or len(chunks) < len(found) or len(kinds) != 1:
            return False
        counts = [width - packing.layout.chunk for width, packing in zip(widths, packings, strict=True)]
        ones = self._unsharded.streams.get_ones(max(counts) * len(rows), kinds.pop()[0])
        pairs = zip(chunks, counts, strict=True)
        tensors = [tensor for each, count in pairs for tensor in (*each, ones[: count * len(rows)])]
        chunk_cat(tensors, 0, len(rows), out=rows)
        for values in gradients:
            values.clear()
        return True

    def _launch_reduce_scatter(
        self, source: torch.Tensor, parts: Sequence[_GradientPart], how: ReduceOptions
    ) -> _Reduction:
        size, custom, what = self.group.size, self.comms.reduce_scatter, f"reduce {self._stored.name}"
        if size == 1 and custom is None:
            return _Reduction(how, parts, source, source, Pending(None, what))
        out = torch.empty(source.numel() // size, dtype=how.dtype, device=how.device)
        has_one_divisor = how.divisors(self.group.world) == (1.0, self.group.world)
        is_mean = self._unsharded.streams.is_async and has_one_divisor and custom is None
        is_mean = is_mean and self.group.can_average(how.device)
        pending = self.group.reduce_scatter(out, source, what, custom, is_mean=is_mean)
        is_kept = custom is not None or self._unsharded.streams.is_async
        return _Reduction(how, parts, out, source if is_kept else None, pending, is_mean=is_mean)

    def _run_comm_hook(self, gradients: list[torch.Tensor | None], how: ReduceOptions) -> _Reduction:
        """Reduce by a user's hook; reduce the flags separately."""
        assert self.hook is not None
        chunk, size = self._stored.packing.layout.chunk, self.group.size
        source = torch.empty(size * chunk, dtype=how.dtype, device=how.device)
        has = tuple(gradient is not None for gradient in gradients)
        flags = torch.empty(len(has), device=source.device)
        _write_flags(flags.view(1, -1), has)
        self._stored.packing.pack(_pop_all(gradients), source.view(size, chunk))
        self.group.all_reduce_flags(flags, f"count the gradients of {self._stored.name}")
        if self._stored.keeps_full:
            out = source
            self.hook.call(self.hook.state, source)
        else:
            out = torch.zeros(chunk, dtype=how.dtype, device=source.device)
            self.hook.call(self.hook.state, source, out)
        return _Reduction(
            how, [_GradientPart(self, has, slice(0, chunk))], out, source, Pending(None, ""), hook_flags=flags
        )

    def _queue_rest(self, reduction: _Reduction) -> None:
        """Queue the work after the reduce-scatter on the reduce stream; computation waits for it to read the result."""
        streams, source = self._unsharded.streams, reduction.source
        assert source is not None, "kept with streams"
        is_scattered = reduction.out is not source and reduction.hook_flags is None
        tensors = tuple(each for each in (source, reduction.out, reduction.hook_flags) if each is not None)
        with streams.use_reduce_stream():
            reduction.pending.wait()
            if is_scattered:
                self._input = _ReduceInput((source,), streams.record_event(), is_scattered=True)
            with streams.use_all_reduce_stream() if is_scattered and self.group.replicas > 1 else nullcontext():
                for tensor in tensors[is_scattered:]:
                    record_stream(tensor)  # its memory may belong to another stream, also as a partial sum
                results, event = reduction.finish(), streams.record_event()
        for part, result in zip(reduction.parts, results, strict=True):
            part.reducer._queued = _QueuedResult(result, event)
        if not is_scattered:
            self._input = _ReduceInput(tensors, event, is_scattered=False)

    def release_input(self, *, only_scattered: bool = False) -> None:
        """Make the current stream wait until the input's memory can be used again, and drop it."""
        held = self._input
        if held is None or (only_scattered and not held.is_scattered):
            return
        self._input = None
        if held.event is not None:
            get_current_stream(self._unsharded.device).wait_event(held.event)
        for tensor in held.tensors:  # the backward's stream may be another one
            record_stream(tensor)

    def wait_reduce_scatter(self) -> ReducedGrad | None:
        """Return the reduction's result; None without a reduction, or if a later one completes it."""
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            results = zip(reduction.parts, reduction.finish(), strict=True)
            return next(result for part, result in results if part.reducer is self)
        queued, self._queued = self._queued, None
        if queued is None:
            return None
        if queued.event is not None:
            get_current_stream(self._unsharded.device).wait_event(queued.event)
        self.release_input()
        if queued.reduced is None:
            return None
        gradient = queued.reduced.gradient
        record_stream(gradient)  # its memory may belong to the reduce stream
        return replace(queued.reduced, gradient=gradient.to(self._stored.data.device))

    def add_partial(self, out: torch.Tensor, how: ReduceOptions) -> bool:
        """Add an earlier backward's sum; return False if the result waits for a later sum over replicas."""
        partial, self._partial = self._partial, None
        if partial is not None:
            out.add_(partial)
        if how.all_reduce or self._stored.keeps_full or self.group.replicas == 1:
            return True
        self._partial = out
        return False

    def complete(self, out: torch.Tensor, has: tuple[bool, ...]) -> ReducedGrad:
        """Return the result of a complete average with flags."""
        chunk = self._stored.packing.layout.chunk
        gradient = out[:chunk]
        if self.comms.all_reduce_hook is not None:
            self.comms.all_reduce_hook(gradient)
        return self.build_result(gradient, has, out[chunk:])

    def build_result(self, gradient: torch.Tensor, has: tuple[bool, ...], flags: torch.Tensor) -> ReducedGrad:
        """Return an average in the gradient's dtype, and start its copy to pinned memory; read flags later."""
        reduced = _build_result(gradient.to(self._stored.dtypes.gradient), has, flags)
        # A copy to other memory would block the host.
        if reduced.gradient.device == self._stored.data.device or not self._stored.offload.pin:
            return reduced
        copied, event = copy_to_pinned(reduced.gradient)
        return replace(reduced, gradient=copied, event=event)

    def reset_after_error(self) -> None:
        """Wait for a pending reduction after an error, and drop all gradients."""
        reduction, self._reduction = self._reduction, None
        self._queued, self._partial, self._unsynced_grads = None, None, []
        self.release_input()
        if reduction is not None:
            reduction.pending.wait()


def start_reduce_scatters(reducers: Sequence[GradientReducer], settings: ReductionSettings) -> None:
    """Start the reduce-scatters of buckets; by one message if possible. Collective."""
    messages: dict[object, list[GradientReducer]] = {}
    for reducer in reducers:
        messages.setdefault(reducer.get_message_key(full_precision=settings.full_precision), []).append(reducer)
    for several in messages.values():
        GradientReducer._start_reduce_scatter(several, settings)


def _build_result(gradient: torch.Tensor, has: tuple[bool, ...], flags: torch.Tensor) -> ReducedGrad:
    """Return a reduced gradient; read flags later if the host would have to wait."""
    if all(has):
        return ReducedGrad(gradient, has)
    if not has_streams(flags.device):
        return ReducedGrad(gradient, tuple((flags != 0).tolist()))
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
