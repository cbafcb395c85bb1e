"""Traverse modules to find either front end's units, buckets and roots; restore nested units that share parameters."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from shardckpt.core.modules.fqn_and_params import Identity, ParamInfo, identity, is_incompatible, walk
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.runtime.fsdp_unit import FSDPUnit

_Users = dict[Identity, set[tuple[int, str]]]


class ShardedModule(ABC):
    """Module with a unit, maybe a shared one; virtual base class for both front ends."""

    # The front ends register instead of deriving from it, because users inspect their bases.

    @property
    @abstractmethod
    def sharding_unit(self) -> FSDPUnit:
        """The module's unit."""

    @property
    @abstractmethod
    def is_sharding_root(self) -> bool:
        """Return True if the module is a root; False before the first forward."""


def units_with_modules(module: nn.Module) -> tuple[list[FSDPUnit], list[nn.Module]]:
    """Return the distinct units below a module with their modules, depth first."""
    modules: dict[FSDPUnit, nn.Module] = {}
    for child in _below(module):
        if isinstance(child, ShardedModule):
            modules.setdefault(child.sharding_unit, child)
    return list(modules), list(modules.values())


def units(module: nn.Module) -> list[FSDPUnit]:
    """Return the units below a module, depth first."""
    return units_with_modules(module)[0]


def buckets(module: nn.Module) -> list[Bucket]:
    """Return the buckets in all units below a module."""
    return [bucket for unit in units(module) for bucket in unit.buckets]


def roots(module: nn.Module) -> list[nn.Module]:
    """Return the modules below a module that are roots."""
    return [child for child in _below(module) if isinstance(child, ShardedModule) and child.is_sharding_root]


def _below(module: nn.Module) -> Iterator[nn.Module]:
    """Yield distinct modules depth first, without those that the engine ignores."""
    seen: set[nn.Module] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if current not in seen and not is_incompatible(current):
            seen.add(current)
            yield current
            waiting.extend(reversed(list(current.children())))


def restore_shared_units(module: nn.Module, units: Sequence[FSDPUnit]) -> list[FSDPUnit]:
    """Undo sharding for nested units that share parameters with others. Collective."""
    # Returns the restored units, inner ones first; the caller has to rebuild them.
    tied = _tied(units, _users(module, units))
    if not tied:
        return []
    reopened = [unit for unit in reversed(units) if any(member.identity in tied for member in unit.params.members)]
    first: dict[Identity, nn.Parameter] = {}
    for unit in reopened:
        members = unit.params.members
        for registration in unit.registrations:
            registration.restore()
        for member in members:
            _unify(member, first)
    _unify_registered(module, first)
    warnings.warn(
        f"parameters used by {[type(unit.modules[0]).__name__ for unit in reopened]} are also used outside them; "
        f"the unit of {type(module).__name__} takes them over",
        stacklevel=4,
    )
    return reopened


def _users(module: nn.Module, units: Sequence[FSDPUnit]) -> _Users:
    """Return all locations of the units' parameters, inside and outside the units."""
    users: _Users = {}
    for unit in units:
        for member in unit.params.members:
            users.setdefault(member.identity, set()).update((id(p.module), p.attribute) for p in member.places)
    for _, inner in walk(module, is_incompatible):
        for name, parameter in inner._parameters.items():
            if parameter is not None and identity(parameter) in users:
                users[identity(parameter)].add((id(inner), name))
    return users


def _tied(units: Sequence[FSDPUnit], users: Mapping[Identity, set[tuple[int, str]]]) -> set[Identity]:
    """Return the parameters that have a location outside a unit that shards them."""
    members = [member for unit in units for member in unit.params.members]
    return {m.identity for m in members if {(id(p.module), p.attribute) for p in m.places} != users[m.identity]}


def _unify(member: ParamInfo, first: dict[Identity, nn.Parameter]) -> None:
    """Register one parameter object at all locations of a shared parameter."""
    kept = first.setdefault(member.identity, member.parameter)
    for place in member.places:
        setattr(place.module, place.attribute, kept)


def _unify_registered(module: nn.Module, first: Mapping[Identity, nn.Parameter]) -> None:
    for _, submodule in walk(module, is_incompatible):
        for name, parameter in list(submodule._parameters.items()):
            if parameter is not None and identity(parameter) in first:
                setattr(submodule, name, first[identity(parameter)])
