"""Full parameters outside forward and backward, for all units or one by one; flat parameters over their shards."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.errors import BusyError, StateError, SummonShapeError
from shardckpt.core.modules import autograd_hooks
from shardckpt.core.modules.dtensors import gather_full_tensor
from shardckpt.core.modules.fqn_and_params import ParamInfo, clean, is_held
from shardckpt.core.params.full_params import FullValues, gather_full, gather_some, scatter_full, write_shard
from shardckpt.core.registration.base import ParamRegistration, ShardedPlaceholder, mark_flat
from shardckpt.core.runtime.fsdp_unit import FSDPUnit, Phase
from shardckpt.core.runtime.traversal import ShardedModule
from shardckpt.devices import wait_for_deferred_copies


@dataclass(frozen=True)
class SummonOptions:
    """Options of `summon_full_params`."""

    writeback: bool = True  # keep changes
    rank0_only: bool = False  # only rank 0 in a unit's shard group gets full parameters
    offload_to_cpu: bool = False
    with_grads: bool = False  # also gather full gradients


@contextmanager
def summon_full_params(
    module: nn.Module, options: SummonOptions, *, recurse: bool = True
) -> Generator[None, None, None]:
    """Register full parameters with the stored dtypes inside the context. Collective."""
    # Full parameters are plain parameters. Parameters with their own shapes and names replace a flat parameter, and a
    # new parameter replaces a DTensor; otherwise the user's objects are used. Inside the context a unit computes like a
    # plain module, and its gradients are not reduced over ranks. With `writeback` changes are kept on any exit, also
    # after an exception, and also for parameters that a user registered inside. Without it changes are lost, unless
    # nothing is sharded. Without `with_grads` gradients stay sharded and unchanged.
    units = _units(module, recurse=recurse)
    if options.offload_to_cpu and not options.rank0_only:
        warnings.warn(
            "offload_to_cpu=True and rank0_only=False may result in every rank of a machine having a copy of the "
            "full parameters in the same CPU memory; rank0_only=True makes one",
            stacklevel=5,  # the caller's `with`, through two contexts
        )
    for unit in units:
        _check_idle(unit)
    if options.writeback:
        wait_for_deferred_copies()
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(_summon_unit(unit, options))
        yield


def _units(module: nn.Module, *, recurse: bool) -> list[FSDPUnit]:
    modules = module.modules() if recurse else [module]
    return list(dict.fromkeys(each.sharding_unit for each in modules if isinstance(each, ShardedModule)))


def _check_idle(unit: FSDPUnit) -> None:
    if unit.root is not None:
        unit.root.recover()
    if unit.params.is_checked_out:
        raise BusyError(
            "Cannot manually unshard parameters when already unsharding parameters",
            where=unit.name,
            fix="Use the parameters that are already full, and do not enter summon_full_params again.",
        )
    if unit.phase is not Phase.IDLE or autograd_hooks.in_backward():
        raise BusyError(
            "Cannot manually unshard parameters during forward/backward",
            where=unit.name,
            found=unit.phase.name,
            fix="Summon before the forward or after the backward.",
        )


@contextmanager
def _check_out_params(unit: FSDPUnit) -> Iterator[tuple[ParamRegistration, ...]]:
    """Yield a unit's resharded buckets; inside the context, it computes without them."""
    if unit.root is not None:
        unit.root.recover()
        unit.reshard()
    unit.pull_user_changes()
    with unit.params.check_out() as registrations:
        yield registrations


@contextmanager
def _summon_unit(unit: FSDPUnit, options: SummonOptions) -> Iterator[None]:
    with _check_out_params(unit) as registrations, ExitStack() as stack:
        for registration in registrations:
            opened = _SummonedBucket(registration, options, persists=unit.config.keeps_full)
            stack.callback(opened.close)
            opened.open()
        _restore_param_order(unit)
        yield


def _restore_param_order(unit: FSDPUnit) -> None:
    """Restore the parameter order in modules from before bucketing."""
    places = [(member.order, place) for member in unit.params.members for place in member.places]
    for _, place in sorted(places, key=lambda entry: entry[0]):
        registered = place.module._parameters
        if place.attribute in registered:
            registered[place.attribute] = registered.pop(place.attribute)


