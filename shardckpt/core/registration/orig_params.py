"""Register the user's own parameters, as 1-D views into the shard."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref as weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.modules.fqn_and_params import Name, ParamLocation, find_user_param, register
from shardckpt.core.params.gradient_reduction import (
    EngineHook,
    ReducedGrad,
    add_gradient_to,
    assign_gradient,
    copy_gradient,
    get_gradient_hooks,
    restore_gradient,
)
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.registration.base import PerParamRegistration
from shardckpt.core.registration.unsharded_grads import UnshardedGradRegistration


class _MoveGradient(EngineHook):
    """Hook that moves a full gradient from a user's parameter to its leaf."""

    # Between forward and backward the user's parameters are registered with full shapes. Code that computes with them
    # then does not use the leaves: for example a penalty in the loss, or another unit with the same module. Only the
    # leaves' gradients are reduced.

    def __init__(self, registration: OrigParamsRegistration, index: int) -> None:
        self.registration, self._index = weakref(registration), index

    def __call__(self, _: nn.Parameter) -> None:
        registration = self.registration()
        if registration is not None:
            registration.move_gradient(self._index)


class OrigParamsRegistration(PerParamRegistration, UnshardedGradRegistration):
    """Registers the user's parameters; while sharded, 1-D views into the shard."""

    def __init__(self, bucket: Bucket, unit: Name) -> None:
        parameters = [member.parameter for member in bucket.members]
        super().__init__(bucket, unit, parameters, computes_sharded=bucket.keeps_full)
        self._grads_before: list[torch.Tensor | None] | None = None
        self._shows_shards = False  # while the full parameters are kept
        # Between forward and backward, otherwise; always after the first forward if nothing is sharded.
        self._shows_full = False
        self.register_sharded()

    def register_unsharded(self) -> None:
        """Register the unsharded leaves."""
        self._shows_shards = False
        super().register_unsharded()

    def register_kept(self, *, is_after_backward: bool) -> None:
        """Register the user's parameters with full shapes, or as shards if they have reduced gradients."""
        # An optimizer may step with reduced gradients before this forward's backward, and has states with the shards'
        # shape. After a backward the parameters are shards, as in torch: a step with unreduced gradients fails. One
        # rank has nothing to reduce.
        unsharded = self.bucket.unsharded
        has_reduced = not self.has_unsharded_grads and any(original.grad is not None for original in self._parameters)
        if has_reduced or (is_after_backward and self.bucket.group.world > 1):
            self.register_sharded()
            self._shows_shards = True
            unsharded.keep((), self._parameters, watches_steps=not self.bucket.keeps_full)
            return
        for index, (original, full) in enumerate(zip(self._parameters, unsharded.tensors, strict=True)):
            original.data = full
            self._hook(index, original)
        self._shows_full = True
        unsharded.keep(self._parameters, self._parameters, watches_steps=not self.bucket.keeps_full)
        self._register(self._parameters)
        for guard in self.guards:
            guard.install(is_allowed=True)

    def _hook(self, index: int, original: nn.Parameter) -> None:
        """Move gradients from a user's parameter to its leaf from now on."""
        hooks = [hook for hook in get_gradient_hooks(original) if isinstance(hook, _MoveGradient)]
        if original.requires_grad and not any(hook.registration() is self for hook in hooks):
            original.register_post_accumulate_grad_hook(_MoveGradient(self, index))  # type: ignore[no-untyped-call]

    def move_gradient(self, index: int) -> None:
        """Move the full gradient that autograd gave a user's parameter to its leaf."""
        original, unsharded = self._parameters[index], self.bucket.unsharded
        if original.grad is None or not (self._shows_full or original.grad.shape != self._views[index].shape):
            return
        if not self.has_unsharded_grads:  # with them, the gradient is already the leaf's
            grad, original.grad = self.bucket.wrap_unsharded(index, original.grad), None
            leaf = unsharded.params[index]
            assign_gradient(leaf, grad if leaf.grad is None else leaf.grad + grad)
        unsharded.watch.notify()

    def register_sharded(self) -> None:
        """Register the user's parameters as views into the shard."""
        self._shows_full = self._shows_full and self.bucket.keeps_full
        if self._shows_shards:  # the next all-gather applies a user's changes since then
            self._shows_shards = False
            return
        self._reset_data()
        super().register_sharded()

    def pull_user_changes(self) -> None:
        """Copy parameters that a user registered, and changed data, into the bucket."""
        for index, member in enumerate(self.bucket.members):
            user_param = find_user_param(member, self._parameters[index], self.bucket.unsharded.params[index])
            if user_param is not None and not isinstance(user_param, DTensor):
                if self.bucket.unsharded.is_aliased:  # the memory gets other values, which are not this parameter's
                    self._parameters[index].data = self._parameters[index].data.clone()
                self._parameters[index] = user_param
        super().pull_user_changes()

    def find_replaced(self) -> list[tuple[ParamLocation, nn.Parameter]]:
        """Return the places where a user registered other parameters or set a shard's data, with these."""
        found = super().find_replaced()
        if self._shows_shards:
            for member, original, view in zip(self.bucket.members, self._parameters, self._views, strict=True):
                if self._is_moved(original.data, view) or _storage_address(original) != _storage_address(view):
                    found += [(place, original) for place in member.places]
        return found

    def _get_local_data(self) -> list[torch.Tensor]:
        return [original.data for original in self._parameters]

    def _reset_data(self) -> None:
        for original, view in zip(self._parameters, self._views, strict=True):
            original.data = view

    def add_gradient(self, reduced: ReducedGrad) -> None:
        """Add each parameter's part to its gradient, if a rank used it and this rank has a part."""
        parts = self.bucket.split_shard(reduced.gradient)
        for original, view, grad, used in zip(self._parameters, self._views, parts, reduced.used, strict=True):
            if not used or grad.numel() == 0:
                continue
            if original.grad is None:
                original.data = view
            add_gradient_to(original, grad)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the shards of the parameters' gradients; full ones if not yet reduced."""
        return [original.grad for original in self._parameters]

    def set_gradients(self, parts: Sequence[torch.Tensor | None]) -> None:
        """Set the gradients where this rank has a part."""
        for original, part in zip(self._parameters, parts, strict=True):
            copy_gradient(original, part if part is not None and part.numel() else None)

    def register_summoned(
        self, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None
    ) -> list[nn.Parameter]:
        """Give the user's parameters their full shapes."""
        self._shows_full = False  # gradients inside belong to this rank
        self._grads_before = None if gradients is None else self.gradients()
        for index, (original, value) in enumerate(zip(self._parameters, values, strict=True)):
            if gradients is not None:
                original.grad = None
            original.data = value
            if gradients is not None:
                assign_gradient(original, gradients[index])
        self._register(self._parameters)
        return [self._register_full(index, grads=gradients is not None) for index in range(len(values))]

    def _register_full(self, index: int, *, grads: bool) -> nn.Parameter:
        """Register a full parameter, as a DTensor if the user's parameter was one."""
        original = self._parameters[index]
        value = self.bucket.wrap_unsharded(index, original.data)
        if not isinstance(value, DTensor):
            return original
        full = nn.Parameter(value, requires_grad=original.requires_grad)
        full.__dict__.update(original.__dict__)
        if grads and original.grad is not None:
            assign_gradient(full, self.bucket.wrap_unsharded(index, original.grad))
        for place in self.bucket.members[index].places:
            register(place, full)
        return full

    def unregister_summoned(self) -> None:
        """Make the parameters views into the shard again; restore their gradients."""
        grads_before, self._grads_before = self._grads_before, None
        for index, (original, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if grads_before is not None:
                original.grad = None
            original.data = view
            before = None if grads_before is None else grads_before[index]
            if before is not None:
                restore_gradient(original, before)
            elif original.grad is not None and original.grad.shape != view.shape and not self.has_unsharded_grads:
                original.grad = None  # from a backward with the full parameters
        self._register(self._parameters, are_shards=True)

    def _collect_unsharded_grads(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        pairs = zip(self._parameters, self.bucket.unsharded.unwrap_gradients(), strict=True)
        return [(original, grad) for original, grad in pairs if grad is not None]

    def _drop_unsharded_grad(self, parameter: nn.Parameter) -> None:
        for original, leaf in zip(self._parameters, self.bucket.unsharded.params, strict=True):
            if original is parameter:
                leaf.grad = None


def _storage_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, also for a part without elements."""
    return tensor.untyped_storage().data_ptr()
