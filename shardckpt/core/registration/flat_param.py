"""Register one flat parameter per bucket on the unit's module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from shardckpt.core.errors import StateError
from shardckpt.core.modules.fqn_and_params import Name, ParamLocation, put, register
from shardckpt.core.params.gradient_reduction import ReducedGrad, add_gradient_to, assign_gradient, copy_gradient
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.registration.base import ShardedPlaceholder, mark_flat
from shardckpt.core.registration.unsharded_grads import UnshardedGradRegistration
from shardckpt.devices import wait_for_deferred_copies
from shardckpt.errors import ShardckptError


class FlatParamRegistration(UnshardedGradRegistration):
    """Registers one flat parameter on the unit's module; submodules have the full parameters as plain attributes."""

    def __init__(self, bucket: Bucket, unit: Name, module: nn.Module, attribute: str) -> None:
        super().__init__(bucket, unit)
        self.flat = mark_flat(nn.Parameter(bucket.shard.data, requires_grad=bucket.trainable))
        self._home = ParamLocation(module, attribute, attribute)
        self._placeholders = self._build_placeholders()
        for member in bucket.members:
            for place in member.places:
                place.module._parameters.pop(place.attribute, None)
            member.forget()
        module.register_parameter(attribute, self.flat)
        self.register_sharded()

    def restore(self) -> None:
        """Undo the sharding and remove the flat parameter. Collective."""
        super().restore()
        module, attribute = self._home.module, self._home.attribute
        module._parameters.pop(attribute)

    def alias_shard(self) -> None:
        """Make the flat parameter alias the shard."""
        self._reset_data()

    @property
    def home(self) -> ParamLocation:
        """Location where the flat parameter is registered."""
        return self._home

    def _build_placeholders(self) -> list[ShardedPlaceholder]:
        pairs = zip(self.bucket.unsharded.params, self.bucket.layout.specs, strict=True)
        return [ShardedPlaceholder(leaf, self.unit, spec.name) for leaf, spec in pairs]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The flat parameter alone."""
        return [self.flat]

    def register_unsharded(self) -> None:
        """Set the unsharded leaves as attributes of the modules."""
        for member, leaf in zip(self.bucket.members, self.bucket.unsharded.params, strict=True):
            for place in member.places:
                put(place, leaf)

    def register_sharded(self) -> None:
        """Set placeholders on the modules: reading freed memory would end the process."""
        if self.bucket.unsharded.is_aliased:
            self.register_unsharded()
            return
        for member, placeholder in zip(self.bucket.members, self._placeholders, strict=True):
            for place in member.places:
                put(place, placeholder)

    def pull_user_changes(self) -> None:
        """Copy parameters that a user registered, and replaced data, into the bucket."""
        registered = self._home.module._parameters.get(self._home.attribute)
        if registered is not None and registered is not self.flat:
            if self.bucket.unsharded.is_aliased:  # the memory gets other values, which are not this parameter's
                self.flat.data = self.flat.data.clone()
            self.flat = mark_flat(registered)
        self._pull_flat_param_data()
        for index, member in enumerate(self.bucket.members):
            for place in member.places:
                user_param = place.module._parameters.get(place.attribute)
                if user_param is not None:
                    self._copy_user_param(index, place, user_param)

    @torch.no_grad()
    def _copy_user_param(self, index: int, place: ParamLocation, user_param: nn.Parameter) -> None:
        """Copy this rank's shard of a full parameter that a user registered."""
        packing, specs = self.bucket.packing, self.bucket.layout.specs
        if tuple(user_param.shape) != specs[index].shape:
            raise StateError(
                f"Cannot writeback when the parameter shape changes: {specs[index].name} was replaced",
                where=self.unit,
                found=tuple(user_param.shape),
                expected=specs[index].shape,
                fix="Keep the parameter's shape.",
            )
        part: torch.Tensor | None = user_param
        if not self.bucket.keeps_full:
            nothing = user_param.new_zeros(())
            values = [user_param if i == index else nothing.expand(spec.shape) for i, spec in enumerate(specs)]
            part = packing.shard_values(values, self.bucket.group.rank)[index]
        if part is not None:
            wait_for_deferred_copies()
            self.bucket.local_shards[index].copy_(part)
            self.bucket.mark_shard_written()
        place.module._parameters.pop(place.attribute)

    def _pull_flat_param_data(self) -> None:
        bucket, data = self.bucket, self.flat.data
        if data.data_ptr() != bucket.shard.data_ptr() or data.dtype != bucket.stored.dtypes.stored:
            if data.numel() != bucket.shard.numel():
                raise ShardckptError(
                    "the flat parameter was replaced by one with another size",
                    where=self.unit,
                    found=tuple(data.shape),
                    expected=tuple(bucket.shard.shape),
                )
            bucket.replace_shard(data.reshape(-1))
            self.flat.data = bucket.shard.data
            self._placeholders = self._build_placeholders()
        for index, leaf in enumerate(bucket.unsharded.params):
            if leaf.requires_grad != self.flat.requires_grad:
                bucket.unsharded.set_requires_grad(index, self.flat.requires_grad)

    def add_gradient(self, reduced: ReducedGrad) -> None:
        """Add the gradient to the flat parameter's, unless no rank used its parameters."""
        if any(reduced.used):
            add_gradient_to(self.flat, reduced.gradient)

    def add_late_gradient(self, reduced: ReducedGrad, used: Sequence[bool]) -> None:
        """Add the gradient if only other ranks used the parameters."""
        if not any(reduced.used):
            self.add_gradient(replace(reduced, used=tuple(used)))

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the shards of the parameters' gradients; full ones if not yet reduced."""
        grad, bucket = self.flat.grad, self.bucket
        if grad is None:
            return [None] * len(bucket.members)
        return list(bucket.packing.views(grad) if self.has_unsharded_grads else bucket.split_shard(grad))

    def set_gradients(self, parts: Sequence[torch.Tensor | None]) -> None:
        """Set the flat parameter's gradient, with zeros for parameters without one."""
        if all(part is None for part in parts):
            self.flat.grad = None
            return
        like = next(part for part in parts if part is not None)
        flat_grad = torch.zeros(self.flat.shape, dtype=like.dtype, device=self.flat.device)
        for place, part in zip(self.bucket.split_shard(flat_grad), parts, strict=True):
            if part is not None:
                place.copy_(part)
        copy_gradient(self.flat, flat_grad)

    def register_summoned(
        self, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None
    ) -> list[nn.Parameter]:
        """Register full parameters on their modules instead of the flat parameter."""
        module, attribute = self._home.module, self._home.attribute
        module._parameters[attribute] = None  # keeps the position for the flat parameter
        pairs = zip(values, self.bucket.unsharded.params, strict=True)
        parameters = [
            nn.Parameter(self.bucket.wrap_unsharded(index, value), requires_grad=leaf.requires_grad)
            for index, (value, leaf) in enumerate(pairs)
        ]
        for index, (member, parameter) in enumerate(zip(self.bucket.members, parameters, strict=True)):
            grad = gradients[index] if gradients is not None else None
            assign_gradient(parameter, None if grad is None else self.bucket.wrap_unsharded(index, grad))
            for place in member.places:
                place.module.__dict__.pop(place.attribute, None)
                register(place, parameter)
        return parameters

    def unregister_summoned(self) -> None:
        """Register the flat parameter again."""
        module, attribute = self._home.module, self._home.attribute
        for member in self.bucket.members:
            for place in member.places:
                place.module._parameters.pop(place.attribute, None)
        module._parameters[attribute] = self.flat
        self.register_sharded()

    def _collect_unsharded_grads(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        bucket = self.bucket
        if all(leaf.grad is None for leaf in bucket.unsharded.params):
            return []
        full = torch.zeros(
            bucket.packing.all_gather_numel, dtype=bucket.stored.dtypes.compute, device=bucket.compute_device
        )
        for index, (view, grad) in enumerate(zip(bucket.packing.views(full), bucket.unsharded.gradients, strict=True)):
            if grad is not None:
                view.copy_(grad)
                bucket.unsharded.params[index].grad = bucket.wrap_unsharded(index, view)
        return [(self.flat, full)]

    def _reset_data(self) -> None:
        self.flat.data = self.bucket.shard.data

    def _drop_unsharded_grad(self, parameter: nn.Parameter) -> None:  # noqa: ARG002  (there is one only)
        self.bucket.unsharded.drop_gradients()
