"""Keeps torch.compile out of the engine's own code: it compiles what modules compute, and calls the engine as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")

_HIDDEN: list[tuple[type, str, bool]] = []


class _Hidden:
    """Stands for a method while its class is being made, to learn where it is."""

    def __init__(self, function: Callable[..., Any], around: bool) -> None:
        self._function = function
        self._around = around

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, self._function)
        _HIDDEN.append((owner, name, self._around))


def hidden(method: Callable[P, T]) -> Callable[P, T]:
    """Let compilers see neither a method nor what it calls."""
    return cast(Callable[P, T], _Hidden(method, around=False))


def around(method: Callable[P, T]) -> Callable[P, T]:
    """Let compilers not see a method, but what it calls."""
    return cast(Callable[P, T], _Hidden(method, around=True))


def hide() -> None:
    """Put it into effect, before anything that holds units is compiled.

    Only now, as it makes torch import its compiler, which takes a second; optimizers do too.
    """
    while _HIDDEN:
        owner, name, nested = _HIDDEN.pop()
        disable: Any = torch.compiler.disable
        setattr(owner, name, disable(owner.__dict__[name], recursive=not nested))
