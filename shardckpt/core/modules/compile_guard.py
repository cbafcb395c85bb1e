"""Disable torch.compile for the engine's hooks; the user's modules are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from shardckpt.torch_features import disable_compiler

P = ParamSpec("P")
T = TypeVar("T")

_DISABLED: list[tuple[type, str, bool]] = []


class _CompilerDisabled:
    """Stand-in for a method while its class is created, to record the class."""

    def __init__(self, function: Callable[..., Any], shallow: bool) -> None:
        self._function = function
        self._shallow = shallow

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, self._function)
        _DISABLED.append((owner, name, self._shallow))


def compiler_disabled(method: Callable[P, T]) -> Callable[P, T]:
    """Disable compilation for a method and for the functions that it calls."""
    return cast(Callable[P, T], _CompilerDisabled(method, shallow=False))


def compiler_disabled_shallow(method: Callable[P, T]) -> Callable[P, T]:
    """Disable compilation for a method, but not for the functions that it calls."""
    return cast(Callable[P, T], _CompilerDisabled(method, shallow=True))


def apply_compiler_disable() -> None:
    """Apply `torch.compiler.disable` to all marked methods, before a module with units is compiled."""
    # Not at import: torch then imports its compiler, which takes a second. Optimizers import it too.
    while _DISABLED:
        owner, name, nested = _DISABLED.pop()
        setattr(owner, name, disable_compiler(owner.__dict__[name], recursive=not nested))
