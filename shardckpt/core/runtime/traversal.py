"""Traverse modules to find either front end's units, buckets and roots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import nn

from shardckpt.core.modules.fqn_and_params import is_incompatible
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.runtime.fsdp_unit import FSDPUnit


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
