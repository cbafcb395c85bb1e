"""Earlier names of public parameters, which keep working for one release."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from shardckpt.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")


def renamed_params(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that accepts earlier names of keyword parameters, with a warning at the caller's line.

    Args:
        **names: Earlier name to today's, which alone is in the signature.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        shown = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for old in [name for name in kwargs if name in names]:
                new = names[old]
                if new in kwargs:
                    raise UsageError(f"{shown}() got `{new}` and its earlier name `{old}`", fix=f"Pass `{new}` alone.")
                warnings.warn(
                    f"`{old}` of {shown}() is deprecated and will be removed in the next release: use `{new}`",
                    DeprecationWarning,
                    stacklevel=2,
                )
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate
