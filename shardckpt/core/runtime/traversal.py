"""Find the units, buckets and roots below a module, of either front end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import nn

from shardckpt.core.modules.fqn_and_params import is_incompatible
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.runtime.fsdp_unit import FSDPUnit


class ShardedModule(ABC):
    """A module that has a unit of its own, or shares one; base of both front ends.

    Classes register for it rather than derive from it, since users look at their bases.
    """

    @property
    @abstractmethod
    def sharding_unit(self) -> FSDPUnit:
        """The unit."""

    @property
    @abstractmethod
    def is_sharding_root(self) -> bool:
        """Return True if the module is the root; False before the first forward."""


def units_with_modules(module: nn.Module) -> tuple[list[FSDPUnit], list[nn.Module]]:
    """Return the units below a module and the modules that have them, depth first, each unit once.

    Nothing below a module that the engine leaves alone is looked at.

    Args:
        module: Where to begin; it is included.
    """
    modules: dict[FSDPUnit, nn.Module] = {}
    for child in _below(module):
        if isinstance(child, ShardedModule):
            modules.setdefault(child.sharding_unit, child)
    return list(modules), list(modules.values())


def units(module: nn.Module) -> list[FSDPUnit]:
    """Return the units below a module, depth first."""
    return units_with_modules(module)[0]


def buckets(module: nn.Module) -> list[Bucket]:
    """Return the buckets of the units below a module; units without parameters have none."""
    return [bucket for unit in units(module) for bucket in unit.buckets]


def roots(module: nn.Module) -> list[nn.Module]:
    """Return the modules below a module that ran as roots."""
    return [child for child in _below(module) if isinstance(child, ShardedModule) and child.is_sharding_root]


def _below(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules depth first, each once, none that the engine leaves alone."""
    seen: set[nn.Module] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if current not in seen and not is_incompatible(current):
            seen.add(current)
            yield current
            waiting.extend(reversed(list(current.children())))
