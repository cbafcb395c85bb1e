"""`StepWatch`: steps of optimizers, which ranks see whether or not they have elements of the updated parameters."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class StepWatch:
    """Watch of parameters, for as long as something refers to it.

    Args:
        parameters: The parameters.

    Attributes:
        has_stepped: Whether an optimizer that has one of them has made a step since the watch began.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._ids = frozenset(map(id, parameters))
        self.has_stepped = False
        _install_hook()
        with _LOCK:
            _WATCHING.add(self)

    def note_step(self, stepped: frozenset[int]) -> None:
        """Record the step of an optimizer.

        Args:
            stepped: Ids of its parameters.
        """
        self.has_stepped = self.has_stepped or not self._ids.isdisjoint(stepped)


_LOCK = threading.Lock()
_WATCHING: WeakSet[StepWatch] = WeakSet()


@cache
def _install_hook() -> None:
    """Note the steps of all optimizers of torch from now on."""
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001  (given by torch)
    if _WATCHING:
        stepped = frozenset(id(each) for group in optimizer.param_groups for each in group["params"])
        with _LOCK:
            watching = [*_WATCHING]
        for watch in watching:
            watch.note_step(stepped)
