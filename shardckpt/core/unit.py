"""One module's buckets, and what happens to them around its forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import nn

from shardckpt.core import autograd
from shardckpt.core.bucket import Bucket
from shardckpt.core.config import UnitConfig
from shardckpt.core.exposure import Exposure
from shardckpt.core.traverse import Managed, Name
from shardckpt.core.tree import mapped, tensors


class Phase(Enum):
    """Where a unit stands in an iteration."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()


class Call:
    """One forward of a unit whose results have gradients.

    Args:
        unit: The unit.
        below: How many calls had ended when it began: later ones that end before it are nested in it.
        threaded: Whether a node in front of its inputs tells when everything behind them has its gradients.
    """

    def __init__(self, unit: Unit, below: int, threaded: bool = False) -> None:
        self.unit = unit
        self.below = below
        self.threaded = threaded


class Iteration(Protocol):
    """What a unit tells its root, which knows the order of all units."""

    def calls_ended(self) -> int:
        """Return how many calls have ended in this forward."""

    def forward_begins(self, unit: Unit) -> None:
        """The unit computes now; its parameters are there."""

    def forward_ended(self, call: Call) -> None:
        """The unit has computed, and its results have gradients."""

    def backward_begins(self) -> None:
        """A gradient is there; told again and again."""

    def backward_reached(self, call: Call) -> None:
        """A gradient of a call's results is there; its parameters are about to be needed."""

    def backward_needs(self, unit: Unit) -> None:
        """The unit's parameters are there; gradients are computed next."""

    def backward_passes(self, call: Call) -> None:
        """Everything of a call has its gradients; what is nested in it must have come first."""

    def backward_passed(self, unit: Unit) -> None:
        """The unit's parameters are not needed any more."""

    def reduction_begins(self, unit: Unit) -> None:
        """A reduction of the unit is under way."""

    def filled(self, bucket: Bucket, unit: Unit) -> None:
        """A bucket's buffer has an address now."""

    def freed(self, address: int) -> None:
        """The buffer at this address is gone."""

    def find(self, tensor: torch.Tensor) -> Unit | None:
        """Return the unit in whose full buffer a tensor lies."""

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Tell whether the unit's parameters stay although its settings say that they go: the root's do."""


class Unit:
    """The buckets of one module: gathered before it computes, freed after, gathered and reduced in backward.

    Args:
        name: What messages call it.
        module: The module.
        exposures: Its buckets, as the user sees them.
        config: Its settings.
    """

    def __init__(self, name: Name, module: nn.Module, exposures: Sequence[Exposure], config: UnitConfig) -> None:
        self._name = name
        self.module = module
        self.exposures = tuple(exposures)
        self.config = config
        self.sync_gradients = True
        self.phase = Phase.IDLE
        self._iteration: Iteration | None = None
        self._calls: set[Call] = set()
        self._running: list[Call] = []
        self._owed = False
        self._addresses: list[int] = []
        self._full_shown = False
        self._held_back = False

    # ---------------------------------------------------------------------------------------------------- facts

    @property
    def name(self) -> str:
        """What messages call it: its name below the root, once that is known."""
        return self._name.text

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in their fixed order."""
        return [each.bucket for each in self.exposures]

    @property
    def members(self) -> list[Managed]:
        """The parameters of all buckets."""
        return [member for each in self.exposures for member in each.bucket.members]

    def restore(self) -> None:
        """Undo the sharding; the unit is done with after that. Collective."""
        for each in self.exposures:
            each.restore()

    @property
    def filled(self) -> bool:
        """Tell whether all full parameters can be read."""
        return all(each.bucket.filled for each in self.exposures)

    @property
    def trainable(self) -> bool:
        """Tell whether some parameter takes part in gradients."""
        return any(each.bucket.requires_grad for each in self.exposures)

    @property
    def owes_reduction(self) -> bool:
        """Tell whether a forward was recorded whose gradients have not been reduced."""
        return self._owed

    def attach(self, iteration: Iteration | None, name: str = "") -> None:
        """Let the unit belong to a root, where it has a name; or to none."""
        self._iteration = iteration
        if name:
            self._name.become(name)

    def synchronise(self, on: bool) -> None:
        """Say whether the next backward reduces gradients, or holds them back."""
        self.sync_gradients = on

    @property
    def attached(self) -> bool:
        """Tell whether the unit belongs to a root."""
        return self._iteration is not None

    @property
    def _root(self) -> Iteration:
        assert self._iteration is not None, "a unit computes only below a root"
        return self._iteration

    # ---------------------------------------------------------------------------------------- full parameters

    def prefetch(self) -> bool:
        """Start to gather what is not there. Collective.

        Returns:
            Whether something was started.
        """
        started = False
        for each in self.exposures:
            if not each.bucket.filled:
                each.adopt()
                started |= each.bucket.begin_gather()
        return started

    def fill(self) -> None:
        """Gather what is not there, and let the modules have it. Collective."""
        if self.filled and self._full_shown:
            return
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            torch.clear_autocast_cache()  # it keys on the leaf, whose content changes
        self.prefetch()
        for each in self.exposures:
            if not each.bucket.filled:
                each.bucket.finish_gather()
                self._root.filled(each.bucket, self)
                self._addresses.append(each.bucket.address)
            if each.bucket.keeps_full:
                each.adopt()
            each.show_full()
        self._full_shown = True

    def free(self) -> None:
        """Give up the full parameters; nothing when they are gone."""
        if self._full_shown or any(each.bucket.holds_full for each in self.exposures):
            self._hide()

    def _hide(self) -> None:
        for address in self._addresses:
            self._root.freed(address)
        self._addresses.clear()
        for each in self.exposures:
            each.show_sharded()
            each.bucket.free()
        self._full_shown = False

    # ---------------------------------------------------------------------------------------------- forward

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather, and put a node in front of the inputs that tells when everything behind them has its gradients.

        Args:
            args: The module's arguments.
            kwargs: And those by name.

        Returns:
            The arguments to compute with.
        """
        again = autograd.in_backward()
        found = [t for t in tensors((args, kwargs)) if t.requires_grad] if torch.is_grad_enabled() else []
        call = Call(self, 0 if again else self._root.calls_ended(), bool(found))
        self._running.append(call)
        if not again:
            self.phase = Phase.FORWARD
        self.fill()
        if not again:
            self._root.forward_begins(self)
        self._owed |= torch.is_grad_enabled()
        if not found or not self.exposures:
            return args, kwargs
        through = iter(autograd.thread(found, lambda: self.passed(call)))
        return mapped((args, kwargs), lambda t: next(through) if t.requires_grad else t)  # type: ignore[no-any-return]

    def after_forward(self, output: Any) -> Any:
        """Free, and let the gradients of the results gather again.

        Args:
            output: The module's result.

        Returns:
            The result to hand on.
        """
        call = self._running.pop()
        again = autograd.in_backward()
        found = [t for t in tensors(output) if t.requires_grad] if torch.is_grad_enabled() else []
        for tensor in found:
            tensor.register_hook(lambda _: self._reached(call))  # type: ignore[no-untyped-call]
        if found and not again and self.exposures:
            self._calls.add(call)
            self._root.forward_ended(call)
        if again or self._running:
            return output
        self.phase = Phase.IDLE
        frees = self.config.frees_after_forward and not self._root.keeps_after_forward(self)
        if frees or not torch.is_grad_enabled():
            self.free()
        else:
            for each in self.exposures:
                each.show_kept()
            self._full_shown = False
        return output

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around the module's forward: what is saved in it for backward can be filled again."""
        with autograd.saving(self._root.find):
            yield

    def forward_failed(self) -> None:
        """The module's forward raised; in a recomputation that is how checkpointing stops early."""
        if self._running:
            self._running.pop()
        if not autograd.in_backward() and not self._running:
            self.phase = Phase.IDLE
            self.free()

    # --------------------------------------------------------------------------------------------- backward

    def _reached(self, call: Call) -> None:
        root = self._root
        root.backward_begins()
        root.backward_reached(call)
        self.fill_for_backward()

    def fill_for_backward(self) -> None:
        """Gather for gradients, unless the parameters are there."""
        root = self._root
        root.backward_begins()
        if self.phase is Phase.BACKWARD and self.filled and self._full_shown:
            return
        self.phase = Phase.BACKWARD
        self._owed = True
        self.fill()
        root.backward_needs(self)

    def stale(self) -> str:
        """Say that a parameter was changed between forward and backward."""
        return (
            f"one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a parameter of unit {self.name} was changed between its forward and its backward"
        )

    def skip(self, call: Call) -> None:
        """Do for a call that this rank's gradients do not reach what the other ranks do for it. Collective."""
        self.fill_for_backward()
        if call in self._calls:
            self.passed(call)

    def passed(self, call: Call) -> None:
        """Everything behind a call has its gradients; after the last call of the unit they are reduced. Collective."""
        self._root.backward_begins()
        self._root.backward_passes(call)
        self._calls.discard(call)
        if self._calls:
            return
        self.finish_backward()

    def finish_backward(self) -> None:
        """Reduce the gradients, or keep them where reductions are held back, and free. Collective."""
        self._owed = False
        self._held_back |= not self.sync_gradients
        if self.sync_gradients or self.config.frees_after_forward:
            self.free()
        self.phase = Phase.IDLE
        self._root.backward_passed(self)
        if self.sync_gradients:
            self._begin_reduce()

    def _begin_reduce(self) -> None:
        began = False
        for each in self.exposures:
            if each.bucket.requires_grad:
                self.finish_reduction()
                each.bucket.begin_reduce()
                began = True
        if began:
            self._root.reduction_begins(self)

    def finish_reduction(self) -> None:
        """Hand the averaged gradients over once they are there."""
        for each in self.exposures:
            reduced = each.bucket.finish_reduce()
            if reduced is not None:
                each.add_gradient(reduced)

    def begin_iteration(self) -> None:
        """Before the first gradient of a backward: take back what was shown of gradients held back."""
        for each in self.exposures:
            each.take_unsharded()

    def end_iteration(self) -> None:
        """After a backward: forget its calls, free what is left, show gradients that were held back."""
        self._calls.clear()
        held, self._held_back = self._held_back, False
        if not held:
            self.free()
            self.phase = Phase.IDLE
            return
        keep = not self.config.frees_after_forward
        if not keep:
            self.free()
        for each in self.exposures:
            each.expose_unsharded()
            if keep:
                each.show_kept()
        self._full_shown = False
        self.phase = Phase.IDLE

    def abandon(self) -> None:
        """After a failure: be as before the iteration, without its gradients."""
        self._calls.clear()
        self._running.clear()
        self._owed = self._held_back = False
        try:
            for each in self.exposures:
                each.abandon()
        finally:
            self._hide()
            self.phase = Phase.IDLE
