"""Call objects back when an optimizer makes a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class StepObserver(Protocol):
    """Object to call when an optimizer makes a step."""

    def note_step(self, stepped: frozenset[int]) -> None:
        """Note a step; `stepped` has the ids of the optimizer's parameters."""


class StepObservers:
    """Observers for all torch optimizers, each for as long as something else refers to it."""

    def __init__(self, register: Callable[[Callable[..., None]], object]) -> None:
        self._install = cache(lambda: register(self._note))  # once, and only where it is needed
        self._lock = threading.Lock()
        self._observers: WeakSet[StepObserver] = WeakSet()

    def add(self, observer: StepObserver) -> None:
        """Add an observer."""
        self._install()
        with self._lock:
            self._observers.add(observer)

    def discard(self, observer: StepObserver) -> None:
        """Remove an observer, if it was added."""
        with self._lock:
            self._observers.discard(observer)

    def _note(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002  (given by torch)
        if self._observers:
            stepped = frozenset(id(each) for group in optimizer.param_groups for each in group["params"])
            with self._lock:
                observers = [*self._observers]
            for observer in observers:
                observer.note_step(stepped)


class StepWatch:
    """Watches parameters, for as long as something refers to it."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._ids = frozenset(map(id, parameters))
        self.has_stepped = False  # an optimizer with a watched parameter has made a step since
        _AFTER_STEPS.add(self)

    def note_step(self, stepped: frozenset[int]) -> None:
        """Record an optimizer's step."""
        self.has_stepped = self.has_stepped or not self._ids.isdisjoint(stepped)


_AFTER_STEPS = StepObservers(register_optimizer_step_post_hook)
