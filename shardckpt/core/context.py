"""What all units below one root share: their order, prefetching, the end of backward, recovery after failures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from shardckpt.core import autograd
from shardckpt.core.bucket import Bucket
from shardckpt.core.config import BackwardPrefetch
from shardckpt.core.unit import Call, Unit
from shardckpt.errors import RankError


class Context:
    """The units below one root, in a fixed order, and the iteration they are in.

    Args:
        root: The root's unit.
        units: All units with their names, the root's among them, in the order of `modules()`.
    """

    def __init__(self, root: Unit, units: Sequence[tuple[str, Unit]]) -> None:
        self.root = root
        self.units = tuple(unit for _, unit in units)
        self._order: list[Call] = []
        self._places: dict[Call, int] = {}
        self._begun: list[Unit] = []
        self._first_order: list[Unit] = []
        self._cursor = 0
        self._backward = False
        self._touched = False
        self._open: list[Call] = []
        self._owners: dict[int, Unit] = {}
        self._reducing: Unit | None = None
        for name, unit in units:
            unit.attach(self, name)

    # ---------------------------------------------------------------------------------------------- iteration

    def forward_starts(self) -> None:
        """Before the root computes: recover from an iteration that ended in an exception."""
        if autograd.in_backward():
            return
        self.recover()
        self._first_order = self._first_order or self._begun
        self._order, self._begun, self._places, self._open = [], [], {}, []

    def forward_failed(self) -> None:
        """The root's forward raised; in a recomputation that is how checkpointing stops early."""
        if not autograd.in_backward():
            with suppress(RankError):  # the exception that is under way says more
                self.abandon()

    def recover(self) -> None:
        """After a backward that raised, nothing of which tells the engine: be as before it."""
        if self._backward and not autograd.in_backward():
            self.abandon()

    def abandon(self) -> None:
        """Bring every unit back to rest, without the gradients of the iteration that failed."""
        self._backward = False
        self._reducing = None
        self._order, self._begun, self._places, self._open = [], [], {}, []
        for unit in self.units:
            unit.abandon()

    def calls_ended(self) -> int:
        """Return how many calls have ended in this forward."""
        return len(self._order)

    def forward_begins(self, unit: Unit) -> None:
        """Start to gather the unit that came next in the first iteration, where forward prefetching is on."""
        position = len(self._begun)
        self._begun.append(unit)
        begun = self._first_order[position : position + 2]
        if unit.config.forward_prefetch and len(begun) == 2 and begun[0] is unit:
            begun[1].prefetch()

    def forward_ended(self, call: Call) -> None:
        """Note the order: backward goes through it from its end, on every rank alike."""
        self._places[call] = len(self._order)
        self._order.append(call)

    def keeps_after_forward(self, unit: Unit) -> bool:
        """The root's parameters are needed first in backward."""
        return unit is self.root

    # ----------------------------------------------------------------------------------------------- backward

    def backward_begins(self) -> None:
        """Once a backward: arrange for its end, and take back gradients that were held back."""
        if self._backward:
            return
        self._backward = True
        self._touched, self._open = False, []
        self._cursor = len(self._order)
        autograd.at_end_of_backward(self._finish)
        for each in self.units:
            each.begin_iteration()

    def backward_reached(self, call: Call) -> None:
        """Go back in the order of forward to this call; calls on the way that nothing came back to are skipped here.

        Other ranks may have reached those, and gathered and reduced them: so does this one, at the same place.
        """
        place = self._places.get(call)
        if place is None:
            return
        self._touched = True
        self._skip_to(place + 1)
        self._close_above(place)
        self._cursor = min(self._cursor, place)
        self._await_end(call)

    def backward_passes(self, call: Call) -> None:
        """Skip what is nested in the call and was not reached."""
        if call in self._places:
            self._skip_to(call.below)
            self._close_above(call.below - 1, self._places[call])

    def _skip_to(self, place: int) -> None:
        while self._cursor > place:
            self._close_above(self._cursor - 1)
            self._cursor -= 1
            call = self._order[self._cursor]
            if call.below < place:  # what was reached is nested in it: it has only begun
                call.unit.fill_for_backward()
                self._await_end(call)
            else:
                call.unit.skip(call)

    def _await_end(self, call: Call) -> None:
        if not call.threaded and call not in self._open:
            self._open.append(call)

    def _close_above(self, place: int, limit: int | None = None) -> None:
        """End the calls whose inputs have no gradients, once backward has gone below all that is nested in them."""
        for call in tuple(self._open):
            at = self._places.get(call, -1)
            if call in self._open and call.below > place and (limit is None or at < limit):
                self._open.remove(call)
                call.unit.passed(call)

    def backward_needs(self, unit: Unit) -> None:
        """Start to gather what is needed next."""
        if unit.config.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._prefetch()

    def backward_passed(self, unit: Unit) -> None:
        """Start to gather what is needed next, where that waits for the gradients."""
        if unit.config.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._prefetch()

    def _prefetch(self) -> None:
        if self._cursor > 0:
            self._order[self._cursor - 1].unit.prefetch()

    def reduction_begins(self, unit: Unit) -> None:
        """Let one reduction be under way, so that one buffer of gradients is held at most."""
        before, self._reducing = self._reducing, unit
        if before is not None and before is not unit:
            before.finish_reduction()

    def _finish(self) -> None:
        """The end of a backward: what is left is reduced in the fixed order of units, everything is freed."""
        if self._touched:
            self._skip_to(0)
            self._close_above(-1)
        for unit in reversed(self.units):
            if unit.owes_reduction:
                unit.finish_backward()
        if self._reducing is not None:
            before, self._reducing = self._reducing, None
            before.finish_reduction()
        for unit in self.units:
            unit.end_iteration()
        self._backward = False

    # ------------------------------------------------------------------------------------------------ buffers

    def filled(self, bucket: Bucket, unit: Unit) -> None:
        """Know whose the buffer is that lies there; two that have storage cannot have one address."""
        if bucket.address:
            self._owners[bucket.address] = unit

    def freed(self, address: int) -> None:
        """Forget an address before others get it."""
        self._owners.pop(address, None)

    def find(self, tensor: torch.Tensor) -> Unit | None:
        """Return the unit in whose full buffer a tensor lies."""
        try:
            return self._owners.get(tensor.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # tensors without a storage of their own
            return None