class _SummonedBucket:
    """One bucket's full parameters."""

    def __init__(self, registration: ParamRegistration, options: SummonOptions, *, persists: bool) -> None:
        # `persists`: changes always persist, since full parameters alias the stored ones in an unsharded unit.
        self._registration = registration
        self._bucket = registration.bucket
        self._options = options
        self._persists = persists
        self._full: FullValues | None = None
        self._given: list[torch.Tensor] = []
        self._parameters: list[nn.Parameter] = []

    def open(self) -> None:
        """Gather and register the full parameters. Collective."""
        options, bucket = self._options, self._bucket
        bucket.unsharded.reshard()
        full = gather_full(bucket, bucket.shard.data)
        gradients = self._gradients() if options.with_grads else None
        if options.rank0_only and not bucket.group.is_first:
            return
        self._given = [self._prepare_value(value) for value in full.values]
        if self._given[0] is full.values[0]:
            self._full = full  # memory accounting counts it while this reference exists
        shown = (
            None if gradients is None else [None if grad is None else self._prepare_value(grad) for grad in gradients]
        )
        self._parameters = self._registration.register_summoned(self._given, shown)
        for parameter in self._parameters:
            if parameter.requires_grad and not any(parameter is sharded for sharded in self._registration.parameters):
                parameter.register_hook(self._refuse_late_backward)  # type: ignore[no-untyped-call]

    def _prepare_value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a full value on the requested device; a copy if changes must not persist."""
        moved = tensor.cpu() if self._options.offload_to_cpu else tensor
        stored = self._bucket.keeps_full and moved is tensor
        return moved.clone() if stored and not (self._persists or self._options.writeback) else moved

    def _refuse_late_backward(self, _: torch.Tensor) -> None:
        if not self._parameters:
            raise StateError(
                "backward reached full parameters from a summon_full_params that has ended",
                where=str(self._bucket.name),
                fix="Leave summon_full_params after the backward, or run the forward outside it.",
            )

    def _gradients(self) -> list[torch.Tensor | None]:
        """Return full gradients; unreduced ones (no_sync) have local values. Collective."""
        registration = self._registration
        gradients = registration.gradients()
        if not registration.has_unsharded_grads:
            return gather_some(self._bucket, gradients, self._bucket.stored.dtypes.gradient)
        gather_some(self._bucket, [None] * len(gradients), self._bucket.stored.dtypes.gradient)
        return [None if grad is None else grad.clone() for grad in gradients]

    def close(self) -> None:
        """Register the sharded parameters again, after writing back changes."""
        # Collective if only rank 0 has full parameters and writes them back. A parameter that was replaced by one with
        # another shape is an error; changes to the others are kept.
        options, bucket, shown = self._options, self._bucket, bool(self._parameters)
        values, wrong = self._values() if shown else ([], None)
        gradients = (
            [None if parameter.grad is None else _local(parameter.grad) for parameter in self._registered()]
            if shown
            else []
        )
        if shown:
            self._registration.unregister_summoned()
        self._parameters, self._given, self._full = [], [], None
        with torch.no_grad():
            if options.writeback and options.rank0_only:
                scatter_full(bucket, values if shown else None, bucket.shard.data)
            elif shown and (options.writeback or self._persists):
                write_shard(bucket, values, bucket.shard.data)
            if options.writeback and options.with_grads:
                self._write_gradients(gradients if shown else None)
        if wrong is not None:
            raise wrong

    def _registered(self) -> list[torch.Tensor]:
        """Return the registered parameters: the summoned ones or a user's replacements."""
        pairs = zip(self._bucket.members, self._parameters, strict=True)
        return [next(_replaced_params(member, ours), ours) for member, ours in pairs]

    def _values(self) -> tuple[list[torch.Tensor], SummonShapeError | None]:
        """Return the values to write back, and an error if a shape has changed."""
        # The summoned value replaces a value with another shape.
        wrong = None
        values = [_local(each) for each in self._registered()]
        rows = zip(self._bucket.members, self._bucket.packing.layout.specs, strict=True)
        for index, (member, spec) in enumerate(rows):
            if tuple(values[index].shape) != spec.shape:
                wrong = SummonShapeError(
                    f"Cannot writeback when the parameter shape changes: {member.fqn}",
                    where=str(self._bucket.name),
                    found=tuple(values[index].shape),
                    expected=spec.shape,
                    fix="summon_full_params changes values only; keep the wrapped module's shapes.",
                )
                values[index] = self._given[index]
        return values, wrong

    def _write_gradients(self, gradients: Sequence[torch.Tensor | None] | None) -> None:
        bucket, registration = self._bucket, self._registration
        out = torch.zeros(bucket.shard.shape, dtype=bucket.stored.dtypes.gradient, device=bucket.shard.device)
        if self._options.rank0_only:
            there = scatter_full(bucket, gradients, out)
        elif gradients is not None:
            there = [grad is not None for grad in gradients]
            specs = bucket.packing.layout.specs
            write_shard(bucket, [_or_zeros(g, s.shape, out) for g, s in zip(gradients, specs, strict=True)], out)
        if not registration.has_unsharded_grads:
            parts = bucket.split_shard(out)
            registration.set_gradients([part if has else None for part, has in zip(parts, there, strict=True)])
        elif gradients is not None:
            for held, grad in zip(registration.gradients(), gradients, strict=True):
                if held is not None:
                    held.copy_(_or_zeros(grad, held.shape, held))


