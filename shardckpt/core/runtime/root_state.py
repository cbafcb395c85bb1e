"""The units below one root: their shared state, and hooks for forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from shardckpt.core.api import BackwardPrefetch
from shardckpt.core.comm import rank_checks
from shardckpt.core.comm.streams import RateLimiter
from shardckpt.core.errors import DoubleBackwardError, StateError, TransformError
from shardckpt.core.modules import autograd_hooks
from shardckpt.core.modules.autograd_hooks import (
    BufferOwners,
    PostBackward,
    compiler_disabled,
    compiler_disabled_shallow,
    profile_range,
)
from shardckpt.core.modules.fqn_and_params import clean
from shardckpt.core.modules.pytree import find_grad_tensors, mapped
from shardckpt.core.params.unsharded_params import BucketPhase
from shardckpt.core.runtime import mixed_precision
from shardckpt.core.runtime.backward_order import RECOMPUTED, BackwardOrder, ForwardCall, Step, Steps
from shardckpt.core.runtime.fsdp_unit import FSDPUnit, Phase, ShardWrites, run_all
from shardckpt.errors import RankError


class Prefetcher:
    """Prefetches units that a user lists, or otherwise the units expected next."""

    def __init__(self) -> None:
        self._first_order: list[FSDPUnit] = []  # from the first iteration; others are expected to repeat it
        self._order: list[FSDPUnit] = []
        # Units that the running forward prefetched and has not called yet, in this order.
        self.unused: dict[FSDPUnit, None] = {}

    def forget(self) -> None:
        """Forget the order of a failed iteration."""
        self._order = []

    def prefetch_forward(self, unit: FSDPUnit, *, is_root: bool) -> None:
        """Prefetch the units after a unit in forward, if enabled. Collective."""
        if is_root:  # an iteration starts
            self._first_order, self._order = self._first_order or self._order, []
        position = len(self._order)
        self._order.append(unit)
        self.unused.pop(unit, None)
        chosen = unit.units_to_prefetch.get(Phase.FORWARD)
        if not chosen and unit.config.forward_prefetch:
            expected = self._first_order[position : position + 2]
            chosen = expected[1:] if expected[:1] == [unit] else []
        for following in chosen or ():
            if following.params.phases <= {BucketPhase.SHARDED}:
                self.unused[following] = None
            with profile_range(f"forward_prefetch for {following.name}"):
                following.prefetch_unshard()

    def free_unused(self) -> None:
        """Free units that a forward did not call, since a step may change them before their next forward."""
        unused, self.unused = self.unused, {}
        for unit in unused:
            if unit.params.phases != {BucketPhase.UNSHARDED}:  # a user may have unsharded it
                unit.reshard()

    def prefetch_backward(self, unit: FSDPUnit, when: BackwardPrefetch, order: BackwardOrder[FSDPUnit]) -> None:
        """Prefetch before or after a unit's backward, depending on its settings. Collective."""
        chosen = unit.units_to_prefetch.get(Phase.PRE_BACKWARD) or ()
        if not chosen and unit.config.backward_prefetch is when:
            call = order.find_next()
            chosen = [call.unit] if call is not None and call.unit.config.unshard_in_backward else ()
        elif when is not BackwardPrefetch.BACKWARD_PRE:
            return
        for following in chosen:
            with profile_range(f"backward_prefetch for {following.name}"):
                following.prefetch_unshard()


class GradientReductionHandle:
    """Handle for an asynchronous `finalize_backward`.

    Args:
        finish: Function that waits for the reductions and ends the iteration; None if there is nothing to wait for.
    """

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish
        self._is_invalid = False

    def wait(self) -> None:
        """Wait until the parameters have their gradients; a second call does nothing.

        Raises:
            StateError: The iteration was reset, or an earlier call failed, so its gradients are lost.
            RankError: Another rank did not join a reduction in time, or is lost.
        """
        if self._is_invalid:
            raise StateError(
                "the handle of this gradient reduction was invalidated by a reset, which dropped the gradients",
                fix="Run the iteration again.",
            )
        finish, self._finish = self._finish, None
        if finish is None:
            return
        try:
            finish()
        except BaseException:
            self.invalidate()
            raise

    def invalidate(self) -> None:
        """Make `wait` raise from now on."""
        self._is_invalid = True


