"""Disable torch.compile for the engine's own code: modules are compiled, the engine's hooks are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")

_DISABLED: list[tuple[type, str, bool]] = []


class _CompilerDisabled:
    """A stand-in for a method while its class is created, to record the class."""

    def __init__(self, function: Callable[..., Any], shallow: bool) -> None:
        self._function = function
        self._shallow = shallow

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, self._function)
        _DISABLED.append((owner, name, self._shallow))


def compiler_disabled(method: Callable[P, T]) -> Callable[P, T]:
    """Disable compilation of a method and of what it calls."""
    return cast(Callable[P, T], _CompilerDisabled(method, shallow=False))


def compiler_disabled_shallow(method: Callable[P, T]) -> Callable[P, T]:
    """Disable compilation of a method, but not of what it calls."""
    return cast(Callable[P, T], _CompilerDisabled(method, shallow=True))


def apply_compiler_disable() -> None:
    """Apply `torch.compiler.disable` to all marked methods, before anything with units is compiled.

    Only now, as it makes torch import its compiler, which takes a second; optimizers do too.
    """
    while _DISABLED:
        owner, name, nested = _DISABLED.pop()
        disable: Any = torch.compiler.disable
        setattr(owner, name, disable(owner.__dict__[name], recursive=not nested))