def _replaced_params(member: ParamInfo, ours: nn.Parameter) -> Iterator[nn.Parameter]:
    """Yield the parameters that a user registered instead of the summoned one."""
    for place in member.places:
        found = place.module._parameters.get(place.attribute)
        if found is not None and found is not ours:
            yield found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.data


def _or_zeros(tensor: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return tensor if tensor is not None else like.new_zeros(()).expand(*shape)


# ------------------------------------------------------------------------------------------------- one at a time


def iter_full_params(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and full values for all parameters below a module. Collective.

    Every rank has to iterate to the end. One unit is gathered at a time, and freed before the next one or when the loop
    is left. A shared parameter is yielded once, under its first name. Parameters that are not sharded come first, and
    are not copied.

    Args:
        module: Sharded module, or a module that contains sharded modules, from either front end.

    Yields:
        The FQN in the unwrapped module, and the value in its stored dtype, on the compute device.

    Raises:
        BusyError: A unit is in a forward or a backward, or its parameters are summoned already.
        StateError: A unit above the module owns some of its parameters.
    """
    units = _units(module, recurse=True)
    for unit in units:
        _check_idle(unit)
        with _check_out_params(unit):
            pass  # the unit takes over parameters that a user registered
    _refuse_parts(module, units)
    yield from _unmanaged_params(module, units)
    names = {each: clean(name) for name, each in module.named_modules()}
    for unit in units:
        with _check_out_params(unit) as registrations:
            for registration in registrations:
                yield from _gather_params(registration, names)


def _unmanaged_params(module: nn.Module, units: Sequence[FSDPUnit]) -> Iterator[tuple[str, torch.Tensor]]:
    ours = {parameter for unit in units for registration in unit.registrations for parameter in registration.parameters}
    members = {id(leaf) for unit in units for bucket in unit.buckets for leaf in bucket.unsharded.params}
    for name, parameter in module.named_parameters():
        if parameter in ours or id(parameter) in members:
            continue
        yield clean(name), _complete(parameter.detach())


def _refuse_parts(module: nn.Module, units: Sequence[FSDPUnit]) -> None:
    """Refuse a module whose parameters belong to a unit above it."""
    ours = {place.module for unit in units for member in unit.params.members for place in member.places}
    for name, each in module.named_modules():
        if each not in ours and any(map(_is_of_unit, (*each._parameters.values(), *each.__dict__.values()))):
            raise StateError(
                "cannot iterate over a part of a unit",
                where=clean(name),
                fix="Iterate over the complete unit.",
            )


def _is_of_unit(value: object) -> bool:
    return isinstance(value, ShardedPlaceholder) or (isinstance(value, nn.Parameter) and is_held(value))


def _gather_params(
    registration: ParamRegistration, names: Mapping[nn.Module, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    bucket = registration.bucket
    bucket.unsharded.reshard()
    full = gather_full(bucket, bucket.shard.data)
    try:
        for index, member in enumerate(bucket.members):
            value = bucket.wrap_unsharded(index, full.values[index])
            yield _name(member, names), _complete(value.clone())  # a copy, so that the unit can free its memory
    finally:
        full.free()


def _name(member: ParamInfo, names: Mapping[nn.Module, str]) -> str:
    place = next((place for place in member.places if place.module in names), member.places[0])
    prefix = names.get(place.module, "")
    return f"{prefix}.{place.attribute}" if prefix else place.attribute


def _complete(tensor: torch.Tensor) -> torch.Tensor:
    return gather_full_tensor(tensor) if isinstance(tensor, DTensor) else tensor


@contextmanager
def register_flat_params(units: Sequence[tuple[nn.Module, FSDPUnit]], name: str) -> Generator[None, None, None]:
    """Register flat parameters instead of the original ones inside the context."""
    # A flat parameter aliases the shard, so the original parameters have its changes afterwards.
    homes = {home: unit.registrations for home, unit in units}
    places = [p for _, unit in units for member in unit.params.members for p in member.places]
    before = {module: dict(module._parameters) for module in [*homes, *(place.module for place in places)]}
    for _, unit in units:
        unit.reshard()
    for place in places:
        place.module._parameters.pop(place.attribute, None)
    flats = []
    for home, registrations in homes.items():
        for index, registration in enumerate(registrations):
            bucket = registration.bucket
            flat = mark_flat(nn.Parameter(bucket.shard.data, requires_grad=bucket.trainable))
            home._parameters[f"{name}_{index}" if index else name] = flat
            flats.append((flat, registration))
    try:
        yield
    finally:
        for module, registered in before.items():
            module._parameters.clear()
            module._parameters.update(registered)
        for flat, registration in flats:
            if flat.data_ptr() != registration.bucket.shard.data_ptr():
                wait_for_deferred_copies()
                registration.bucket.shard.data.copy_(flat.data)
            registration.register_sharded()
