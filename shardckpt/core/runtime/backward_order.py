"""Order of backward, equal on every rank, whatever units its gradients reach.

The invariant: **reduce-scatters start in the reverse order of the forward calls, on every rank.** Ranks agree on the
forward calls, because every rank runs the same modules. They do not agree on the gradients: a rank may detach an
output, or compute its loss from some outputs. Therefore a rank that goes back to an earlier call runs the
hooks for each call in between, as other ranks may do because of gradients.

Example: units A, B and C compute one after the other, so the calls are [A, B, C]. On rank 0 no gradient reaches B:

    rank 0                                        rank 1
    C gets a gradient   enter C                   enter C
    C is done           leave C: reduce C         leave C: reduce C
    B gets a gradient   (nothing)                 enter B
    B is done           (nothing)                 leave B: reduce B
    A gets a gradient   skip B: reduce B          enter A
                        enter A
    A is done           leave A: reduce A         leave A: reduce A

Both ranks start the same collectives in the same order: C, B, A.

A call is **nested** in another if it started after the other and finished before it. Its position is at least
the other's `finished_before`, and below the other's position. An outer call is entered before the calls that are
nested in it, and finished after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

RECOMPUTED = 0  # forward id for calls that the running backward recomputes, and for their gradients

Unit = TypeVar("Unit")


@dataclass(frozen=True, eq=False, slots=True)
class ForwardCall(Generic[Unit]):
    """One unit's forward call."""

    unit: Unit
    finished_before: int = 0  # number of calls that had finished when this call started
    # An input requires gradients, so that autograd calls the post-backward hook.
    has_post_backward_hook: bool = False
    # The outermost forward's number; a backward covers the forwards that it reaches.
    forward_id: int = RECOMPUTED


class Step(Enum):
    """Hooks that autograd does not call on this rank."""

    ENTER = auto()  # pre-backward hook: nested calls have been reached
    SKIP = auto()  # both hooks: no gradient on this rank reaches the call
    CLOSE = auto()  # post-backward hook


Steps = Iterator[tuple[Step, ForwardCall[Unit]]]


class BackwardOrder(Generic[Unit]):
    """One backward's position in the forward calls."""

    # Each method yields the hooks to run before backward continues. A hook may call the methods again while the caller
    # iterates.

    def __init__(self, calls: Sequence[ForwardCall[Unit]]) -> None:
        self.forward_ids: set[int] = set()  # forwards that this backward has reached
        self.is_finishing = False  # autograd has called all its hooks
        self._calls = tuple(calls)
        self._positions = {call: position for position, call in enumerate(self._calls)}
        self._cursor = len(self._calls)  # calls at this position and after it have been reached or skipped
        self._unfinished: list[ForwardCall[Unit]] = []  # entered calls without a post-backward hook

    def enter(self, call: ForwardCall[Unit]) -> Steps[Unit]:
        """Move to a call whose output has a gradient."""
        position = self._positions.get(call)
        if position is None:
            return
        self.forward_ids.add(call.forward_id)
        yield from self._skip_after(position + 1)
        yield from self._close_after(position)
        self._cursor = min(self._cursor, position)
        self._note_unfinished(call)

    def leave(self, call: ForwardCall[Unit]) -> Steps[Unit]:
        """Finish the calls nested in a call whose gradients are complete."""
        if call.forward_id != RECOMPUTED:
            self.forward_ids.add(call.forward_id)
        position = self._positions.get(call)
        if position is not None:
            yield from self._skip_after(call.finished_before)
            yield from self._close_after(call.finished_before - 1, before=position)

    def finish(self) -> Steps[Unit]:
        """Finish all calls in the forwards that were reached; autograd calls no more hooks."""
        self.is_finishing = True
        if self.forward_ids:
            yield from self._skip_after(0)
            yield from self._close_after(-1)

    def find_next(self) -> ForwardCall[Unit] | None:
        """Return the call that backward is expected to reach next."""
        for position in range(self._cursor - 1, -1, -1):
            if self._calls[position].forward_id in self.forward_ids:
                return self._calls[position]
        return None

    def sort_units(self, units: Sequence[Unit]) -> list[Unit]:
        """Return units in the order in which ranks that reach more calls reduce them."""
        # A unit is reduced after its first call, the last one that backward leaves. So units whose first call started
        # later come first; units without calls come last.
        starts = []
        for position, call in enumerate(self._calls):
            starts.append((call.finished_before, -position))
        first: dict[Unit, int] = {}
        for index, (_, position) in enumerate(sorted(starts)):
            first.setdefault(self._calls[-position].unit, index)
        ordered = list(reversed(units))
        ordered.sort(key=lambda unit: first.get(unit, -1), reverse=True)
        return ordered

    def _skip_after(self, position: int) -> Steps[Unit]:
        """Move to a position; yield the hooks for calls in between without gradients."""
        while self._cursor > position:
            yield from self._close_after(self._cursor - 1)
            self._cursor -= 1
            call = self._calls[self._cursor]
            if call.forward_id not in self.forward_ids:
                continue
            if call.finished_before < position:  # the call at the position is nested in this one: only enter it
                yield Step.ENTER, call
                self._note_unfinished(call)
            else:
                yield Step.SKIP, call

    def _note_unfinished(self, call: ForwardCall[Unit]) -> None:
        if not call.has_post_backward_hook and call not in self._unfinished:
            self._unfinished.append(call)

    def _close_after(self, position: int, before: int | None = None) -> Steps[Unit]:
        """Close unfinished calls that started after a position: nested calls are complete."""
        for call in tuple(self._unfinished):
            if call not in self._unfinished or call.finished_before <= position:
                continue
            if before is None or self._positions[call] < before:
                self._unfinished.remove(call)
                yield Step.CLOSE, call
