"""Unreduced gradients (no_sync), stored in the registered parameters."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardckpt.core.errors import StateError
from shardckpt.core.modules.fqn_and_params import Name
from shardckpt.core.modules.optimizer_steps import StepObservers
from shardckpt.core.params.gradient_reduction import restore_gradient
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.registration.base import ParamRegistration


class UnshardedGradRegistration(ParamRegistration):
    """Registration that stores unreduced gradients (no_sync) in registered parameters, where `zero_grad` drops them."""

    def __init__(self, bucket: Bucket, unit: Name) -> None:
        super().__init__(bucket, unit)
        self._reduced_grads: list[torch.Tensor | None] = []
        self._unsharded_grads: list[tuple[nn.Parameter, torch.Tensor, int]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamRegistration:
        """Return the registration for a copy, without unreduced gradients."""
        aside = self._reduced_grads, self._unsharded_grads
        self._reduced_grads, self._unsharded_grads = [], []
        try:
            return super().__deepcopy__(memo)
        finally:
            self._reduced_grads, self._unsharded_grads = aside

    @property
    def has_unsharded_grads(self) -> bool:
        """Return True if registered parameters have unreduced gradients (no_sync)."""
        return bool(self._unsharded_grads)

    @abstractmethod
    def _collect_unsharded_grads(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return registered parameters with the leaves' unsharded gradients."""

    @abstractmethod
    def _reset_data(self) -> None:
        """Set the registered parameters' data to the shard again."""

    @abstractmethod
    def _drop_unsharded_grad(self, parameter: nn.Parameter) -> None:
        """Drop a registered parameter's leaf gradients."""

    def stash_unsharded_grads(self) -> None:
        """Move the leaves' gradients to the registered parameters."""
        if self._unsharded_grads:
            return
        for parameter, grad in self._collect_unsharded_grads():
            self._reduced_grads.append(parameter.grad)
            parameter.grad = None
            parameter.data = grad  # torch requires a gradient to have its parameter's shape
            parameter.grad = grad
            self._unsharded_grads.append((parameter, grad, grad._version))
        self._reset_data()
        # The user owns an unsharded bucket, as with DDP; one rank has nothing to reduce.
        if self._unsharded_grads and not self.bucket.keeps_full and self.bucket.group.world > 1:
            _BEFORE_STEPS.add(self)

    def note_step(self, stepped: frozenset[int]) -> None:
        """Raise StateError if an optimizer steps with unreduced gradients: each rank would use its own data alone."""
        if any(id(parameter) in stepped and parameter.grad is grad for parameter, grad, _ in self._unsharded_grads):
            raise StateError(
                "an optimizer step got unreduced gradients from a backward under no_sync",
                where=self.unit,
                fix="Run the last backward before a step outside of no_sync, or drop the gradients with zero_grad.",
            )

    def restore_unsharded_grads(self) -> None:
        """Move unsharded gradients back to the leaves, except those that a user dropped."""
        shown, parked = self._take_unsharded_grads()
        for (parameter, grad, version), before in zip(shown, parked, strict=True):
            kept = parameter.grad is grad
            zeroed = kept and grad._version != version and not bool(grad.any())
            if not kept:
                self._drop_unsharded_grad(parameter)
                if parameter.grad is not None:
                    continue
            parameter.grad = None
            if kept and not zeroed and before is not None:
                restore_gradient(parameter, before)

    def reset_after_error(self) -> None:
        """Drop the iteration's gradients after an error, also stashed ones."""
        shown, parked = self._take_unsharded_grads()
        try:
            self.bucket.reset_after_error()
        finally:
            for (parameter, grad, _), before in zip(shown, parked, strict=True):
                if parameter.grad is grad:
                    parameter.grad = None
                    if before is not None:
                        restore_gradient(parameter, before)

    def _take_unsharded_grads(
        self,
    ) -> tuple[list[tuple[nn.Parameter, torch.Tensor, int]], list[torch.Tensor | None]]:
        """Return and forget the stashed gradients, and the reduced ones that they replaced."""
        _BEFORE_STEPS.discard(self)
        shown, self._unsharded_grads = self._unsharded_grads, []
        parked, self._reduced_grads = self._reduced_grads, []
        return shown, parked


_BEFORE_STEPS = StepObservers(register_optimizer_step_pre_hook)
