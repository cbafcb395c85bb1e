"""Gradient clipping by the norm over all ranks, bitwise equal on every rank."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardckpt.core.comm.collectives import ShardGroup
from shardckpt.core.errors import ArgumentError, StateError
from shardckpt.core.params.tensor_parallel import count_tp_replicas, get_tp_mesh
from shardckpt.core.registration.base import ParamRegistration
from shardckpt.core.runtime import traversal
from shardckpt.core.runtime.fsdp_unit import FSDPUnit
from shardckpt.devices import has_float64

Kind = TypeVar("Kind", bound=tuple[object, ...])


def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale sharded gradients so that their norm is at most `max_norm`. Collective.

    The norm is computed over all ranks; both front ends of the engine are supported. Unsharded
    parameters' gradients are neither counted nor scaled.

    Args:
        module: Sharded module, or a module that contains sharded modules.
        max_norm: Largest norm after the call.
        norm_type: Order of the norm; infinity for the largest absolute value.
        error_if_nonfinite: Raise an error if the norm is infinite or NaN, instead of scaling by it.

    Returns:
        The norm before scaling: a plain scalar tensor, bitwise equal on every rank.

    Raises:
        ArgumentError: Nothing in the module is sharded, the order is not positive, or two DTensors' meshes have
            different numbers of ranks.
        StateError: `error_if_nonfinite` is set and the norm is not finite (gradients are unchanged), or gradients
            were not reduced because of `no_sync`.
    """
    units = traversal.units(module)
    buckets = traversal.buckets(module)
    if not buckets:
        raise ArgumentError(
            "the module has no sharded parameters", where=type(module).__name__, fix="Use torch.nn.utils."
        )
    return clip_units(
        units, buckets[0].group, buckets[0].compute_device, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
    )


