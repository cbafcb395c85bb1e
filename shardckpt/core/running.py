"""One call of something that a unit's parameters are needed for: gathered before, freed after, put right on failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardckpt.core.context import Context
from shardckpt.core.unit import Unit


def compute(
    context: Context, unit: Unit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return what a function gives with the unit's parameters there. Collective.

    Args:
        context: The root's.
        unit: The unit.
        function: What computes: a module's forward, or another method.
        args: Its arguments.
        kwargs: And those by name.
    """
    is_root = context.root is unit
    if is_root:
        context.forward_starts()
    with context.computing():
        try:
            args, named = unit.before_forward(args, dict(kwargs))
            with unit.computing():
                output = function(*args, **named)
            return unit.after_forward(output)
        except BaseException:
            unit.forward_failed()
            if is_root:
                context.forward_failed()
            raise