class UnitReductions:
    """Reductions for the units below one root; a backward, or the user, ends an iteration.

    | mode | a unit that backward leaves by its hook | a unit without such a hook | who waits for reductions |
    |---|---|---|---|
    | automatic | is reduced then | is reduced at the end of the backward | the backward, if it is the last one |
    | manual | is reduced then | waits for `finalize` | the handle from `finalize` |

    In both modes a unit that does not synchronize keeps its gradients for `finalize`, or for the next backward that
    synchronizes, whether it reaches the unit or not.
    """

    def __init__(self, units: Sequence[FSDPUnit], order: rank_checks.OrderCheck | None) -> None:
        self._units = tuple(units)
        self._order = order
        self._running: list[FSDPUnit] = []  # oldest first
        self.unreduced: set[FSDPUnit] = set()  # their gradients wait for another reduction
        self._is_last_backward = True
        self._is_manual = False
        self._mode_in_use: bool | None = None  # `_is_manual` in an iteration whose backward has started
        # From a `finalize` that was not waited for; None without one.
        self.pending_handle: GradientReductionHandle | None = None

    # ---------------------------------------------------------------------------------------------------- settings

    @property
    def is_manual(self) -> bool:
        """Return True if the user ends the iteration by `finalize`."""
        return self._is_manual if self._mode_in_use is None else self._mode_in_use

    def set_manual(self, is_manual: bool) -> None:
        """Set whether the user ends iterations, or raise StateError after the iteration's backward has started."""
        if is_manual != self._is_manual and autograd_hooks.in_backward():
            raise StateError("set_manual_backward_finalization cannot change mode during backward")
        if self._mode_in_use not in (None, is_manual):
            raise StateError(
                "set_manual_backward_finalization cannot change mode after backward starts",
                fix="Set it before the first backward, or after finalize_backward or reset_iter_state.",
            )
        self._is_manual = is_manual

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether a backward waits for its last reductions, or the next one does."""
        self._is_last_backward = is_last_backward

    # ---------------------------------------------------------------------------------------------------- backward

    def start_backward(self) -> None:
        """Record the iteration's mode."""
        self._mode_in_use = self.is_manual

    def start(self, unit: FSDPUnit) -> None:
        """Start a unit's reduction, maybe after waiting for older ones to free buffers. Collective."""
        if self._order is not None:
            self._order.check_unit(self._units.index(unit), "reduce")
        buffers = unit.config.reduce_scatter_max_input_buffers
        is_async = unit.params.is_async
        if is_async:
            self._release_inputs(buffers - 1, only_scattered=True)
        with unit.profile_range("post_backward_reduce"):
            unit.reducer.start(unit.config, full_precision=unit.full_precision)
        (self.unreduced.discard if _is_complete(unit) else self.unreduced.add)(unit)
        self._running = [*(other for other in self._running if other is not unit), unit]
        if is_async:
            self._release_inputs(buffers)
        # Without streams the backend has a copy of the buffer until the reduction is over.
        self._finish(self._count_unread(buffers) if is_async else buffers - 1)

    def _release_inputs(self, left: int, *, only_scattered: bool = False) -> None:
        """Free the oldest reductions' inputs until `left` remain."""
        for unit in self._running[: max(0, len(self._running) - left)]:
            unit.reducer.release_inputs(only_scattered=only_scattered)

    def _count_unread(self, buffers: int) -> int:
        """Return how many of the latest reductions may stay queued: nobody reads their gradients before the end."""
        # Gradients that are added to others would need more memory until then.
        older = len(self._running) - buffers
        read = [number for number in range(older) if self._running[number].reducer.is_read_at_once]
        return len(self._running) - (read[-1] + 1 if read else 0)

    def defer(self, unit: FSDPUnit) -> None:
        """Record that a unit's gradients wait for its next reduction."""
        self.unreduced.add(unit)

    def finish_completed(self) -> None:
        """Finish reductions that are over, which frees their buffers early."""
        while self._running and self._running[0].reducer.is_done:
            self._finish(len(self._running) - 1)

    def _finish(self, left: int) -> None:
        """Finish the oldest reductions to free their buffers, until `left` remain."""
        while len(self._running) > left:
            unit = self._running.pop(0)
            with unit.profile_range("post_backward_rs_wait"):
                unit.reducer.finish(unit.config)

    def start_unreached(self) -> None:
        """Start the reductions for units that a last backward did not reach. Collective."""
        # A step or `zero_grad` may follow, for which their gradients would come too late.
        if self._is_last_backward and not self.is_manual:
            for unit in reversed(self._units):
                if unit in self.unreduced and unit.config.sync_gradients and _is_complete(unit):
                    self.start(unit)

    def end_backward(self) -> None:
        """End a backward; an automatic iteration's last one waits for all reductions."""
        if self._is_last_backward and not self.is_manual:
            self._finish(0)
            self._mode_in_use = None
        for unit in self._units:
            unit.reducer.finish_gradients()

    def reset_after_error(self) -> None:
        """Forget a failed iteration's reductions."""
        self._running, self.unreduced = [], set()
        self._mode_in_use = None
        if self.pending_handle is not None:
            self.pending_handle.invalidate()
            self.pending_handle = None

    # ------------------------------------------------------------------------------------------ by a call of the user

    def check_finalized(self) -> None:
        """Check that no `finalize` is pending."""
        if self.pending_handle is not None:
            raise StateError(
                "the previous gradient reduction must be waited on before a forward or another finalize_backward",
                where=self._units[0].name,
                fix="Call wait() on finalize_backward's handle, or reset_iter_state.",
            )

    def find_waiting(self) -> list[FSDPUnit]:
        """Return the units whose gradients wait for `finalize`, in reduction order; errors lose nothing."""
        self.check_finalized()
        if not self.is_manual:
            raise StateError(
                "finalize_backward requires manual backward finalization",
                where=self._units[0].name,
                fix="Call set_manual_backward_finalization(True) before forward.",
            )
        waiting = [unit for unit in reversed(self._units) if unit in self.unreduced and unit.config.sync_gradients]
        partial = [unit.name for unit in waiting if not _is_complete(unit)]
        if partial:
            raise StateError(
                "finalize_backward requires an all-reduce over replicas",
                found=partial,
                fix="Call set_requires_all_reduce(True) before it.",
            )
        return waiting

    def finalize(self, waiting: Sequence[FSDPUnit], end: Callable[[], None]) -> GradientReductionHandle:
        """Reduce all waiting gradients; return a handle that ends the iteration by `end`. Collective."""
        with torch.no_grad(), profile_range("finalize_backward"):
            for unit in waiting:
                self.start(unit)
        self.pending_handle = GradientReductionHandle(end)
        return self.pending_handle

    def end_iteration(self) -> None:
        """Wait for all reductions."""
        with torch.no_grad():
            self._finish(0)
            for unit in self._units:
                unit.reducer.finish_gradients()
        self.pending_handle = self._mode_in_use = None