@torch.no_grad()
def clip_units(
    units: Sequence[FSDPUnit],
    around: ShardGroup,
    device: torch.device,
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale unit gradients so that their norm is at most `max_norm`; return the norm before. Collective."""
    # Each rank gathers all ranks' partial norms and adds them in the same order, in float64 where a device has it. The
    # norm and the scaling factor are therefore bitwise equal on every rank, in whatever order a backend reduces.
    # Ignored parameters' gradients are not reduced and differ between ranks: they are neither counted nor scaled. A
    # flat unit over a subset of the ranks, such as an expert, has gradients that the other ranks do not have; all ranks
    # count them.
    order = float(norm_type)
    if not order > 0:
        raise ArgumentError("the order of a norm must be positive", where="clip_grad_norm_", found=norm_type)
    ranked = [pair for unit in units for registration in unit.registrations for pair in _optimizer_params(registration)]
    _refuse_unsynced([parameter for parameter, _ in ranked])
    widest = max([_Ranks.from_group(around), *(ranks for _, ranks in ranked)], key=lambda ranks: ranks.count)
    mesh = get_tp_mesh(bucket for unit in units for bucket in unit.buckets)
    if mesh is None:
        parts = [
            _Part.from_grad(parameter.grad, ranks.copies) for parameter, ranks in ranked if parameter.grad is not None
        ]
    else:
        parts = [
            part
            for unit in units
            for registration in unit.registrations
            for part in _parts_over_mesh(registration, mesh)
        ]
        widest = widest.over(mesh)
    _refuse_submesh(ranked, widest)
    total = _reduce_over_ranks(_reduce_locally(parts, order, device), widest, order)
    norm = total if math.isinf(order) else total.pow(1.0 / order)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise StateError(
            f"The total norm of order {order} for gradients is non-finite, so it cannot be clipped",
            found=norm.item(),
            fix="Skip the step, or call with error_if_nonfinite=False.",
        )
    factor = (max_norm / (norm.float() + 1e-6)).clamp(max=1.0)
    for (where, _), grads in _group_by(((part.grad.device, part.grad.dtype), part.grad) for part in parts).items():
        torch._foreach_mul_(grads, factor.to(where))  # one copy for all: to the CPU, each would block the host
    return norm.to(_promote_dtypes([part.grad for part in parts]))


@dataclass(frozen=True)
class _Ranks:
    """Ranks that shard or replicate a parameter."""

    groups: tuple[dist.ProcessGroup, ...]  # one per mesh dimension, to gather over in this order
    count: int
    copies: int = 1  # ranks with the same shard of the parameter

    @classmethod
    def from_dtensor(cls, tensor: DTensor) -> _Ranks:
        mesh = tensor.device_mesh
        replicas = [mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
        groups = tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
        return cls(groups, mesh.size(), math.prod(replicas))

    @classmethod
    def from_group(cls, group: ShardGroup) -> _Ranks:
        groups = tuple(each for each in (group.shard, group.replicate) if each is not None)
        return cls(groups, group.world, group.replicas)

    def over(self, mesh: DeviceMesh) -> _Ranks:
        """Return these ranks combined with tensor parallelism's."""
        groups = tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
        return _Ranks((*self.groups, *groups), self.count * mesh.size(), self.copies)


@dataclass(frozen=True)
class _Part:
    """This rank's shard of one gradient."""

    grad: torch.Tensor  # plain tensor that aliases the gradient; changes are made in place
    copies: int  # ranks with the same values

    @classmethod
    def from_grad(cls, grad: torch.Tensor, copies: int) -> _Part:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        return cls(local.detach(), copies)


def _optimizer_params(registration: ParamRegistration) -> list[tuple[nn.Parameter, _Ranks]]:
    """Return the parameters that an optimizer updates, with their ranks."""
    parameters = registration.parameters
    if parameters and isinstance(parameters[0].data, DTensor):
        return [(parameter, _Ranks.from_dtensor(cast("DTensor", parameter.data))) for parameter in parameters]
    ranks = _Ranks.from_group(registration.bucket.group)
    return [(parameter, ranks) for parameter in parameters]


def _parts_over_mesh(registration: ParamRegistration, mesh: DeviceMesh) -> list[_Part]:
    """Return a flat unit's gradients by parameter: their numbers of copies differ."""
    # Tensor parallelism shards some parameters and replicates others.
    replicas = registration.bucket.group.replicas
    rows = zip(registration.gradients(), count_tp_replicas(registration.bucket, mesh), strict=True)
    return [_Part.from_grad(grad, replicas * copies) for grad, copies in rows if grad is not None]


def _reduce_locally(parts: Sequence[_Part], order: float, device: torch.device) -> torch.Tensor:
    """Return this rank's sum of powers, or its maximum if the order is infinite."""
    wide = _get_sum_dtype(device)
    shares = []
    kinds = _group_by(
        ((part.copies, part.grad.device, part.grad.dtype), part.grad) for part in parts if part.grad.numel()
    )
    for (copies, _, dtype), grads in kinds.items():
        # In float32 at least: squares overflow in half precision.
        norm_dtype = None if dtype.is_complex else torch.promote_types(dtype, torch.float32)
        together = torch.stack(torch._foreach_norm(grads, order, dtype=norm_dtype)).to(wide)
        share = together.max() if math.isinf(order) else together.pow(order).sum() / copies
        shares.append(share.view(1).to(device))
    return _combine_parts(shares, order, device)


def _get_sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float64 if has_float64(device) else torch.float32


def _group_by(pairs: Iterable[tuple[Kind, torch.Tensor]]) -> dict[Kind, list[torch.Tensor]]:
    groups: dict[Kind, list[torch.Tensor]] = {}
    for kind, tensor in pairs:
        groups.setdefault(kind, []).append(tensor)
    return groups


def _refuse_unsynced(parameters: Sequence[nn.Parameter]) -> None:
    """Refuse gradients that were not reduced: their norm over ranks is meaningless."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.numel() != parameter.numel():
            raise StateError(
                "unreduced gradients (no_sync) have no norm yet",
                where="clip_grad_norm_",
                found=f"{parameter.grad.numel()} elements",
                expected=f"{parameter.numel()}",
                fix="Clip after a backward outside no_sync().",
            )


def _refuse_submesh(ranked: Sequence[tuple[nn.Parameter, _Ranks]], widest: _Ranks) -> None:
    """Refuse DTensors on a smaller mesh than others: how many copies exist is unknown."""
    for parameter, ranks in ranked:
        if isinstance(parameter.data, DTensor) and ranks.count < widest.count:
            raise ArgumentError(
                "a parameter's mesh does not show whether other ranks hold copies",
                where="clip_grad_norm_",
                found=f"a parameter of shape {tuple(parameter.shape)} over {ranks.count} ranks",
                expected=f"{widest.count} ranks like the other parameters",
                fix="Distribute it over all of them with Replicate(), or clip both sets apart.",
            )


def _combine_parts(parts: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    together = torch.cat([torch.zeros(1, dtype=_get_sum_dtype(device), device=device), *parts])
    return (together.max() if math.isinf(order) else together.sum()).view(1)


def _reduce_over_ranks(local: torch.Tensor, ranks: _Ranks, order: float) -> torch.Tensor:
    """Return all ranks' combined contributions, a scalar."""
    for process_group in ranks.groups:
        group = ShardGroup(process_group)
        everyone = local.new_empty(group.size)
        group.all_gather(everyone, local, "clip gradients").wait()
        local = _combine_parts([everyone], order, local.device)
    return local.squeeze()


def _promote_dtypes(grads: Sequence[torch.Tensor]) -> torch.dtype:
    if not grads:
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {dist.get_rank()} with no gradients -- returning the total norm in "
            f"the default dtype {torch.float32}",
            stacklevel=5,
        )
        return torch.float32
    return reduce(torch.promote_types, [grad.dtype for grad in grads]).to_real()
