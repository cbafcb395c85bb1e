"""DTensors around each parameter's part of the shard, in the place of the user's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.modules.fqn_and_params import Name, given_instead, register
from shardckpt.core.params.buffer_layout import apart
from shardckpt.core.params.grad_accum import add_gradient_to, assign_gradient, copy_gradient
from shardckpt.core.params.gradient_reduction import Reduced
from shardckpt.core.params.param_bucket import Bucket, Placed
from shardckpt.core.params.tensor_extension import ExtensionBucket, is_extended, is_possibly_extended, move_functions
from shardckpt.core.registration.base import ParamRegistration, PerParamRegistration


class DTensorRegistration(PerParamRegistration):
    """Register each parameter as a DTensor around its shard, with the attributes of the user's parameter.

    Args:
        bucket: The bucket.
        unit: Name of the unit, for messages.
        placed: How each parameter lies over the mesh.
    """

    def __init__(self, bucket: Bucket, unit: Name, placed: Sequence[Placed]) -> None:
        super().__init__(bucket, unit)
        self._placed = tuple(placed)
        self._parameters = [self._made(i) for i in range(len(bucket.members))]
        for member in bucket.members:
            member.forget()
        self.show_sharded()

    def _made(self, index: int) -> nn.Parameter:
        member = self.bucket.members[index]
        made = nn.Parameter(
            self._placed[index].sharded(self._views[index]), requires_grad=member.parameter.requires_grad
        )
        for each in (made, self.bucket.leaves[index]):
            each.__dict__.update(_of_user(member.parameter))
        return made

    @property
    def placed(self) -> tuple[Placed, ...]:
        """How each parameter lies over the mesh."""
        return self._placed

    def copy_parameters(self, memo: dict[int, Any]) -> None:
        """Copy the DTensors."""
        for parameter, placed, view in zip(self._parameters, self._placed, self._views, strict=True):
            made = nn.Parameter(placed.sharded(view.clone()), requires_grad=parameter.requires_grad)
            memo.setdefault(id(parameter), made)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The DTensors."""
        return self._parameters

    def _show(self, shown: Sequence[nn.Parameter]) -> None:
        for member, parameter in zip(self.bucket.members, shown, strict=True):
            for place in member.places:
                register(place, parameter)

    def show_full(self) -> None:
        """Register the leaves."""
        self._refuse_changes()
        self._show(self.bucket.leaves)
        self._allow_forward()

    def show_kept(self) -> None:
        """Leave the leaves registered."""
        self._watch(self.bucket.leaves)

    def show_sharded(self) -> None:
        """Register the DTensors."""
        self._take_changes()
        self._show(self._parameters)
        self._refuse_forward()

    def _current(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [_local(parameter) for parameter in self._parameters]

    def _reset_data(self) -> None:
        """Let the DTensors be around the views again; they stay the objects that an optimizer may hold."""
        for parameter, placed, view in zip(self._parameters, self._placed, self._views, strict=True):
            renewed = nn.Parameter(placed.sharded(view), requires_grad=parameter.requires_grad)
            renewed.__dict__.update(parameter.__dict__)
            renewed.grad = parameter.grad
            torch.utils.swap_tensors(parameter, renewed)  # type: ignore[no-untyped-call]

    def adopt(self) -> None:
        """Take the parameters that a user registered in the places of ours, and what is in them."""
        self._take_given()
        super().adopt()

    def _take_given(self) -> None:
        for index, member in enumerate(self.bucket.members):
            given = given_instead(member, self._parameters[index], self.bucket.leaves[index])
            if given is not None:
                self._parameters[index] = given

    @property
    def has_unbound_extensions(self) -> bool:
        """Tell whether a local tensor has all-gather extensions, unless full parameters that were gathered stay."""
        if self.bucket.holds_full and not self.bucket.aliased:
            return False
        self._take_given()
        return bool(self._extended())

    def _extended(self) -> list[int]:
        locals_ = map(_stored, self._parameters)
        return [index for index, local in enumerate(locals_) if is_possibly_extended(local) and is_extended(local)]

    def bind_extensions(self) -> tuple[ParamRegistration, ...]:
        """Return one registration for each parameter that has all-gather extensions, after one for the others."""
        extended = self._extended()
        if not extended:
            return (self,)
        self._allow_forward()
        others = [index for index in range(len(self._parameters)) if index not in extended]
        kept = [self._selected(DTensorRegistration, Bucket, others)] if others else []
        return (*kept, *(self._selected(ExtensionRegistration, ExtensionBucket, [index]) for index in extended))

    def _selected(
        self, kind: type[DTensorRegistration], of: type[Bucket], indices: Sequence[int]
    ) -> DTensorRegistration:
        device = self.bucket.compute_device
        made = kind(self.bucket.select(of, indices), self._unit, [self._placed[index] for index in indices])
        made._parameters = [self._parameters[index] for index in indices]
        made.show_sharded()
        made.adopt()
        made.bucket.compute_on(device)
        return made

    def add_gradient(self, reduced: Reduced) -> None:
        """Add each parameter's part to its gradient; nothing for what no rank used."""
        parts = self.bucket.of_shard(reduced.gradient)
        for parameter, placed, grad, used in zip(self._parameters, self._placed, parts, reduced.used, strict=True):
            if used:
                add_gradient_to(parameter, placed.sharded(grad))

    def gradients(self) -> list[torch.Tensor | None]:
        """Return this rank's part of each parameter's gradient."""
        return [None if each.grad is None else _local(each.grad) for each in self._parameters]

    def set_gradients(self, parts: Sequence[torch.Tensor | None]) -> None:
        """Set each parameter's gradient."""
        for parameter, placed, part in zip(self._parameters, self._placed, parts, strict=True):
            copy_gradient(parameter, None if part is None else placed.sharded(part))

    def show_whole(
        self, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None
    ) -> list[nn.Parameter]:
        """Register full parameters in the places of the DTensors, with their attributes."""
        rows = zip(self._parameters, self._placed, values, gradients or [None] * len(values), strict=True)
        made = []
        for parameter, placed, value, grad in rows:
            whole = nn.Parameter(placed.full(value), requires_grad=parameter.requires_grad)
            whole.__dict__.update(parameter.__dict__)
            assign_gradient(whole, None if grad is None else placed.full(grad))
            made.append(whole)
        self._show(made)
        self._allow_forward()
        return made

    def hide_whole(self) -> None:
        """Register the DTensors again."""
        self.show_sharded()

    def hold_gradients(self) -> None:
        """Keep them out of sight."""
        self.bucket.hold_gradients()

    def take_held(self) -> None:
        """Nothing to do: the reduction adds them."""


class ExtensionRegistration(DTensorRegistration):
    """Register one parameter whose local tensor has `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

    Args:
        bucket: The bucket.
        unit: Name of the unit, for messages.
        placed: How the parameter lies over the mesh.
    """

    _known: torch.Tensor | None = None

    def __init__(self, bucket: Bucket, unit: Name, placed: Sequence[Placed]) -> None:
        super().__init__(bucket, unit, placed)
        self._ask()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamRegistration:
        """Return the registration of a copy; its local tensor has only the functions of its class."""
        aside, self._known = self._known, None
        try:
            return super().__deepcopy__(memo)
        finally:
            self._known = aside

    @property
    def has_unbound_extensions(self) -> bool:
        """Return False: `adopt` takes over other local tensors."""
        return False

    def bind_extensions(self) -> tuple[ParamRegistration, ...]:
        """Return this registration."""
        return (self,)

    def _is_moved(self, data: torch.Tensor, view: torch.Tensor) -> bool:
        return _stored(self._parameters[0]) is not self._known or super()._is_moved(data, view)

    def _current(self) -> list[torch.Tensor]:
        local = _stored(self._parameters[0]).detach()
        return [local.as_subclass(torch.Tensor) if _is_dense(local) else local]

    def _reset_data(self) -> None:
        """Let the local tensor be the part of the shard; one that has the functions stays the object, if it can."""
        local = _stored(self._parameters[0])
        view = self._views[0]
        if _is_dense(local) and is_extended(local):
            local.data = apart(view)
        else:
            super()._reset_data()
            move_functions(local, _stored(self._parameters[0]))
        self._ask()

    def _ask(self) -> None:
        bucket = self.bucket
        assert isinstance(bucket, ExtensionBucket), "its local tensor says what is gathered"
        self._known = _stored(self._parameters[0])
        bucket.ask(self._known)


def _is_dense(local: torch.Tensor) -> bool:
    """Tell whether a tensor has memory itself, rather than tensors that it is made of."""
    return type(local).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _stored(parameter: nn.Parameter) -> torch.Tensor:
    """Return the local tensor itself, where `to_local` returns a view; functions that a user put on it are here."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


def _of_user(parameter: nn.Parameter) -> dict[str, Any]:
    """Return what a user set on a parameter: not the tensors that one of a wrapping class is made of."""
    flatten = getattr(parameter, "__tensor_flatten__", None)
    content = set(flatten()[0]) if flatten is not None else set()
    return {name: value for name, value in parameter.__dict__.items() if name not in content}
