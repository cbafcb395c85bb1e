"""Base classes for the parameters that a sharded bucket registers on its modules, and FlatParameter."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardckpt.core.errors import StateError
from shardckpt.core.modules.fqn_and_params import Name
from shardckpt.core.params.grad_accum import restore_gradient
from shardckpt.core.params.gradient_reduction import Reduced
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.registration.placeholders import ForwardGuard
from shardckpt.errors import ShardckptError


class ChangedError(ShardckptError, RuntimeError, AssertionError):
    """A full parameter was changed where its old value is still needed."""


class ParamRegistration(ABC):
    """Register the parameters of one bucket on its modules, as the user and the optimizer see them.

    Args:
        bucket: The bucket.
        unit: Name of the unit, for messages.
    """

    def __init__(self, bucket: Bucket, unit: Name) -> None:
        self.bucket = bucket
        self._unit = unit
        self._kept: list[tuple[torch.Tensor, int, int]] = []  # what is shown, its version, its memory
        for member in bucket.members:
            member.identity.hold(self)

    def _watch(self, shown: Sequence[torch.Tensor]) -> None:
        """Note what a user could change while full parameters are kept between forward and backward."""
        self._kept = [] if self.bucket.aliased else [(each, each._version, each.data_ptr()) for each in shown]

    @property
    def _changed(self) -> bool:
        return any(each._version != version for each, version, _ in self._kept)

    @property
    def _replaced(self) -> bool:
        return any(each.data_ptr() != memory for each, _, memory in self._kept)

    def _refuse_changes(self) -> None:
        """Raise where a user changed what was kept: gradients would be those of neither value."""
        if self._changed or self._replaced:
            raise ChangedError(
                "one of the variables needed for gradient computation has been modified by an inplace operation, or "
                "replaced: FSDP does not support changing the parameters between forward and backward",
                where=self._unit,
                fix="Change parameters after backward, or after a forward under no_grad.",
            )
        self._kept = []

    def _take_changes(self) -> None:
        """Take over what a user changed while it was kept, before it goes."""
        if self._changed and self.bucket.filled:
            if self.bucket.exact:
                self.bucket.write_back()
            else:  # taking over a rounded copy would round what nobody changed
                warnings.warn(f"{self._unit}: changes of parameters in their compute dtype are lost", stacklevel=2)
        self._kept = []

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamRegistration:
        """Return the registration of a copy of the bucket on a copy of the model, without gradients."""
        made = object.__new__(type(self))
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            made.__dict__[name] = copy.deepcopy(value, memo)
        for ours, copied in zip(self.parameters, made.parameters, strict=True):
            copied.__dict__.update(copy.deepcopy(ours.__dict__, memo))
        for member in made.bucket.members:
            member.identity.hold(made)
        made.alias()
        return made

    def copy_parameters(self, memo: dict[int, Any]) -> None:
        """Copy first what cannot copy itself."""
        del memo

    @abstractmethod
    def alias(self) -> None:
        """Let the exposed parameters be of the shard's memory."""

    @property
    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that an optimizer gets."""

    def restore(self) -> None:
        """Undo the sharding: register full parameters again. Collective."""
        self.adopt()
        self.bucket.free()
        self.bucket.begin_gather(exact=True)
        self.bucket.finish_gather()
        for member, leaf in zip(self.bucket.members, self.bucket.leaves, strict=True):
            member.restore(leaf.detach().clone().requires_grad_(leaf.requires_grad))
        self.bucket.free()

    def set_backward_unshard(self, unshard: Callable[[], None]) -> None:
        """Set what unshards the unit in backward, when a module is recomputed outside the unit's forward."""
        del unshard

    @abstractmethod
    def show_full(self) -> None:
        """Let the modules compute with the full parameters."""

    @abstractmethod
    def show_kept(self) -> None:
        """Let the modules have full parameters between forward and backward."""

    @abstractmethod
    def show_sharded(self) -> None:
        """Let the modules have what is registered while the bucket is sharded."""

    @abstractmethod
    def adopt(self) -> None:
        """Take over what a user did to the exposed parameters: other storage, dtype, device, requires_grad."""

    @property
    def has_unbound_extensions(self) -> bool:
        """Tell whether a local tensor has all-gather extensions that the bucket does not gather by."""
        return False

    def bind_extensions(self) -> tuple[ParamRegistration, ...]:
        """Return registrations of the same parameters whose buckets gather by these extensions."""
        return (self,)

    @abstractmethod
    def add_gradient(self, reduced: Reduced) -> None:
        """Add an averaged gradient to what the optimizer sees."""

    def computed(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Return what the module would have for a full value of a parameter: with tensor parallelism a DTensor."""
        return self.bucket.computed(index, value)

    @property
    def shows_held(self) -> bool:
        """Tell whether the gradients that are exposed are unsharded ones, held back from reduction."""
        return False

    @abstractmethod
    def gradients(self) -> list[torch.Tensor | None]:
        """Return this rank's part of each parameter's gradient; all of it where it is held back."""

    @abstractmethod
    def set_gradients(self, parts: Sequence[torch.Tensor | None]) -> None:
        """Set the gradients to other parts.

        Args:
            parts: For each parameter this rank's part, None for one without a gradient.
        """

    @abstractmethod
    def show_whole(
        self, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None
    ) -> list[nn.Parameter]:
        """Register full parameters with other memory than the bucket's; `hide_whole` undoes it.

        Args:
            values: Full values, which are aliased.
            gradients: And their gradients; None to leave gradients as they are.

        Returns:
            What is registered now, for each parameter.
        """

    @abstractmethod
    def hide_whole(self) -> None:
        """Register again what is registered while sharded, with the gradients of before."""

    @abstractmethod
    def hold_gradients(self) -> None:
        """After a backward without a reduction: keep the leaves' gradients for the next one."""

    @abstractmethod
    def take_held(self) -> None:
        """Before the next backward: go on from what is kept."""

    def abandon(self) -> None:
        """After a failure: forget the gradients of the iteration."""
        self.bucket.abandon()


class UnshardedGradMixin(ParamRegistration):
    """Store not yet reduced gradients (no_sync) in the registered parameters, so that `zero_grad` drops them."""

    def __init__(self, bucket: Bucket, unit: Name) -> None:
        super().__init__(bucket, unit)
        self._parked: list[torch.Tensor | None] = []
        self._shown: list[tuple[nn.Parameter, torch.Tensor, int]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamRegistration:
        """Return the registration of a copy; gradients that are not yet reduced stay with this one."""
        aside = self._parked, self._shown
        self._parked, self._shown = [], []
        try:
            return super().__deepcopy__(memo)
        finally:
            self._parked, self._shown = aside

    @property
    def shows_held(self) -> bool:
        """Tell whether the gradients that are exposed are unsharded ones, held back from reduction."""
        return bool(self._shown)

    @abstractmethod
    def _unsharded(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return exposed parameters with the unsharded gradients that the leaves hold."""

    @abstractmethod
    def _reset_data(self) -> None:
        """Let the exposed parameters' data be the shard again."""

    @abstractmethod
    def _forget(self, parameter: nn.Parameter) -> None:
        """Drop the leaf gradients behind an exposed parameter."""

    def hold_gradients(self) -> None:
        """Show the leaves' gradients as the exposed parameters' own."""
        if self._shown:
            return
        for parameter, grad in self._unsharded():
            self._parked.append(parameter.grad)
            parameter.grad = None
            parameter.data = grad  # a gradient has to have its parameter's shape when it is set
            parameter.grad = grad
            self._shown.append((parameter, grad, grad._version))
        self._reset_data()

    def take_held(self) -> None:
        """Take the shown gradients back, or forget them where the user has."""
        shown, self._shown = self._shown, []
        parked, self._parked = self._parked, []
        for (parameter, grad, version), before in zip(shown, parked, strict=True):
            kept = parameter.grad is grad
            zeroed = kept and grad._version != version and not bool(grad.any())
            if not kept:
                self._forget(parameter)
                if parameter.grad is not None:
                    continue
            parameter.grad = None
            if kept and not zeroed and before is not None:
                restore_gradient(parameter, before)

    def abandon(self) -> None:
        """After a failure: forget the gradients of the iteration, those that are shown included."""
        shown, self._shown = self._shown, []
        parked, self._parked = self._parked, []
        try:
            self.bucket.abandon()
        finally:
            for (parameter, grad, _), before in zip(shown, parked, strict=True):
                if parameter.grad is grad:
                    parameter.grad = None
                    if before is not None:
                        restore_gradient(parameter, before)


class PerParamRegistration(ParamRegistration):
    """Register each parameter by itself, as this rank's shard of it."""

    def __init__(self, bucket: Bucket, unit: Name) -> None:
        super().__init__(bucket, unit)
        self._views = bucket.parts
        homes = {place.module: member.fqn for member in reversed(bucket.members) for place in member.places}
        self._guards = [ForwardGuard(module, unit, fqn) for module, fqn in homes.items()]

    def set_backward_unshard(self, unshard: Callable[[], None]) -> None:
        """Set what unshards the unit in backward, when a module is recomputed outside the unit's forward."""
        for guard in self._guards:
            guard.set_backward_unshard(unshard)

    def restore(self) -> None:
        """Undo the sharding: register full parameters again. Collective."""
        super().restore()
        self._allow_forward()

    def _allow_forward(self) -> None:
        """Allow forward with the registered parameters."""
        for guard in self._guards:
            guard.allow()

    def _allow_kept_forward(self) -> None:
        """Allow forward with the kept parameters; in backward with unsharded ones, which get the gradients."""
        for guard in self._guards:
            guard.allow_kept()

    def _refuse_forward(self) -> None:
        """Refuse forward with shards of parameters."""
        for guard in self._guards:
            guard.refuse()

    def alias(self) -> None:
        """Let the exposed parameters be the parts of the shard."""
        self._views = self.bucket.parts
        self._reset_data()

    @abstractmethod
    def _current(self) -> list[torch.Tensor]:
        """Return what the exposed parameters hold now, as plain tensors."""

    @abstractmethod
    def _reset_data(self) -> None:
        """Let the exposed parameters hold the views of the shard."""

    def adopt(self) -> None:
        """Copy what a user put in place of the views into the shard, and alias it again."""
        current = self._current()
        pairs = list(zip(current, self._views, strict=True))
        moved = [(data, view) for data, view in pairs if self._is_moved(data, view)]
        for member, (data, view) in zip(self.bucket.members, pairs, strict=True):
            if data.shape != view.shape:
                raise StateError(
                    f"Cannot writeback when the parameter shape changes: {member.fqn} was replaced",
                    where=self._unit,
                    found=tuple(data.shape),
                    expected=tuple(view.shape),
                    fix="While its unit is sharded it has the shape of this rank's part; full values go in "
                    "by summon_full_params.",
                )
        if moved:
            self._take(current, moved)
        both = zip(self.parameters, self.bucket.leaves, strict=True)
        for index, (exposed, leaf) in enumerate(both):
            if exposed.requires_grad != leaf.requires_grad:
                self.bucket.train(index, exposed.requires_grad)

    def _is_moved(self, data: torch.Tensor, view: torch.Tensor) -> bool:
        """Tell whether a user put other memory in place of a view."""
        return _parted(data, view)

    def _take(self, current: list[torch.Tensor], moved: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        like = moved[0][0]
        if like.dtype != self.bucket.dtype or like.device != self.bucket.shard.device:
            shard = self.bucket.shard
            self.bucket.replace_shard(like.new_zeros(shard.shape, dtype=like.dtype, device=like.device))
            self._views = self.bucket.parts
            moved = list(zip(current, self._views, strict=True))
        for data, view in moved:
            view.copy_(data)
        self._reset_data()


def _parted(data: torch.Tensor, view: torch.Tensor) -> bool:
    if data.dtype != view.dtype or data.device != view.device or data.shape != view.shape:
        return True
    return data.numel() > 0 and data.data_ptr() != view.data_ptr()


_ParameterMeta: Any = type(nn.Parameter)  # which has no public name


class _MarkedMeta(_ParameterMeta):  # type: ignore[misc]
    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, nn.Parameter) and getattr(instance, "_is_flat_param", False) is True


class FlatParameter(nn.Parameter, metaclass=_MarkedMeta):
    """The 1-D parameter that a sharded bucket is registered as; never made by users.

    It is an ordinary `torch.nn.Parameter` with a mark: a subclass would cost a detour in every operation on it.
    """


def mark_flat(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter as one that is an instance of `FlatParameter`."""
    parameter._is_flat_param = True  # type: ignore[attr-defined]
    return parameter
