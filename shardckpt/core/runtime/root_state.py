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
from shardckpt.core.modules.compile_guard import hidden
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
        self.waits_for_reductions = True
        self._optimized: Any = None
        self._order: list[ForwardCall] = []
        self._places: dict[ForwardCall, int] = {}
        self._begun: list[FSDPUnit] = []
        self._first_order: list[FSDPUnit] = []
        self._cursor = 0
        self._backward = False
        self._kept = False
        self._lap = self._depth = 0
        self._laps: set[int] = set()
        self._open: list[ForwardCall] = []
        self._owners: dict[int, FSDPUnit] = {}
        self._reducing: list[FSDPUnit] = []
        for name, unit in units:
            unit.attach(self, name)
        self._ranks = self._comparison() if rank_checks.detailed() else None

    def _comparison(self) -> rank_checks.Comparison:
        """Make what ranks compare in debug mode."""
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

    @hidden
    def root_pre_forward(self) -> None:
        """Prepare an iteration before the root computes; recover from one that failed."""
        if autograd_hooks.in_backward():
            return
        self.recover()
        self._free_kept()
        if self._ranks is not None:
            self._ranks.forward_begins()
        self._await_optimizer()
        self._first_order = self._first_order or self._begun
        self._order, self._begun, self._places, self._open = [], [], {}, []

    def _free_kept(self) -> None:
        """Give up what a forward kept that no backward followed: parameters may have been changed since."""
        if self._kept:
            self._kept = False
            for unit in self.units:
                unit.free()

    def _await_optimizer(self) -> None:
        """Let gathers read what the optimizer wrote."""
        event, self._optimized = self._optimized, None
        for device in {bucket.compute_device for unit in self.units for bucket in unit.buckets}:
            gathers_await(device, event)

    def optimized(self, event: Any) -> None:
        """Let the next iteration's gathers wait for this event only, instead of for all that is queued.

        Args:
            event: Recorded behind the optimizer's step.
        """
        self._optimized = event

    def awaits_reductions(self, on: bool) -> None:
        """Say whether a backward ends with all its reductions done, or leaves the last ones to the next."""
        self.waits_for_reductions = on

    @hidden
    def forward_failed(self) -> None:
        """The root's forward raised; in a recomputation that is how checkpointing stops early."""
        if not autograd_hooks.in_backward():
            with suppress(RankError):  # the exception that is under way says more
                self.reset_after_error()

    def recover(self) -> None:
        """After a backward that raised, nothing of which tells the engine: be as before it."""
        if self._backward and not autograd_hooks.in_backward():
            self.reset_after_error()

    def reset_after_error(self) -> None:
        """Bring every unit back to rest, without the gradients of the iteration that failed."""
        self._backward = False
        if self._ranks is not None:
            self._ranks.order.forget()
        self._reducing = []
        self._order, self._begun, self._places, self._open = [], [], {}, []
        for unit in self.units:
            unit.reset_after_error()

    @property
    def lap(self) -> int:
        """The number of the computation that a user began last."""
        return self._lap

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around each call of a unit: the outermost begins a lap, which has a backward of its own."""
        if autograd_hooks.in_backward():
            yield
            return
        if not self._depth:
            self._lap += 1
            if not any(unit.owes_reduction for unit in self.units):
                self._order, self._places, self._open = [], {}, []
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                for unit in self.units:
                    unit.end_root_forward()

    def count_finished_calls(self) -> int:
        """Return the number of calls that finished in this forward."""
        return len(self._order)

    def on_pre_forward(self, unit: FSDPUnit) -> None:
        """Record a unit that computes next, and prefetch the one that follows it if settings say so."""
        position = len(self._begun)
        self._begun.append(unit)
        told = unit.told_next(Phase.FORWARD)
        if told is not None:
            for each in told:
                each.prefetch()
            return
        begun = self._first_order[position : position + 2]
        if unit.config.forward_prefetch and len(begun) == 2 and begun[0] is unit:
            begun[1].prefetch()

    def record_post_forward(self, call: ForwardCall) -> None:
        """Record the post-forward order: backward goes through it in reverse, on every rank alike."""
        self._places[call] = len(self._order)
        self._order.append(call)

    def is_root(self, unit: FSDPUnit) -> bool:
        """Tell whether the unit is the outermost one."""
        return unit is self.root

    def on_post_forward(self, unit: FSDPUnit) -> None:
        """Note that parameters may be kept once the root has computed; in debug mode, compare ranks."""
        if unit is self.root:
            self._kept |= torch.is_grad_enabled()
            if self._ranks is not None:
                self._ranks.order.forward_ends()

    def reduces(self, unit: FSDPUnit) -> None:
        """Let ranks compare, in debug mode, whose gradients they are about to reduce."""
        if self._ranks is not None:
            self._ranks.order.reduces(self.units.index(unit))

    def admit(self, unit: FSDPUnit) -> None:
        """Return when the unit may be gathered; in debug mode, ranks compare which one it is."""
        if self._ranks is not None:
            self._ranks.order.gathers(self.units.index(unit))
        if unit.config.limit_gathers:
            self.limiter.admit()

    def released(self, unit: FSDPUnit) -> None:
        """Note that the unit's memory is free as soon as what is queued has been computed."""
        if unit.config.limit_gathers and unit.registrations:
            self.limiter.freed(unit.registrations[0].bucket.compute_device)

    # ----------------------------------------------------------------------------------------------- backward

    def ensure_backward_started(self) -> None:
        """Queue the final callback when a backward starts, and prepare the gradients of all units."""
        if self._backward:
            self._end_done_reductions()
            return
        self._backward = True
        if self._ranks is not None:
            self._ranks.order.backward_begins()
        self._laps, self._open = set(), []
        self._cursor = len(self._order)
        autograd_hooks.at_end_of_backward(self._post_backward_final_callback)
        for each in self.units:
            each.prepare_gradients_for_backward()

    def on_pre_backward(self, call: ForwardCall) -> None:
        """Go back in the post-forward order to this call; run the calls on the way that were missed.

        Other ranks may have reached those, and gathered and reduced them: so does this one, at the same place.
        """
        place = self._places.get(call)
        if place is None:
            return
        self._laps.add(call.lap)
        self._run_missed_calls(place + 1)
        self._finish_calls_above(place)
        self._cursor = min(self._cursor, place)
        self._defer_finish(call)

    def on_post_backward(self, call: ForwardCall) -> None:
        """Run the missed calls that are nested in this one, and finish those that began."""
        if call.lap:
            self._laps.add(call.lap)
        if call in self._places:
            self._run_missed_calls(call.below)
            self._finish_calls_above(call.below - 1, self._places[call])

    def _run_missed_calls(self, place: int) -> None:
        while self._cursor > place:
            self._finish_calls_above(self._cursor - 1)
            self._cursor -= 1
            call = self._order[self._cursor]
            if call.lap not in self._laps:
                continue
            if call.below < place:  # what was reached is nested in it: it has only begun
                call.unit.pre_backward()
                self._defer_finish(call)
            else:
                call.unit.run_skipped_post_backward(call)

    def _defer_finish(self, call: ForwardCall) -> None:
        if not call.threaded and call not in self._open:
            self._open.append(call)

    def _finish_calls_above(self, place: int, limit: int | None = None) -> None:
        """Finish the calls without a post-backward hook, once backward has passed all that is nested in them."""
        for call in tuple(self._open):
            at = self._places.get(call, -1)
            if call in self._open and call.below > place and (limit is None or at < limit):
                self._open.remove(call)
                call.unit.post_backward_hook(call)

    def prefetch_backward_pre(self, unit: FSDPUnit) -> None:
        """Prefetch what backward needs next, before the gradients of a unit are computed."""
        told = unit.told_next(Phase.BACKWARD)
        if told is not None:
            for each in told:
                each.prefetch()
        elif unit.config.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._prefetch()

    def prefetch_backward_post(self, unit: FSDPUnit) -> None:
        """Prefetch what backward needs next, if settings say to wait for the gradients of a unit."""
        posted = unit.config.backward_prefetch is BackwardPrefetch.BACKWARD_POST
        if posted and unit.told_next(Phase.BACKWARD) is None:
            self._prefetch()

    def _prefetch(self) -> None:
        ahead = (self._order[place] for place in range(self._cursor - 1, -1, -1))
        call = next((each for each in ahead if each.lap in self._laps), None)
        if call is not None and call.unit.config.gathers_in_backward:
            call.unit.prefetch()

    def on_reduction_start(self, unit: FSDPUnit) -> None:
        """Record a reduction, and finish older ones beyond the number of buffers that is allowed."""
        self._reducing = [*(each for each in self._reducing if each is not unit), unit]
        self._end_reductions(unit.config.reductions_under_way)

    def _end_done_reductions(self) -> None:
        """Make room as soon as there is some to make."""
        while self._reducing and self._reducing[0].reduced:
            self._reducing.pop(0).finish_reduction()

    def _end_reductions(self, left: int) -> None:
        while len(self._reducing) > left:
            self._reducing.pop(0).finish_reduction()

    def _post_backward_final_callback(self) -> None:
        """End a backward: reduce the remaining gradients in the fixed order of units, reshard all."""
        self._reach_laps_of_gradients()
        if self._laps:
            self._run_missed_calls(0)
            self._finish_calls_above(-1)
        for unit in reversed(self.units):
            if unit.owes(self._laps):
                unit.post_backward(self._laps)
        if self.waits_for_reductions:
            self._end_reductions(0)
        for unit in self.units:
            unit.finalize_backward()
        if self._ranks is not None:
            self._ranks.order.backward_ends()
        self._backward = False
        self._kept &= any(unit.owes_reduction for unit in self.units)

    def _reach_laps_of_gradients(self) -> None:
        """Count a lap as reached if it gave gradients to a unit, by way of tensors that are results of no call.

        Which of its laps such a tensor is of is not known: of a unit none of whose laps was reached, all are. So a rank
        that has such gradients only reduces what a rank does whose results were reached.
        """
        for unit in reversed(self.units):
            if unit.takes_part and self._laps.isdisjoint(unit.owed_laps):
                self._laps |= unit.owed_laps

    # ------------------------------------------------------------------------------------------------ buffers

    def filled(self, bucket: Bucket, unit: FSDPUnit) -> None:
        """Know whose the buffer is that lies there; two that have storage cannot have one address."""
        if bucket.address:
            self._owners[bucket.address] = unit

    def freed(self, address: int) -> None:
        """Forget an address before others get it."""
        self._owners.pop(address, None)

    @hidden
    def find(self, tensor: torch.Tensor) -> FSDPUnit | None:
        """Return the unit in whose full buffer a tensor lies."""
        try:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            return self._owners.get(tensor.untyped_storage().data_ptr())
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
    with root_state.computing():
        try:
            args, named = unit.pre_forward(args, dict(kwargs))
            with unit.computing():
                output = function(*args, **named)
            return unit.post_forward(output)
        except BaseException:
            unit.forward_failed()
            if is_root:
                root_state.forward_failed()
            raise
