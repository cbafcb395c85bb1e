"""The user's own parameters, which while sharded are 1-D views of their parts of the shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.modules.fqn_and_params import Name, given_instead, register
from shardckpt.core.params.grad_accum import add_gradient_to, assign_gradient, copy_gradient, restore_gradient
from shardckpt.core.params.gradient_reduction import Reduced
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.registration.base import PerParamRegistration, UnshardedGradMixin


class OrigParamsRegistration(PerParamRegistration, UnshardedGradMixin):
    """Keep the user's own parameters registered; while sharded each is a 1-D view of its part of the shard.

    Args:
        bucket: The bucket.
        unit: Name of the unit, for messages.
    """

    def __init__(self, bucket: Bucket, unit: Name) -> None:
        super().__init__(bucket, unit)
        self._originals = [member.parameter for member in bucket.members]
        self._aside: list[torch.Tensor | None] | None = None
        self.show_sharded()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The user's parameters."""
        return self._originals

    def show_full(self) -> None:
        """Register the leaves."""
        self._refuse_changes()
        for member, leaf in zip(self.bucket.members, self.bucket.leaves, strict=True):
            for place in member.places:
                register(place, leaf)
        self._allow_forward()

    def show_kept(self) -> None:
        """Register the user's parameters with full shapes."""
        for original, full in zip(self._originals, self.bucket.fulls, strict=True):
            original.data = full
        self._watch(self._originals)
        self._register_originals()
        self._allow_kept_forward()

    def show_sharded(self) -> None:
        """Register the user's parameters as views of the shard."""
        self._take_changes()
        self._reset_data()
        self._register_originals()
        self._refuse_forward()

    def _refuse_forward(self) -> None:
        if not self.bucket.keeps_full:
            super()._refuse_forward()

    def _register_originals(self) -> None:
        for member, original in zip(self.bucket.members, self._originals, strict=True):
            for place in member.places:
                register(place, original)

    def adopt(self) -> None:
        """Take the parameters that a user registered in the places of ours, and what is in them."""
        for index, member in enumerate(self.bucket.members):
            given = given_instead(member, self._originals[index], self.bucket.leaves[index])
            if given is not None and not isinstance(given, DTensor):
                self._originals[index] = given
        super().adopt()

    @property
    def _replaced(self) -> bool:
        places = [member.places[0] for member in self.bucket.members] if self._kept else []
        registered = [place.module._parameters.get(place.attribute) for place in places]
        return super()._replaced or any(
            each is not ours for each, ours in zip(registered, self._originals, strict=False) if each is not None
        )

    def _current(self) -> list[torch.Tensor]:
        return [original.data for original in self._originals]

    def _reset_data(self) -> None:
        for original, view in zip(self._originals, self._views, strict=True):
            original.data = view

    def add_gradient(self, reduced: Reduced) -> None:
        """Add each parameter's part to its gradient; nothing for what no rank used or what it has no part of."""
        parts = self.bucket.of_shard(reduced.gradient)
        for original, view, grad, used in zip(self._originals, self._views, parts, reduced.used, strict=True):
            if not used or grad.numel() == 0:
                continue
            if original.grad is None:
                original.data = view
            add_gradient_to(original, grad)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return this rank's part of each parameter's gradient; all of it where it is held back."""
        return [original.grad for original in self._originals]

    def set_gradients(self, parts: Sequence[torch.Tensor | None]) -> None:
        """Set each parameter's gradient; of those that this rank has no part of there is none."""
        for original, part in zip(self._originals, parts, strict=True):
            copy_gradient(original, part if part is not None and part.numel() else None)

    def show_whole(
        self, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None
    ) -> list[nn.Parameter]:
        """Let the user's parameters have full shapes."""
        self._aside = None if gradients is None else self.gradients()
        for index, (original, value) in enumerate(zip(self._originals, values, strict=True)):
            if gradients is not None:
                original.grad = None
            original.data = value
            if gradients is not None:
                assign_gradient(original, gradients[index])
        self._register_originals()
        self._allow_forward()
        return [self._whole(index, grads=gradients is not None) for index in range(len(values))]

    def _whole(self, index: int, *, grads: bool) -> nn.Parameter:
        """Return what is registered for a full parameter: a DTensor in the place of one that was a DTensor."""
        original = self._originals[index]
        value = self.computed(index, original.data)
        if not isinstance(value, DTensor):
            return original
        made = nn.Parameter(value, requires_grad=original.requires_grad)
        made.__dict__.update(original.__dict__)
        if grads and original.grad is not None:
            assign_gradient(made, self.computed(index, original.grad))
        for place in self.bucket.members[index].places:
            register(place, made)
        return made

    def hide_whole(self) -> None:
        """Let the user's parameters be views of the shard again, with the gradients of before."""
        aside, self._aside = self._aside, None
        for index, (original, view) in enumerate(zip(self._originals, self._views, strict=True)):
            if aside is not None:
                original.grad = None
            original.data = view
            before = None if aside is None else aside[index]
            if before is not None:
                restore_gradient(original, before)
            elif original.grad is not None and original.grad.shape != view.shape and not self.shows_held:
                original.grad = None  # made inside, by a backward of the full parameters
        self._register_originals()
        self._refuse_forward()

    def _unsharded(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        pairs = zip(self._originals, self.bucket.unsharded_gradients(), strict=True)
        return [(original, grad) for original, grad in pairs if grad is not None]

    def _forget(self, parameter: nn.Parameter) -> None:
        for original, leaf in zip(self._originals, self.bucket.leaves, strict=True):
            if original is parameter:
                leaf.grad = None
