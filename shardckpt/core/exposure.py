"""What is registered while a bucket is sharded: one flat parameter, or the user's own parameters as 1-D views."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardckpt.core.bucket import Bucket, Reduced
from shardckpt.core.traverse import Name, Place
from shardckpt.errors import ShardckptError


class NotGatheredError(ShardckptError, RuntimeError):
    """A full parameter was used while its unit is sharded."""


_READABLE = frozenset({"__get__", "size", "dim", "numel", "nelement", "stride", "is_floating_point", "element_size"})


class AbsentParameter(nn.Parameter):
    """Stands for a full parameter while its unit is sharded: it has a shape and a dtype, and no values.

    Args:
        like: The full parameter.
        unit: Name of the unit, for the message.
        fqn: Name of the parameter.
    """

    unit: Name
    fqn: str
    true_device: torch.device

    def __new__(cls, like: torch.Tensor, unit: Name, fqn: str) -> AbsentParameter:
        """Make one; no memory is taken."""
        empty = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
        made: AbsentParameter = torch.Tensor._make_subclass(cls, empty, like.requires_grad)
        made.unit = unit
        made.fqn = fqn
        made.true_device = like.device
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what needs no values; refuse the rest by name."""
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.device.__get__:
            return args[0].true_device
        if name in _READABLE or (name in ("__repr__", "__set__") and len(types) == 1):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        absent = next((each for each in args if isinstance(each, AbsentParameter)), None)
        raise NotGatheredError(
            f"parameter {absent.fqn if absent is not None else ''} is used outside its unit's forward, while sharded",
            where=absent.unit if absent is not None else "",
            found=f"a call of {name}",
            fix="Call the unit itself, or gather it: register_fsdp_forward_method, summon_full_params or unshard.",
        )


class Exposure(ABC):
    """What the user and the optimizer see of one bucket.

    Args:
        bucket: The bucket.
        unit: Name of the unit, for messages.
    """

    def __init__(self, bucket: Bucket, unit: Name) -> None:
        self.bucket = bucket
        self._unit = unit
        for member in bucket.members:
            member.identity.hold(self)
        self._parked: list[torch.Tensor | None] = []
        self._shown: list[tuple[nn.Parameter, torch.Tensor, int]] = []

    @property
    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that an optimizer gets."""

    def restore(self) -> None:
        """Undo the sharding: register full parameters again. Collective."""
        self.adopt()
        self.bucket.begin_gather()
        self.bucket.finish_gather()
        for member, leaf in zip(self.bucket.members, self.bucket.leaves, strict=True):
            member.restore(leaf.detach().clone().requires_grad_(leaf.requires_grad))
        self.bucket.free()

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

    @abstractmethod
    def add_gradient(self, reduced: Reduced) -> None:
        """Add an averaged gradient to what the optimizer sees."""

    @abstractmethod
    def _unsharded(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return exposed parameters with the unsharded gradients that the leaves hold."""

    @abstractmethod
    def _reset_data(self) -> None:
        """Let the exposed parameters' data be the shard again."""

    def expose_unsharded(self) -> None:
        """After a backward without a reduction: show the leaves' gradients as the exposed parameters' own."""
        if self._shown:
            return
        for parameter, grad in self._unsharded():
            self._parked.append(parameter.grad)
            parameter.grad = None
            parameter.data = grad  # a gradient has to have its parameter's shape when it is set
            parameter.grad = grad
            self._shown.append((parameter, grad, grad._version))
        self._reset_data()

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
                        self._restore(parameter, before)

    def take_unsharded(self) -> None:
        """Before the next backward: take the shown gradients back, or forget them where the user has."""
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
                self._restore(parameter, before)

    @abstractmethod
    def _forget(self, parameter: nn.Parameter) -> None:
        """Drop the leaf gradients behind an exposed parameter."""

    def _restore(self, parameter: nn.Parameter, grad: torch.Tensor) -> None:
        data = parameter.data
        parameter.data = grad
        parameter.grad = grad
        parameter.data = data


