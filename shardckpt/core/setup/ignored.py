"""Modules or parameters that the wrapper ignores."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardckpt.core.errors import ArgumentError, ArgumentTypeError
from shardckpt.core.modules.fqn_and_params import parameters_below


@dataclass(frozen=True)
class Ignored:
    """Modules and parameters that are neither sharded nor moved."""

    modules: set[nn.Module]  # with all their submodules
    parameters: set[nn.Parameter]  # including the modules' parameters

    @classmethod
    def from_arguments(
        cls,
        root: nn.Module,
        ignored_modules: Iterable[nn.Module] | None,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
        sharded: type[nn.Module],
    ) -> Ignored:
        """Check the wrapper's arguments, at most one of which may be given; `sharded` modules cannot be ignored."""
        if ignored_modules is not None and ignored_states is not None:
            raise ArgumentError("Cannot pass both ignored_modules and ignored_states at the same time")
        if ignored_states is None:
            return cls._from_modules(root, ignored_modules, sharded)
        states: list[Any] = list(ignored_states)
        if states and all(isinstance(state, nn.Parameter) for state in states):
            return cls(set(), set(states))
        if not all(isinstance(state, nn.Module) for state in states):
            raise ArgumentError(
                f"ignored_states expects all nn.Parameter or all nn.Module list elements but got types {_types(states)}"
            )
        return cls._from_modules(root, states, sharded)

    @classmethod
    def _from_modules(cls, root: nn.Module, given: Iterable[nn.Module] | None, sharded: type[nn.Module]) -> Ignored:
        try:
            modules = list(given or ())
        except TypeError as error:
            raise ArgumentTypeError(
                f"ignored_modules should be an iterable of modules but got {type(given)}"
            ) from error
        if not all(isinstance(module, nn.Module) for module in modules):
            raise ArgumentTypeError(f"ignored_modules expects nn.Module list elements but got types {_types(modules)}")
        for module in modules:
            if isinstance(module, sharded):
                raise ArgumentError("`ignored_modules` should not include FSDP modules")
            if module is root:
                warnings.warn(
                    "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
                    f"parameters being ignored: {type(module).__name__}",
                    stacklevel=4,
                )
        below = {inner for module in modules for inner in module.modules()}
        return cls(below, parameters_below(modules))


def _types(values: Iterable[object]) -> list[type]:
    return sorted({type(value) for value in values}, key=repr)