class RootState:
    """Units below one root: their hooks, their order, and the running iteration."""

    def __init__(self, root: FSDPUnit, units: Sequence[tuple[str, FSDPUnit]]) -> None:
        self.root = root
        self.units = tuple(unit for _, unit in units)
        self.limiter = RateLimiter()
        self.shard_writes = ShardWrites(self.units)
        self.owners = BufferOwners()
        self._forward_id = self._forward_depth = 0
        self._prefetcher = Prefetcher()
        self._calls: list[ForwardCall[FSDPUnit]] = []  # calls that require gradients, as they finished
        self._order: BackwardOrder[FSDPUnit] | None = None  # while a backward runs
        self._has_kept_params = False
        for name, unit in units:
            unit.attach(self, name)
        self._rank_checks = _build_rank_checks(root, self.units) if rank_checks.is_debug_mode() else None
        self.reductions = UnitReductions(self.units, self._rank_checks.order if self._rank_checks is not None else None)

    def prepare_all_gather(self, unit: FSDPUnit) -> None:
        """Prepare a unit's all-gathers: order them."""
        if not (self._forward_depth or autograd_hooks.in_backward()):  # a running pass has done this already
            self.shard_writes.make_gathers_wait()
        if self._rank_checks is not None:
            self._rank_checks.order.check_unit(self.units.index(unit), "gather")

    # ------------------------------------------------------------------------------------------------- forward

    @compiler_disabled_shallow
    def run_forward(
        self, unit: FSDPUnit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a function with unsharded parameters and return its result. Collective."""
        if self.reductions.pending_handle is not None:
            self.reductions.check_finalized()
        try:
            call, saved_tensor_hooks, args, kwargs = self.pre_forward(unit, args, kwargs)
            with saved_tensor_hooks:
                output = function(*args, **kwargs)
            return self.post_forward(call, output)
        except BaseException:
            self.forward_failed(unit)
            raise

    @compiler_disabled
    def pre_forward(
        self, unit: FSDPUnit, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[ForwardCall[FSDPUnit], AbstractContextManager[object], tuple[Any, ...], Mapping[str, Any]]:
        """Unshard a unit, and register its post-backward hook on the inputs."""
        # Returns the call, a context in which autograd saves full parameters by reference, and the arguments.
        recomputes = autograd_hooks.in_backward()
        if not recomputes:
            self._start_forward(unit)
        if autograd_hooks.differentiating_functionally():
            raise _transform_error(unit)
        has_backward = torch.is_grad_enabled()
        args, kwargs = unit.prepare_inputs((args, dict(kwargs)), is_root=unit is self.root)
        inputs = find_grad_tensors((args, kwargs)) if has_backward else []
        finished_before, forward_id = (0, RECOMPUTED) if recomputes else (len(self._calls), self._forward_id)
        call = ForwardCall(unit, finished_before, bool(inputs), forward_id)
        with unit.profile_range("pre_forward"):
            unit.pre_forward(forward_id)
        if not recomputes:
            self._prefetcher.prefetch_forward(unit, is_root=unit is self.root)
            (self.owners.saved.discard if has_backward else self.owners.saved.add)(unit)
        if inputs and unit.params.active:
            hooked = iter(PostBackward.apply(partial(self.post_backward, call), *inputs))  # type: ignore[no-untyped-call]
            args, kwargs = mapped((args, kwargs), lambda each: next(hooked) if each.requires_grad else each)
        # Activation checkpointing inside the unit must see the same calls as in forward.
        if recomputes and unit not in self.owners.saved:
            return call, nullcontext(), args, kwargs
        return call, autograd_hooks.saved_tensor_hooks(self.owners), args, kwargs

    def _start_forward(self, unit: FSDPUnit) -> None:
        """Start a forward: the outermost one gets an id, the root's starts an iteration."""
        self._forward_depth += 1
        is_outermost, is_root = self._forward_depth == 1, unit is self.root
        if self._order is not None and (is_outermost or is_root):
            self.recover()
        if is_root:
            with profile_range("root_pre_forward"):
                if self._has_kept_params:  # a forward without backward kept them; they may be outdated
                    self._has_kept_params = False
                    _reshard_all(self.units)
                if self._rank_checks is not None:
                    self._rank_checks.forward_starts()
                self.shard_writes.make_gathers_wait(starts_iteration=True)
        elif is_outermost:
            self.shard_writes.make_gathers_wait()
        if is_outermost:
            self._forward_id += 1
            is_kept = has_calls = False
            for each in self.units:
                is_kept = is_kept or BucketPhase.KEPT in each.params.phases
                has_calls = has_calls or bool(each.open_calls if is_root else each.pending_forward_ids)
            if is_kept:
                _reshard_outdated(self.units)
            if not has_calls:
                self._calls = []

    @compiler_disabled
    def post_forward(self, call: ForwardCall[FSDPUnit], output: Any) -> Any:
        """Reshard a unit, register its pre-backward hook on the outputs and return them."""
        unit, recomputes = call.unit, call.forward_id == RECOMPUTED
        has_backward = torch.is_grad_enabled()
        if unit.config.precision.output_dtype is not None:
            with profile_range("cast_forward_outputs"):
                output = mixed_precision.cast_tensors(output, unit.config.precision.output_dtype)
        outputs = find_grad_tensors(output) if has_backward else []
        for tensor in outputs:
            tensor.register_hook(lambda _: self.pre_backward(call))  # type: ignore[no-untyped-call]
        is_recorded = bool(outputs) and not recomputes and bool(unit.params.active)
        if is_recorded:
            self._calls.append(call)
        with unit.profile_range("post_forward"):
            unit.post_forward(call, is_root=unit is self.root, is_recorded=is_recorded)
        if recomputes:
            return output
        self._has_kept_params |= has_backward
        if self._rank_checks is not None and unit is self.root and unit.phase is Phase.IDLE:
            self._rank_checks.order.forward_ends()
        self._end_forward()
        return output

    def _end_forward(self) -> None:
        self._forward_depth -= 1
        if not self._forward_depth:
            for unit in self.units:
                unit.finalize_forward()
                for registration in unit.params.active:
                    if registration.bucket.unsharded.streams.is_async:
                        registration.bucket.unsharded.streams.release_gather_outputs()
            if self._prefetcher.unused:
                self._prefetcher.free_unused()

    @compiler_disabled
    def forward_failed(self, unit: FSDPUnit) -> None:
        """Reset after an exception in forward."""
        # In a recomputation, activation checkpointing raises one to stop early.
        recomputes = autograd_hooks.in_backward()
        with suppress(RankError):  # the current exception says more
            unit.forward_failed(recomputes=recomputes)
        if recomputes:
            return
        with suppress(RankError):
            if unit is self.root:
                self.reset_after_error()
        self._end_forward()

    # ------------------------------------------------------------------------------------------------ backward

    def start_backward(self) -> BackwardOrder[FSDPUnit]:
        """Start a backward unless one is running: queue the final callback, prepare units. Return its order."""
        if self._order is not None:
            self.reductions.finish_completed()
            return self._order
        self._order = BackwardOrder(self._calls)
        self.reductions.start_backward()
        if self._rank_checks is not None:
            self._rank_checks.order.backward_starts()
        autograd_hooks.queue_backward_callback(partial(self._finalize_backward, self._order))
        for unit in self.units:
            for registration in unit.params.active:
                registration.restore_unsharded_grads()
        self.shard_writes.make_gathers_wait()  # a user may have written since forward: with torch's load_state_dict
        return self._order

    def pre_backward(self, call: ForwardCall[FSDPUnit]) -> None:
        """Prepare a call's backward when an output's gradient arrives. Collective."""
        unit = call.unit
        if torch.is_grad_enabled() and not all(bucket.unsharded.is_aliased for bucket in unit.buckets):
            raise _double_backward_error(unit)
        self._run_steps(self.start_backward().enter(call))
        self.enter_backward(unit, needs_params=unit.config.unshard_in_backward)

    def enter_backward(self, unit: FSDPUnit, *, needs_params: bool) -> None:
        """Unshard a unit for its backward if necessary; prefetch the next one. Collective."""
        order = self.start_backward()
        if unit.pre_backward(needs_params=needs_params):
            self._prefetcher.prefetch_backward(unit, BackwardPrefetch.BACKWARD_PRE, order)

    def post_backward(self, call: ForwardCall[FSDPUnit]) -> None:
        """Finish a call with complete gradients; the unit's last call reduces. Collective."""
        order = self.start_backward()
        self._run_steps(order.leave(call))
        call.unit.open_calls.discard(call)
        if not call.unit.open_calls:
            self._reduce(call.unit, order)

    def _run_steps(self, steps: Steps[FSDPUnit]) -> None:
        """Run the hooks for other calls that precede a call. Collective."""
        for step, call in steps:
            unit = call.unit
            if step is not Step.CLOSE:
                self.enter_backward(unit, needs_params=unit.config.unshard_in_backward)
            if step is Step.CLOSE or (step is Step.SKIP and call in unit.open_calls):
                self.post_backward(call)

    def _reduce(self, unit: FSDPUnit, order: BackwardOrder[FSDPUnit], forward_ids: set[int] | None = None) -> None:
        """Reshard a unit; start its reduction, or keep its gradients for a later one. Collective."""
        is_deferred = order.is_finishing and self.reductions.is_manual
        reduces = unit.config.sync_gradients and not is_deferred
        with unit.profile_range("post_backward_reshard"):
            unit.post_backward(forward_ids, is_unsynced=not reduces)
        self._prefetcher.prefetch_backward(unit, BackwardPrefetch.BACKWARD_POST, order)
        if unit.params.requires_grad:
            (self.reductions.start if reduces else self.reductions.defer)(unit)

    def _finalize_backward(self, order: BackwardOrder[FSDPUnit]) -> None:
        """End a backward: reduce remaining gradients in unit order; reshard all."""
        with profile_range("root_post_backward_callback"):
            for unit in reversed(self.units):
                # Gradients came through tensors that are not outputs, whose forward is unknown. If no forward of the
                # unit was reached, all its forwards count: all ranks reduce like a rank whose outputs were reached.
                if RECOMPUTED in unit.pending_forward_ids and order.forward_ids.isdisjoint(unit.pending_forward_ids):
                    order.forward_ids |= unit.pending_forward_ids - {RECOMPUTED}
            self._run_steps(order.finish())
            for unit in order.sort_units(self.units):
                if not unit.pending_forward_ids.isdisjoint({RECOMPUTED, *order.forward_ids}):
                    self._reduce(unit, order, order.forward_ids)
            if self.reductions.unreduced:
                self.reductions.start_unreached()
            self.reductions.end_backward()
            for unit in self.units:
                unit.finalize_backward()
            if self._rank_checks is not None:
                self._rank_checks.order.backward_ends()
            self._order = None
            self._has_kept_params &= any(unit.pending_forward_ids for unit in self.units)

    def finalize_backward(self) -> GradientReductionHandle:
        """Reduce the gradients that wait, and reshard all units (manual finalization). Collective."""
        if self._order is not None:
            raise StateError(
                "finalize_backward must be called after backward completes",
                where=self.root.name,
                fix="After a backward that failed, call reset_iter_state.",
            )
        waiting = self.reductions.find_waiting()
        with _reset_on_error(self):
            handle = self.reductions.finalize(waiting, self._end_iteration)
            for unit in self.units:
                unit.finalize_backward()
        return handle

    def _end_iteration(self) -> None:
        with _reset_on_error(self):
            self.reductions.end_iteration()

    # ------------------------------------------------------------------------------------------------ recovery

    def recover(self) -> None:
        """Reset after an exception in backward, which autograd does not report."""
        if self._order is not None and not autograd_hooks.in_backward():
            self.reset_after_error()

    def reset_after_error(self) -> None:
        """Reset every unit, without the failed iteration's gradients."""
        self._order, self._calls = None, []
        if self._rank_checks is not None:
            self._rank_checks.order.forget()
        self._prefetcher.forget()
        self.reductions.reset_after_error()
        run_all(unit.reset_after_error for unit in self.units)


def _reshard_outdated(units: Sequence[FSDPUnit]) -> None:
    """Reshard all units if any unit's parameters were changed since full ones were kept."""
    if any(unit.params.is_outdated for unit in units):
        # A rank does not see a step if it has no elements of the unit.
        _reshard_all(units)


def _reshard_all(units: Sequence[FSDPUnit]) -> None:
    for unit in units:
        unit.reshard()


def _is_complete(unit: FSDPUnit) -> bool:
    """Return True if a unit's reduction sums over all ranks, replicas included."""
    return unit.config.all_reduce or all(bucket.group.replicas == 1 for bucket in unit.buckets)


def _build_rank_checks(root: FSDPUnit, units: Sequence[FSDPUnit]) -> rank_checks.RankComparison:
    """Build the rank checks for debug mode."""
    groups = [unit.buckets[0].group if unit.buckets else None for unit in units]
    sharded = {parameter for unit in units for each in unit.registrations for parameter in each.parameters}
    full: dict[str, torch.Tensor] = {}
    for module in root.modules:
        full.update((clean(name), each) for name, each in module.named_parameters() if each not in sharded)
        full.update((clean(name), each) for name, each in module.named_buffers())
    buckets = [("" if unit is root else unit.name, each) for unit in units for each in unit.buckets]
    order = rank_checks.OrderCheck([unit.name for unit in units], groups)
    return rank_checks.RankComparison(order, rank_checks.ReplicaCheck(buckets, full))


def _transform_error(unit: FSDPUnit) -> TransformError:
    return TransformError(
        "torch.func transforms do not support units that gather and free parameters",
        where=unit.name,
        fix="Use backward, or copy the module with full parameters inside summon_full_params.",
    )


def _double_backward_error(unit: FSDPUnit) -> DoubleBackwardError:
    return DoubleBackwardError(
        "gradients of gradients need full parameters, which are already freed",
        where=unit.name,
        found="a backward with create_graph=True",
        fix="Compute this term with summon_full_params or a NO_SHARD unit, or without create_graph.",
    )


@contextmanager
def _reset_on_error(root: RootState) -> Iterator[None]:
    """Reset a root's units if the context raises."""
    try:
        yield
    except BaseException:
        with suppress(RankError):  # the current exception says more
            root.reset_after_error()
        raise