def _put(place: Place, value: torch.Tensor) -> None:
    """Make `value` an attribute of a module without registering it."""
    module, name = place.module, place.attribute
    if type(module).__setattr__ is nn.Module.__setattr__:
        module.__dict__[name] = value
        return
    module._parameters.pop(name, None)
    setattr(module, name, value)  # recurrent layers keep lists of their weights and watch their attributes
    if name in module._parameters:
        module._parameters.pop(name)
        module.__dict__[name] = value


def _register(place: Place, value: nn.Parameter) -> None:
    """Make `value` the registered parameter of a module, in its old position."""
    module, name = place.module, place.attribute
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = value
    else:
        setattr(module, name, value)


class FlatExposure(Exposure):
    """One flat parameter is registered on the unit's module; the submodules hold full ones as plain attributes.

    Args:
        bucket: The bucket.
        unit: Name of the unit, for messages.
        module: The unit's module.
        attribute: Name of the flat parameter there.
    """

    def __init__(self, bucket: Bucket, unit: Name, module: nn.Module, attribute: str) -> None:
        super().__init__(bucket, unit)
        self.flat = nn.Parameter(bucket.shard.data, requires_grad=bucket.trainable)
        self._home = (module, attribute)
        self._absent = self._stand_ins()
        for member in bucket.members:
            for place in member.places:
                place.module._parameters.pop(place.attribute, None)
            member.forget()
        module.register_parameter(attribute, self.flat)
        self.show_sharded()

    def restore(self) -> None:
        """Undo the sharding, and take the flat parameter away. Collective."""
        super().restore()
        module, attribute = self._home
        module._parameters.pop(attribute)

    def _stand_ins(self) -> list[AbsentParameter]:
        pairs = zip(self.bucket.leaves, self.bucket.layout.specs, strict=True)
        return [AbsentParameter(leaf, self._unit, spec.name) for leaf, spec in pairs]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The flat parameter."""
        return [self.flat]

    def show_full(self) -> None:
        """Put the leaves into the modules."""
        for member, leaf in zip(self.bucket.members, self.bucket.leaves, strict=True):
            for place in member.places:
                _put(place, leaf)

    def show_kept(self) -> None:
        """Leave the leaves where they are."""

    def show_sharded(self) -> None:
        """Put stand-ins into the modules, since reading freed memory would end the process."""
        if self.bucket.keeps_full:
            self.show_full()
            return
        for member, absent in zip(self.bucket.members, self._absent, strict=True):
            for place in member.places:
                _put(place, absent)

    def adopt(self) -> None:
        """Take the flat parameter's data as the shard where they have parted."""
        bucket, data = self.bucket, self.flat.data
        if data.data_ptr() != bucket.shard.data_ptr() or data.dtype != bucket.dtype:
            if data.numel() != bucket.shard.numel():
                raise ShardckptError(
                    "the flat parameter was replaced by one of another size",
                    where=self._unit,
                    found=tuple(data.shape),
                    expected=tuple(bucket.shard.shape),
                )
            bucket.replace_shard(data.reshape(-1))
            self.flat.data = bucket.shard.data
            self._absent = self._stand_ins()
        for leaf in bucket.leaves:
            if leaf.requires_grad != self.flat.requires_grad:
                leaf.requires_grad_(self.flat.requires_grad)

    def add_gradient(self, reduced: Reduced) -> None:
        """Add it to the flat parameter's gradient; nothing when no rank used any of its parameters."""
        if not any(reduced.used):
            return
        if self.flat.grad is None:
            self.flat.grad = reduced.gradient
        else:
            self.flat.grad.add_(reduced.gradient)

    def _unsharded(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        bucket = self.bucket
        if all(leaf.grad is None for leaf in bucket.leaves):
            return []
        whole = torch.zeros(bucket.layout.chunk * bucket.group.size, dtype=bucket.dtype, device=bucket.shard.device)
        for spec, at, leaf in zip(bucket.layout.specs, bucket.layout.offsets, bucket.leaves, strict=True):
            if leaf.grad is None:
                continue
            view = whole[at : at + spec.numel].view(spec.memory_shape)
            if spec.order:
                view = view.permute([spec.order.index(d) for d in range(len(spec.order))])
            view.copy_(leaf.grad)
            leaf.grad = view
        return [(self.flat, whole)]

    def _reset_data(self) -> None:
        self.flat.data = self.bucket.shard.data

    def _forget(self, parameter: nn.Parameter) -> None:  # noqa: ARG002  (there is one only)
        self.bucket.drop_gradients()


class OriginalExposure(Exposure):
    """The user's own parameters stay registered; while sharded each is a 1-D view of its part of the shard.

    Args:
        bucket: The bucket.
        unit: Name of the unit, for messages.
    """

    def __init__(self, bucket: Bucket, unit: Name) -> None:
        super().__init__(bucket, unit)
        self._originals = [member.parameter for member in bucket.members]
        self._views: list[torch.Tensor] = []
        self._renew()
        self.show_sharded()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The user's parameters."""
        return self._originals

    def _renew(self) -> None:
        bucket = self.bucket
        if bucket.keeps_full:
            self._views = [leaf.data for leaf in bucket.leaves]
        else:
            empty = slice(0, 0)
            self._views = [bucket.shard.data[bucket.runs.get(i, empty)] for i in range(len(bucket.leaves))]

    def show_full(self) -> None:
        """Register the leaves."""
        for member, leaf in zip(self.bucket.members, self.bucket.leaves, strict=True):
            for place in member.places:
                _register(place, leaf)

    def show_kept(self) -> None:
        """Register the user's parameters with full shapes."""
        for original, leaf in zip(self._originals, self.bucket.leaves, strict=True):
            original.data = leaf.data
        self._register_originals()

    def show_sharded(self) -> None:
        """Register the user's parameters as views of the shard."""
        self._reset_data()
        self._register_originals()

    def _register_originals(self) -> None:
        for member in self.bucket.members:
            for place in member.places:
                _register(place, member.parameter)

    def _reset_data(self) -> None:
        for original, view in zip(self._originals, self._views, strict=True):
            original.data = view

    def adopt(self) -> None:
        """Copy what a user put in place of the views into the shard, and alias it again."""
        moved = [
            (original.data, view)
            for original, view in zip(self._originals, self._views, strict=True)
            if original.data.data_ptr() != view.data_ptr() or original.dtype != view.dtype
        ]
        for data, view in moved:
            if data.shape != view.shape:
                raise ShardckptError(
                    "a parameter was replaced by one of another shape while its unit is sharded",
                    where=self._unit,
                    found=tuple(data.shape),
                    expected=tuple(view.shape),
                )
        if moved:
            self._take(moved)
        for original, leaf in zip(self._originals, self.bucket.leaves, strict=True):
            if original.requires_grad != leaf.requires_grad:
                leaf.requires_grad_(original.requires_grad)

    def _take(self, moved: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        like = moved[0][0]
        if like.dtype != self.bucket.dtype or like.device != self.bucket.shard.device:
            self.bucket.replace_shard(self.bucket.shard.to(device=like.device, dtype=like.dtype))
            values = [original.data for original in self._originals]
            self._renew()
            for value, view in zip(values, self._views, strict=True):
                view.copy_(value)
        else:
            for data, view in moved:
                view.copy_(data)
        self._reset_data()

    def add_gradient(self, reduced: Reduced) -> None:
        """Add each parameter's part to its gradient; nothing for what no rank used or what it has no part of."""
        bucket = self.bucket
        for index, (original, view) in enumerate(zip(self._originals, self._views, strict=True)):
            if not reduced.used[index] or (index not in bucket.runs and view.numel() == 0):
                continue
            grad = reduced.gradient[bucket.runs[index]]
            if bucket.keeps_full:
                order = bucket.layout.specs[index].order
                grad = grad.view(bucket.layout.specs[index].memory_shape)
                grad = grad.permute([order.index(d) for d in range(len(order))]) if order else grad
            if original.grad is None:
                original.data = view
                original.grad = grad
            else:
                original.grad.add_(grad)

    def _unsharded(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        pairs = zip(self._originals, self.bucket.leaves, strict=True)
        return [(original, leaf.grad) for original, leaf in pairs if leaf.grad is not None]

    def _forget(self, parameter: nn.Parameter) -> None:
        for original, leaf in zip(self._originals, self.bucket.leaves, strict=True):
            if original is parameter:
                leaf.grad = None
