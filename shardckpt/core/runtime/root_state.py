"""State that units below one root share: order, prefetching, end of backward, recovery."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardckpt.core.comm import rank_checks
from shardckpt.core.comm.streams import RateLimiter, gathers_await
from shardckpt.core.config import BackwardPrefetch
from shardckpt.core.modules import autograd_hooks
from shardckpt.core.modules.compile_guard import compiler_disabled
from shardckpt.core.modules.fqn_and_params import clean
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.runtime.fsdp_unit import ForwardCall, FSDPUnit, Phase
from shardckpt.errors import RankError


class RootState:
    """State that the units below one root share: their order, and the iteration that runs.

    Args:
        root: The root's unit.
        units: All units with their names, the root's among them, in the order of `modules()`.
    """

    def __init__(self, root: FSDPUnit, units: Sequence[tuple[str, FSDPUnit]]) -> None:
        self.root = root
        self.units = tuple(unit for _, unit in units)
        self.limiter = RateLimiter()
        self.is_last_backward = True
        self._post_optim_event: Any = None
        self._post_forward_order: list[ForwardCall] = []
        self._order_index: dict[ForwardCall, int] = {}
        self._pre_forward_order: list[FSDPUnit] = []
        self._first_pre_forward_order: list[FSDPUnit] = []
        self._cursor = 0
        self._in_backward = False
        self._has_kept_params = False
        self._forward_id = self._forward_depth = 0
        self._active_forward_ids: set[int] = set()
        self._unfinished_calls: list[ForwardCall] = []
        self._unit_by_address: dict[int, FSDPUnit] = {}
        self._reducing_units: list[FSDPUnit] = []
        for name, unit in units:
            unit.attach(self, name)
        self._rank_checks = self._build_rank_checks() if rank_checks.detailed() else None

    def _build_rank_checks(self) -> rank_checks.Comparison:
        """Build the checks that compare ranks in debug mode."""
        groups = [unit.buckets[0].group if unit.buckets else None for unit in self.units]
        shown = {parameter for unit in self.units for each in unit.registrations for parameter in each.parameters}
        whole: dict[str, torch.Tensor] = {}
        for module in self.root.modules:
            whole.update((clean(name), each) for name, each in module.named_parameters() if each not in shown)
            whole.update((clean(name), each) for name, each in module.named_buffers())
        buckets = [("" if unit is self.root else unit.name, each) for unit in self.units for each in unit.buckets]
        order = rank_checks.OrderCheck([unit.name for unit in self.units], groups)
        return rank_checks.Comparison(order, rank_checks.ReplicaCheck(buckets, whole))

    # ---------------------------------------------------------------------------------------------- iteration

    @compiler_disabled
    def root_pre_forward(self) -> None:
        """Prepare an iteration before the root computes; recover from one that failed."""
        if autograd_hooks.in_backward():
            return
        self.recover()
        self._reshard_kept()
        if self._rank_checks is not None:
            self._rank_checks.forward_begins()
        self._wait_for_optimizer()
        self._first_pre_forward_order = self._first_pre_forward_order or self._pre_forward_order
        self._post_forward_order, self._pre_forward_order, self._order_index, self._unfinished_calls = [], [], {}, []

    def _reshard_kept(self) -> None:
        """Reshard what a forward kept without a backward: parameters may have changed since."""
        if self._has_kept_params:
            self._has_kept_params = False
            for unit in self.units:
                unit.reshard()

    def _wait_for_optimizer(self) -> None:
        """Let all-gathers wait for what the optimizer wrote."""
        event, self._post_optim_event = self._post_optim_event, None
        for device in {bucket.compute_device for unit in self.units for bucket in unit.buckets}:
            gathers_await(device, event)

    def set_post_optim_event(self, event: Any) -> None:
        """Set the event that all-gathers of the next iteration wait for, in place of all that is queued.

        Args:
            event: Recorded behind the optimizer's step.
        """
        self._post_optim_event = event

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether a backward waits for all its reductions, or leaves the last ones to the next."""
        self.is_last_backward = is_last_backward

    @compiler_disabled
    def forward_failed(self) -> None:
        """Reset after a forward of the root that raised; in a recomputation checkpointing stops early that way."""
        if not autograd_hooks.in_backward():
            with suppress(RankError):  # the exception that is under way says more
                self.reset_after_error()

    def recover(self) -> None:
        """Reset after a backward that raised; autograd does not report it."""
        if self._in_backward and not autograd_hooks.in_backward():
            self.reset_after_error()

    def reset_after_error(self) -> None:
        """Reset every unit, without the gradients of the failed iteration."""
        self._in_backward = False
        if self._rank_checks is not None:
            self._rank_checks.order.forget()
        self._reducing_units = []
        self._post_forward_order, self._pre_forward_order, self._order_index, self._unfinished_calls = [], [], {}, []
        for unit in self.units:
            unit.reset_after_error()

    @property
    def forward_id(self) -> int:
        """Number of the outermost forward that began last."""
        return self._forward_id

    @contextmanager
    def count_forward(self) -> Iterator[None]:
        """Count nested calls of units; the outermost gets a forward id and a backward of its own."""
        if autograd_hooks.in_backward():
            yield
            return
        if not self._forward_depth:
            self._forward_id += 1
            if not any(unit.has_pending_grads for unit in self.units):
                self._post_forward_order, self._order_index, self._unfinished_calls = [], {}, []
        self._forward_depth += 1
        try:
            yield
        finally:
            self._forward_depth -= 1
            if not self._forward_depth:
                for unit in self.units:
                    unit.end_root_forward()

    def count_finished_calls(self) -> int:
        """Return the number of calls that finished in this forward."""
        return len(self._post_forward_order)

    def on_pre_forward(self, unit: FSDPUnit) -> None:
        """Record a unit that computes next, and prefetch the one that follows it if settings say so."""
        position = len(self._pre_forward_order)
        self._pre_forward_order.append(unit)
        chosen = unit.get_units_to_prefetch(Phase.FORWARD)
        if chosen is not None:
            for each in chosen:
                each.prefetch_unshard()
            return
        begun = self._first_pre_forward_order[position : position + 2]
        if unit.config.forward_prefetch and len(begun) == 2 and begun[0] is unit:
            begun[1].prefetch_unshard()

    def record_post_forward(self, call: ForwardCall) -> None:
        """Record the post-forward order: backward goes through it in reverse, on every rank alike."""
        self._order_index[call] = len(self._post_forward_order)
        self._post_forward_order.append(call)

    def is_root(self, unit: FSDPUnit) -> bool:
        """Return True if the unit is the root."""
        return unit is self.root

    def on_post_forward(self, unit: FSDPUnit) -> None:
        """Note that parameters may be kept once the root has computed; in debug mode, compare ranks."""
        if unit is self.root:
            self._has_kept_params |= torch.is_grad_enabled()
            if self._rank_checks is not None:
                self._rank_checks.order.forward_ends()

    def check_reduce_order(self, unit: FSDPUnit) -> None:
        """Compare, in debug mode, whose gradients ranks are about to reduce."""
        if self._rank_checks is not None:
            self._rank_checks.order.reduces(self.units.index(unit))

    def wait_for_rate_limiter(self, unit: FSDPUnit) -> None:
        """Wait until the unit may be unsharded; in debug mode, compare which one it is on all ranks."""
        if self._rank_checks is not None:
            self._rank_checks.order.gathers(self.units.index(unit))
        if unit.config.limit_gathers:
            self.limiter.wait()

    def record_reshard_event(self, unit: FSDPUnit) -> None:
        """Record that the unit's memory is free once the queued computation has run."""
        if unit.config.limit_gathers and unit.registrations:
            self.limiter.record_free_event(unit.registrations[0].bucket.compute_device)

    # ----------------------------------------------------------------------------------------------- backward

    def ensure_backward_started(self) -> None:
        """Queue the final callback when a backward starts, and prepare the gradients of all units."""
        if self._in_backward:
            self._finish_done_reductions()
            return
        self._in_backward = True
        if self._rank_checks is not None:
            self._rank_checks.order.backward_begins()
        self._active_forward_ids, self._unfinished_calls = set(), []
        self._cursor = len(self._post_forward_order)
        autograd_hooks.queue_backward_callback(self._post_backward_final_callback)
        for each in self.units:
            each.prepare_gradients_for_backward()

    def on_pre_backward(self, call: ForwardCall) -> None:
        """Go back in the post-forward order to this call; run the calls on the way that were missed.

        Other ranks may have reached those, and gathered and reduced them: so does this one, at the same place.
        """
        place = self._order_index.get(call)
        if place is None:
            return
        self._active_forward_ids.add(call.forward_id)
        self._run_missed_calls(place + 1)
        self._finish_calls_above(place)
        self._cursor = min(self._cursor, place)
        self._defer_finish(call)

    def on_post_backward(self, call: ForwardCall) -> None:
        """Run the missed calls that are nested in this one, and finish those that began."""
        if call.forward_id:
            self._active_forward_ids.add(call.forward_id)
        if call in self._order_index:
            self._run_missed_calls(call.finished_before)
            self._finish_calls_above(call.finished_before - 1, self._order_index[call])

    def _run_missed_calls(self, place: int) -> None:
        """Run the hooks of calls after a place that this rank's gradients did not reach. Collective."""
        while self._cursor > place:
            self._finish_calls_above(self._cursor - 1)
            self._cursor -= 1
            call = self._post_forward_order[self._cursor]
            if call.forward_id not in self._active_forward_ids:
                continue
            if call.finished_before < place:  # what was reached is nested in it: it has only begun
                call.unit.pre_backward()
                self._defer_finish(call)
            else:
                call.unit.run_skipped_post_backward(call)

    def _defer_finish(self, call: ForwardCall) -> None:
        """Note a call that autograd will not finish: none of its inputs requires gradients."""
        if not call.has_post_backward_hook and call not in self._unfinished_calls:
            self._unfinished_calls.append(call)

    def _finish_calls_above(self, place: int, limit: int | None = None) -> None:
        """Finish the calls without a post-backward hook, once backward has passed all that is nested in them."""
        for call in tuple(self._unfinished_calls):
            at = self._order_index.get(call, -1)
            if call in self._unfinished_calls and call.finished_before > place and (limit is None or at < limit):
                self._unfinished_calls.remove(call)
                call.unit.post_backward_hook(call)

    def prefetch_backward_pre(self, unit: FSDPUnit) -> None:
        """Prefetch what backward needs next, before the gradients of a unit are computed."""
        chosen = unit.get_units_to_prefetch(Phase.BACKWARD)
        if chosen is not None:
            for each in chosen:
                each.prefetch_unshard()
        elif unit.config.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._prefetch_next()

    def prefetch_backward_post(self, unit: FSDPUnit) -> None:
        """Prefetch what backward needs next, if settings say to wait for the gradients of a unit."""
        posted = unit.config.backward_prefetch is BackwardPrefetch.BACKWARD_POST
        if posted and unit.get_units_to_prefetch(Phase.BACKWARD) is None:
            self._prefetch_next()

    def _prefetch_next(self) -> None:
        ahead = (self._post_forward_order[place] for place in range(self._cursor - 1, -1, -1))
        call = next((each for each in ahead if each.forward_id in self._active_forward_ids), None)
        if call is not None and call.unit.config.gathers_in_backward:
            call.unit.prefetch_unshard()

    def on_reduction_start(self, unit: FSDPUnit) -> None:
        """Record a reduction, and finish older ones beyond the number of buffers that is allowed."""
        self._reducing_units = [*(each for each in self._reducing_units if each is not unit), unit]
        self._finish_reductions(unit.config.reductions_under_way)

    def _finish_done_reductions(self) -> None:
        """Finish reductions that are done, to free their buffers early."""
        while self._reducing_units and self._reducing_units[0].is_reduced:
            self._reducing_units.pop(0).finish_reduction()

    def _finish_reductions(self, left: int) -> None:
        while len(self._reducing_units) > left:
            self._reducing_units.pop(0).finish_reduction()

    def _post_backward_final_callback(self) -> None:
        """End a backward: reduce the remaining gradients in the fixed order of units, reshard all."""
        self._activate_forwards_with_gradients()
        if self._active_forward_ids:
            self._run_missed_calls(0)
            self._finish_calls_above(-1)
        for unit in reversed(self.units):
            if unit.needs_post_backward(self._active_forward_ids):
                unit.post_backward(self._active_forward_ids)
        if self.is_last_backward:
            self._finish_reductions(0)
        for unit in self.units:
            unit.finalize_backward()
        if self._rank_checks is not None:
            self._rank_checks.order.backward_ends()
        self._in_backward = False
        self._has_kept_params &= any(unit.has_pending_grads for unit in self.units)

    def _activate_forwards_with_gradients(self) -> None:
        """Count a forward as reached if it gave gradients to a unit by way of tensors that are not outputs.

        Which forward of the unit such a tensor belongs to is not known: if none was reached, all count. So a rank that
        has such gradients only reduces the same as a rank whose outputs were reached.
        """
        for unit in reversed(self.units):
            if unit.is_in_backward and self._active_forward_ids.isdisjoint(unit.pending_forward_ids):
                self._active_forward_ids |= unit.pending_forward_ids

    # ------------------------------------------------------------------------------------------------ buffers

    def record_unsharded(self, bucket: Bucket, unit: FSDPUnit) -> None:
        """Record the unit of a full buffer by its address, which is unique while it has storage."""
        if bucket.address:
            self._unit_by_address[bucket.address] = unit

    def forget_unsharded(self, address: int) -> None:
        """Forget an address before other tensors get it."""
        self._unit_by_address.pop(address, None)

    @compiler_disabled
    def find_unit(self, tensor: torch.Tensor) -> FSDPUnit | None:
        """Return the unit in whose full buffer a tensor lies."""
        try:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            return self._unit_by_address.get(tensor.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # tensors without a storage of their own
            return None


def run_forward(
    root_state: RootState,
    unit: FSDPUnit,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run a function with the unit's parameters unsharded, and return its result. Collective.

    Args:
        root_state: The state of the root.
        unit: The unit.
        function: The forward of a module, or another method.
        args: Its arguments.
        kwargs: And those by name.
    """
    is_root = root_state.root is unit
    if is_root:
        root_state.root_pre_forward()
    with root_state.count_forward():
        try:
            args, named = unit.pre_forward(args, dict(kwargs))
            with unit.save_params_by_reference():
                output = function(*args, **named)
            return unit.post_forward(output)
        except BaseException:
            unit.forward_failed()
            if is_root:
                root_state.forward_failed()
            raise
