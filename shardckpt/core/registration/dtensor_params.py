"""Register DTensors around each parameter's part in the shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.modules.fqn_and_params import Name, find_user_param
from shardckpt.core.params.buffer_layout import isolate_storage
from shardckpt.core.params.gradient_reduction import ReducedGrad, add_gradient_to, assign_gradient, copy_gradient
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.params.tensor_extension import ExtensionBucket, is_extended, is_possibly_extended, move_functions
from shardckpt.core.params.unsharded_params import BucketPhase, ParamPlacement
from shardckpt.core.registration.base import ParamRegistration, PerParamRegistration


class DTensorRegistration(PerParamRegistration):
    """Registers each parameter as a DTensor, with the user's attributes."""

    def __init__(self, bucket: Bucket, unit: Name, placements: Sequence[ParamPlacement]) -> None:
        super().__init__(bucket, unit, ())
        self._placements = tuple(placements)
        self._parameters = [self._build_parameter(i) for i in range(len(bucket.members))]
        for member in bucket.members:
            member.forget()
        self.register_sharded()

    def _build_parameter(self, index: int) -> nn.Parameter:
        member = self.bucket.members[index]
        sharded = nn.Parameter(
            self._placements[index].sharded(self._views[index]), requires_grad=member.parameter.requires_grad
        )
        for parameter in (sharded, self.bucket.unsharded.params[index]):
            parameter.__dict__.update(_user_attributes(member.parameter))
        return sharded

    @property
    def placements(self) -> tuple[ParamPlacement, ...]:
        """Each parameter's placement on the mesh."""
        return self._placements

    def copy_parameters(self, memo: dict[int, Any]) -> None:
        """Copy the DTensors."""
        for parameter, placement, view in zip(self._parameters, self._placements, self._views, strict=True):
            copied = nn.Parameter(placement.sharded(view.clone()), requires_grad=parameter.requires_grad)
            memo.setdefault(id(parameter), copied)

    def _get_local_data(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [_to_local(parameter) for parameter in self._parameters]

    def _reset_data(self) -> None:
        """Set the local tensors to the views again; an optimizer may hold the DTensors."""
        for parameter, placement, view in zip(self._parameters, self._placements, self._views, strict=True):
            renewed = nn.Parameter(placement.sharded(view), requires_grad=parameter.requires_grad)
            renewed.__dict__.update(parameter.__dict__)
            renewed.grad = parameter.grad
            torch.utils.swap_tensors(parameter, renewed)  # type: ignore[no-untyped-call]

    def pull_user_changes(self) -> None:
        """Copy parameters that a user registered, and changed data, into the bucket."""
        self._pull_user_params()
        super().pull_user_changes()

    def _pull_user_params(self) -> None:
        for index, member in enumerate(self.bucket.members):
            user_param = find_user_param(member, self._parameters[index], self.bucket.unsharded.params[index])
            if user_param is not None:
                self._parameters[index] = user_param

    @property
    def has_unbound_extensions(self) -> bool:
        """Return True if a local tensor has extensions and the bucket is sharded."""
        if self.bucket.unsharded.phase is not BucketPhase.SHARDED and not self.bucket.unsharded.is_aliased:
            return False
        self._pull_user_params()
        return bool(self._find_extended())

    def _find_extended(self) -> list[int]:
        locals_ = map(_get_local_tensor, self._parameters)
        return [index for index, local in enumerate(locals_) if is_possibly_extended(local) and is_extended(local)]

    def bind_extensions(self) -> tuple[ParamRegistration, ...]:
        """Return a registration per extended parameter, after one for all others."""
        extended = self._find_extended()
        if not extended:
            return (self,)
        self._allow_forward()
        others = [index for index in range(len(self._parameters)) if index not in extended]
        kept = [self._select(DTensorRegistration, Bucket, others)] if others else []
        return (*kept, *(self._select(ExtensionRegistration, ExtensionBucket, [index]) for index in extended))

    def _select(self, kind: type[DTensorRegistration], of: type[Bucket], indices: Sequence[int]) -> DTensorRegistration:
        device = self.bucket.compute_device
        selected = kind(self.bucket.select(of, indices), self.unit, [self._placements[index] for index in indices])
        selected._parameters = [self._parameters[index] for index in indices]
        selected.register_sharded()
        selected.pull_user_changes()
        selected.bucket.set_compute_device(device)
        return selected

    def add_gradient(self, reduced: ReducedGrad) -> None:
        """Add each parameter's part to its gradient; skip parameters that no rank used."""
        parts = self.bucket.split_shard(reduced.gradient)
        is_async = self.bucket.unsharded.streams.is_async
        for parameter, placement, grad, used in zip(
            self._parameters, self._placements, parts, reduced.used, strict=True
        ):
            if used:
                add_gradient_to(parameter, placement.sharded(grad, keeps_storage=is_async))

    def gradients(self) -> list[torch.Tensor | None]:
        """Return this rank's shard of each parameter's gradient."""
        return [None if parameter.grad is None else _to_local(parameter.grad) for parameter in self._parameters]

    def set_gradients(self, parts: Sequence[torch.Tensor | None]) -> None:
        """Set each parameter's gradient."""
        is_async = self.bucket.unsharded.streams.is_async
        for parameter, placement, part in zip(self._parameters, self._placements, parts, strict=True):
            copy_gradient(parameter, None if part is None else placement.sharded(part, keeps_storage=is_async))

    def register_summoned(
        self, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None
    ) -> list[nn.Parameter]:
        """Register full parameters instead of the DTensors, with the user's attributes."""
        rows = zip(self._parameters, self._placements, values, gradients or [None] * len(values), strict=True)
        registered = []
        for parameter, placement, value, grad in rows:
            full = nn.Parameter(placement.full(value), requires_grad=parameter.requires_grad)
            full.__dict__.update(parameter.__dict__)
            assign_gradient(full, None if grad is None else placement.full(grad))
            registered.append(full)
        self._register(registered)
        return registered

    def restore_unsharded_grads(self) -> None:
        """Do nothing: the reduction adds them."""


class ExtensionRegistration(DTensorRegistration):
    """Registers one parameter whose local tensor has all-gather extensions."""

    _bound_local: torch.Tensor | None = None

    def __init__(self, bucket: Bucket, unit: Name, placements: Sequence[ParamPlacement]) -> None:
        super().__init__(bucket, unit, placements)
        self._bind_local()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamRegistration:
        """Return the registration for a copy, which has only its class's extensions."""
        aside, self._bound_local = self._bound_local, None
        try:
            return super().__deepcopy__(memo)
        finally:
            self._bound_local = aside

    @property
    def has_unbound_extensions(self) -> bool:
        """Return False: `pull_user_changes` handles replaced local tensors."""
        return False

    def bind_extensions(self) -> tuple[ParamRegistration, ...]:
        """Return this registration."""
        return (self,)

    def _is_moved(self, data: torch.Tensor, view: torch.Tensor) -> bool:
        return _get_local_tensor(self._parameters[0]) is not self._bound_local or super()._is_moved(data, view)

    def _get_local_data(self) -> list[torch.Tensor]:
        local = _get_local_tensor(self._parameters[0]).detach()
        return [local.as_subclass(torch.Tensor) if _is_dense(local) else local]

    def _reset_data(self) -> None:
        """Set the local tensor's data to the shard; keep its object if possible."""
        local = _get_local_tensor(self._parameters[0])
        view = self._views[0]
        if _is_dense(local) and is_extended(local):
            local.data = isolate_storage(view)
        else:
            super()._reset_data()
            move_functions(local, _get_local_tensor(self._parameters[0]))
        self._bind_local()

    def _bind_local(self) -> None:
        bucket = self.bucket
        assert isinstance(bucket, ExtensionBucket), "its local tensor says what is gathered"
        self._bound_local = _get_local_tensor(self._parameters[0])
        bucket.set_extended_tensor(self._bound_local)


def _is_dense(local: torch.Tensor) -> bool:
    """Return True if a tensor has its own memory instead of inner tensors."""
    return type(local).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _get_local_tensor(parameter: nn.Parameter) -> torch.Tensor:
    """Return the local tensor object, with the extensions that a user set on it."""
    # `to_local` would return a view.
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data


def _to_local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


def _user_attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the attributes that a user set on a parameter."""
    flatten = getattr(parameter, "__tensor_flatten__", None)
    # Exclude a wrapper subclass's inner tensors.
    content = set(flatten()[0]) if flatten is not None else set()
    return {name: value for name, value in parameter.__dict__.items() if name not in content}
