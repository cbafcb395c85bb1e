"""DTensors around each parameter's part of the shard, in the place of the user's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.bucket import Bucket, Placed
from shardckpt.core.exposure import PartsExposure
from shardckpt.core.gradients import add_gradient_to, assign_gradient, copy_gradient
from shardckpt.core.places import given_instead, register
from shardckpt.core.reduction import Reduced
from shardckpt.core.traverse import Name


class DTensorExposure(PartsExposure):
    """Each parameter is a DTensor around its part of the shard, in the place of the user's, with its attributes.

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
        self._let_in()

    def show_kept(self) -> None:
        """Leave the leaves registered."""
        self._watch(self.bucket.leaves)

    def show_sharded(self) -> None:
        """Register the DTensors."""
        self._take_changes()
        self._show(self._parameters)
        self._keep_out()

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
        for index, member in enumerate(self.bucket.members):
            given = given_instead(member, self._parameters[index], self.bucket.leaves[index])
            if given is not None:
                self._parameters[index] = given
        super().adopt()

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
        self._let_in()
        return made

    def hide_whole(self) -> None:
        """Register the DTensors again."""
        self.show_sharded()

    def hold_gradients(self) -> None:
        """Keep them out of sight."""
        self.bucket.hold_gradients()

    def take_held(self) -> None:
        """Nothing to do: the reduction adds them."""


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


def _of_user(parameter: nn.Parameter) -> dict[str, Any]:
    """Return what a user set on a parameter: not the tensors that one of a wrapping class is made of."""
    flatten = getattr(parameter, "__tensor_flatten__", None)
    content = set(flatten()[0]) if flatten is not None else set()
    return {name: value for name, value in parameter.__dict__.items() if name not in content}
